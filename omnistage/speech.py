"""A whole utterance in one piece, for those who do not stream, and the wav file it can become."""

from __future__ import annotations

import io
import secrets
import shutil
import wave
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import os

    from omnistage.request import Pcm, Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class Speech:
    """All audio of a request.

    Args:
        pcm: Mono samples, float32 in [-1, 1], [samples].
        sample_rate: Samples a second.
        usage: What the request took.
    """

    pcm: Pcm
    sample_rate: int
    usage: Usage

    @property
    def seconds(self) -> float:
        """Playing time."""
        return len(self.pcm) / self.sample_rate

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a wav file, mono and 16 bit; see :func:`save_wav`."""
        save_wav(Path(path), self.pcm, self.sample_rate)


def save_wav(path: Path, pcm: Pcm, sample_rate: int) -> None:
    """Write mono 16-bit PCM; a file takes its place only when it was written to the end.

    Any number of threads and processes may write into one directory.

    Args:
        path: The file, device or pipe to write.
        pcm: Samples, float32, [samples]; those beyond [-1, 1] are clipped.
        sample_rate: Samples a second.

    Raises:
        OSError: It cannot be written; what was there before is still there.
    """
    whole = io.BytesIO()
    with wave.open(whole, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(sample_rate)
        file.writeframes((np.clip(pcm, -1, 1) * 32767).astype("<i2").tobytes())
    target = path.resolve()
    if target.exists() and not target.is_file():
        target.write_bytes(whole.getvalue())  # a device or a pipe, which must not be replaced
        return
    partial = target.with_name(f".{secrets.token_hex(8)}.part")
    try:
        with partial.open("xb") as new:
            new.write(whole.getvalue())
        if target.exists():
            shutil.copymode(target, partial)
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)

"""A decoder of your own: the talker's codes played as a melody, one short tone for each code.

Run it as ``python examples/custom_decoder.py [OUTPUT]``; it writes OUTPUT, or melody.wav.
"""

from __future__ import annotations

import asyncio
import sys
import wave
from typing import TYPE_CHECKING

import numpy as np

from omnistage import CodecFrames, DecoderStageConfig, Pipeline
from omnistage.models import load_preset
from omnistage.models.talker.layout import read_layout

if TYPE_CHECKING:
    from collections.abc import Sequence

    from omnistage.request import Codes, Pcm

CODES = 1125


class Tones:
    """Gives each frame a tone that fades in and out over the frames before and after it.

    So a frame's audio depends on one frame of the past and one of the future, and says so: the
    decoder stage then cuts a stream into overlapping windows whose audio is that of the whole clip.
    """

    sample_rate = 24_000
    hop_length = 600
    codebooks = 1
    codebook_size = CODES
    left_context = 1
    right_context = 1
    deterministic = True

    def __init__(self) -> None:
        length = 3 * self.hop_length
        self._fade = np.hanning(length) * 0.2
        self._angle = 2 * np.pi * np.arange(length) / self.sample_rate

    def decode(self, windows: Sequence[Codes]) -> list[Pcm]:
        """Samples of each window, [frames * hop_length]."""
        return [self._decode(window[:, 0]) for window in windows]

    def _decode(self, codes: Codes) -> Pcm:
        hop = self.hop_length
        pitches = 110 * 2 ** (codes % 25 / 12)  # two octaves of semitones
        audio = np.zeros((len(codes) + 2) * hop)
        for frame, pitch in enumerate(pitches):
            audio[frame * hop : (frame + 3) * hop] += self._fade * np.sin(pitch * self._angle)
        return audio[hop:-hop].astype(np.float32)


async def main(output: str) -> None:
    """Have the talker's model speak, and hear its codes instead of its voice."""
    ar, _ = load_preset(
        "talker",
        # Of the ids that the model samples, those of codes are kept and become indices from 0.
        processor=CodecFrames(first_id=read_layout().first_code, codebook_size=CODES),
        # Starts in a third of the time; safe here, since no torch code has run in this process.
        start_method="fork",
    )
    pipeline = Pipeline(ar=ar, decoder=DecoderStageConfig(build=Tones))
    async with pipeline, pipeline.submit("The kettle is boiling.") as stream:
        pcm = np.concatenate([chunk.pcm async for chunk in stream])
    with wave.open(output, "wb") as wav:
        wav.setparams((1, 2, Tones.sample_rate, 0, "NONE", ""))  # mono, 16 bit
        wav.writeframes((pcm * 32767).astype("<i2").tobytes())
    print(f"{output}: {len(pcm) / Tones.sample_rate:.2f} s of audio, {stream.usage}")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "melody.wav"))

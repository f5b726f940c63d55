"""A wav file takes its place whole, whoever else writes beside it."""

from __future__ import annotations

import os
import stat
import threading
import wave
from pathlib import Path

import numpy as np
import pytest

from omnistage.speech import save_wav


def samples(value: float) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    return np.full(24_000, value, np.float32)


def test_threads_that_save_into_one_directory_leave_each_other_alone(tmp_path: Path) -> None:
    broken: list[str] = []
    ready = threading.Barrier(4)

    def write(number: int) -> None:
        path = tmp_path / f"{number}.wav"
        ready.wait()
        for _ in range(40):
            try:
                save_wav(path, samples(number / 100), 24_000)
                with wave.open(str(path)) as file:
                    first = np.frombuffer(file.readframes(24_000), "<i2")
            except Exception as error:
                broken.append(repr(error))
                continue
            if len(first) != 24_000 or first[0] != int(np.float32(number / 100) * 32767):
                broken.append(f"{path.name} holds another's audio")

    threads = [threading.Thread(target=write, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert broken == []
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{n}.wav" for n in range(1, 5)]


def test_a_file_has_the_permissions_that_open_would_give_it(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        save_wav(tmp_path / "new.wav", samples(0.1), 24_000)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "new.wav").stat().st_mode) == 0o640
    (tmp_path / "new.wav").chmod(0o604)
    save_wav(tmp_path / "new.wav", samples(0.2), 24_000)
    assert stat.S_IMODE((tmp_path / "new.wav").stat().st_mode) == 0o604


def test_what_cannot_take_its_place_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no")

    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(OSError, match="no"):
        save_wav(tmp_path / "a.wav", samples(0.1), 24_000)
    assert list(tmp_path.iterdir()) == []

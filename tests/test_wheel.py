"""The wheel: what is in it, and that it speaks where nothing of the repository is."""

from __future__ import annotations

import subprocess
import sys
import wave
import zipfile
from pathlib import Path

import pytest

from tests.cli.sandbox import Sandbox

ROOT = Path(__file__).resolve().parents[1]
CHECKPOINT = "omnistage/models/talker/checkpoint"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = (sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder)
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (built,) = folder.glob("omnistage-*.whl")
    return built


def test_it_holds_the_package_the_voice_and_the_licences_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        sizes = {info.filename: info.file_size for info in archive.infolist()}
    assert {name.partition("/")[0] for name in sizes} == {
        "omnistage",
        next(name for name in sizes if ".dist-info/" in name).partition("/")[0],
    }
    for name in (
        "model.safetensors",
        "code2wav/decoder.safetensors",
        "tokenizer.json",
        "README.md",
    ):
        assert sizes[f"{CHECKPOINT}/{name}"] > 0
    assert "omnistage/py.typed" in sizes
    assert {name.rpartition("/")[2] for name in sizes if "/licenses/" in name} == {
        "LICENSE",
        "NOTICE",
    }
    weights = sum(size for name, size in sizes.items() if name.startswith(CHECKPOINT))
    assert weights < 15e6
    assert not [name for name in sizes if name.endswith((".bin", ".pt", ".pkl", ".pyc"))]


@pytest.mark.vllm
@pytest.mark.slow
def test_it_speaks(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    sandbox = Sandbox(tmp_path, PYTHONPATH=str(tmp_path / "site"))
    probe = "import omnistage; print(omnistage.__file__)"
    where = sandbox.run(sys.executable, "-c", probe).stdout
    assert where.startswith(str(tmp_path))
    done = sandbox.run(
        sys.executable, "-m", "omnistage.cli", "speak", "Hello world.", "-o", "out.wav"
    )
    assert done.code == 0, done.stderr
    with wave.open(str(sandbox.output / "out.wav")) as file:
        assert 0.4 < file.getnframes() / file.getframerate() < 2
    assert sandbox.leftovers() == []

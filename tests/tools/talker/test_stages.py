"""All stages in a row on a few texts, stopped and gone on with; what comes out is a talker."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
import unicodedata
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file

from omnistage.models.talker.decoder import TalkerDecoder
from omnistage.models.talker.frames import UnitFrames
from omnistage.models.talker.layout import CHECKPOINT, read_layout
from omnistage.models.talker.text import TextStep
from tests.tools.talker.runs import small_run
from tools.talker import __main__ as command
from tools.talker import codec, corpus, export, talker, teacher, tokens
from tools.talker.settings import ROOT, TINY, Run, StageError


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run that made every stage."""
    run = small_run(tmp_path_factory.mktemp("run"))
    corpus.build(run)
    teacher.speak(run)
    codec.train_codec(run)
    tokens.make(run)
    codec.train_decoder(run)
    talker.train(run)
    export.export(run)
    return run


@pytest.fixture
def copy(run: Run, tmp_path: Path) -> Run:
    """The same run in a folder of the test's own."""
    shutil.copytree(run.folder, tmp_path, dirs_exist_ok=True)
    return Run(tmp_path, run.settings)


def spoken(run: Run) -> list[teacher.Utterance]:
    return [said for path in sorted(run.shards.glob("*.npz")) for said in teacher.read(path)]


def _stressed(phone: str) -> bool:
    return unicodedata.name(phone[0]) == "MODIFIER LETTER VERTICAL LINE"


def test_the_teacher_says_every_text_in_order_and_aligns_it(run: Run) -> None:
    layout, text = read_layout(), TextStep(read_layout())
    assert [said.text for said in spoken(run)] == run.corpus.read_text().splitlines()
    pitch: list[float] = []
    for said in spoken(run):
        assert said.units.tolist() == text.prompt_ids(said.text)[1:-1]
        assert len(said.frames) == len(said.units)
        assert len(said.bands) == len(said.pitch) == 2 * said.frames.sum()
        assert (said.frames[1:] > 0).all()
        stressed = [
            unit >= layout.first_phone and _stressed(layout.phones[unit - layout.first_phone])
            for unit in said.units
        ]
        pitch += said.pitch[np.repeat(stressed, 2 * said.frames)].tolist()
    # A wrong alignment would put many of them where there is no voice.
    assert np.mean(np.asarray(pitch) > 0) > 0.9


def test_the_teacher_speaks_only_the_shards_that_are_missing(copy: Run) -> None:
    first, last = sorted(copy.shards.glob("*.npz"))
    before, kept = last.read_bytes(), first.stat().st_mtime_ns
    last.unlink()
    teacher.speak(copy)
    assert last.read_bytes() == before
    assert first.stat().st_mtime_ns == kept


def test_the_codec_waits_for_all_the_speech_that_it_wants(copy: Run) -> None:
    sorted(copy.shards.glob("*.npz"))[-1].unlink()
    with pytest.raises(StageError, match="the teacher has not said everything yet"):
        codec.train_codec(copy)


def test_a_text_that_cannot_be_said_is_left_out() -> None:
    assert teacher.Teacher().speak("...") is None
    assert teacher.Teacher().speak("one two three four five " * 5) is None


def test_the_export_is_a_talker_of_the_shipped_size(run: Run) -> None:
    folder = run.folder / "export"
    assert read_layout(folder) == read_layout()
    for name in ("model.safetensors", "code2wav/decoder.safetensors"):
        ours, theirs = load_file(folder / name), load_file(CHECKPOINT / name)
        assert {n: (v.shape, v.dtype) for n, v in ours.items()} == {
            n: (v.shape, v.dtype) for n, v in theirs.items()
        }
    names = {path.name for path in CHECKPOINT.rglob("*") if path.is_file()} - {"README.md"}
    assert names == {path.name for path in folder.rglob("*") if path.is_file()}


def test_the_exported_decoder_decodes_the_trainings_codes(run: Run) -> None:
    decoder, frames = TalkerDecoder(run.folder / "export" / "code2wav"), UnitFrames(read_layout())
    one, said = tokens.read(run)[0], spoken(run)[0]
    window = np.asarray(frames.push(frames.new(), one.ids[one.prompt :].tolist()))
    assert len(window) == said.frames.sum()
    (rows,) = decoder.decode([window])
    assert rows.shape == (len(said.bands), 113)
    assert np.isfinite(rows).all()


def test_the_same_run_again_makes_the_same_files(run: Run, copy: Run) -> None:
    for made in ("codec.pt", "tokens.npz", "decoder.pt", "talker.pt"):
        (copy.folder / made).unlink()
    shutil.rmtree(copy.folder / "export")
    for stage in (codec.train_codec, tokens.make, codec.train_decoder, talker.train):
        stage(copy)
    export.export(copy)
    for name in ("model.safetensors", "code2wav/decoder.safetensors"):
        ours, theirs = (load_file(one.folder / "export" / name) for one in (run, copy))
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


def test_the_talker_can_begin_with_another_ones_weights(run: Run, tmp_path: Path) -> None:
    shutil.copy(run.folder / "tokens.npz", tmp_path)
    talker.train(Run(tmp_path, run.settings, begin=CHECKPOINT))
    first, *_ = (tmp_path / "logs" / "talker.log").read_text().split("step 1,", 1)[1].splitlines()
    loss = float(first.split("loss ")[1].split(";")[0])
    untrained = 7.2  # the logarithm of how many ids there are
    assert loss != pytest.approx(untrained, abs=0.5)


def test_what_began_with_another_ones_weights_is_exported_as_the_mean(copy: Run) -> None:
    export.export(Run(copy.folder, copy.settings, begin=CHECKPOINT))
    trained = talker.load(copy).state_dict()["model.norm.weight"]
    first = load_file(CHECKPOINT / "model.safetensors")["model.norm.weight"]
    mean = load_file(copy.folder / "export" / "model.safetensors")["model.norm.weight"]
    torch.testing.assert_close(mean, ((trained + first.float()) / 2).bfloat16())


@pytest.mark.parametrize(
    ("stage", "first"),
    [
        ("teacher", "corpus"),
        ("codec", "teacher"),
        ("tokens", "codec"),
        ("decoder", "codec"),
        ("talker", "tokens"),
        ("export", "codec"),
    ],
)
def test_a_stage_out_of_turn_says_which_comes_first(
    stage: str, first: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main([stage, "--tiny", "--folder", str(tmp_path)]) == 1
    assert f"run the stage `{first}` first" in capsys.readouterr().err


@pytest.mark.parametrize(("stage", "missing"), [("codec", "torch"), ("teacher", "hibari")])
def test_a_missing_library_is_named_with_what_brings_it(
    stage: str, missing: str, tmp_path: Path
) -> None:
    (tmp_path / "corpus.txt").write_text("Hello there.\n")
    program = (
        f"import sys; sys.modules[{missing!r}] = None\n"
        "from tools.talker.__main__ import main\n"
        f"sys.exit(main([{stage!r}, '--tiny', '--folder', {str(tmp_path)!r}]))"
    )
    said = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert said.returncode == 1
    assert f"{missing} is missing: .venv/bin/pip install -e '.[talker]' brings it" in said.stderr


def test_an_unknown_network_of_the_teachers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teacher, "_DURATIONS", "no_such_tensor")
    with pytest.raises(StageError, match=r"hibari-tts 0\.2\.1"):
        teacher.Teacher()


@pytest.mark.slow  # starts the teacher twice
def test_a_killed_stage_leaves_no_worker_and_no_half_shard(tmp_path: Path) -> None:
    run = small_run(tmp_path)
    run.corpus.write_text("\n".join(f"This is sentence number {n}." for n in range(90)) + "\n")
    stage = subprocess.Popen(
        [sys.executable, "-m", "tools.talker", "teacher", "--tiny", "--folder", tmp_path],
        cwd=ROOT,
        start_new_session=True,
    )
    while not list(run.shards.glob("0*.npz")):
        assert stage.poll() is None
        time.sleep(0.05)
    workers = psutil.Process(stage.pid).children(recursive=True)
    stage.kill()
    stage.wait()
    gone, alive = psutil.wait_procs(workers, timeout=20)
    assert gone
    assert not alive
    finished = sorted(run.shards.glob("0*.npz"))
    for path in finished:
        assert len(list(teacher.read(path))) == TINY.shard
    command.main(["teacher", "--tiny", "--folder", str(tmp_path)])
    assert [said.text for said in spoken(run)] == run.corpus.read_text().splitlines()

"""The commands with a model of the user's: listed, looked at, spoken with, served, refused."""

from __future__ import annotations

import json
import shutil
import signal
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.sandbox import COMMAND, Sandbox
from tests.cli.test_stage import Process
from tests.conftest import Checkpoints


@pytest.fixture
def sandbox(tmp_path: Path) -> Sandbox:
    return Sandbox(tmp_path / "box")


def decoder(checkpoints: Checkpoints) -> tuple[str, str]:
    return "--set", f"decoder.model={checkpoints('snac')}"


def test_models_lists_what_model_takes(sandbox: Sandbox) -> None:
    done = sandbox.run(COMMAND, "models", "--json")
    found = {one["name"]: one for one in json.loads(done.stdout)["models"]}
    assert done.code == 0
    assert list(found) == ["talker", "orpheus", "llasa", "neutts", "flat"]
    assert found["orpheus"]["model"] == "canopylabs/orpheus-3b-0.1-ft"
    assert found["orpheus"]["voices"][0] == "tara"
    in_words = sandbox.run(COMMAND, "models")
    for one in found.values():
        assert one["name"] in in_words.stdout
        assert one["summary"] in in_words.stdout


@pytest.mark.vllm
class TestCheck:
    def test_it_explains_without_loading_weights(
        self, sandbox: Sandbox, checkpoints: Checkpoints
    ) -> None:
        model = str(checkpoints("orpheus"))
        done = sandbox.run(
            COMMAND, "check", "--model", model, *decoder(checkpoints), "--set",
            "sampling.temperature=0.5", "--json",
        )  # fmt: skip
        told: dict[str, Any] = json.loads(done.stdout)
        assert (done.code, done.stderr) == (0, "")
        assert (told["preset"], told["model"], told["runs"]) == ("orpheus", model, True)
        assert told["sampling"]["temperature"] == 0.5
        assert told["decoder"]["sample_rate"] == 24_000
        in_words = sandbox.run(COMMAND, "check", "--model", model, *decoder(checkpoints))
        assert in_words.code == 0
        for words in ("preset: orpheus", "first_id=128266", "hop_length=2048", "tara, leah"):
            assert words in in_words.stdout

    def test_the_talker_is_a_model_too(self, sandbox: Sandbox) -> None:
        done = sandbox.run(COMMAND, "check", "--model", "talker")
        assert done.code == 0
        assert "preset: talker" in done.stdout

    def test_a_hub_id_in_the_cache_is_found_offline(
        self, checkpoints: Checkpoints, tmp_path: Path
    ) -> None:
        hub = tmp_path / "hf" / "hub"
        for name, family in (
            ("canopylabs/orpheus-3b-0.1-ft", "orpheus"),
            ("hubertsiuzdak/snac_24khz", "snac"),
            ("someone/finetune", "orpheus"),
        ):
            where = hub / f"models--{name.replace('/', '--')}"
            (where / "refs").mkdir(parents=True)
            (where / "refs" / "main").write_text("0" * 40)
            (where / "snapshots").mkdir()
            (where / "snapshots" / ("0" * 40)).symlink_to(checkpoints(family))
        box = Sandbox(tmp_path / "box", HF_HOME=str(tmp_path / "hf"), HF_HUB_OFFLINE="1")
        for model in ("orpheus", "canopylabs/orpheus-3b-0.1-ft", "someone/finetune"):
            done = box.run(COMMAND, "check", "--model", model, "--json")
            assert done.code == 0, done.stderr
            told = json.loads(done.stdout)
            assert told["preset"] == "orpheus"
            assert told["codes"]["first_id"] == 128_266
        missing = box.run(COMMAND, "check", "--model", "llasa")
        assert missing.code == 3
        assert "from HKUSTAudio/Llasa-1B: it is no directory here" in missing.stderr


def wrong_range(where: Path) -> None:
    config = json.loads((where / "config.json").read_text())
    (where / "config.json").write_text(json.dumps({**config, "vocab_size": 150_000}))


def no_tokenizer(where: Path) -> None:
    (where / "tokenizer.json").unlink()


def truncated(where: Path) -> None:
    shard = where / "model-00001-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[: 2**20])


def other_rate(where: Path) -> None:
    config = json.loads((where / "snac" / "config.json").read_text())
    (where / "snac" / "config.json").write_text(json.dumps({**config, "sampling_rate": 16_000}))


BROKEN: dict[str, tuple[Callable[[Path], None], str]] = {
    "wrong range": (wrong_range, "its head has 150000"),
    "missing tokenizer": (no_tokenizer, "has no tokenizer.json"),
    "truncated weights": (truncated, "it was not copied to its end"),
    "decoder of another rate": (other_rate, "sample_rate 16000, preset 'orpheus' needs 24000"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_bad_checkpoint_ends_every_command_with_3_and_a_sentence(
    sandbox: Sandbox, checkpoints: Checkpoints, tmp_path: Path, case: str
) -> None:
    spoil, words = BROKEN[case]
    where = shutil.copytree(checkpoints("orpheus"), tmp_path / "model")
    shutil.copytree(checkpoints("snac"), where / "snac")
    spoil(where)
    model = ("--model", str(where), "--set", f"decoder.model={where / 'snac'}")
    for command in (
        ("check",),
        ("speak", "Hi.", "-o", "a.wav"),
        ("stage", "ar"),
        ("stage", "decoder", "--connect", "tcp://127.0.0.1:9"),
    ):
        done = sandbox.run(COMMAND, *command, *model)
        assert (done.code, done.stdout) == (3, ""), command
        assert words in done.stderr
        assert done.stderr.count("\n") == 1
    assert sandbox.leftovers() == []
    assert list(sandbox.output.iterdir()) == []


@pytest.mark.parametrize(
    ("setting", "code", "words"),
    [
        ("temperature", 2, "--set is FIELD=VALUE"),
        ("=1", 2, "--set is FIELD=VALUE"),
        ("loud=1", 3, "has no 'loud'"),
        ("sampling=1", 3, "is a mapping"),
        ("chunks.first=-1", 3, "chunk sizes must satisfy"),
    ],
)
def test_a_setting_that_is_none_is_refused(
    sandbox: Sandbox, checkpoints: Checkpoints, setting: str, code: int, words: str
) -> None:
    for command in (("check",), ("speak", "Hi.", "-o", "a.wav")):
        done = sandbox.run(
            COMMAND, *command, "--model", str(checkpoints("orpheus")), *decoder(checkpoints),
            "--set", setting,
        )  # fmt: skip
        assert done.code == code
        assert words in done.stderr


def test_settings_that_contradict_are_refused(sandbox: Sandbox) -> None:
    for settings in (("a=1", "a=2"), ("a=1", "a.b=2"), ("a.b=1", "a=2")):
        told = [part for setting in settings for part in ("--set", setting)]
        done = sandbox.run(COMMAND, "check", *told)
        assert done.code == 2
        assert "twice" in done.stderr
    done = sandbox.run(COMMAND, "speak", "Hi.", "-o", "a.wav", "--connect", "x", "--model", "y")
    assert done.code == 2
    assert "leave --model out" in done.stderr


@pytest.mark.vllm
@pytest.mark.timeout(180)
def test_a_model_on_disk_speaks_with_one_argument(
    checkpoints: Checkpoints, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    sandbox = Sandbox(tmp_path_factory.mktemp("box"))  # a short path, for sockets
    where = shutil.copytree(checkpoints("orpheus"), tmp_path / "mine")
    shutil.copytree(checkpoints("snac"), where / "snac")
    settings = {
        "preset": "orpheus",
        "decoder": {"model": "snac"},
        "voices": ["ana"],
        "sampling": {"min_tokens": 64, "max_tokens": 64},
        "engine_args": {"enforce_eager": True},
    }
    (where / "omnistage.json").write_text(json.dumps(settings))
    done = sandbox.run(
        COMMAND, "speak", "Hello.", "-o", "a.wav", "--model", str(where), "--voice", "ana", "--json"
    )
    assert done.code == 0, done.stderr
    spoken = json.loads(done.stdout)
    assert spoken["output_tokens"] == 64
    with wave.open(str(sandbox.output / "a.wav")) as wav:
        assert (wav.getframerate(), wav.getnframes()) == (24_000, 9 * 2048)
    refused = sandbox.run(
        COMMAND, "speak", "Hello.", "-o", "b.wav", "--model", str(where), "--voice", "tara"
    )
    assert refused.code == 2
    assert "unknown voice 'tara'; known: ana" in refused.stderr
    assert sandbox.leftovers() == []


@pytest.mark.vllm
@pytest.mark.timeout(180)
def test_a_preset_is_served_and_takes_no_other_presets_decoder(
    checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory
) -> None:
    sandbox = Sandbox(tmp_path_factory.mktemp("box"))
    model = (
        "--model", str(checkpoints("orpheus")), *decoder(checkpoints),
        "--set", "engine_args.enforce_eager=true", "--set", "sampling.max_tokens=64",
    )  # fmt: skip
    bind = ("--bind", "tcp://127.0.0.1:0", "--json")
    ar = Process(sandbox, "ar", COMMAND, "stage", "ar", *bind, *model)
    try:
        endpoint = ar.wait_for(r'"(tcp://[^"]+)"')[1]
        stage = (COMMAND, "stage", "decoder", "--connect", endpoint, *bind)
        wrong = Process(sandbox, "wrong", *stage)  # the talker's
        assert wrong.end() == 3
        assert "talker" in wrong.err
        assert "orpheus" in wrong.err
        right = Process(sandbox, "right", *stage, *model)
        right.wait_for('"endpoint"')
        spoken = [
            sandbox.run(
                COMMAND, "speak", "Hello. It is late.", "-o", f"{voice}.wav", "--json",
                "--connect", endpoint, "--voice", voice, "--by-sentence", "--seed", "5",
            )
            for voice in ("tara", "zoe", "nobody")
        ]  # fmt: skip
        assert [done.code for done in spoken] == [0, 0, 2], spoken[1].stderr
        assert "known: tara" in spoken[2].stderr
        with wave.open(str(sandbox.output / "tara.wav")) as wav:
            assert wav.getframerate() == 24_000
            assert wav.getnframes() % 2048 == 0
        for process in (right, ar):
            assert process.end(signal.SIGTERM) == 0, process.err
        assert not sandbox.leftovers()
    finally:
        for left in sandbox.processes():
            left.kill()

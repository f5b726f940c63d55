"""What the command refuses, with which exit code, and what it says about its surroundings."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import omnistage
from omnistage.errors import UnsupportedEnvironment
from omnistage.pipeline import Pipeline
from omnistage.wire import PROTOCOL_VERSION
from tests.cli.sandbox import COMMAND, Sandbox


@pytest.fixture
def sandbox(tmp_path: Path) -> Sandbox:
    return Sandbox(tmp_path)


@pytest.fixture
def short_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with room in its path for sockets, whatever the test is called."""
    return tmp_path_factory.mktemp("cli")


@pytest.fixture
def old_vllm(short_path: Path) -> Sandbox:
    """A sandbox in which vLLM's metadata names a version that is out of range."""
    metadata = short_path / "shadow" / "vllm-0.30.1.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.30.1\n")
    return Sandbox(short_path, PYTHONPATH=str(short_path / "shadow"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        pytest.param(("speak", " ", "-o", "a.wav"), "the text is empty", id="no text"),
        pytest.param(("speak", "-", "-o", "a.wav"), "the text is empty", id="nothing on stdin"),
        pytest.param(("speak", "Hi.", "-o", "no/a.wav"), "no is no directory", id="no directory"),
        pytest.param(("speak", "Hi.", "-o", "."), "is a directory", id="output is a directory"),
        pytest.param(("speak", "Hi.", "-o", "/dev/full/a.wav"), "/dev/full is no", id="a device"),
        pytest.param(("speak", "Hi."), "--output", id="no output"),
        pytest.param(("speak", "-o", "a.wav"), "text", id="no text argument"),
        pytest.param(("speak", "Hi.", "-o", "a.wav", "--seed", "-1"), "--seed", id="a bad seed"),
        pytest.param(
            ("speak", "Hi.", "-o", "a.wav", "--timeline", "t.txt"), "end in .png", id="no picture"
        ),
        pytest.param(
            ("speak", "Hi.", "-o", "a.wav", "--timeline", "no/t.png"), "no is no", id="no folder"
        ),
        pytest.param(
            ("speak", "Hi.", "-o", "a.png", "--timeline", "./a.png"), "the same file", id="one file"
        ),
        pytest.param(("speak", "Hi.", "-o", "no[/x]/a.wav"), "no[/x] is no", id="square brackets"),
        pytest.param(("speak", "Hi.", "-o", "a.wav", "--loud"), "--loud", id="an unknown option"),
        pytest.param(("sing",), "sing", id="an unknown command"),
    ],
)
def test_bad_usage_ends_with_2_before_anything_starts(
    sandbox: Sandbox, arguments: tuple[str, ...], words: str
) -> None:
    done = sandbox.run(COMMAND, *arguments)
    assert done.code == 2
    assert done.stdout == ""
    assert words in done.stderr
    assert list(sandbox.output.iterdir()) == []
    assert list(sandbox.temporary.iterdir()) == []


@pytest.mark.parametrize(
    ("shell", "words"),
    [
        ("printf 'caf\\351' | {} speak - -o a.wav", "is no UTF-8"),
        ("{} speak - -o a.wav <&-", "standard input is closed"),
        ("{} speak \"$(printf 'caf\\351')\" -o a.wav", "is no UTF-8"),
    ],
)
def test_a_text_that_cannot_be_read_ends_with_2(sandbox: Sandbox, shell: str, words: str) -> None:
    done = sandbox.run("bash", "-c", shell.format(COMMAND))
    assert done.code == 2, done.stderr
    assert words in done.stderr
    assert done.stderr.count("\n") == 1
    assert list(sandbox.output.iterdir()) == []


def test_a_stage_that_cannot_start_ends_with_3_and_a_sentence(old_vllm: Sandbox) -> None:
    done = old_vllm.run(COMMAND, "speak", "Hello world.", "-o", "a.wav")
    assert (done.code, done.stdout) == (3, "")
    assert done.stderr == ("error: omnistage supports vllm>=0.32,<0.34, installed is 0.30.1.\n")
    assert old_vllm.leftovers() == []
    assert list(old_vllm.output.iterdir()) == []


def test_check_says_what_would_not_run_and_why(old_vllm: Sandbox) -> None:
    done = old_vllm.run(COMMAND, "check", "--json")
    assert (done.code, done.stderr) == (3, "")
    features = {each["name"]: each for each in json.loads(done.stdout)["features"]}
    for name in ("AR stage", "embedded talker"):
        assert not features[name]["runs"]
        assert "installed is 0.30.1" in features[name]["why"]
    assert features["codec decoders"]["runs"]


@pytest.mark.vllm
def test_check_finds_everything_where_the_suite_runs(sandbox: Sandbox) -> None:
    done = sandbox.run(COMMAND, "check", "--json")
    report: dict[str, Any] = json.loads(done.stdout)
    assert done.code == 0
    assert report["omnistage"] == omnistage.__version__
    assert report["protocol"] == PROTOCOL_VERSION
    assert all(feature["runs"] for feature in report["features"])
    assert report["packages"]["pyzmq"]
    assert report["notes"] == [] or report["accelerator"] != "none"
    in_words = sandbox.run(COMMAND, "check")
    assert in_words.code == 0
    for name in (*(feature["name"] for feature in report["features"]), "vLLM", "pyzmq"):
        assert name in in_words.stdout


def test_version_and_help_name_the_version_and_the_commands(sandbox: Sandbox) -> None:
    version = sandbox.run(COMMAND, "--version")
    assert (version.code, version.stdout.strip()) == (0, omnistage.__version__)
    usage = sandbox.run(sys.executable, "-m", "omnistage.cli", "--help")
    assert usage.code == 0
    assert "speak" in usage.stdout
    assert "check" in usage.stdout


def test_without_the_cli_extra_the_command_says_how_to_get_it(sandbox: Sandbox) -> None:
    code = "import sys; sys.modules['typer'] = None; from omnistage.cli import main; main()"
    done = sandbox.run(sys.executable, "-c", code)
    assert done.code == 1
    assert "pip install 'omnistage[cli]'" in done.stderr


def test_under_another_event_loop_the_pipeline_is_refused_with_a_sentence() -> None:
    # Driven by hand: what a coroutine meets under trio is that asyncio has no running loop.
    entering = Pipeline.from_preset("talker").__aenter__()
    with pytest.raises(UnsupportedEnvironment, match="needs a running asyncio event loop"):
        entering.send(None)
    entering.close()


def test_a_package_that_breaks_vllm_is_named_with_its_cure(short_path: Path) -> None:
    package = short_path / "shadow" / "torchvision"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text('raise RuntimeError("operator nms does not exist")\n')
    metadata = short_path / "shadow" / "torchvision-0.28.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: torchvision\nVersion: 0.28.0\n")
    sandbox = Sandbox(short_path, PYTHONPATH=str(short_path / "shadow"))
    spoken = sandbox.run(COMMAND, "speak", "Hi.", "-o", "a.wav")
    assert spoken.code == 3
    assert "operator nms does not exist" in spoken.stderr
    checked = sandbox.run(COMMAND, "check")
    assert checked.code == 3
    assert "pip uninstall torchvision" in checked.stdout

"""What `omnistage stage` makes of its options before anything is started."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from omnistage import DecoderStageConfig
from omnistage.cli import stage
from omnistage.cli.stage import Options, _load, run_decoder
from omnistage.errors import ConfigError, StartupError

Module = Callable[[str], str]


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Module:
    """Writes a module into the working directory and gives its name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def write(code: str) -> str:
        name = f"voice_{abs(hash(code))}"
        (tmp_path / f"{name}.py").write_text(code)
        return name

    return write


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("raise ValueError('a bug')", r"ValueError: a bug \(.*voice_\d+\.py:1\)"),
        ("def (", "SyntaxError"),
        ("def voice():\n    return 1 / 0", r"ZeroDivisionError: .* \(.*voice_\d+\.py:2\)"),
        ("def voice(name): ...", "TypeError: .* missing 1 required positional argument"),
        ("import nowhere_at_all", "No module named 'nowhere_at_all'"),
        ("", "has no attribute 'voice'"),
        ("voice = 7", "is no DecoderStageConfig but 7"),
    ],
)
def test_a_configuration_that_cannot_be_loaded_is_said_in_a_sentence(
    module: Module, code: str, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        _load(f"{module(code)}:voice", DecoderStageConfig)


class Ready:
    name = "ar"
    endpoint = "ipc:///a"


class Full(io.StringIO):
    def flush(self) -> None:
        raise OSError("no space left")


@pytest.mark.parametrize(("stdout", "why"), [(None, "is closed"), (Full(), "no space left")])
def test_an_endpoint_that_cannot_be_told_is_said_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch, stdout: Any, why: str
) -> None:
    monkeypatch.setattr(sys, "stdout", stdout)
    with pytest.raises(StartupError, match=f"standard output, which fails: .*{why}"):
        stage._report(cast("Any", Ready()), None, json=False)


def test_an_address_of_metrics_is_looked_at_before_the_stage_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def host(*_: Any, **__: Any) -> int:
        raise AssertionError("it was started")

    monkeypatch.setattr(stage, "host", host)
    monkeypatch.setattr(stage, "prepare", lambda: None)
    options = Options(
        model=None,
        settings=[],
        config=None,
        bind="ipc",
        keys=None,
        metrics=":x:",
        drain=1.0,
        json=False,
    )
    assert run_decoder(options, connect="tcp://127.0.0.1:9", within=0.1) == 3
    assert "HOST:PORT or PORT, got ':x:'" in capsys.readouterr().err  # and no emoji

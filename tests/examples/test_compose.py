"""The compose file: what it runs are commands that there are. Docker itself is not run here."""

from __future__ import annotations

import shlex

import yaml  # type: ignore[import-untyped]
from typer.testing import CliRunner

from omnistage.cli.app import app
from tests.examples.documents import ROOT

FOLDER = ROOT / "examples" / "microservices"


def test_every_command_of_the_compose_file_is_one() -> None:
    services = yaml.safe_load((FOLDER / "compose.yaml").read_text())["services"]
    assert set(services) == {"ar", "decoder", "client"}
    for name in ("ar", "decoder"):
        program, *arguments = shlex.split(services[name]["command"])
        assert program == "omnistage"
        result = CliRunner().invoke(app, [*arguments, "--help"])
        assert result.exit_code == 0, result.output
    program, script, *_ = shlex.split(services["client"]["command"])
    assert program == "python"
    assert (ROOT / script).exists()


def test_all_reach_the_ar_stage_where_it_listens() -> None:
    text = (FOLDER / "compose.yaml").read_text()
    services = yaml.safe_load(text)["services"]
    endpoint = "tcp://127.0.0.1:7101"
    assert all(endpoint in service["command"] for service in services.values())
    assert [services[name]["network_mode"] for name in ("decoder", "client")] == ["service:ar"] * 2
    dockerfile = services["ar"]["build"]["dockerfile"]
    assert (FOLDER / services["ar"]["build"]["context"] / dockerfile).exists()

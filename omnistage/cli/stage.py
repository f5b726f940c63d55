"""``omnistage stage``: one stage as a process, that others connect to."""

from __future__ import annotations

import asyncio
import importlib
import logging
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec
from rich.console import Console

from omnistage.cli.terminal import STARTUP, USAGE, complain, prepare
from omnistage.config import ARStageConfig, DecoderStageConfig
from omnistage.errors import (
    ConfigError,
    InvalidRequest,
    OmniStageError,
    StartupError,
    UnsupportedEnvironment,
)
from omnistage.models import load_preset
from omnistage.services.ar import ARService
from omnistage.services.decoder import DecoderService
from omnistage.services.process import host
from omnistage.stages.ar import ARStage
from omnistage.stages.environment import is_cpu_build
from omnistage.transport.endpoints import beside, check_bind, check_endpoint

if TYPE_CHECKING:
    from collections.abc import Callable

    from omnistage.services.process import Service
    from omnistage.transport.endpoints import Endpoints

_Config = TypeVar("_Config", ARStageConfig, DecoderStageConfig)


def run_ar(
    *,
    preset: str,
    config: str | None,
    model: str | None,
    bind: str,
    drain: float,
    json: bool,
) -> int:
    """Serve an AR stage; returns the exit code."""

    def make() -> Callable[[Endpoints], Service]:
        check_bind(bind)
        if config is None:
            # Nothing has run in this process that a fork could break.
            changes = {"start_method": "fork"} if is_cpu_build() else {}
            stage, _ = load_preset(preset, **changes, **({"model": model} if model else {}))
        else:
            stage = _load(config, ARStageConfig)
            stage = replace(stage, model=model) if model else stage
        stage = replace(stage, bind=beside(bind))
        return lambda endpoints: ARService(
            ARStage(stage, endpoints),
            endpoints,
            bind=bind,
            codec=stage.codec,
            codebooks=getattr(stage.processor, "codebooks", 0),
        )

    return _run(make, drain=drain, json=json)


def run_decoder(
    *, preset: str, config: str | None, connect: str, bind: str, drain: float, json: bool
) -> int:
    """Serve a decoder stage; returns the exit code."""

    def make() -> Callable[[Endpoints], Service]:
        check_bind(bind)
        check_endpoint(connect)
        stage = load_preset(preset)[1] if config is None else _load(config, DecoderStageConfig)
        return lambda endpoints: DecoderService(stage, endpoints, connect=connect, bind=bind)

    return _run(make, drain=drain, json=json)


def _run(make: Callable[[], Callable[[Endpoints], Service]], *, drain: float, json: bool) -> int:
    prepare()
    logging.getLogger("omnistage").setLevel(logging.INFO)
    console = Console(stderr=True)
    try:
        serving = host(make(), drain_seconds=drain, on_ready=partial(_report, json=json))
        return asyncio.run(serving)
    except (ConfigError, StartupError, UnsupportedEnvironment) as error:
        return complain(console, error, STARTUP)
    except InvalidRequest as error:
        return complain(console, error, USAGE)
    except (OmniStageError, OSError) as error:
        return complain(console, error, 1)


def _report(service: Service, *, json: bool) -> None:
    """Say where it listens, on standard output: who starts the others reads it there."""
    if json:
        ready = msgspec.json.encode({"stage": service.name, "endpoint": service.endpoint}).decode()
    else:
        ready = f"stage {service.name} is ready at {service.endpoint}"
    sys.stdout.write(ready + "\n")
    sys.stdout.flush()


def _load(reference: str, kind: type[_Config]) -> _Config:
    """What ``module:name`` names: a stage's configuration, or a function that makes it.

    Raises:
        ConfigError: There is none.
    """
    module, _, name = reference.partition(":")
    if not module or not name:
        raise ConfigError(f"--config is MODULE:NAME, got {reference!r}")
    sys.path.insert(0, str(Path.cwd()))
    try:
        found = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"--config {reference}: {error}") from error
    made = found() if callable(found) else found
    if not isinstance(made, kind):
        raise ConfigError(f"--config {reference} is no {kind.__name__} but {made!r}")
    return made

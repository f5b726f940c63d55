"""``omnistage stage``: one stage as a process, that others connect to."""

from __future__ import annotations

import asyncio
import importlib
import logging
import sys
import traceback
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from rich.console import Console

from omnistage.cli.settings import parse_settings
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
from omnistage.monitoring import Health, MetricsServer, parse_address, serve_metrics
from omnistage.services.ar import ARService
from omnistage.services.decoder import DecoderService
from omnistage.services.process import host
from omnistage.stages.ar import ARStage
from omnistage.stages.environment import is_cpu_build
from omnistage.transport.endpoints import beside, check_bind, check_endpoint
from omnistage.transport.keys import load_keys

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from omnistage.services.process import Service
    from omnistage.transport.endpoints import Endpoints

_Config = TypeVar("_Config", ARStageConfig, DecoderStageConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What both kinds of stages are told.

    Args:
        model: A preset's name, or a model's directory or hub id; with ``config``, another
            checkpoint for that.
        settings: Pieces of the preset to replace, FIELD=VALUE.
        config: ``MODULE:NAME`` of its configuration instead.
        bind: Where it listens.
        keys: Directory of the CURVE keys of its tcp sockets.
        metrics: Where metrics and health are served over HTTP, if they are.
        drain: Seconds that running requests have when it is told to stop.
        json: Whether to say in JSON that it is ready.
    """

    model: str | None
    settings: Sequence[str]
    config: str | None
    bind: str
    keys: Path | None
    metrics: str | None
    drain: float
    json: bool


def run_ar(options: Options) -> int:
    """Serve an AR stage; returns the exit code."""
    bind, config = options.bind, options.config

    def make() -> Callable[[Endpoints], Service]:
        settings = _settings(options)
        if config is None:
            # Nothing has run in this process that a fork could break.
            start = {"start_method": "fork"} if is_cpu_build() else {}
            stage, _ = load_preset(options.model or "talker", **{**start, **settings})
        else:
            stage = _load(config, ARStageConfig)
            stage = replace(stage, model=options.model) if options.model else stage
        stage = replace(stage, bind=beside(bind), keys=options.keys)
        return lambda endpoints: ARService(
            ARStage(stage, endpoints),
            endpoints,
            bind=bind,
            codec=stage.codec,
            codebooks=getattr(stage.processor, "codebooks", 0),
        )

    return _run(make, options)


def run_decoder(options: Options, *, connect: str, within: float) -> int:
    """Serve a decoder stage; returns the exit code."""
    bind, config = options.bind, options.config

    def make() -> Callable[[Endpoints], Service]:
        check_endpoint(connect)
        settings = _settings(options)
        if config is None:
            stage = load_preset(options.model or "talker", **settings)[1]
        elif options.model is not None:
            raise ConfigError("a decoder's --config says all; leave --model out")
        else:
            stage = _load(config, DecoderStageConfig)
        return lambda endpoints: DecoderService(
            stage, endpoints, connect=connect, bind=bind, within=within
        )

    return _run(make, options)


def _settings(options: Options) -> dict[str, Any]:
    settings = parse_settings(options.settings)
    if settings and options.config is not None:
        raise ConfigError("--set replaces a piece of a preset, and --config is none; leave one out")
    return settings


def _run(make: Callable[[], Callable[[Endpoints], Service]], options: Options) -> int:
    prepare()
    logging.getLogger("omnistage").setLevel(logging.INFO)
    console = Console(stderr=True)
    with ExitStack() as stack:

        def ready(service: Service) -> None:
            monitor = None
            if options.metrics is not None:
                health = partial(_health, service)
                monitor = stack.enter_context(serve_metrics(options.metrics, health))
            _report(service, monitor, json=options.json)

        try:
            check_bind(options.bind, load_keys(options.keys))
            if options.metrics is not None:
                parse_address(options.metrics)  # now: an engine takes minutes to start
            return asyncio.run(
                host(make(), keys=options.keys, drain_seconds=options.drain, on_ready=ready)
            )
        except (ConfigError, StartupError, UnsupportedEnvironment) as error:
            return complain(console, error, STARTUP)
        except InvalidRequest as error:
            return complain(console, error, USAGE)
        except (OmniStageError, OSError) as error:
            return complain(console, error, 1)


def _health(service: Service) -> Health:
    closed = service.closed
    return Health(
        ok=closed is None, reason=None if closed is None else str(closed), running=len(service)
    )


def _report(service: Service, monitor: MetricsServer | None, *, json: bool) -> None:
    """Say where it listens, on standard output: who starts the others reads it there.

    Raises:
        StartupError: It cannot be written there.
    """
    told = {"stage": service.name, "endpoint": service.endpoint}
    if monitor is not None:
        told["metrics"] = f"http://{monitor.address}/metrics"
    if json:
        ready = msgspec.json.encode(told).decode()
    else:
        ready = f"stage {service.name} is ready at {service.endpoint}"
        ready += "" if monitor is None else f", metrics at http://{monitor.address}/metrics"
    try:
        if sys.stdout is None:
            raise OSError("it is closed")
        sys.stdout.write(ready + "\n")
        sys.stdout.flush()
    except OSError as error:
        raise StartupError(
            f"where the stage listens is said on standard output, which fails: {error}"
        ) from error


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
        made = found() if callable(found) else found
    except OmniStageError:
        raise
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"--config {reference}: {error}") from error
    except Exception as error:
        *_, last = traceback.extract_tb(error.__traceback__)
        raise ConfigError(
            f"--config {reference} raised {type(error).__name__}: {error} "
            f"({last.filename}:{last.lineno})"
        ) from error
    if not isinstance(made, kind):
        raise ConfigError(f"--config {reference} is no {kind.__name__} but {made!r}")
    return made

"""``omnistage check``: what is installed, what runs here, and what would not and why."""

from __future__ import annotations

import importlib.util
import platform
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any, Final

import msgspec
from rich.console import Console
from rich.markup import escape

import omnistage
from omnistage.cli.settings import parse_settings
from omnistage.cli.terminal import STARTUP, USAGE, complain, prepare
from omnistage.decoders.registry import decoder_class
from omnistage.errors import ConfigError, InvalidRequest
from omnistage.models import describe_preset
from omnistage.stages.environment import environment_problems, vllm_version
from omnistage.wire import PROTOCOL_VERSION

_PACKAGES: Final = ("torch", "transformers", "pyzmq", "msgspec", "anyio", "numpy", "hibari-tts")

_FEATURES: Final = {
    "AR stage": (),  # the environment's own problems
    "embedded talker": ("torch", "safetensors", "hibari"),
    "codec decoders": ("torch", "transformers"),
    "SNAC decoder": ("torch", "snac"),
    "phonemes": ("phonemizer", "espeakng_loader"),
}
_EXTRAS: Final = {
    "embedded talker": "talker",
    "codec decoders": "codecs",
    "SNAC decoder": "snac",
    "phonemes": "phonemes",
}
_NEED_VLLM: Final = ("AR stage", "embedded talker")
# These break at import beside a CPU build of torch, and vLLM imports them where they are found.
_BREAKING: Final = ("torchvision", "torchaudio", "torchcodec")


class Finding(msgspec.Struct, frozen=True):
    """One feature: whether it runs here, and if not, what to do."""

    name: str
    runs: bool
    why: str | None = None


class Report(msgspec.Struct, frozen=True):
    """What ``omnistage check --json`` prints."""

    omnistage: str
    protocol: int
    python: str
    platform: str
    vllm: str | None
    accelerator: str
    packages: dict[str, str | None]
    features: list[Finding]
    notes: list[str]

    @property
    def runs(self) -> bool:
        """Whether everything runs."""
        return all(feature.runs for feature in self.features)


def run(*, json: bool) -> int:
    """Print the report.

    Returns:
        0 if everything runs here, 3 if not.
    """
    report = examine()
    if json:
        sys.stdout.write(msgspec.json.encode(report).decode() + "\n")
    else:
        _print(report)
    return 0 if report.runs else 3


def run_model(model: str, settings: Sequence[str], *, json: bool) -> int:
    """Print what a model would do, from its small files; no weights are loaded.

    Returns:
        0 if it would start, 3 if not, 2 for a setting that is none.
    """
    prepare()
    console = Console(stderr=True)
    try:
        found = describe_preset(model, **parse_settings(settings))
    except InvalidRequest as error:
        return complain(console, error, USAGE)
    except ConfigError as error:
        return complain(console, error, STARTUP)
    problems = [*environment_problems(), *_breaking(), *_missing(found)]
    if json:
        report = {**found, "runs": not problems, "problems": problems}
        sys.stdout.write(msgspec.json.encode(report).decode() + "\n")
    else:
        _print_model(found)
        for problem in problems:
            complain(console, problem, STARTUP)
    return STARTUP if problems else 0


def _missing(found: Mapping[str, Any]) -> list[str]:
    """What the decoder and the text step of a model need and is not installed."""
    problems = []
    if kind := found.get("decoder", {}).get("kind"):
        decoder = decoder_class(kind)
        missing = [name for name in decoder.packages if importlib.util.find_spec(name) is None]
        if missing:
            problems.append(_install(missing, decoder.extra))
    if found.get("phonemes") and importlib.util.find_spec("phonemizer") is None:
        problems.append(_install(["phonemizer"], "phonemes"))
    if found["preset"] == "talker":
        problems += [why for why in [_feature("embedded talker").why] if why]
    return problems


def _install(missing: Sequence[str], extra: str) -> str:
    return f"{', '.join(missing)} not installed: pip install 'omnistage[{extra}]'."


def _print_model(found: Mapping[str, Any]) -> None:
    console = Console(highlight=False, soft_wrap=True)
    for name, value in found.items():
        if isinstance(value, Mapping):
            text = ", ".join(f"{key}={inner!r}" for key, inner in value.items())
        elif isinstance(value, list):
            text = ", ".join(map(str, value)) or "none"
        else:
            text = repr(value) if isinstance(value, str) and "\n" in value else str(value)
        console.print(f"{name}: {escape(text)}")


def examine() -> Report:
    """Look at this installation, without starting anything."""
    accelerator = _accelerator()
    notes = []
    if accelerator != "none":
        notes.append(
            "omnistage was developed on CPU; on a GPU it is unproven (Model Runner V2 too)."
        )
    return Report(
        omnistage=omnistage.__version__,
        protocol=PROTOCOL_VERSION,
        python=platform.python_version(),
        platform=f"{platform.system()} {platform.machine()}",
        vllm=vllm_version(),
        accelerator=accelerator,
        packages={name: _version(name) for name in _PACKAGES},
        features=[_feature(name) for name in _FEATURES],
        notes=notes,
    )


def _feature(name: str) -> Finding:
    problems = [*environment_problems(), *_breaking()] if name in _NEED_VLLM else []
    missing = [m for m in _FEATURES[name] if importlib.util.find_spec(m) is None]
    if missing:
        problems.append(_install(missing, _EXTRAS[name]))
    return Finding(name, not problems, " ".join(problems) or None)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _breaking() -> list[str]:
    return [
        f"{name} cannot be imported beside this torch, and vLLM tries to: pip uninstall {name}."
        for name in _BREAKING
        if _broken(name)
    ]


def _broken(name: str) -> bool:
    if importlib.util.find_spec(name) is None:
        return False
    try:
        importlib.import_module(name)
    except (ImportError, OSError, RuntimeError):
        return True
    return False


def _accelerator() -> str:
    if importlib.util.find_spec("torch") is None:
        return "unknown (torch is not installed)"
    import torch

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none"


def _print(report: Report) -> None:
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"omnistage {report.omnistage}, wire protocol {report.protocol}")
    console.print(f"Python {report.python} on {report.platform}, accelerator: {report.accelerator}")
    console.print(f"vLLM {report.vllm or 'not installed'}")
    for name, version in report.packages.items():
        console.print(f"  {name} {version or 'not installed'}")
    for feature in report.features:
        mark = "[green]runs[/green]" if feature.runs else "[red]does not run[/red]"
        console.print(f"{feature.name}: {mark}{' - ' + escape(feature.why) if feature.why else ''}")
    for note in report.notes:
        console.print(f"[yellow]note:[/yellow] {escape(note)}")

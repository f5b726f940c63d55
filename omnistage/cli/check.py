"""``omnistage check``: what is installed, what runs here, and what would not and why."""

from __future__ import annotations

import importlib.util
import platform
import sys
from importlib import metadata
from typing import Final

import msgspec
from rich.console import Console
from rich.markup import escape

import omnistage
from omnistage.stages.environment import environment_problems, vllm_version
from omnistage.wire import PROTOCOL_VERSION

_PACKAGES: Final = ("torch", "transformers", "pyzmq", "msgspec", "anyio", "numpy", "hibari-tts")

_FEATURES: Final = {
    "AR stage": (),  # the environment's own problems
    "embedded talker": ("torch", "safetensors", "hibari"),
    "EnCodec decoder": ("torch", "transformers"),
}
_EXTRAS: Final = {"embedded talker": "talker", "EnCodec decoder": "codecs"}
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
    problems = [*environment_problems(), *_breaking()] if name != "EnCodec decoder" else []
    missing = [m for m in _FEATURES[name] if importlib.util.find_spec(m) is None]
    if missing:
        extra = _EXTRAS[name]
        problems.append(f"{', '.join(missing)} not installed: pip install 'omnistage[{extra}]'.")
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

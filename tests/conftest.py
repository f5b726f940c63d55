"""Environment and fixtures of the whole suite: one thread a process, nothing from the network."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import blockbuster
import pytest

# Before anything imports torch or vllm: two cores are shared by several processes.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# The test models' entry point, which vLLM looks for in every process that it starts.
sys.path.append(str(Path(__file__).parent / "omni_models" / "plugin"))


class Checkpoints:
    """Small checkpoints in published formats, each written when it is first asked for.

    Args:
        root: Where they are; tests must not change them, but may copy one.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    def __call__(self, family: str, *, seed: int = 0) -> Path:
        """The directory of a family's checkpoint, a name of ``tools.checkpoints``."""
        from tools.checkpoints.__main__ import FAMILIES

        where = self._root / f"{family}-{seed}"
        if not where.exists():
            FAMILIES[family](where, seed=seed)
        return where


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """Small checkpoints in published formats."""
    return Checkpoints(tmp_path_factory.mktemp("checkpoints"))


# Where the package's code may block the event loop: (file, functions). Never while it serves.
ALLOWED = [
    # One private directory on the local disk, made when a pipeline starts and removed when it ends.
    ("omnistage/transport/endpoints.py", {"__init__", "close"}),
    ("omnistage/core/engine.py", {"attach", "_remove"}),
    # A handful of small files, read before the start.
    ("omnistage/transport/keys.py", {"load", "can_listen", "make_keys", "add_client"}),
    # Its event loop is its own, in a thread; closing waits for that.
    ("omnistage/monitoring.py", {"_page", "close"}),
    # What is installed, and what a preset or a ready engine is: read once, before the start.
    ("omnistage/stages/environment.py", {"check_environment"}),
    ("omnistage/core/engine.py", {"adopt"}),
    ("omnistage/models/__init__.py", {"load_preset"}),
    # It belongs into an engine process, where there is no loop; only tests start one beside theirs.
    ("omnistage/transport/publisher.py", {"start", "close"}),
    # Logging writes to where the application wants its log, with whatever handler it chose.
    ("logging/__init__.py", {"handle"}),
    # vLLM lists the installed packages' entry points at the first request of a process, cached.
    ("vllm/v1/sample/logits_processor/__init__.py", {"_load_logitsprocs_plugins"}),
    # vLLM tries a request's grammar in a thread, for which it waits a bounded time.
    ("vllm/v1/structured_output/utils.py", {"compile_regex_with_timeout"}),
]


class Blocked(blockbuster.BlockingError):
    """Notes itself, because what our code logs and goes on after would not fail a test."""

    seen: list[str] = []  # noqa: RUF012 the one list of a process

    def __init__(self, func: str) -> None:
        super().__init__(func)
        ours = [f"{f.filename}:{f.lineno}" for f in inspect.stack(0) if "/omnistage/" in f.filename]
        self.seen.append(f"{func} in {ours[:3]}")


@pytest.fixture(autouse=True)
def no_blocking_call_on_the_event_loop(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Fail an async test in which code of the package, or what it calls, blocks its event loop."""
    if not inspect.iscoroutinefunction(request.function):
        yield
        return
    monkeypatch.setattr(blockbuster.blockbuster, "BlockingError", Blocked)
    Blocked.seen.clear()
    with blockbuster.blockbuster_ctx("omnistage") as guard:
        for function in guard.functions.values():
            for file, functions in ALLOWED:
                function.can_block_in(file, functions)
        yield
    assert not Blocked.seen

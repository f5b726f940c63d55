"""What keeps "vLLM owns base scheduling" true, and tells when a new vLLM comes whether it still is.

vLLM's own scheduler tests run with its schedulers and with ours, test by test: ours twice, idle,
and with a channel, a processor and metadata on each request. Random schedules run through both in
lock-step. Every name of vLLM's that is used is looked at, and the ways of running it are listed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from tools.modes import PAGE
from tools.upstream import ContractError, fetch, hub, image_support

ROOT = Path(__file__).resolve().parents[1]
CACHE = ROOT / ".cache" / "contract"

STOCK = "stock"
OURS = ("idle", "wired")
TESTS = (
    "tests/v1/core/test_scheduler.py",
    "tests/v1/core/test_async_scheduler.py",
    "tests/v1/core/test_deferred_block_free.py",
    "tests/v1/core/test_prefix_replay.py",
    "tests/v1/core/test_output.py",
    "tests/v1/core/test_priority_preemption_bug.py",
    "tests/v1/core/test_priority_scheduler_random.py",
    "tests/v1/streaming_input/test_scheduler_streaming.py",
    "tests/v1/engine/test_abort_final_step.py",
)
# Twelve tests of 20,000 random steps take ten times as long as all others together; the short form
# keeps the two that draft and preempt most.
SHORT = "not test_priority_scheduling_blast or preemption-5"
# Fewer pass only where something is missing: a stub that no longer loads, a test not collected.
LEAST = 225
TIMEOUT_SECONDS = 3600


class Run(NamedTuple):
    """What one run over the tests brought.

    Args:
        outcomes: "passed", "failed" or "skipped" by test.
        heard: What the wired schedulers' subscribers received, in sum.
    """

    outcomes: dict[str, str]
    heard: dict[str, int]

    @property
    def passed(self) -> set[str]:
        """The tests that passed."""
        return {test for test, outcome in self.outcomes.items() if outcome == "passed"}


def main() -> int:
    """Prints both counts and what was lost; 0 only if nothing was."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--long", action="store_true", help="every test; half an hour on 2 cores")
    arguments = parser.parse_args()
    try:
        root, environment = prepare()
        runs = {
            variant: run_variant(variant, root, environment, long=arguments.long)
            for variant in (STOCK, *OURS)
        }
    except (ContractError, subprocess.TimeoutExpired) as error:
        print(f"contract: {error}", file=sys.stderr)
        return 1
    failed = report(runs)
    failed |= differential(long=arguments.long)
    print("contract: the names of vLLM's that are overridden, called or read", flush=True)
    failed |= subprocess.run(
        [sys.executable, "-m", "tools.watch"], cwd=ROOT, check=False
    ).returncode
    failed |= modes(long=arguments.long)
    return failed


def differential(*, long: bool) -> int:
    """Runs both schedulers in lock-step and prints how many schedules differed."""
    marked = "slow" if long else "not slow"
    print("contract: lock-step", flush=True)
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "--hypothesis-show-statistics"),
            *("--timeout=0", "-m", marked, "tests/core/test_differential.py"),
        ],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    counts = re.findall(r"(\d+) passing, (\d+) failing", ended.stdout)
    examples = sum(int(count) for pair in counts for count in pair)
    mismatches = sum(int(failing) for _, failing in counts)
    print(f"contract: {examples} schedules in lock-step, {mismatches} mismatches")
    if ended.returncode or not examples:
        print("\n".join(ended.stdout.splitlines()[-40:]))
        return 1
    return 0


def modes(*, long: bool) -> int:
    """Prints the ways of running vLLM; the long form proves them first."""
    if (
        long
        and subprocess.run([sys.executable, "-m", "tools.modes"], cwd=ROOT, check=False).returncode
    ):
        return 1
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")][2:]
    for row in rows:
        name, _, _, result = row.strip("| ").split(" | ")
        print(f"contract: {result:8} {name}")
    if not long:
        print(f"contract: {len(rows)} ways of running vLLM, each proven by tests of `make test`")
    return 0


def prepare() -> tuple[Path, dict[str, str]]:
    """Fetches what is missing; returns the test tree and the environment to run it in.

    Raises:
        ContractError: Something could not be fetched.
    """
    root = fetch(CACHE)
    path = [str(image_support(CACHE)), str(ROOT / "tests" / "contract")]
    return root, {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path),
        "HF_HOME": str(hub(CACHE)),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CACHE_ROOT": str(CACHE / "vllm-cache"),
        "VLLM_NO_USAGE_STATS": "1",
    }


def run_variant(variant: str, root: Path, environment: dict[str, str], *, long: bool) -> Run:
    """Runs every test file once with one variant's schedulers.

    Raises:
        ContractError: pytest ended before it could say how the tests went.
    """
    outcomes, log = CACHE / f"{variant}.json", CACHE / f"{variant}.log"
    outcomes.unlink(missing_ok=True)
    settings = CACHE / "pytest.ini"
    settings.write_text("[pytest]\nasyncio_default_fixture_loop_scope = function\n")
    print(f"contract: {variant}", flush=True)
    command = [sys.executable, "-m", "pytest", "-c", str(settings), "--rootdir", str(root)]
    command += ["--noconftest", "-p", "no:cacheprovider", "-p", "stand_in", "--tb=short"]
    command += [] if long else ["-k", SHORT]
    with log.open("w") as output:
        subprocess.run(
            [*command, *TESTS],
            cwd=root,
            env={
                **environment,
                "OMNISTAGE_STAND_IN": variant,
                "OMNISTAGE_OUTCOMES": str(outcomes),
            },
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=TIMEOUT_SECONDS,
            check=False,
        )
    if not outcomes.exists():
        raise ContractError(f"pytest ended early with the {variant} schedulers; see {log}")
    return Run(**json.loads(outcomes.read_text()))


def report(runs: dict[str, Run]) -> int:
    """Prints the comparison and returns the exit code."""
    stock = runs[STOCK].passed
    for variant, run in runs.items():
        print(f"contract: {variant}: {len(run.passed)} of {len(run.outcomes)} tests pass")
    heard = runs["wired"].heard
    print(
        f"contract: wired: {heard['requests']} requests, {heard['ids']} ids and "
        f"{heard['terminals']} terminals heard"
    )
    lost = [(variant, test) for variant in OURS for test in sorted(stock - runs[variant].passed)]
    for variant, test in lost:
        print(f"contract: passes with vLLM's scheduler, fails with ours ({variant}): {test}")
    too_few = len(stock) < LEAST
    if too_few:
        print(f"contract: only {len(stock)} tests pass with vLLM's own; expected {LEAST} or more")
    silent = not heard["ids"] or not heard["terminals"]
    if silent:
        print("contract: the wired schedulers published nothing, so that run proves nothing")
    kept = sum(len(stock & runs[variant].passed) for variant in OURS)
    print(f"{kept} passed, {len(lost) + too_few + silent} failed")
    return 1 if lost or too_few or silent else 0


if __name__ == "__main__":
    sys.exit(main())

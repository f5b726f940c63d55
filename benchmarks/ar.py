"""The AR path beside stock vLLM: what it costs to have every token at a decoder coroutine.

Three ways to run the same requests, interleaved round by round in one process:

* ``final``: stock vLLM, FINAL_ONLY: nobody sees a token before the end. The ceiling.
* ``naive``: stock vLLM, DELTA outputs put into an ``asyncio.Queue`` that a coroutine reads.
* ``omnistage``: our scheduler publishes, a coroutine reads the same kind of queue.

Run it on a quiet machine: ``make bench``, or ``python benchmarks/ar.py --rounds 20``.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import platform
import random
import resource
import statistics
import time
import warnings
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("PYTHONWARNINGS", "ignore")
warnings.simplefilter("ignore")
logging.getLogger("vllm").setLevel(logging.ERROR)

import psutil  # noqa: E402

import omnistage  # noqa: E402
from omnistage.adapters.processor import Emission, Step  # noqa: E402
from omnistage.config import AUDIO, ARStageConfig  # noqa: E402
from omnistage.request import (  # noqa: E402
    FinishReason,
    StageInput,
    StageRequest,
    Start,
    Usage,
    new_request_id,
)
from omnistage.stages.ar import ARStage  # noqa: E402
from omnistage.transport.endpoints import Endpoints  # noqa: E402
from omnistage.transport.subscriber import Subscriber  # noqa: E402
from omnistage.wire import Update  # noqa: E402

MODEL = Path(omnistage.__file__).parent / "models" / "talker" / "checkpoint"
ENGINE_ARGS: dict[str, Any] = {
    "max_model_len": 1024,
    "enforce_eager": True,
    "dtype": "bfloat16",
    "max_num_seqs": 64,
    "skip_tokenizer_init": True,
    "enable_prefix_caching": False,
    "kv_cache_memory_bytes": 2**28,
    "use_tqdm_on_load": False,
    "disable_log_stats": True,
}
SAMPLING = {"temperature": 1.0, "ignore_eos": True}
PROCESSOR_MS = (0, 1, 5)
SETTLE_SECONDS = 1.3


class Timed:
    """Passes ids on, with the time at which it ran, and takes a fixed time a step.

    Args:
        share_ns: Busy nanoseconds of each call: the step's time over the requests of a step.
    """

    requires_token_updates = True

    def __init__(self, share_ns: int) -> None:
        self.share_ns = share_ns

    def open(self, request_id: str, start: Start) -> None:
        """No state."""

    def update(self, state: None, step: Step) -> Emission:
        """The ids, then the monotonic clock in ns."""
        now = time.monotonic_ns()
        while time.monotonic_ns() - now < self.share_ns:
            pass
        return Emission((*step.ids, now))

    def finish(self, state: None, reason: FinishReason) -> None:
        """Nothing was held back."""


Arm = tuple[psutil.Process, Callable[["Round"], Coroutine[Any, Any, int]]]
"""An engine core, and how to run one request on it."""


@dataclass
class Round:
    """One round of one arm."""

    tokens: int
    seconds: float
    cpu_seconds: float
    core_cpu_seconds: float = 0.0
    hops_us: list[float] = field(default_factory=list)
    sends_us: list[float] = field(default_factory=list)
    lags_us: list[float] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds


class Stock:
    """Stock vLLM, through its own front-end."""

    def __init__(self, llm: Any, core: psutil.Process) -> None:
        self.core = core
        self._llm = llm
        self._stamp = 0.0
        process = llm.output_processor.process_outputs

        def note_stamp(outputs: Any, stamp: float, *rest: Any, **more: Any) -> Any:
            self._stamp = stamp  # the engine core's clock when it made these outputs
            return process(outputs, stamp, *rest, **more)

        llm.output_processor.process_outputs = note_stamp

    async def final(self, prompt: list[int], tokens: int) -> int:
        """FINAL_ONLY: the count of ids."""
        async for output in self._generate(prompt, tokens, "FINAL_ONLY"):
            count = len(output.outputs[0].token_ids)
        return count

    async def naive(self, prompt: list[int], tokens: int, hops: list[float]) -> int:
        """DELTA outputs into a queue, read by a decoder coroutine."""
        queue: asyncio.Queue[tuple[list[int], float] | None] = asyncio.Queue()

        async def decoder() -> int:
            count = 0
            while (item := await queue.get()) is not None:
                hops.append((time.monotonic() - item[1]) * 1e6)
                count += len(item[0])
            return count

        reading = asyncio.create_task(decoder())
        async for output in self._generate(prompt, tokens, "DELTA"):
            queue.put_nowait((output.outputs[0].token_ids, self._stamp))
        queue.put_nowait(None)
        return await reading

    def _generate(self, prompt: list[int], tokens: int, kind: str) -> Any:
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        params = SamplingParams(
            **SAMPLING, max_tokens=tokens, detokenize=False, output_kind=RequestOutputKind[kind]
        )
        return self._llm.generate({"prompt_token_ids": prompt}, params, new_request_id())


class Ours:
    """An AR stage whose updates go to one queue and coroutine a request."""

    def __init__(self, stage: ARStage, core: psutil.Process) -> None:
        self.core = core
        self._stage = stage
        self._queues: dict[str, asyncio.Queue[tuple[Update, int]]] = {}

    def on_update(self, update: Update, buffers: Sequence[Any], stamp: int) -> None:
        """From the subscriber."""
        self._queues[update.request_id].put_nowait((update, stamp))

    def on_lost(self, error: Exception) -> None:
        """A benchmark that loses something is none."""
        raise error

    async def run(
        self, prompt: list[int], tokens: int, hops: list[float], sends: list[float]
    ) -> int:
        """One request: the count of ids that reached its decoder coroutine."""
        request_id = new_request_id()
        queue = self._queues[request_id] = asyncio.Queue()
        done: asyncio.Future[Usage] = asyncio.get_running_loop().create_future()

        async def decoder() -> int:
            count = 0
            while True:
                update, stamp = await queue.get()
                if update.ids:
                    hops.append((time.monotonic_ns() - stamp) / 1e3)
                    sends.append((update.ids[-1] - stamp) / 1e3)
                    count += len(update.ids) - 1
                if update.terminal is not None:
                    return count

        reading = asyncio.create_task(decoder())
        asked = StageInput(prompt=prompt, sampling={**SAMPLING, "max_tokens": tokens})
        request = StageRequest(
            request_id=request_id,
            external_id=request_id,
            input=asked,
            consumers=((AUDIO, "bench"),),
        )

        def on_done(outcome: Any) -> None:
            if isinstance(outcome, Usage):
                done.set_result(outcome)
            else:
                done.set_exception(outcome)

        self._stage.submit(request, on_done=on_done)
        await done
        count = await reading
        del self._queues[request_id]
        return count


async def measure(
    concurrency: int, core: psutil.Process, one: Callable[[Round], Coroutine[Any, Any, int]]
) -> Round:
    """Run ``concurrency`` requests at once; meanwhile a timer measures how late the loop is."""
    round_ = Round(0, 0.0, 0.0)
    core_cpu = sum(core.cpu_times()[:2])
    watching = asyncio.create_task(_watch(round_.lags_us))
    cpu = resource.getrusage(resource.RUSAGE_SELF)
    began = time.perf_counter()
    counts = await asyncio.gather(*(one(round_) for _ in range(concurrency)))
    round_.seconds = time.perf_counter() - began
    used = resource.getrusage(resource.RUSAGE_SELF)
    watching.cancel()
    round_.core_cpu_seconds = sum(core.cpu_times()[:2]) - core_cpu
    round_.tokens = sum(counts)
    round_.cpu_seconds = used.ru_utime + used.ru_stime - cpu.ru_utime - cpu.ru_stime
    return round_


async def _watch(lags: list[float]) -> None:
    while True:
        due = time.perf_counter() + 0.005
        await asyncio.sleep(0.005)
        lags.append((time.perf_counter() - due) * 1e6)


def median_ratio(ours: list[float], theirs: list[float]) -> str:
    """Median of the paired ratios, with a 95 % bootstrap interval."""
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(2000))
    return f"{statistics.median(ratios):.3f} [{medians[50]:.3f}, {medians[-51]:.3f}]"


def quantile(values: list[float], q: float) -> float:
    """A quantile of what was measured; 0 where nothing was."""
    return sorted(values)[min(int(q * len(values)), len(values) - 1)] if values else 0.0


def new_child(before: set[int]) -> psutil.Process:
    """The engine core that was just started."""
    children = psutil.Process().children()
    (core,) = [c for c in children if c.pid not in before and "EngineCore" in " ".join(c.cmdline())]
    return core


def start_stock() -> Any:
    """Stock vLLM, forked as ours is."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    config = AsyncEngineArgs(model=str(MODEL), **ENGINE_ARGS).create_engine_config()
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
    return AsyncLLM.from_vllm_config(config)


async def start_ours(stack: AsyncExitStack, endpoints: Endpoints, name: str, share_ns: int) -> Ours:
    """An AR stage and its subscriber."""
    before = {child.pid for child in psutil.Process().children()}
    config = ARStageConfig(
        model=str(MODEL),
        processor=Timed(share_ns),
        engine_args=ENGINE_ARGS,
        start_method="fork",
        name=name,
    )
    stage = ARStage(config, endpoints)
    await stage.start()
    stack.push_async_callback(stage.aclose)
    ours = Ours(stage, new_child(before))
    subscriber = Subscriber(endpoints, AUDIO, "bench", ours)
    stack.callback(subscriber.close)
    await subscriber.connect(stage.publishers, within=10)
    return ours


async def main(rounds: int, tokens: int) -> None:
    """All arms, all concurrencies, and the processors that take time."""
    prompt = [1, 4, *range(70, 100), 3]
    print(f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    print(f"{rounds} interleaved rounds, {tokens} tokens a request, model {MODEL.parent.name}")
    async with AsyncExitStack() as stack:
        endpoints = stack.enter_context(Endpoints())
        llm = start_stock()
        stack.callback(llm.shutdown, 15)
        stock = Stock(llm, new_child(set()))
        engines = {
            ms: await start_ours(stack, endpoints, f"ar{ms}", ms * 1_000_000 // 32)
            for ms in PROCESSOR_MS
        }
        ours = engines[0]
        for concurrency in (1, 8, 32):
            arms: dict[str, Arm] = {
                "final": (stock.core, lambda r: stock.final(prompt, tokens)),
                "naive": (stock.core, lambda r: stock.naive(prompt, tokens, r.hops_us)),
                "omnistage": (
                    ours.core,
                    lambda r: ours.run(prompt, tokens, r.hops_us, r.sends_us),
                ),
            }
            results = await interleave(rounds, concurrency, arms)
            report(concurrency, results)
        slow: dict[str, Arm] = {
            f"{ms} ms": (engine.core, partial(_run_timed, engine, prompt, tokens))
            for ms, engine in engines.items()
        }
        print("\nprocessors that hold the interpreter, 32 streams")
        rows = await interleave(rounds, 32, slow)
        base = [r.rate for r in rows["0 ms"]]
        for name, runs in rows.items():
            rate = statistics.median(r.rate for r in runs)
            print(
                f"  {name} a step: {rate:7.0f} tokens/s, ratio to 0 ms "
                f"{median_ratio([r.rate for r in runs], base)}"
            )


async def _run_timed(engine: Ours, prompt: list[int], tokens: int, round_: Round) -> int:
    return await engine.run(prompt, tokens, round_.hops_us, round_.sends_us)


async def interleave(
    rounds: int,
    concurrency: int,
    arms: dict[str, Arm],
) -> dict[str, list[Round]]:
    """Every arm once a round, in an order that changes; one round more to warm up."""
    results: dict[str, list[Round]] = {name: [] for name in arms}
    rng = random.Random(concurrency)
    for index in range(rounds + 1):
        order = list(arms)
        rng.shuffle(order)
        for name in order:
            # vLLM's processes spin for 1 s after their last step: another arm's would take part
            # of this one's cores.
            await asyncio.sleep(SETTLE_SECONDS)
            outcome = await measure(concurrency, *arms[name])
            if index:
                results[name].append(outcome)
    return results


def report(concurrency: int, results: dict[str, list[Round]]) -> None:
    """Print one concurrency's figures."""
    print(f"\n{concurrency} streams")
    for name, runs in results.items():
        hops = [hop for run in runs for hop in run.hops_us]
        sends = [send for run in runs for send in run.sends_us]
        lags = [lag for run in runs for lag in run.lags_us]
        cpu = statistics.median(run.cpu_seconds / run.tokens * 1e6 for run in runs)
        line = f"  {name:10s} {statistics.median(r.rate for r in runs):7.0f} tokens/s"
        core = statistics.median(run.core_cpu_seconds / run.tokens * 1e6 for run in runs)
        line += f", CPU us a token: app {cpu:.1f}, engine core {core:.1f}"
        line += f"; loop lag p99 {quantile(lags, 0.99) / 1e3:.1f} ms"
        if hops:
            line += ", hop p50/p95/p99 " + "/".join(
                f"{quantile(hops, q):.0f}" for q in (0.5, 0.95, 0.99)
            )
            line += " us"
        if sends:
            line += f" (append to send p50 {quantile(sends, 0.5):.0f} us)"
        print(line)
    rates = {name: [r.rate for r in runs] for name, runs in results.items()}
    hop = {name: [quantile(r.hops_us, 0.5) for r in runs] for name, runs in results.items()}
    print(f"  omnistage / final  tokens/s {median_ratio(rates['omnistage'], rates['final'])}")
    print(f"  omnistage / naive  tokens/s {median_ratio(rates['omnistage'], rates['naive'])}")
    print(f"  omnistage / naive  hop p50  {median_ratio(hop['omnistage'], hop['naive'])}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=128)
    options = parser.parse_args()
    asyncio.run(main(options.rounds, options.tokens))

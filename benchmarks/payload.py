"""What rows of hidden states cost beside the same stage without them, in one run.

Two engines of one tiny model of hidden size 2048, bfloat16, random weights: ``ids`` publishes
sampled ids and has vLLM's own worker, ``rows`` publishes the rows too. Rounds alternate; a pair is
one of each. Then the parts alone: CPU time in the worker and in the scheduler for a step of n rows.

Run it on a quiet machine: ``python benchmarks/payload.py --executor uni`` for rows that are built
in the step, ``--executor mp --scheduling async`` for those built where its output is waited for.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import pickle
import random
import statistics
import time
import warnings
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
warnings.simplefilter("ignore")

import omnistage  # noqa: E402
from omnistage import ARStageConfig, HiddenStates, Pipeline, TokenUpdates, subscribe  # noqa: E402

HIDDEN = 2048
PREFILL = 2048
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": 2048,
    "num_hidden_layers": 1,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "vocab_size": 1024,
    "max_position_embeddings": 4096,
    "eos_token_id": 1,
    "torch_dtype": "bfloat16",
}
ENGINE_ARGS: dict[str, Any] = {
    "load_format": "dummy",
    "max_model_len": 4096,
    "max_num_batched_tokens": 4096,
    "max_num_seqs": 64,
    "enforce_eager": True,
    "skip_tokenizer_init": True,
    "enable_prefix_caching": False,
    "kv_cache_memory_bytes": 2**28,
    "use_tqdm_on_load": False,
    "disable_log_stats": True,
}


def ratio(ours: list[float], theirs: list[float]) -> str:
    """Median of the paired ratios, with a 95 % bootstrap interval."""
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(2000))
    return f"{statistics.median(ratios):.3f} [{medians[50]:.3f}, {medians[-51]:.3f}]"


def cpu_us(call: Any, times: int = 200) -> float:
    """Median CPU time of a call in this thread, in us."""
    taken = []
    for _ in range(times):
        began = time.thread_time_ns()
        call()
        taken.append(time.thread_time_ns() - began)
    return statistics.median(taken) / 1000


def measure_parts() -> None:
    """CPU time of each part of a step of n decode rows, and of one prefill."""
    import torch

    from omnistage.core.rows import RowCount
    from omnistage.worker.build import build, take
    from omnistage.worker.contract import ModelContract
    from omnistage.worker.reader import Executed

    contract = ModelContract(model="bench")
    print("\nCPU us a step         take     build    pickle  unpickle scheduler     bytes")
    for requests, count, first in (
        (1, 1, 0),
        (16, 1, 0),
        (16, 1, 3000),
        (64, 1, 0),
        (1, PREFILL, 0),
    ):
        names = [f"a-request-with-a-name-{i}" for i in range(requests)]
        hidden = torch.zeros(requests * count, HIDDEN, dtype=torch.bfloat16)
        executed = Executed(names, [count] * requests, [first] * requests, hidden)
        took = partial(take, executed, {}, contract, dict.fromkeys(names, 8))
        taken = took()
        assert taken is not None  # noqa: S101
        made = partial(build, taken, names)
        beside: list[pickle.PickleBuffer] = []

        def beside_if_large(buffer: pickle.PickleBuffer, beside: Any = beside) -> bool:
            beside.append(buffer)  # as vLLM's queue between its processes does
            return len(buffer.raw()) < 1 << 20

        dump = partial(pickle.dumps, made(), 5, buffer_callback=beside_if_large)
        raw = dump()
        large = [bytearray(b.raw()) for b in beside if len(b.raw()) >= 1 << 20]
        load = partial(pickle.loads, raw, buffers=large)
        payload = load()

        def cut(payload: Any = payload, requests: int = requests, first: int = first) -> None:
            for i in range(requests):
                rows = RowCount(10_000)
                rows.next = first
                rows.take(payload, i, committed=0, sampled=1)

        cells = "".join(f"{cpu_us(call):10.0f}" for call in (took, made, dump, load, cut))
        size = len(raw) + sum(map(len, large))
        print(f"{requests:4d} x {count:4d} at {first:4d}{cells} {size:9d}")


def measure_idle() -> None:
    """What a worker that can give rows does in a step in which nobody wants any."""
    from types import SimpleNamespace

    from torch.utils._python_dispatch import TorchDispatchMode
    from vllm.v1.worker.worker_base import WorkerBase

    from omnistage.worker.contract import ModelContract
    from omnistage.worker.mixin import PayloadWorkerMixin
    from omnistage.worker.requests import WorkerRequests

    class Stock(WorkerBase):
        def __init__(self) -> None: ...

        def execute_model(self, scheduler_output: Any) -> Any: ...

        def sample_tokens(self, grammar_output: Any) -> Any: ...

    class Ours(PayloadWorkerMixin, Stock): ...

    class Operations(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            Operations.seen += 1
            return func(*args, **(kwargs or {}))

    empty: dict[str, Any] = {}
    new = SimpleNamespace(
        req_id="a", sampling_params=None, prompt_token_ids=[1], prompt_embeds=None
    )
    step: Any = SimpleNamespace(
        finished_req_ids=set(),
        scheduled_new_reqs=[new],
        scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=set()),
    )
    kind: Any = Ours
    worker = kind()
    worker._omni_requests = WorkerRequests(all_of_them=False)
    worker._omni_hooks = SimpleNamespace(
        contract=ModelContract(model="bench"), take_outputs=lambda: empty
    )

    def run(one: Any) -> None:
        one.execute_model(step)
        one.sample_tokens(None)

    stock_us, ours_us = cpu_us(partial(run, Stock()), 2000), cpu_us(partial(run, worker), 2000)
    with Operations():  # type: ignore[no-untyped-call]
        run(worker)
    print(
        f"\na step in which nobody wants rows: {ours_us - stock_us:.1f} us of CPU more, "
        f"{Operations.seen} tensor operations"
    )


def make_llm(model: str, config: ARStageConfig, executor: str, scheduling: str) -> Any:
    """A forked engine, attached to a stage."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if executor == "uni" else "1"
    args = {**ENGINE_ARGS, "distributed_executor_backend": executor}
    vllm_config = AsyncEngineArgs(model=model, **args).create_engine_config()
    assert vllm_config.parallel_config.distributed_executor_backend == executor  # noqa: S101
    # vLLM's CPU platform turns it off; this is how it runs on a GPU by default.
    vllm_config.scheduler_config.async_scheduling = scheduling == "async"
    omnistage.attach(vllm_config, config)
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
    return AsyncLLM.from_vllm_config(vllm_config)


async def one_round(pipeline: Pipeline, streams: int, prompt: int, tokens: int) -> float:
    """Seconds until a subscriber has everything of so many requests."""
    sampling = {"temperature": 0.0, "ignore_eos": True, "max_tokens": tokens}
    async with subscribe(pipeline.endpoints, subscriber="bench") as updates:
        began = time.perf_counter()
        running = [
            asyncio.ensure_future(
                pipeline.submit(
                    [2 + (i + k) % 1000 for k in range(prompt)],
                    sampling=sampling,
                    subscribers=["bench"],
                ).finished()
            )
            for i in range(streams)
        ]
        left = streams
        async for update in updates:
            left -= update.terminal is not None
            if not left:
                break
        took = time.perf_counter() - began
        await asyncio.gather(*running)
    return took


async def measure_engines(executor: str, scheduling: str, pairs: int, tokens: int) -> None:
    """Pairs of rounds, one without and one with rows."""
    with TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(MODEL))
        async with AsyncExitStack() as stack:
            arms = []
            for processor in (TokenUpdates(), HiddenStates()):
                config = ARStageConfig(model=directory, processor=processor)
                llm = make_llm(directory, config, executor, scheduling)
                stack.callback(llm.shutdown)
                pipeline = Pipeline(ar=config, decoder=None, llm=llm)
                arms.append(await stack.enter_async_context(pipeline))
            way = "background" if (executor, scheduling) == ("mp", "async") else "inline"
            print(
                f"\nexecutor {executor}, {scheduling}, rows built {way}, {pairs} pairs; "
                "ms a step, median; rows/ids with 95%"
            )
            for streams, prompt, count in (
                (1, 8, tokens),
                (16, 8, tokens),
                (64, 8, tokens),
                (1, PREFILL, 1),
            ):
                taken: list[list[float]] = [[], []]
                for pair in range(-1, pairs):
                    for arm in (0, 1) if pair % 2 else (1, 0):
                        seconds = await one_round(arms[arm], streams, prompt, count)
                        if pair >= 0:  # the first warms up
                            taken[arm].append(seconds * 1000 / count)
                ids, rows = taken
                print(
                    f"{streams:3d} streams, {prompt:4d} + {count:3d} ids: "
                    f"ids {statistics.median(ids):7.2f}, rows {statistics.median(rows):7.2f}, "
                    f"rows/ids {ratio(rows, ids)}",
                    flush=True,
                )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--executor", choices=["mp", "uni"], default="mp")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--scheduling", choices=["sync", "async"], default="sync")
    options = parser.parse_args()
    ways = options.executor, options.scheduling
    asyncio.run(measure_engines(*ways, options.pairs, options.tokens))
    measure_parts()  # last: torch has run in no process that is forked
    measure_idle()


if __name__ == "__main__":
    main()

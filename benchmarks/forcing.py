"""What enforcing the talker's structure costs: tokens per second with and without, in one engine.

Rounds of 16 concurrent requests are interleaved. Both kinds have the talker's prompt; one of them
behind a padding id, by which the logits processor does not know it for a talker's.

Run it on a quiet machine: ``python benchmarks/forcing.py --rounds 20``.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import random
import statistics
import time
import warnings

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("PYTHONWARNINGS", "ignore")
warnings.simplefilter("ignore")
logging.getLogger("vllm").setLevel(logging.ERROR)

from omnistage import Pipeline, StageInput  # noqa: E402
from omnistage.models import load_preset  # noqa: E402
from omnistage.models.talker.preset import TALKER, TalkerInput  # noqa: E402

TEXT = "The children built a castle of sand and watched the tide take it away."
PADDING = 0


async def tokens_per_second(pipeline: Pipeline, prompt: list[int], streams: int) -> float:
    """One round: so many requests of 150 tokens at once."""
    sampling = {"max_tokens": 150, "ignore_eos": True, "stop_token_ids": []}
    began = time.perf_counter()
    usages = await asyncio.gather(
        *(pipeline.submit(prompt, sampling=sampling).finished() for _ in range(streams))
    )
    return sum(usage.output_tokens for usage in usages) / (time.perf_counter() - began)


async def main(rounds: int, streams: int) -> None:
    """Measure and print the ratio with its spread."""
    adapted = await TalkerInput(TALKER).adapt(StageInput(prompt=TEXT))
    forced = [i for i in adapted.prompt if isinstance(i, int)]
    prompts = {"free": [PADDING, *forced], "forced": forced}
    ar, _ = load_preset("talker", start_method="fork")
    taken: dict[str, list[float]] = {name: [] for name in prompts}
    async with Pipeline(ar=ar, decoder=None) as pipeline:
        for number in range(rounds + 1):
            order = list(prompts)
            random.shuffle(order)
            for name in order:
                rate = await tokens_per_second(pipeline, prompts[name], streams)
                if number:  # the first is a warm-up
                    taken[name].append(rate)
    ratios = sorted(a / b for a, b in zip(taken["forced"], taken["free"], strict=True))
    low, high = ratios[len(ratios) // 20], ratios[-1 - len(ratios) // 20]
    print(f"{streams} streams, {rounds} rounds of each, interleaved")
    for name, rates in taken.items():
        print(f"  {name:7} {statistics.median(rates):6.0f} tokens/s")
    print(f"  forced over free: median {statistics.median(ratios):.3f} [{low:.3f}, {high:.3f}]")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--streams", type=int, default=16)
    options = parser.parse_args()
    asyncio.run(main(options.rounds, options.streams))

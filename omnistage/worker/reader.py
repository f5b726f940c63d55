"""The one place that knows what vLLM's model runners keep between a forward pass and its sampling.

Runner V1 keeps the batch beside the state, V2 inside it; what is read here is the same of both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.v1.core.sched.output import SchedulerOutput


@dataclass(slots=True)
class Batch:
    """The requests of a forward pass, in its order; the runner's own objects, to be read at once.

    Args:
        request_ids: Their ids.
        counts: How many tokens each had scheduled, which is how many rows it has.
        first_rows: How many tokens of each had been computed before.
    """

    request_ids: Sequence[str]
    counts: Sequence[int]
    first_rows: Sequence[int]


@dataclass(slots=True)
class Executed(Batch):
    """A forward pass that has not been sampled from.

    Args:
        hidden: Hidden states, [tokens or more, hidden size]; behind the tokens is padding.
    """

    hidden: torch.Tensor


def read_executed(runner: Any) -> Executed | None:
    """What a model runner has executed and not sampled yet.

    Args:
        runner: vLLM's model runner, V1 or V2.

    Returns:
        None if there is nothing, or if this rank has no hidden states.
    """
    state = runner.execute_model_state
    hidden = getattr(state, "hidden_states", None)
    if not isinstance(hidden, torch.Tensor):
        return None
    batch = getattr(state, "input_batch", None)
    if batch is not None:  # V2
        count = batch.num_reqs
        return Executed(
            batch.req_ids[:count],
            batch.num_scheduled_tokens[:count].tolist(),
            batch.num_computed_tokens_np[:count].tolist(),
            hidden,
        )
    read = read_prepared(runner, state.scheduler_output)
    return Executed(read.request_ids, read.counts, read.first_rows, hidden)


def read_prepared(runner: Any, scheduled: SchedulerOutput) -> Batch:
    """What runner V1 has prepared, before or after its forward pass; V2 does not show it before.

    Args:
        runner: vLLM's model runner V1.
        scheduled: The step it has prepared.
    """
    batch, counts = runner.input_batch, scheduled.num_scheduled_tokens
    computed = batch.num_computed_tokens_cpu
    if runner.use_async_spec_decode:
        # The host's are a guess at how many drafts were accepted; the device's are not.
        computed = runner.num_computed_tokens
    return Batch(
        batch.req_ids,
        [counts[request_id] for request_id in batch.req_ids],
        computed[: batch.num_reqs].tolist(),
    )

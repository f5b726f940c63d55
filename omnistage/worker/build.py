"""From a forward pass to a payload: the rows of those that want them, in memory of their own."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from omnistage.worker.payload import HIDDEN, Rows, StepPayload

if TYPE_CHECKING:
    from collections.abc import Container

    from omnistage.worker.reader import Executed


def build_payload(executed: Executed, wanted: Container[str]) -> StepPayload | None:
    """The rows of the wanted requests, detached, in their exact dtype, owning their memory.

    It waits for the device, so that the next execution may reuse whatever it likes.

    Args:
        executed: The forward pass.
        wanted: Ids of the requests whose rows are wanted.

    Returns:
        None if no such request is in the batch.
    """
    picked = [i for i, request_id in enumerate(executed.request_ids) if request_id in wanted]
    if not picked:
        return None
    counts = [executed.counts[i] for i in picked]
    return StepPayload(
        [executed.request_ids[i] for i in picked],
        [executed.first_rows[i] for i in picked],
        counts,
        {HIDDEN: _rows(_pick(executed, picked), counts)},
    )


def _pick(executed: Executed, picked: list[int]) -> torch.Tensor:
    """The picked requests' rows of hidden states behind one another, [rows, hidden size]."""
    ends = list(accumulate(executed.counts))
    if len(picked) == len(executed.counts):
        return executed.hidden[: ends[-1]]
    return torch.cat([executed.hidden[ends[i] - executed.counts[i] : ends[i]] for i in picked])


def _rows(tensor: torch.Tensor, counts: list[int]) -> Rows:
    """Copy a tensor, [rows, ...], to the host and cut it into as many rows as ``counts`` say."""
    host = tensor.detach().cpu().contiguous()
    shape = tuple(host.shape[1:])
    flat = host.reshape(len(host), -1).view(torch.uint8).numpy()
    ends = accumulate(counts)
    data = [flat[end - n : end].tobytes() for n, end in zip(counts, ends, strict=True)]
    return Rows(str(host.dtype).removeprefix("torch."), shape, data)

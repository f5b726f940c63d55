"""From a forward pass to a payload: the rows of those that want them, in memory of their own.

In two halves. :func:`take` runs between the forward pass and its sampling, before the next
execution can reuse what it reads; :func:`build` may run in another thread, and reads only what was
taken.
"""

from __future__ import annotations

import logging
import traceback
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final

import msgspec
import torch

from omnistage.worker.contract import HIDDEN, Occurrence
from omnistage.worker.payload import Rows, StepPayload
from omnistage.worker.prefixes import PrefixStep

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from omnistage.worker.contract import ModelContract
    from omnistage.worker.reader import Executed

log = logging.getLogger(__name__)

DTYPES: Final = {
    getattr(torch, name): name
    for name in (
        *("bool", "uint8", "int8", "int16", "int32", "int64"),
        *("float8_e4m3fn", "float8_e5m2", "float16", "bfloat16", "float32", "float64"),
    )
}
"""The dtypes that cross, each exactly."""

Span = tuple[int, int]


class OutputError(Exception):
    """A model's outputs are not what it declares; the message names the key."""


class TakenRows(msgspec.Struct, frozen=True):
    """One key's rows, [rows, ...], still on the device; see :class:`Rows`."""

    occurrence: Occurrence
    ends: list[int]
    tensor: torch.Tensor
    ready: Any = None


class Taken(msgspec.Struct):
    """What was taken of a step; see :class:`StepPayload`.

    Args:
        places: As there.
        first_rows: As there.
        counts: As there.
        prompts: The length of each one's prompt.
        keys: The rows; with ``prefixes``, of every request of the batch.
        prefixes: What the step adds to the rows of cached prefixes, where they are kept.
        error: Why there are no rows, if they could not be taken.
    """

    places: list[int]
    first_rows: list[int]
    counts: list[int]
    prompts: list[int]
    keys: dict[str, TakenRows]
    prefixes: PrefixStep | None = None
    error: str | None = None


def take(
    executed: Executed,
    outputs: Mapping[str, Any],
    contract: ModelContract,
    wanted: Mapping[str, int],
    *,
    later: bool = False,
    prefixes: PrefixStep | None = None,
) -> Taken | None:
    """Take the rows of the wanted requests: detached, in their exact dtype.

    Args:
        executed: The forward pass.
        outputs: What the model returned beside hidden states.
        contract: What it declares.
        wanted: The requests whose rows are wanted, and the length of each one's prompt.
        later: Leave the copy from the device to :func:`build`.
        prefixes: Take those of all requests, and keep them.

    Returns:
        None if there is nothing to send or to keep. Where rows cannot be taken, an error in their
        place.
    """
    names, firsts = executed.request_ids, executed.first_rows
    picked = [i for i, name in enumerate(names) if name in wanted]
    if contract.only_prefill:
        picked = [i for i in picked if firsts[i] < wanted[names[i]]]
    if not picked and prefixes is None:
        return None
    taken = Taken(
        picked,
        [firsts[i] for i in picked],
        [executed.counts[i] for i in picked],
        [wanted[names[i]] for i in picked],
        {},
        prefixes,
    )
    try:
        _check_outputs(outputs, contract, executed)
        taken.keys = _take_keys(executed, outputs, contract, taken, later=later)
    except Exception as error:
        taken.error = _describe(error)
    return taken


def build(taken: Taken, request_ids: list[str]) -> StepPayload:
    """Bring what was taken to the host, and keep what is to be kept.

    Args:
        taken: What :func:`take` returned.
        request_ids: The ids that vLLM returns with the step.
    """
    payload = StepPayload(request_ids, taken.places, taken.first_rows, taken.counts, {})
    error = taken.error
    try:
        if error is None:
            payload.keys.update({key: _to_host(rows) for key, rows in taken.keys.items()})
    except Exception as failure:
        error = _describe(failure)
    try:
        if taken.prefixes is not None:  # in any case: it says which rows are no more
            payload = taken.prefixes.complete(payload, taken.prompts)
    except Exception as failure:
        error = error or _describe(failure)
    if error is not None:
        payload.keys.clear()
        payload.errors.update(dict.fromkeys(range(len(taken.places)), error))
    return payload


def _describe(error: Exception) -> str:
    """An exception and where it was raised, as its requests' client will read it."""
    log.error("the payload of a step cannot be built; its requests fail", exc_info=error)
    (*_, frame) = traceback.extract_tb(error.__traceback__)
    return f"{type(error).__name__}: {error} ({frame.filename}:{frame.lineno})"


def _check_outputs(outputs: Mapping[str, Any], contract: ModelContract, executed: Executed) -> None:
    """Check what a model returned against what it declares.

    Raises:
        OutputError: An undeclared key, or one of another shape or kind.
    """
    for key in outputs:
        if key not in contract.outputs:
            raise OutputError(
                f"{contract.model} returned {key!r}, which its omni_outputs does not declare"
            )
    rows = sum(executed.counts)
    for key, occurrence in contract.outputs.items():
        value = outputs.get(key)
        if value is None and occurrence is Occurrence.PREFILL:
            continue  # missed below, where rows of it are due
        if not isinstance(value, torch.Tensor):
            raise OutputError(
                f"{contract.model} declares {key!r} and returned {type(value).__name__}, no tensor"
            )
        least = len(executed.counts) if occurrence is Occurrence.REQUEST else rows
        if value.dim() == 0 or len(value) < least:
            raise OutputError(
                f"{contract.model} returned {key!r} of shape {list(value.shape)}; one row a "
                f"{'request' if occurrence is Occurrence.REQUEST else 'token'} makes {least}"
            )


def _take_keys(
    executed: Executed,
    outputs: Mapping[str, Any],
    contract: ModelContract,
    taken: Taken,
    *,
    later: bool,
) -> dict[str, TakenRows]:
    stops = list(accumulate(executed.counts))
    spans = [(stop - count, stop) for stop, count in zip(stops, executed.counts, strict=True)]
    prompts = spans
    if taken.prefixes is None:
        spans = [spans[i] for i in taken.places]
        prompts = [
            (start, max(start, min(end, start + prompt - first)))
            for (start, end), prompt, first in zip(
                spans, taken.prompts, taken.first_rows, strict=True
            )
        ]
    places = [(i, i + 1) for i in taken.places]
    cuts = {Occurrence.TOKEN: spans, Occurrence.PREFILL: prompts, Occurrence.REQUEST: places}
    sources: dict[str, tuple[Occurrence, Any]] = {}
    if contract.include_hidden:
        sources[HIDDEN] = (Occurrence.TOKEN, executed.hidden)
    sources |= {key: (n, outputs.get(key)) for key, n in contract.outputs.items()}
    found = {}
    for key, (occurrence, tensor) in sources.items():
        own = cuts[occurrence]
        if all(start == end for start, end in own):
            continue
        if tensor is None:
            raise OutputError(
                f"{contract.model} returned no {key!r} for a step whose rows of it are due"
            )
        if tensor.dtype not in DTYPES:
            raise OutputError(f"{contract.model} returned {key!r} in {tensor.dtype}")
        rows = _select(tensor.detach(), own)
        ready = None
        if rows.is_cuda:
            if later:
                ready = torch.cuda.Event()
                ready.record()
            else:
                rows = rows.cpu()
        ends = list(accumulate(end - start for start, end in own))
        found[key] = TakenRows(occurrence, ends, rows, ready)
    return found


def _select(tensor: torch.Tensor, spans: Sequence[Span]) -> torch.Tensor:
    """Copy spans of rows behind one another."""
    pieces: list[Span] = []
    for start, end in spans:
        if pieces and pieces[-1][1] == start:
            pieces[-1] = (pieces[-1][0], end)
        elif start < end:
            pieces.append((start, end))
    if len(pieces) == 1:
        ((start, end),) = pieces
        return tensor[start:end].clone(memory_format=torch.contiguous_format)
    return torch.cat([tensor[start:end] for start, end in pieces])


def _to_host(rows: TakenRows) -> Rows:
    tensor = rows.tensor
    if rows.ready is not None:  # on a stream of its own: the main one is in the next forward pass
        stream = torch.cuda.Stream(tensor.device)
        stream.wait_event(rows.ready)
        with torch.cuda.stream(stream):
            tensor = tensor.to("cpu", non_blocking=True)
        stream.synchronize()
    data = tensor.reshape(-1).view(torch.uint8).numpy()
    return Rows(rows.occurrence, DTYPES[tensor.dtype], tuple(tensor.shape[1:]), rows.ends, data)

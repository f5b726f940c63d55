"""The contract of a chunk processor: requests stay apart, steps are only a grouping."""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any, Final

from omnistage.adapters.processor import ChunkProcessor, Emission, Step
from omnistage.request import FinishReason, Start
from omnistage.testing.checks import contract

if TYPE_CHECKING:
    from omnistage.testing.checks import Check

Make = Callable[[], ChunkProcessor]
Ids = Sequence[int]

_DRAWN: Final = 400
_CODEBOOKS: Final = (1, 2, 3, 4, 6, 7, 8, 9, 12, 16)
_ANY: Final = range(4096)
_LARGEST: Final = 1 << 63  # what a decoder's array of indices holds; the wire holds as much


def declares_itself(make: Make, ids: Ids) -> None:
    """The methods are there and ``requires_token_updates`` is a bool."""
    processor = make()
    assert isinstance(processor, ChunkProcessor), (
        "an attribute or method of the protocol is missing"
    )
    assert isinstance(processor.requires_token_updates, bool), (
        "requires_token_updates must be a bool"
    )


def reaches_the_engine_process(make: Make, ids: Ids) -> None:
    """It can be sent to another process, and does the same there."""
    processor = make()
    try:
        arrived = ForkingPickler.loads(ForkingPickler.dumps(processor))
    except Exception as error:
        raise AssertionError(f"it cannot be sent to another process: {error!r}") from error
    sampled = _sampled(ids)
    assert _run(arrived, sampled) == _run(processor, sampled), (
        "its copy in another process emits otherwise"
    )


def gives_the_same_however_ids_are_grouped(make: Make, ids: Ids) -> None:
    """Speculative decoding samples several ids a step: what comes out must not depend on that."""
    sampled = _sampled(ids)
    alone = _run(make(), sampled)
    for seed in range(5):
        sizes = random.Random(seed).choices(range(1, 9), k=len(sampled))
        grouped = _run(make(), sampled, sizes=sizes)
        assert grouped == alone, "it emits otherwise if a step samples several ids"


def keeps_requests_apart(make: Make, ids: Ids) -> None:
    """Two requests whose steps alternate get what each gets alone."""
    processor = make()
    sampled = _sampled(ids, 1), _sampled(ids, 2)
    runs = [_Run(processor, "a"), _Run(processor, "b")]
    for pair in zip_longest(*sampled):
        for run, token in zip(runs, pair, strict=True):
            if token is not None:
                run.step((token,))
    for run, own in zip(runs, sampled, strict=True):
        run.end()
        assert run.emitted == _run(make(), own), "interleaved requests change each other's output"


def ends_a_request_that_sampled_nothing(make: Make, ids: Ids) -> None:
    """A request may end before its first id, for whatever reason."""
    for reason in FinishReason:
        run = _Run(make(), "empty")
        run.end(reason)
        assert run.emitted[0] == [], "it emits ids for a request that sampled none"


def counts_what_it_drops(make: Make, ids: Ids) -> None:
    """No more ids are dropped than were sampled, and never fewer than none."""
    sampled = _sampled(ids)
    _, dropped = _run(make(), sampled)
    assert 0 <= dropped <= len(sampled), f"it dropped {dropped} of {len(sampled)} ids"


def emits_something(make: Make, ids: Ids) -> None:
    """Of ids that it takes something comes out; otherwise the other checks would say nothing."""
    sampled = _sampled(ids)
    run = _Run(make(), "alone")
    for token in sampled:
        run.step((token,))
    run.end()
    assert run.has_emitted, (
        f"{len(sampled)} ids from {min(sampled)} to {max(sampled)} went in and nothing came out; "
        "if it takes others, say which: omnistage.testing.processor_contract(ids=...)"
    )


def processor_contract(*, ids: Ids = _ANY) -> Sequence[Check]:
    """Checks of a :class:`~omnistage.ChunkProcessor` that takes the ids that you say.

    Args:
        ids: A range that ids are drawn from, at random and as codebooks that follow one another
            would be; or the very ids of a request, in order, for a processor to which their order
            means more.

    Raises:
        ValueError: No ids, or one that vLLM cannot sample.
    """
    if not ids or min(ids) < 0:
        raise ValueError("ids must be at least one id, and none of them negative")
    return contract(
        declares_itself,
        reaches_the_engine_process,
        gives_the_same_however_ids_are_grouped,
        keeps_requests_apart,
        ends_a_request_that_sampled_nothing,
        counts_what_it_drops,
        emits_something,
        ids=ids,
    )


PROCESSOR_CONTRACT: Final = processor_contract()
"""Checks of a :class:`~omnistage.ChunkProcessor` that takes ids below 4096.

Each takes what makes the processor; :func:`processor_contract` is for those that take others.
"""


class _Run:
    """One request, and what was emitted for it: (ids, number dropped)."""

    def __init__(self, processor: ChunkProcessor, request_id: str) -> None:
        self._processor = processor
        self._state: Any = processor.open(request_id, Start())
        self._position = 0
        self._ids: list[int] = []
        self.has_emitted = False
        self._dropped = 0

    @property
    def emitted(self) -> tuple[list[int], int]:
        return self._ids, self._dropped

    def step(self, ids: tuple[int, ...]) -> None:
        self._take(self._processor.update(self._state, Step(ids, self._position, {})))
        self._position += len(ids)

    def end(self, reason: FinishReason = FinishReason.STOP) -> None:
        self._take(self._processor.finish(self._state, reason))

    def _take(self, emission: Emission | None) -> None:
        if emission is None:
            return
        assert isinstance(emission, Emission), (
            f"it returned {type(emission).__name__}, expected Emission or None"
        )
        new = [operator.index(i) for i in emission.ids]
        for i in new:
            assert 0 <= i < _LARGEST, f"it emitted {i}; an id must be in [0, 2**63)"
        self._ids += new
        self.has_emitted = bool(self.has_emitted or new or emission.tensors)
        self._dropped += operator.index(emission.dropped)


def _sampled(ids: Ids, seed: int = 0) -> list[int]:
    if not isinstance(ids, range):
        return list(ids)
    draw = random.Random(seed)
    sampled = draw.choices(ids, k=_DRAWN)
    for books in _CODEBOOKS:  # whole frames, should the range be that of so many codebooks
        parts = [ids[len(ids) * k // books : len(ids) * (k + 1) // books] for k in range(books)]
        if all(parts):
            sampled += [draw.choice(part) for part in [*parts, *parts]]
    return sampled


def _run(
    processor: ChunkProcessor, ids: Sequence[int], sizes: Iterable[int] | None = None
) -> tuple[list[int], int]:
    run = _Run(processor, "alone")
    rest = list(ids)
    for size in sizes or [1] * len(rest):
        if rest:
            run.step(tuple(rest[:size]))
            del rest[:size]
    run.end()
    return run.emitted

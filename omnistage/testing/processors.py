"""The contract of a chunk processor: requests stay apart, steps are only a grouping."""

from __future__ import annotations

import multiprocessing
import operator
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from omnistage.adapters.processor import ChunkProcessor, Emission, Step
from omnistage.request import FinishReason, Start

Make = Callable[[], ChunkProcessor]

_IDS: Final = 400
_VOCABULARY: Final = 4096


def declares_itself(make: Make) -> None:
    """The methods are there and ``requires_token_updates`` is a bool."""
    processor = make()
    assert isinstance(processor, ChunkProcessor), (
        "an attribute or method of the protocol is missing"
    )
    assert isinstance(processor.requires_token_updates, bool), (
        "requires_token_updates must be a bool"
    )


def reaches_the_engine_process(make: Make) -> None:
    """It can be sent to another process, and does the same there."""
    here, there = multiprocessing.Pipe()
    processor = make()
    try:
        here.send(processor)
        arrived = there.recv()
    except Exception as error:
        raise AssertionError(f"it cannot be sent to another process: {error!r}") from error
    finally:
        here.close()
        there.close()
    ids = _sampled()
    assert _run(arrived, ids) == _run(processor, ids), "its copy in another process emits otherwise"


def gives_the_same_however_ids_are_grouped(make: Make) -> None:
    """Speculative decoding samples several ids a step: what comes out must not depend on that."""
    ids = _sampled()
    alone = _run(make(), ids)
    for seed in range(5):
        grouped = _run(make(), ids, sizes=random.Random(seed).choices(range(1, 9), k=_IDS))
        assert grouped == alone, "it emits otherwise if a step samples several ids"


def keeps_requests_apart(make: Make) -> None:
    """Two requests whose steps alternate get what each gets alone."""
    processor = make()
    first, second = _sampled(1), _sampled(2)
    runs = [_Run(processor, "a"), _Run(processor, "b")]
    for pair in zip(first, second, strict=True):
        for run, token in zip(runs, pair, strict=True):
            run.step((token,))
    for run, ids in zip(runs, (first, second), strict=True):
        run.end()
        assert run.emitted == _run(make(), ids), "interleaved requests change each other's output"


def ends_a_request_that_sampled_nothing(make: Make) -> None:
    """A request may end before its first id, for whatever reason."""
    for reason in FinishReason:
        run = _Run(make(), "empty")
        run.end(reason)
        assert run.emitted[0] == [], "it emits ids for a request that sampled none"


def counts_what_it_drops(make: Make) -> None:
    """No more ids are dropped than were sampled, and never fewer than none."""
    emitted, dropped = _run(make(), _sampled())
    assert 0 <= dropped <= _IDS, f"it dropped {dropped} of {_IDS} ids"
    assert emitted or dropped, "ids went in, nothing came out, and nothing was counted as dropped"


PROCESSOR_CONTRACT: Final[Sequence[Callable[[Make], None]]] = (
    declares_itself,
    reaches_the_engine_process,
    gives_the_same_however_ids_are_grouped,
    keeps_requests_apart,
    ends_a_request_that_sampled_nothing,
    counts_what_it_drops,
)
"""Checks of a :class:`~omnistage.ChunkProcessor` that takes ids.

Each takes what makes the processor, and feeds it 400 random ids below 4096.
"""


class _Run:
    """One request, and what was emitted for it: (ids, number dropped)."""

    def __init__(self, processor: ChunkProcessor, request_id: str) -> None:
        self._processor = processor
        self._state: Any = processor.open(request_id, Start())
        self._position = 0
        self._ids: list[int] = []
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
        self._ids += [operator.index(i) for i in emission.ids]
        assert all(i >= 0 for i in self._ids), "it emitted a negative id"
        self._dropped += operator.index(emission.dropped)


def _sampled(seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(_VOCABULARY), k=_IDS)


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

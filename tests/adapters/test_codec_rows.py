"""Codec frames out of rows: which rows are audio, whatever steps they come in."""

from __future__ import annotations

import pickle
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnistage import ChunkProcessor, CodecRows, PayloadProcessor, Step
from omnistage.adapters.processor import check_keys, row_keys
from omnistage.errors import ConfigError
from omnistage.request import FinishReason, Payload, Start

SIZE = 64
END = 9


class Request:
    """What a model that gives a row a position computes of a request, cut into steps."""

    def __init__(self, prompt: int, ids: list[int], rows: np.ndarray) -> None:
        self.prompt, self.ids, self.rows = prompt, ids, rows
        assert len(rows) == prompt + len(ids) - 1

    def steps(self, chunks: list[int], accepted: list[int], *, aligned: bool = True) -> list[Step]:
        """Chunks of the prefill, then steps that accept several ids, as long as there are any."""
        made, at, sampled = [], 0, 0
        while at < self.prompt:
            count = min(chunks.pop() if chunks else self.prompt, self.prompt - at)
            ids = tuple(self.ids[:1]) if at + count == self.prompt else ()
            made.append(Step(ids, 0, {"codes": self.payload(at, at + count)}))
            at, sampled = at + count, len(ids)
        while sampled < len(self.ids):
            count = min(accepted.pop() if accepted else 1, len(self.ids) - sampled)
            ids = tuple(self.ids[sampled : sampled + count])
            made.append(Step(ids, sampled, {"codes": self.payload(at, at + count)}))
            at, sampled = at + count, sampled + count
        return made

    def payload(self, first: int, end: int) -> Payload:
        rows = self.rows[first:end]
        return Payload(str(rows.dtype), rows.shape, first, memoryview(rows.tobytes()))


def run(
    processor: CodecRows, steps: list[Step], reason: FinishReason
) -> tuple[list[int], int, list[int]]:
    """All indices, how many ids were dropped, and how many indices each call gave."""
    state = processor.open("r", Start())
    emissions = [processor.update(state, step) for step in steps]
    emissions.append(processor.finish(state, reason))
    ids = [i for one in emissions if one is not None for i in one.ids]
    dropped = sum(one.dropped for one in emissions if one is not None)
    return ids, dropped, [0 if one is None else len(one.ids) for one in emissions]


@st.composite
def requests(draw: st.DrawFn) -> tuple[Request, list[int], list[int], int]:
    prompt, count = draw(st.integers(1, 9)), draw(st.integers(1, 12))
    books = draw(st.integers(1, 4))
    dtype = draw(st.sampled_from([np.int8, np.uint8, np.int16, np.int32, np.int64]))
    values = st.integers(0, 63) if dtype is np.uint8 else st.integers(-1, SIZE)
    total = prompt + count - 1
    flat = draw(st.lists(values, min_size=total * books, max_size=total * books))
    rows = np.array(flat, dtype).reshape(total, books)
    few = st.lists(st.integers(1, 4), max_size=9)
    return Request(prompt, [5] * (count - 1) + [END], rows), draw(few), draw(few), books


@given(
    requests(),
    st.sampled_from(["sampled", "read"]),
    st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]),
    st.booleans(),
)
def test_any_steps_give_the_same_frames(
    drawn: tuple[Request, list[int], list[int], int],
    of: Literal["sampled", "read"],
    reason: FinishReason,
    knows_the_end: bool,
) -> None:
    request, chunks, accepted, books = drawn
    end_ids = frozenset({END}) if knows_the_end else frozenset()
    processor = CodecRows(codebooks=books, codebook_size=SIZE, of=of, end_ids=end_ids)
    if of == "read":
        frames, ended = request.rows[request.prompt :], 0
    else:
        frames = request.rows[request.prompt - 1 :]
        ended = int(knows_the_end or reason is FinishReason.STOP)
        frames = frames[: len(frames) - ended]
    good = [f for f in frames.tolist() if all(0 <= i < SIZE for i in f)]
    ids, dropped, _ = run(processor, request.steps(chunks, accepted), reason)
    assert ids == [i for frame in good for i in frame]
    assert dropped == len(frames) - len(good) + ended


def request_of(prompt: int, ids: list[int]) -> Request:
    rows = np.arange(2 * (prompt + len(ids) - 1), dtype=np.int64).reshape(-1, 2)
    return Request(prompt, ids, rows)


def test_a_frame_waits_for_a_step_only_where_no_end_id_is_known() -> None:
    steps = request_of(3, [5, 5, END]).steps([], [])
    waits = CodecRows(codebooks=2, codebook_size=SIZE)
    assert run(waits, steps, FinishReason.STOP) == ([4, 5, 6, 7], 1, [0, 2, 2, 0])
    assert run(waits, steps, FinishReason.LENGTH)[2] == [0, 2, 2, 2]
    knows = CodecRows(codebooks=2, codebook_size=SIZE, end_ids=frozenset({END}))
    assert run(knows, steps, FinishReason.STOP) == ([4, 5, 6, 7], 1, [2, 2, 0, 0])
    read = CodecRows(codebooks=2, codebook_size=SIZE, of="read")
    assert run(read, steps, FinishReason.STOP) == ([6, 7, 8, 9], 0, [0, 2, 2, 0])


def test_a_model_that_gives_a_row_a_request_gives_its_frames_too() -> None:
    request = request_of(3, [5, 5, END])
    steps = [Step((request.ids[k],), k, {"codes": request.payload(2 + k, 3 + k)}) for k in range(3)]
    processor = CodecRows(codebooks=2, codebook_size=SIZE)
    assert run(processor, steps, FinishReason.STOP)[0] == [4, 5, 6, 7]


def test_an_end_without_rows_gives_nothing() -> None:
    processor = CodecRows(codebooks=2, codebook_size=SIZE)
    for reason in FinishReason:
        assert run(processor, [], reason) == ([], 0, [0])
    prefill = request_of(4, [5]).steps([2, 2], [])[:1]
    assert run(processor, prefill, FinishReason.ABORT) == ([], 0, [0, 0])


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([Step((5,), 0, {})], "brought no rows of 'codes'"),
        ([Step((5,), 0, {"codes": Payload("float32", (1, 2), 0, bytes(8))})], "expected integers"),
        ([Step((5,), 0, {"codes": Payload("bool", (1, 2), 0, bytes(2))})], "expected integers"),
        ([Step((5,), 0, {"codes": Payload("int8", (1, 3), 0, bytes(3))})], r"\[rows, 2\]"),
        ([Step((5,), 0, {"codes": Payload("int8", (1,), 0, bytes(1))})], r"\[rows, 2\]"),
        (
            [
                Step((5,), 0, {"codes": Payload("int8", (1, 2), 0, bytes(2))}),
                Step((5,), 1, {"codes": Payload("int8", (1, 2), 3, bytes(2))}),
            ],
            "rows 1 to 2 of 'codes' are missing",
        ),
        (
            [Step((5, 6), 0, {"codes": Payload("int8", (1, 2), 7, bytes(2))})],
            "rows 6 to 6 of 'codes' are missing",
        ),
    ],
)
def test_rows_that_are_not_as_declared_fail_the_request(steps: list[Step], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(CodecRows(codebooks=2, codebook_size=SIZE), steps, FinishReason.STOP)


@pytest.mark.parametrize(
    "given", [{"codebooks": 0}, {"codebook_size": 0}, {"of": "other"}], ids=str
)
def test_a_configuration_that_cannot_be_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        CodecRows(**{"codebooks": 1, "codebook_size": 1, **given})


def test_what_it_takes_and_gives_is_known_at_start() -> None:
    processor = CodecRows(codebooks=2, codebook_size=SIZE, key="audio")
    assert isinstance(processor, ChunkProcessor)
    assert isinstance(processor, PayloadProcessor)
    assert pickle.loads(pickle.dumps(processor)) == processor  # noqa: S301 as spawning does
    check_keys(processor, {"audio", "hidden"}, "Model")
    with pytest.raises(ConfigError, match="takes rows of 'audio', Model gives 'codes', 'hidden'"):
        check_keys(processor, {"hidden", "codes"}, "Model")
    with pytest.raises(ConfigError, match="Model gives none"):
        check_keys(processor, (), "Model")
    assert row_keys(processor, {"audio"}) == frozenset()

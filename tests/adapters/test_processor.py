"""The shipped chunk processors."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnistage.adapters.processor import (
    ChunkProcessor,
    CodecFrames,
    HiddenStates,
    Step,
    TokenUpdates,
)
from omnistage.errors import ConfigError
from omnistage.request import FinishReason, Payload, Start


def run(processor: CodecFrames, *steps: list[int]) -> tuple[list[int], int]:
    state = processor.open("r", Start())
    out: list[int] = []
    dropped = position = 0
    for ids in steps:
        emission = processor.update(state, Step(tuple(ids), position, {}))
        position += len(ids)
        out += emission.ids
        dropped += emission.dropped
    last = processor.finish(state, FinishReason.STOP)
    return out, dropped + (last.dropped if last else 0)


def test_ids_outside_the_codec_are_removed_not_clamped_and_counted() -> None:
    processor = CodecFrames(first_id=5, codebook_size=3)
    assert run(processor, [5, 6562, 7, 9000, -1]) == ([0, 2], 3)


def test_frames_are_whole_across_steps_and_a_partial_one_is_dropped_at_the_end() -> None:
    processor = CodecFrames(first_id=10, codebook_size=4, codebooks=3)
    assert run(processor, [10], [11, 12, 13], [10]) == ([0, 1, 2], 2)


def test_with_a_stride_an_id_of_the_wrong_codebook_breaks_the_frame() -> None:
    processor = CodecFrames(first_id=100, codebook_size=10, codebooks=3, stride=10)
    # Frame, then a frame cut short by the next one's first id, then a stray id of codebook 2.
    ids = [100, 111, 122, 103, 114, 105, 116, 127, 129, 101, 112, 123]
    assert run(processor, ids) == ([0, 1, 2, 5, 6, 7, 1, 2, 3], 3)


@pytest.mark.parametrize(
    "bad",
    [
        {"first_id": -1, "codebook_size": 4},
        {"first_id": 0, "codebook_size": 0},
        {"first_id": 0, "codebook_size": 4, "codebooks": 0},
        {"first_id": 0, "codebook_size": 4, "codebooks": 2, "stride": 3},
    ],
)
def test_a_range_that_cannot_be_is_refused(bad: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        CodecFrames(**bad)


@given(
    ids=st.lists(st.integers(95, 135), max_size=60),
    cuts=st.lists(st.integers(0, 60), max_size=8),
    stride=st.sampled_from([0, 10]),
)
def test_any_grouping_into_steps_gives_the_same_frames_and_counts(
    ids: list[int], cuts: list[int], stride: int
) -> None:
    processor = CodecFrames(first_id=100, codebook_size=10, codebooks=3, stride=stride)
    edges = [0, *sorted(min(c, len(ids)) for c in cuts), len(ids)]
    steps = [ids[a:b] for a, b in pairwise(edges)]
    frames, dropped = run(processor, *steps)
    assert (frames, dropped) == run(processor, ids)
    assert len(frames) % 3 == 0
    assert len(frames) + dropped == len(ids)


def test_the_shipped_processors_keep_the_protocol() -> None:
    assert isinstance(TokenUpdates(), ChunkProcessor)
    assert isinstance(CodecFrames(first_id=0, codebook_size=1), ChunkProcessor)


def test_hidden_states_pass_a_steps_ids_and_rows_on_as_they_are() -> None:
    processor = HiddenStates()
    rows = {"hidden": Payload("float32", (2, 3), 7, bytes(24))}
    emission = processor.update(None, Step((4, 5), 2, rows))
    assert (emission.ids, emission.tensors, emission.dropped) == ((4, 5), rows, 0)
    assert processor.requires_token_updates

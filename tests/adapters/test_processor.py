"""The shipped chunk processors."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnistage.adapters.processor import (
    ChunkProcessor,
    CodecFrames,
    Emission,
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


class TestOrpheus:
    """Frames of seven, each slot with a range of its own, from 128266 on."""

    ORPHEUS = CodecFrames(first_id=128_266, codebook_size=4096, codebooks=7, stride=4096)

    @staticmethod
    def ids(*slots: int, code: int = 9) -> list[int]:
        return [128_266 + 4096 * slot + code for slot in slots]

    def test_an_id_outside_its_slots_range_drops_the_partial_frame_and_is_counted(self) -> None:
        broken = [*self.ids(0, 1, 2), 128_258, *self.ids(0, 1, 2, 3, 4, 5, 6)]
        assert run(self.ORPHEUS, broken) == ([9] * 7, 4)

    def test_slots_count_from_where_a_frame_begins_again(self) -> None:
        # A slot is left out: the rest of its frame is nobody's, and the next one is whole.
        broken = [*self.ids(0, 1, 3, 4, 5, 6), *self.ids(0, 1, 2, 3, 4, 5, 6)]
        assert run(self.ORPHEUS, broken) == ([9] * 7, 6)

    def test_an_id_of_slot_0_where_another_is_due_begins_a_frame(self) -> None:
        broken = [*self.ids(0, 1), *self.ids(0, 1, 2, 3, 4, 5, 6)]
        assert run(self.ORPHEUS, broken) == ([9] * 7, 2)

    def test_the_edges_of_a_range(self) -> None:
        edges = [128_266 + 4096 * slot + code for code in (0, 4095) for slot in range(7)]
        assert run(self.ORPHEUS, edges) == ([0] * 7 + [4095] * 7, 0)
        assert run(self.ORPHEUS, [128_265]) == ([], 1)
        assert run(self.ORPHEUS, [128_266 + 7 * 4096]) == ([], 1)

    def test_a_frame_that_the_end_cuts_short_is_counted(self) -> None:
        assert run(self.ORPHEUS, [*self.ids(0, 1, 2, 3, 4, 5, 6), *self.ids(0, 1)]) == ([9] * 7, 2)


def test_the_shipped_processors_keep_the_protocol() -> None:
    assert isinstance(TokenUpdates(), ChunkProcessor)
    assert isinstance(CodecFrames(first_id=0, codebook_size=1), ChunkProcessor)


class TestHiddenStates:
    rows = np.arange(24, dtype=np.float32).reshape(8, 3)

    def payload(self, first: int, end: int) -> Payload:
        data = memoryview(self.rows[first:end].tobytes())
        return Payload("float32", (end - first, 3), first, data)

    @pytest.mark.parametrize("cuts", [(4,), (1, 4), (3, 4), (1, 2, 3, 4)], ids=str)
    def test_without_its_prompt_a_request_has_the_rows_of_its_ids(self, cuts: Any) -> None:
        """A prompt of four, in one step or several; then an id a step, or three."""
        for steps in (((5,), (6,), (7,), (8,)), ((5,), (6, 7, 8))):
            processor = HiddenStates(prompt=False)
            state = processor.open("r", Start())
            made, at, sampled = [], 0, 0
            for cut in cuts:
                ids: tuple[int, ...] = steps[0] if cut == 4 else ()
                made.append(processor.update(state, Step(ids, 0, {"h": self.payload(at, cut)})))
                at, sampled = cut, len(ids)
            for ids in steps[1:]:
                tensors = {"h": self.payload(at, at + len(ids))}
                made.append(processor.update(state, Step(ids, sampled, tensors)))
                at, sampled = at + len(ids), sampled + len(ids)
            given = [one for one in made if one is not None]
            assert [i for one in given for i in one.ids] == [5, 6, 7, 8]
            assert [one.tensors["h"].first_row for one in given] == [3, *range(4, 7, len(steps[1]))]
            raw = b"".join(one.tensors["h"].data for one in given)
            assert raw == self.rows[3:7].tobytes()

    def test_with_its_prompt_every_step_is_passed_on_as_it_is(self) -> None:
        processor = HiddenStates()
        state = processor.open("r", Start())
        step = Step((), 0, {"h": self.payload(0, 2)})
        assert processor.update(state, step) == Emission((), step.tensors)
        assert processor.requires_token_updates

    def test_ids_without_rows_are_passed_on(self) -> None:
        processor = HiddenStates(prompt=False)
        state = processor.open("r", Start())
        assert processor.update(state, Step((5,), 0, {})) == Emission((5,))

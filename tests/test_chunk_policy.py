"""Chunk sizes against a player: whoever makes audio faster than it plays keeps it supplied."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnistage.models.flat import LLASA, NEUTTS
from omnistage.models.orpheus import ORPHEUS
from omnistage.models.talker.preset import TALKER
from omnistage.request import ChunkPolicy


def gaps(policy: ChunkPolicy, speed: float, frames: int) -> list[int]:
    """The chunks that arrive after everything before them was played, in times of a frame.

    Frames are made ``speed`` times as fast as they are played; a chunk arrives with its last frame.
    """
    late = []
    made = policy.size(0)
    ends = made / speed + made  # of what the player has, from its first sample on
    index = 1
    while made < frames:
        made += policy.size(index)
        if made / speed > ends + 1e-9:
            late.append(index)
        ends = max(ends, made / speed) + policy.size(index)
        index += 1
    return late


@given(first=st.integers(1, 40), growth=st.floats(1, 4), steady=st.integers(1, 200))
def test_made_twice_as_fast_as_chunks_grow_no_chunk_comes_late(
    first: int, growth: float, steady: int
) -> None:
    policy = ChunkPolicy(first=first, growth=growth, steady=max(first, steady))
    assert gaps(policy, 2 * growth, 4000) == []


@pytest.mark.parametrize(
    ("policy", "speed"),
    [
        pytest.param(ChunkPolicy(), 2.0, id="default"),
        pytest.param(TALKER.chunks, 1.6, id="talker"),
        pytest.param(ORPHEUS.chunks, 1.7, id="orpheus"),
        pytest.param(LLASA.chunks, 1.4, id="llasa"),
        pytest.param(NEUTTS.chunks, 1.4, id="neutts"),
    ],
)
def test_the_policies_that_come_along_need_no_more_than_their_growth(
    policy: ChunkPolicy, speed: float
) -> None:
    assert gaps(policy, speed, 4000) == []


def test_a_small_first_chunk_before_large_ones_would_run_dry() -> None:
    """What the growth is for: one frame and then 25 at once are a gap at any ordinary speed."""
    assert gaps(ChunkPolicy(first=1, growth=25, steady=25), 4.0, 200) == [1]

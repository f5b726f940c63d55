from __future__ import annotations

import subprocess
import sys
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnistage.models.talker.frames import UnitFrames
from omnistage.models.talker.layout import read_layout
from tests.models.talker.samples import HELLO

LAYOUT = read_layout()
UNITS = UnitFrames(LAYOUT)


def test_each_code_gets_the_phone_of_the_marker_before_it() -> None:
    state = UNITS.new()
    h, schwa = 68 + LAYOUT.phones.index("h"), 68 + LAYOUT.phones.index("ə")
    frames = UNITS.push(state, [4, 176, h, 177, 178, schwa, 1300, 5, 179, 2])
    assert frames == [(0, 0), (1, h - 68), (2, h - 68), (1124, schwa - 68), (3, 0)]
    assert state.dropped == 0


def test_codes_before_any_marker_have_no_phone() -> None:
    assert UNITS.push(UNITS.new(), [200]) == [(24, 0)]


def test_ids_without_meaning_are_counted_and_the_end_is_not() -> None:
    state = UNITS.new()
    frames = UNITS.push(state, [0, 1, 3, 1301, 1343, 10**9, -1, 2, 2, 176])
    assert frames == [(0, 0)]
    assert state.dropped == 7


def test_a_real_utterance_is_taken_whole() -> None:
    state = UNITS.new()
    frames = UNITS.push(state, HELLO)
    assert (len(frames), state.dropped) == (47, 0)


@given(
    ids=st.lists(st.one_of(st.integers(-5, 1400), st.integers(60, 200)), max_size=60),
    cuts=st.lists(st.integers(0, 60), max_size=10),
)
def test_any_cut_gives_the_same_frames(ids: list[int], cuts: list[int]) -> None:
    whole_state, state = UNITS.new(), UNITS.new()
    whole = UNITS.push(whole_state, ids)
    edges = [0, *sorted(cuts), len(ids)]
    parts = [frame for start, end in pairwise(edges) for frame in UNITS.push(state, ids[start:end])]
    if max(cuts, default=0) <= len(ids):
        assert parts == whole
        assert state == whole_state
    assert all(0 <= code < LAYOUT.codes and 0 <= phone < 108 for code, phone in whole)


@pytest.mark.parametrize("heavy", ["torch", "numpy", "vllm", "hibari"])
def test_the_engine_process_needs_nothing_heavy_for_it(heavy: str) -> None:
    code = f"import sys; sys.modules[{heavy!r}] = None; import omnistage.models.talker.frames"
    subprocess.run([sys.executable, "-c", code], check=True)

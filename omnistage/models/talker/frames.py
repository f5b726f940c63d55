"""Sampled talker ids to codec frames, id by id, with nothing but integers.

It runs where the ids are sampled and knows neither vLLM nor the decoder that takes the frames.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from omnistage.models.talker.layout import Layout


@dataclass(slots=True)
class UnitFramesState:
    """One request's place in its output.

    Attributes:
        phone: Index of the phone that is being spoken; 0, the word gap, until a marker says more.
        dropped: Ids seen so far that no output should have: neither a unit, a code nor the end.
    """

    phone: int = 0
    dropped: int = 0


class UnitFrames:
    """Pairs each code with the phone that the latest marker named.

    Args:
        layout: The talker's vocabulary.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout

    def new(self) -> UnitFramesState:
        """The state of a request that has sampled nothing."""
        return UnitFramesState()

    def push(self, state: UnitFramesState, ids: Iterable[int]) -> list[tuple[int, int]]:
        """Take a request's next ids, however many.

        Args:
            state: The request's state, changed in place.
            ids: Ids in the order they were sampled, perhaps none.

        Returns:
            The frames they complete, each (code, phone). Markers and the end make no frame; an id
            without meaning makes none either and is counted.
        """
        layout = self._layout
        first_word, first_phone, first_code = (
            layout.first_word,
            layout.first_phone,
            layout.first_code,
        )
        end = first_code + layout.codes
        frames = []
        for token in ids:
            if first_code <= token < end:
                frames.append((token - first_code, state.phone))
            elif first_phone <= token < first_code:
                state.phone = token - first_phone
            elif first_word <= token < first_phone:
                state.phone = 0
            elif token != layout.eos:
                state.dropped += 1
        return frames

"""What a talker may sample next: one rule for every way of reading a request's ids.

The output repeats the prompt's units in order, each as a marker with its codes behind it, then
ends. Which marker comes is the prompt's affair; when it comes is the model's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from omnistage.models.talker.layout import Layout

# Codes a unit, 25 ms each. In the training set every unit has 1 to 24; the last one, the silence
# at the end, has 7 or more, and cutting it short cuts the word before it.
FEWEST: Final = 1
MOST: Final = 30
FEWEST_AT_THE_END: Final = 6

_NEVER: Final = float("-inf")


def constrain(layout: Layout, logits: Tensor, following: Tensor, may: Tensor, must: Tensor) -> None:
    """Leave each row its codes and the one marker that may follow, in place.

    The probability of everything that is no code goes to that marker: a model that is sure that a
    unit is over but not of what comes next would otherwise go on with it.

    Args:
        layout: The talker's vocabulary.
        logits: [rows, vocabulary], float.
        following: The next marker, or the end, of each row, [rows], int64.
        may: Whether it may come now, [rows], bool.
        must: Whether nothing else may, [rows], bool.
    """
    head, end = layout.first_code, layout.first_code + layout.codes
    leaving = logits[:, :head].logsumexp(-1)
    codes = logits[:, head:end]
    must = must | codes.isneginf().all(-1)  # masked by a request's own options
    codes.masked_fill_(must[:, None], _NEVER)
    logits[:, :head] = _NEVER
    logits[:, end:] = _NEVER
    # A mass of nothing stays possible: a row without any would be no distribution.
    leaving = leaving.clamp(min=torch.finfo(logits.dtype).min / 2)
    leaving = leaving.where(may | must, torch.full_like(leaving, _NEVER))
    logits.scatter_(1, following[:, None], leaving[:, None])


class Progress:
    """How far one request is: read from its output ids, and never more than a cache of them.

    Args:
        layout: The talker's vocabulary.
        units: The prompt's units.
        output: The request's sampled ids; the list that vLLM goes on filling.
    """

    __slots__ = (
        "_codes",
        "_end",
        "_ended",
        "_last",
        "_layout",
        "_marker",
        "_read",
        "_units",
        "output",
    )

    def __init__(self, layout: Layout, units: list[int], output: list[int]) -> None:
        self.output = output
        self._layout = layout
        self._units = units
        self._end = layout.first_code + layout.codes
        self._rewind()

    def following(self) -> tuple[int, bool, bool]:
        """The marker that comes next, whether it may come now, and whether it must."""
        self._read_on()
        layout = self._layout
        if self._ended:
            return layout.eos, True, True  # only a request that ignores its end gets here
        if self._marker == 0:
            return self._units[0], True, True
        last = self._marker == len(self._units)
        fewest = FEWEST_AT_THE_END if last else FEWEST
        following = layout.eos if last else self._units[self._marker]
        return following, self._codes >= fewest, self._codes >= MOST

    def _rewind(self) -> None:
        self._read = self._marker = self._codes = 0
        self._last = -1
        self._ended = False

    def _read_on(self) -> None:
        output, layout = self.output, self._layout
        if self._read and (len(output) < self._read or output[self._read - 1] != self._last):
            self._rewind()  # the list was cut or replaced
        # A negative id stands for one that is not known yet; vLLM fills it in before it samples.
        while self._read < len(output) and output[self._read] >= 0:
            token = self._last = output[self._read]
            self._read += 1
            if layout.first_code <= token < self._end:
                self._codes += 1
            elif layout.first_word <= token < layout.first_code:
                self._marker = min(self._marker + 1, len(self._units))
                self._codes = 0
            elif token == layout.eos:
                self._ended = True


def units_of(layout: Layout, prompt: list[int] | None) -> list[int]:
    """The units of a talker's prompt; none if it is no such prompt."""
    if not prompt or len(prompt) < 3 or prompt[0] != layout.bos or prompt[-1] != layout.audio:
        return []
    units = prompt[1:-1]
    return units if all(layout.first_word <= u < layout.first_code for u in units) else []

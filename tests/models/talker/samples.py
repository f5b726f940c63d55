"""What the talker sampled in stock vLLM 0.32 for two texts, at temperature 0.3."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from omnistage.models.talker.frames import UnitFrames
from omnistage.models.talker.layout import read_layout

if TYPE_CHECKING:
    from omnistage.request import Codes

# fmt: off
HELLO = (  # "Hello world."
    4, 1127, 1119, 730, 151, 270, 295, 124, 269, 318, 442, 154, 245, 289, 80, 284, 259, 258, 332,
    5, 592, 342, 161, 392, 134, 392, 522, 772, 897, 166, 922, 892, 883, 738, 154, 594, 807, 929,
    149, 1255, 979, 877, 1101, 1076, 976, 1026, 901, 901, 901, 901, 901, 69, 901, 901, 901, 901,
    901, 901, 901, 1001, 2,
)
STOCKINGS = (  # "A large size in stockings is hard to sell."
    4, 1161, 806, 274, 112, 417, 318, 5, 317, 311, 154, 244, 417, 116, 263, 259, 254, 254, 166,
    379, 427, 454, 171, 610, 1255, 6, 1273, 754, 158, 262, 519, 77, 792, 798, 774, 774, 624, 399,
    845, 1065, 162, 584, 833, 7, 772, 848, 136, 571, 691, 156, 1194, 935, 8, 840, 1085, 158, 1251,
    683, 159, 249, 792, 116, 791, 537, 765, 682, 801, 153, 714, 199, 624, 136, 721, 446, 164, 562,
    1070, 162, 479, 832, 9, 772, 719, 136, 1194, 939, 162, 1113, 10, 963, 863, 151, 366, 116, 516,
    422, 373, 343, 166, 743, 936, 149, 931, 11, 965, 758, 159, 694, 124, 1220, 810, 12, 1064, 935,
    158, 607, 893, 131, 1142, 1242, 1272, 1271, 1277, 977, 728, 154, 977, 951, 1101, 1001, 1026,
    901, 901, 901, 901, 901, 901, 901, 901, 69, 901, 901, 901, 901, 901, 901, 901, 2,
)
# fmt: on


def speech(ids: tuple[int, ...] = HELLO) -> Codes:
    """The frames of sampled ids, [frames, 2]."""
    units = UnitFrames(read_layout())
    return np.array(units.push(units.new(), ids), np.int64)

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
    4, 1074, 999, 644, 151, 270, 542, 124, 387, 357, 333, 154, 523, 542, 80, 391, 266, 241,
    217, 337, 5, 433, 583, 161, 586, 134, 731, 731, 981, 986, 166, 862, 732, 507, 154, 358,
    435, 149, 1045, 1296, 1050, 1099, 1199, 1199, 1198, 1196, 1196, 1071, 1071, 1071, 69, 1071,
    1071, 1071, 1071, 1071, 1071, 1196, 1071, 2,
)
STOCKINGS = (  # "A large size in stockings is hard to sell."
    4, 1073, 565, 619, 112, 336, 332, 5, 458, 313, 154, 642, 491, 116, 341, 271, 271, 296, 166,
    221, 319, 495, 171, 419, 1293, 6, 1270, 395, 158, 499, 881, 77, 961, 861, 1006, 1026, 776,
    901, 752, 1155, 162, 645, 744, 7, 855, 752, 136, 678, 801, 156, 829, 785, 8, 790, 1164,
    158, 1219, 465, 159, 669, 986, 116, 966, 861, 532, 330, 685, 153, 220, 409, 627, 136, 477,
    552, 427, 164, 457, 353, 660, 162, 500, 714, 9, 835, 651, 136, 1003, 910, 162, 989, 10,
    1009, 484, 151, 594, 116, 686, 356, 351, 781, 166, 476, 680, 149, 805, 11, 1020, 360, 159,
    1009, 124, 879, 780, 12, 1010, 525, 158, 474, 888, 131, 1014, 1083, 1234, 1213, 1222, 850,
    849, 154, 844, 1074, 1199, 1198, 1197, 1196, 1071, 1071, 1071, 1071, 1071, 1071, 1071, 69,
    1071, 1071, 1071, 1071, 1071, 1196, 1071, 2,
)
# fmt: on


def speech(ids: tuple[int, ...] = HELLO) -> Codes:
    """The frames of sampled ids, [frames, 2]."""
    units = UnitFrames(read_layout())
    return np.array(units.push(units.new(), ids), np.int64)

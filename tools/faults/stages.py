"""The AR stage that the matrix runs: the talker with room for all streams at once."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from omnistage.models import load_preset

if TYPE_CHECKING:
    from omnistage.config import ARStageConfig

STREAMS = 32


def ar() -> ARStageConfig:
    """The stage, its engine started as ``OMNISTAGE_FAULTS_START`` says: ``spawn`` or ``fork``."""
    method = os.environ.get("OMNISTAGE_FAULTS_START", "spawn")
    stage, _ = load_preset(
        "talker", start_method=method, engine_args={"max_num_seqs": STREAMS}, startup_timeout=180.0
    )
    return stage

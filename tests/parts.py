"""The stages inside a pipeline, for tests that look there."""

from __future__ import annotations

from typing import cast

from omnistage import Pipeline
from omnistage.stages.branch import Branch


def branches_of(pipeline: Pipeline) -> list[Branch]:
    """Its decoder branches, which are of this process."""
    return [cast("Branch", branch) for branch in pipeline._routes[0].branches]

"""From what a pipeline is given to the AR stage that it runs."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from omnistage.config import ARStageConfig
from omnistage.errors import ConfigError
from omnistage.stages.ar import ARStage
from omnistage.stages.thinker import ThinkerTalker

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.v1.engine.async_llm import AsyncLLM

    from omnistage.stages.base import AutoregressiveStage
    from omnistage.transport.endpoints import Endpoints

    MakeAR = Callable[[Endpoints], AutoregressiveStage]


def ar_maker(
    ar: ARStageConfig | MakeAR, thinker: ARStageConfig | MakeAR | None, llm: AsyncLLM | None
) -> MakeAR:
    """What makes a pipeline's AR stage of this process's sockets.

    Args:
        ar: The AR stage; behind a thinker, the talker.
        thinker: The thinker, if there is one.
        llm: An engine for ``ar`` that is running already.

    Raises:
        ConfigError: What is no AR stage, or an engine without its description.
    """
    make_ar = _maker(ar, "ar", llm)
    if thinker is None:
        return make_ar
    make_thinker = _maker(thinker, "thinker", None)
    return lambda endpoints: ThinkerTalker(make_thinker(endpoints), make_ar(endpoints), endpoints)


def _maker(stage: ARStageConfig | MakeAR, what: str, llm: AsyncLLM | None) -> MakeAR:
    if isinstance(stage, ARStageConfig):
        return partial(ARStage, stage, llm=llm)
    if llm is not None:
        raise ConfigError("llm= goes with an ARStageConfig")
    if not callable(stage):
        raise ConfigError(f"{what} is an ARStageConfig, or makes an AR stage, got {stage!r}")
    return stage

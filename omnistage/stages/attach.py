"""An engine that an application starts itself, prepared for a pipeline's AR stage."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from omnistage.config import ARStageConfig


def attach(vllm_config: VllmConfig, config: ARStageConfig) -> None:
    """Prepare an engine that you start yourself for a pipeline.

    Call it before ``AsyncLLM.from_vllm_config(vllm_config)``, then hand that engine over:
    ``Pipeline(ar=config, decoder=..., llm=llm)``. It sets the configuration's scheduler class and
    adds to its ``additional_config``; requests that do not come from the pipeline are served as
    before.

    Args:
        vllm_config: What ``AsyncEngineArgs(...).create_engine_config()`` returned.
        config: The stage, without engine arguments and start method.

    Raises:
        ConfigError: A configuration with a scheduler of its own, or a stage that says how to start
            an engine.
    """
    from omnistage.core.engine import attach

    attach(vllm_config, config)

"""omnistage: the autoregressive stage runtime for speech and omni models, on stock vLLM.

Importing this package costs neither vllm nor torch; both load when a stage that needs them starts.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from omnistage.adapters.codec_rows import CodecRows
    from omnistage.adapters.input import EngineInput, InputAdapter, TextInput
    from omnistage.adapters.processor import (
        ChunkProcessor,
        CodecFrames,
        Emission,
        HiddenStates,
        PayloadProcessor,
        Step,
        TokenUpdates,
    )
    from omnistage.adapters.rows import RequestRows, RowsInput
    from omnistage.config import ARStageConfig, Deadlines, DecoderStageConfig
    from omnistage.decoders.base import Decoder, Renderer, RowDecoder
    from omnistage.errors import ClientError, OmniStageError, ServerError
    from omnistage.pipeline import Pipeline
    from omnistage.request import (
        AudioChunk,
        ChunkPolicy,
        FinishReason,
        StageInput,
        TokenUpdate,
        Usage,
    )
    from omnistage.speaker import Speaker, speak
    from omnistage.speech import Speech
    from omnistage.stages.attach import attach
    from omnistage.stages.base import AudioSink, AudioStage, AutoregressiveStage, Stage
    from omnistage.stream import Stream
    from omnistage.subscription import Subscription, subscribe

__version__ = "0.1.0"

_HOMES = {
    "subscribe": "subscription",
    "speak": "speaker",
    "attach": "stages.attach",
    "TokenUpdate": "request",
    "Subscription": "subscription",
    "Speech": "speech",
    "Speaker": "speaker",
    "AudioStage": "stages.base",
    "AudioSink": "stages.base",
    "ARStageConfig": "config",
    "AudioChunk": "request",
    "AutoregressiveStage": "stages.base",
    "ChunkPolicy": "request",
    "ChunkProcessor": "adapters.processor",
    "ClientError": "errors",
    "CodecFrames": "adapters.processor",
    "CodecRows": "adapters.codec_rows",
    "Deadlines": "config",
    "Decoder": "decoders.base",
    "DecoderStageConfig": "config",
    "Emission": "adapters.processor",
    "EngineInput": "adapters.input",
    "FinishReason": "request",
    "HiddenStates": "adapters.processor",
    "InputAdapter": "adapters.input",
    "OmniStageError": "errors",
    "PayloadProcessor": "adapters.processor",
    "Pipeline": "pipeline",
    "Renderer": "decoders.base",
    "RequestRows": "adapters.rows",
    "RowDecoder": "decoders.base",
    "RowsInput": "adapters.rows",
    "ServerError": "errors",
    "Stage": "stages.base",
    "StageInput": "request",
    "Step": "adapters.processor",
    "Stream": "stream",
    "TextInput": "adapters.input",
    "TokenUpdates": "adapters.processor",
    "Usage": "request",
}

__all__ = [
    "ARStageConfig",
    "AudioChunk",
    "AudioSink",
    "AudioStage",
    "AutoregressiveStage",
    "ChunkPolicy",
    "ChunkProcessor",
    "ClientError",
    "CodecFrames",
    "CodecRows",
    "Deadlines",
    "Decoder",
    "DecoderStageConfig",
    "Emission",
    "EngineInput",
    "FinishReason",
    "HiddenStates",
    "InputAdapter",
    "OmniStageError",
    "PayloadProcessor",
    "Pipeline",
    "Renderer",
    "RequestRows",
    "RowDecoder",
    "RowsInput",
    "ServerError",
    "Speaker",
    "Speech",
    "Stage",
    "StageInput",
    "Step",
    "Stream",
    "Subscription",
    "TextInput",
    "TokenUpdate",
    "TokenUpdates",
    "Usage",
    "__version__",
    "attach",
    "speak",
    "subscribe",
]


if not TYPE_CHECKING:  # a type checker would take every name for one of ours

    def __getattr__(name: str) -> Any:
        """Import a public name when it is first asked for."""
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    """The public names."""
    return __all__

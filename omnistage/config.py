"""What a pipeline is, apart from where it runs: plain, frozen descriptions of its stages."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from omnistage.errors import ConfigError
from omnistage.request import ChunkPolicy, check_name

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from omnistage.adapters.input import InputAdapter
    from omnistage.adapters.processor import ChunkProcessor
    from omnistage.decoders.base import Decoder

AUDIO = "audio"
"""The channel that a pipeline's decoder subscribes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ARStageConfig:
    """An AR stage: a model in vLLM, what goes in and what comes out.

    Args:
        model: Directory or hub id of the model, as vLLM takes it.
        processor: Makes of the sampled ids what the decoder takes. It is sent to the engine
            process.
        input_adapter: Makes of a stage input what the model takes; None passes text or ids on.
        engine_args: Further fields of vLLM's ``AsyncEngineArgs``, passed through unchanged.
        name: Names the stage in errors, logs and metrics.
        bind: Where updates are published: ``ipc``, or ``tcp://127.0.0.1:PORT``.
        start_method: How vLLM starts its processes; None leaves it to vLLM. ``fork`` starts in a
            fifth of the time and is safe only while this process has run no torch computation in
            other threads.
        startup_timeout: Seconds from the engine's start to every engine core's hello.

    Raises:
        ConfigError: A name that cannot be one, or an engine argument that the stage sets itself.
    """

    model: str
    processor: ChunkProcessor
    input_adapter: InputAdapter | None = None
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    name: str = "ar"
    bind: str = "ipc"
    start_method: Literal["spawn", "fork"] | None = None
    startup_timeout: float = 60.0

    def __post_init__(self) -> None:
        check_name(self.name, "a stage name")
        for taken in ("model", "scheduler_cls"):
            if taken in self.engine_args:
                raise ConfigError(f"engine_args.{taken} is set by the AR stage; leave it out")


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderStageConfig:
    """A decoder stage: what turns frames into audio, and in which portions.

    Args:
        build: Makes the decoder; called once in a worker thread, so that it may load weights.
        chunks: Chunk sizes of requests that do not set their own.
        max_batch: Streams that are decoded in one call.
        name: Names the stage in errors, logs and metrics.

    Raises:
        ConfigError: A name that cannot be one, or a batch of none.
    """

    build: Callable[[], Decoder]
    chunks: ChunkPolicy = field(default_factory=ChunkPolicy)
    max_batch: int = 32
    name: str = "decoder"

    def __post_init__(self) -> None:
        check_name(self.name, "a stage name")
        if self.max_batch < 1:
            raise ConfigError(f"max_batch must be at least 1, got {self.max_batch}")

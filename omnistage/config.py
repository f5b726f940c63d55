"""What a pipeline is, apart from where it runs: plain, frozen descriptions of its stages."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from omnistage.errors import ConfigError
from omnistage.request import ChunkPolicy, check_name

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from omnistage.adapters.input import InputAdapter
    from omnistage.adapters.processor import ChunkProcessor
    from omnistage.decoders.base import AnyDecoder
    from omnistage.stages.base import AudioStage

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
        bind: Where updates are published: ``ipc``, or ``tcp://ADDRESS:PORT``; another address than
            the loopback interface's needs keys.
        keys: Directory of the CURVE keys of its tcp sockets, made by ``omnistage keys``.
        start_method: How vLLM starts its processes; None leaves it to vLLM. ``fork`` starts in a
            fifth of the time and is safe only while this process has run no torch computation in
            other threads.
        startup_timeout: Seconds from the engine's start to every engine core's hello.
        codec: Names what its ids are, for services: a decoder that names another codec is refused.
        omni_pooler_payload_include_hidden: Whether hidden states leave vLLM's workers, where the
            processor wants payloads; None leaves it to the model, whose default is True. With
            False, and no other outputs of the model's, nothing is taken there.

        prefix_rows: Keep the rows of everything in the prefix cache, in the worker's CPU memory, so
            that requests with rows may read that cache; without it they compute their whole prompt.
            It takes a row for every slot of the KV cache that was ever used.

    Raises:
        ConfigError: A name that cannot be one, or an engine argument that the stage sets itself.
    """

    model: str
    processor: ChunkProcessor
    input_adapter: InputAdapter | None = None
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    name: str = "ar"
    bind: str = "ipc"
    keys: str | Path | None = None
    start_method: Literal["spawn", "fork"] | None = None
    startup_timeout: float = 60.0
    codec: str = ""
    omni_pooler_payload_include_hidden: bool | None = None
    prefix_rows: bool = False

    def __post_init__(self) -> None:
        check_name(self.name, "a stage name")
        for taken in ("model", "scheduler_cls"):
            if taken in self.engine_args:
                raise ConfigError(f"engine_args.{taken} is set by the AR stage; leave it out")

    @property
    def served_name(self) -> str:
        """The model's name in metrics: vLLM's ``served_model_name``, or the model's own."""
        names = self.engine_args.get("served_model_name") or self.model.rstrip("/")
        return names.rpartition("/")[2] if isinstance(names, str) else str(names[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelIO:
    """What a running AR stage's model takes and gives beside ids, where stages must fit together.

    Args:
        has_tokenizer: Whether its ids can be made text.
        hidden_size: Numbers of a row of hidden states.
        embedding_size: Numbers a position of a prompt of embeddings; None if it takes none.
    """

    has_tokenizer: bool
    hidden_size: int
    embedding_size: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """How long a request may be without progress; None for as long as it takes.

    What is late is looked at once more, up to 0.25 s later, before the request fails: a blocked
    event loop has not read yet what came in time.

    Args:
        between_chunks: Seconds from an update or a chunk that was due to the next one. It starts
            with the first update and pauses while the request is preempted or its reader does not
            read.
        first_audio: Seconds from the request to its first chunk, time in vLLM's queue included.

    Raises:
        ConfigError: A time that is not positive.
    """

    between_chunks: float | None = 30.0
    first_audio: float | None = None

    def __post_init__(self) -> None:
        for name in ("between_chunks", "first_audio"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"deadlines.{name} must be positive or None, got {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderStageConfig:
    """A decoder stage: what turns frames into audio, and in which portions.

    Args:
        build: Makes the decoder; called once in a worker thread, so that it may load weights.
        chunks: Chunk sizes of requests that do not set their own.
        max_batch: Streams that are decoded in one call.
        deadlines: How long a request may be without progress.
        max_unread: Seconds of audio that a reader may leave unread.
        slow_reader: What happens beyond that: ``hold`` decodes no more of the request until it is
            read, ``fail`` ends it with ReaderStalled.
        then: Makes each stage that the audio goes through behind the decoder, in order.
        name: Names the stage in errors, logs and metrics, and is its subscriber id on the wire.
        codec: Names what it decodes; see :class:`ARStageConfig`.

    Raises:
        ConfigError: A name that cannot be one, a batch of none, or no audio that may be unread.
    """

    build: Callable[[], AnyDecoder]
    chunks: ChunkPolicy = field(default_factory=ChunkPolicy)
    max_batch: int = 32
    deadlines: Deadlines = field(default_factory=Deadlines)
    max_unread: float = 30.0
    slow_reader: Literal["hold", "fail"] = "hold"
    then: Sequence[Callable[[], AudioStage]] = ()
    name: str = "decoder"
    codec: str = ""

    def __post_init__(self) -> None:
        check_name(self.name, "a stage name")
        if self.max_batch < 1:
            raise ConfigError(f"max_batch must be at least 1, got {self.max_batch}")
        if not self.max_unread > 0:
            raise ConfigError(f"max_unread must be positive, got {self.max_unread}")
        if self.slow_reader not in ("hold", "fail"):
            raise ConfigError(f"slow_reader is 'hold' or 'fail', got {self.slow_reader!r}")

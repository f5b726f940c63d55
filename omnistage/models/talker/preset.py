"""The talker as a pipeline's two stages: its defaults, and what stands at the AR stage's borders.

Plain descriptions; weights, tables and torch load when the stages start.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import msgspec
from anyio import to_thread

from omnistage.adapters.input import EngineInput, copy_prompt, merge
from omnistage.adapters.processor import Emission
from omnistage.config import ARStageConfig, DecoderStageConfig
from omnistage.errors import ConfigError, InvalidRequest
from omnistage.models.preset import Preset
from omnistage.models.talker.frames import UnitFrames, UnitFramesState
from omnistage.models.talker.layout import CHECKPOINT, Layout, read_layout
from omnistage.models.talker.pieces import pieces
from omnistage.models.talker.text import TRAINED_WORDS, TextStep, is_said
from omnistage.request import ChunkPolicy, Payload
from omnistage.stages.environment import is_cpu_build

if TYPE_CHECKING:
    from collections.abc import Sequence

    from omnistage.adapters.processor import Step
    from omnistage.checkpoint import Checkpoint
    from omnistage.decoders.base import Decoder
    from omnistage.request import FinishReason, StageInput, Start

log = logging.getLogger(__name__)

MAX_TEXT: Final = 100_000
"""Characters of one request, two hours of speech."""

_MAX_PIECE: Final = 400  # a piece of ordinary words has some 80 characters


CODEC: Final = "talker"
"""Names its frames where its stages are services."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TalkerPreset(Preset):
    """A talker and how it runs well; its decoder's weights are in its ``code2wav``."""

    def decoder(self) -> Decoder:
        """The decoder, with its weights loaded.

        Raises:
            ConfigError: torch or safetensors is missing, or the weights are not a talker's.
        """
        try:
            from omnistage.models.talker.decoder import TalkerDecoder
        except ImportError as error:
            raise ConfigError(
                f"the talker decodes with {error.name}: install omnistage[talker]"
            ) from error
        return TalkerDecoder(Path(self.model) / "code2wav")

    def stages(self) -> tuple[ARStageConfig, DecoderStageConfig]:
        """See :meth:`Preset.stages`."""
        if self.engine_args.get("speculative_config"):
            raise ConfigError(
                "the talker's structure is enforced by a logits processor, which vLLM cannot "
                "combine with speculative decoding; leave speculative_config out"
            )
        ar = ARStageConfig(
            model=self.model,
            processor=TalkerFrames(layout=read_layout(Path(self.model))),
            input_adapter=TalkerInput(self),
            engine_args={**self.engine_args, "logits_processors": [_forcing()]},
            codec=CODEC,
        )
        return ar, DecoderStageConfig(build=self.decoder, chunks=self.chunks, codec=CODEC)

    def recognizes(self, checkpoint: Checkpoint) -> bool:
        """Whether its configuration says what its ids are."""
        return "talker" in checkpoint.config()


def _forcing() -> str:
    """The class that enforces the structure, for the model runner that vLLM will choose."""
    # Model Runner V2 is the default where triton runs, which is not on a CPU.
    old = is_cpu_build() or os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "0"
    return f"omnistage.models.talker.forcing:{'TalkerForcing' if old else 'TalkerForcingV2'}"


class TalkerInput:
    """The talker's input adapter: text becomes prompt ids, ids are passed on.

    Args:
        preset: The defaults that a request's own sampling fields lie over.
    """

    def __init__(self, preset: TalkerPreset) -> None:
        self._sampling = preset.sampling
        self._text = TextStep(read_layout(Path(preset.model)))

    async def start(self) -> None:
        """Load hibari's tables, which takes 0.4 s.

        Raises:
            ConfigError: hibari is not installed.
        """
        await to_thread.run_sync(self._text.prompt_ids, "Hello.")

    def split(self, stage_input: StageInput) -> Sequence[StageInput]:
        """Cut a text into pieces as long as those of the training.

        One sentence of several that has nothing to say is left out.

        Raises:
            InvalidRequest: More text than anyone listens to, or a word that cannot be one.
        """
        text = stage_input.prompt
        if not isinstance(text, str):
            return [stage_input]
        if len(text) > MAX_TEXT:
            raise InvalidRequest(
                f"the text has {len(text)} characters, at most {MAX_TEXT} can be one request",
                parameter="prompt",
            )
        if stage_input.by_sentence and not is_said(text):
            log.warning("skipped a sentence of %d characters that cannot be spoken", len(text))
            return []
        cut = pieces(text, TRAINED_WORDS, is_said)
        if len(longest := max(cut, key=len)) > _MAX_PIECE:
            raise InvalidRequest(
                f"the text has a word of {max(map(len, longest.split()))} characters",
                parameter="prompt",
            )
        return [replace(stage_input, prompt=piece) for piece in cut]

    async def adapt(self, stage_input: StageInput) -> EngineInput:
        """Convert one input, in a thread: hibari takes milliseconds for a sentence.

        Raises:
            InvalidRequest: A voice, no or too much text, or a bad prompt or sampling field.
            ConfigError: hibari is not installed.
        """
        if stage_input.voice is not None:
            raise InvalidRequest("the talker has one voice; leave voice out", parameter="voice")
        asked = stage_input.prompt
        if isinstance(asked, str):
            prompt: str | list[int] | Payload = await to_thread.run_sync(
                self._text.prompt_ids, asked
            )
        else:
            prompt = copy_prompt(asked)
        return EngineInput(prompt=prompt, sampling=merge(self._sampling, stage_input))


class TalkerFrames(msgspec.Struct, frozen=True, kw_only=True):
    """The talker's chunk processor: sampled ids become frames of [code, phone], flat.

    Args:
        layout: The talker's vocabulary.
    """

    layout: Layout

    requires_token_updates = True

    def open(self, request_id: str, start: Start) -> UnitFramesState:
        """The request's place in its output."""
        return UnitFramesState()

    def update(self, state: UnitFramesState, step: Step) -> Emission:
        """The frames of a step's ids."""
        dropped = state.dropped
        frames = UnitFrames(self.layout).push(state, step.ids)
        return Emission([index for frame in frames for index in frame], {}, state.dropped - dropped)

    def finish(self, state: UnitFramesState, reason: FinishReason) -> None:
        """No frame is ever incomplete."""


TALKER = TalkerPreset(
    name="talker",
    summary="the embedded voice: small, American English, comes with the package",
    licence="Apache-2.0",
    model=str(CHECKPOINT),
    sampling=MappingProxyType(
        # A stop id, since an engine without a tokenizer takes no end from the model.
        {"temperature": 0.3, "top_p": 0.9, "max_tokens": 1400, "stop_token_ids": [2]}
    ),
    engine_args=MappingProxyType(
        {
            "dtype": "bfloat16",
            "enforce_eager": True,
            "max_model_len": 2048,
            "max_num_seqs": 16,
            "served_model_name": "talker",
            "disable_log_stats": True,  # lets per-step outputs that nobody reads be withheld
            # vLLM's CPU runner dies when a seeded request's prefill is split.
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": 2048,
            "use_tqdm_on_load": False,
            "skip_tokenizer_init": True,  # prompts are ids
            "kv_cache_memory_bytes": 2**28,  # 100,000 tokens; 16 full streams need a third
        }
    ),
    # The first chunk plays for 200 ms and is there 70 ms after the request; the growth keeps every
    # later one shorter than what is still to be played, with eight streams at once.
    chunks=ChunkPolicy(first=10, growth=1.4, steady=32),
)
"""The talker that comes with the package."""

"""Language models that speak: a text LM whose vocabulary has codec codes, and a codec's decoder.

Orpheus, Llasa, NeuTTS and their finetunes differ in their prompt, in which ids are codes and in the
decoder, and in nothing else.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from omnistage.adapters.processor import CodecFrames
from omnistage.checkpoint import Checkpoint
from omnistage.config import ARStageConfig, DecoderStageConfig
from omnistage.decoders.registry import decoder_class
from omnistage.errors import ConfigError
from omnistage.models.preset import LABEL, Preset
from omnistage.models.prompt import PromptInput, Template
from omnistage.models.voices import Voices
from omnistage.stages.environment import is_cpu_build

if TYPE_CHECKING:
    from collections.abc import Mapping

    from omnistage.decoders.base import AnyDecoder, Declaration


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeRange:
    """Which ids of a vocabulary are codes.

    The ids of codebook k follow those of codebook k - 1. Both ends are given as the tokenizer names
    them, or as ids, so that a vocabulary with a hole or of another size is noticed.

    Args:
        first: Codebook 0's index 0.
        last: The last codebook's last index.
        codebooks: Ids a frame.
        codebook_size: Indices a codebook.
    """

    first: str | int = ""
    last: str | int = ""
    codebooks: int = 1
    codebook_size: int = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderChoice:
    """A codec's decoder, and where it runs.

    Args:
        kind: Its name in :data:`omnistage.decoders.registry.DECODERS`.
        model: Directory or hub id of its weights.
        device: torch's name of where it runs.
        dtype: torch's name of what it computes in.
        max_frames: The most frames of one forward call, padding included; None for no limit.
        options: Further arguments of its ``from_pretrained``.
    """

    kind: str = ""
    model: str = ""
    device: str = "cpu"
    dtype: str = "float32"
    max_frames: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def declare(self) -> Declaration:
        """What it will declare, from its configuration alone.

        Raises:
            ConfigError: There is no such decoder, or no such model.
        """
        decoder = decoder_class(self.kind)
        config = Checkpoint(self.model, decoder.label).config()
        return decoder.declare(config, **self.options)

    def build(self) -> AnyDecoder:
        """The decoder, its weights loaded.

        Raises:
            ConfigError: A package or the weights are missing, or are another model's.
        """
        made: AnyDecoder = decoder_class(self.kind).from_pretrained(
            self.model,
            device=self.device,
            dtype=self.dtype,
            max_frames=self.max_frames,
            **self.options,
        )
        return made


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeechLM(Preset):
    """A speech LM and its decoder.

    Args:
        prompt: The prompt's template; see :class:`~omnistage.models.prompt.Template`.
        end: The token that ends the audio, by name or id.
        codes: Which ids are codes.
        decoder: What turns them into audio.
        sample_rate: Samples a second that the model was trained for; a decoder of another rate is
            refused.
        max_text: Characters of one request, as many as ``sampling["max_tokens"]`` are enough for.
        voices: The voices that the model knows by name; the first is the default. None at all: any
            name may be asked for.
        voice_directory: Recorded voices; see :class:`~omnistage.models.voices.Voices`.
        recorded: Whether a request must have a recorded voice.
        phonemes: Language of the phonemes that text is turned into, as espeak names it; empty for
            text itself.
    """

    prompt: str = ""
    end: str | int = ""
    codes: CodeRange = field(default_factory=CodeRange)
    decoder: DecoderChoice = field(default_factory=DecoderChoice)
    sample_rate: int = 24_000
    max_text: int = 400
    voices: tuple[str, ...] = ()
    voice_directory: str = ""
    recorded: bool = False
    phonemes: str = ""

    def stages(self) -> tuple[ARStageConfig, DecoderStageConfig]:
        """See :meth:`Preset.stages`."""
        self._check_given()
        checkpoint = self._checkpoint()
        frames, end, tokens = self._vocabulary(checkpoint)
        self._check_decoder()
        checkpoint.weight_bytes()
        more_ends = self.sampling.get("stop_token_ids") or []
        sampling = {**self.sampling, "stop_token_ids": [end, *more_ends]}
        voices = Voices(
            names=self.voices,
            directory=self.voice_directory or None,
            recorded=self.recorded,
            codebook_size=self.codes.codebook_size,
        )
        adapter = PromptInput(
            checkpoint=self._checkpoint(),  # another one: this has the whole vocabulary
            template=Template(self.prompt, tokens, self.model),
            sampling=sampling,
            voices=voices,
            first_code=frames.first_id,
            max_text=self.max_text,
            phonemes=self.phonemes or None,
        )
        ar = ARStageConfig(
            model=self.model,
            processor=frames,
            input_adapter=adapter,
            engine_args=self._engine_args(),
            codec=self.name,
        )
        return ar, DecoderStageConfig(build=self.decoder.build, chunks=self.chunks, codec=self.name)

    def recognizes(self, checkpoint: Checkpoint) -> bool:
        """Whether its tokenizer has the tokens that the preset names, where it names them."""
        ends = (self.codes.first, self.codes.last, self.end)
        if not all(isinstance(name, str) and name for name in ends):
            return False
        try:
            tokens = checkpoint.tokens()
            return self._range_of(tokens) is not None and self.end in tokens
        except ConfigError:
            return False

    def describe(self) -> dict[str, Any]:
        """See :meth:`Preset.describe`."""
        ar, _ = self.stages()
        frames, adapter = ar.processor, ar.input_adapter
        if not isinstance(frames, CodecFrames) or not isinstance(adapter, PromptInput):
            raise TypeError("stages() makes codec frames and prompts")
        declared = self.decoder.declare()
        frame_seconds = declared.hop_length / declared.sample_rate
        tokens = self.sampling.get("max_tokens")
        most = tokens // self.codes.codebooks if type(tokens) is int else None
        return {
            **self._described(ar),
            "sampling": dict(adapter.sampling),
            "licence": self.licence,
            "weights_bytes": adapter.checkpoint.weight_bytes(),
            "prompt": self.prompt,
            "phonemes": self.phonemes,
            "voices": list(adapter.voices.known),
            "max_text": self.max_text,
            "max_audio_seconds": None if most is None else round(most * frame_seconds, 2),
            "codes": {
                "first_id": frames.first_id,
                "codebooks": frames.codebooks,
                "codebook_size": frames.codebook_size,
                "end_id": adapter.sampling["stop_token_ids"][0],
            },
            "decoder": {
                **dataclasses.asdict(self.decoder),
                **dataclasses.asdict(declared),
                "first_audio_frames": self.chunks.size(0) + declared.right_context,
            },
        }

    def _checkpoint(self) -> Checkpoint:
        return Checkpoint(self.model, LABEL, revision=self.engine_args.get("revision"))

    def _check_given(self) -> None:
        needed = {
            "model": self.model,
            "prompt": self.prompt,
            "end": self.end,
            "codes.first": self.codes.first,
            "codes.last": self.codes.last,
            "decoder.kind": self.decoder.kind,
            "decoder.model": self.decoder.model,
        }
        if missing := [name for name, value in needed.items() if value == ""]:
            raise ConfigError(
                f"preset {self.name!r} does not say {', '.join(missing)}; give "
                f"{'it' if len(missing) == 1 else 'them'}, in omnistage.json in the model's "
                "directory or as a change"
            )

    def _vocabulary(self, checkpoint: Checkpoint) -> tuple[CodecFrames, int, Mapping[str, int]]:
        """The codes and the end, as ids that the model's head has.

        Raises:
            ConfigError: It has them not, or they contradict the tokenizer.
        """
        size = checkpoint.config().get("vocab_size")
        if type(size) is not int:
            raise ConfigError(f"config.json of {self.model} has no vocab_size")
        tokens = checkpoint.tokens()
        end = self._id_of(self.end, tokens)
        if not 0 <= end < size:
            raise ConfigError(
                f"{self.end!r} is id {end}, and the head of {self.model} has {size} ids: no "
                "request would ever end"
            )
        found = self._range_of(tokens)
        if found is None:
            raise ConfigError(
                f"{self.model} is no checkpoint of preset {self.name!r}: from "
                f"{self.codes.first!r} to {self.codes.last!r} its tokenizer has "
                f"{self._span(tokens)} ids, {self.codes.codebooks} codebooks of "
                f"{self.codes.codebook_size} need "
                f"{self.codes.codebooks * self.codes.codebook_size}"
            )
        last = found + self.codes.codebooks * self.codes.codebook_size - 1
        if last >= size:
            raise ConfigError(
                f"the codes of {self.model} are ids {found} to {last}, and its head has {size}"
            )
        if found <= end <= last:
            raise ConfigError(f"the end, id {end}, is one of the codes, {found} to {last}")
        frames = CodecFrames(
            first_id=found,
            codebook_size=self.codes.codebook_size,
            codebooks=self.codes.codebooks,
            stride=self.codes.codebook_size if self.codes.codebooks > 1 else 0,
        )
        return frames, end, tokens

    def _check_decoder(self) -> None:
        """That codes and decoder fit.

        Raises:
            ConfigError: They do not.
        """
        declared = self.decoder.declare()
        where = f"decoder {self.decoder.kind} in {self.decoder.model}"
        for name, wanted in (
            ("codebooks", self.codes.codebooks),
            ("codebook_size", self.codes.codebook_size),
            ("sample_rate", self.sample_rate),
        ):
            if (has := getattr(declared, name)) != wanted:
                raise ConfigError(f"{where} has {name} {has}, preset {self.name!r} needs {wanted}")

    def _engine_args(self) -> dict[str, Any]:
        args = {
            "disable_log_stats": True,  # lets per-step outputs that nobody reads be withheld
            "skip_tokenizer_init": True,  # prompts are ids
            "served_model_name": self.name,
            **self.engine_args,
        }
        if is_cpu_build() and "enable_chunked_prefill" not in args:
            # vLLM's CPU runner dies when a seeded request's prefill is split.
            args["enable_chunked_prefill"] = False
            args.setdefault("max_num_batched_tokens", args.get("max_model_len"))
        return args

    def _range_of(self, tokens: Mapping[str, int]) -> int | None:
        """The id of code 0, if the ids up to the last code are as many as there should be."""
        if self._span(tokens) != self.codes.codebooks * self.codes.codebook_size:
            return None
        return self._id_of(self.codes.first, tokens)

    def _span(self, tokens: Mapping[str, int]) -> int:
        return self._id_of(self.codes.last, tokens) - self._id_of(self.codes.first, tokens) + 1

    def _id_of(self, token: str | int, tokens: Mapping[str, int]) -> int:
        if isinstance(token, int):
            return token
        if token not in tokens:
            raise ConfigError(
                f"{self.model} is no checkpoint of preset {self.name!r}: its tokenizer does not "
                f"know {token}"
            )
        return tokens[token]

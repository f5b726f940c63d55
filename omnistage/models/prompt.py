"""Prompts out of a template: a model's own tokens around what a caller says.

What a caller says is tokenized by a tokenizer that knows no added token, so that a text with
``<|eot_id|>`` in it is a text, not an end of turn.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import msgspec
from anyio import to_thread

from omnistage.adapters.input import EngineInput, copy_prompt, merge
from omnistage.errors import ConfigError, InvalidRequest
from omnistage.sentences import sentences

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from omnistage.checkpoint import Checkpoint
    from omnistage.models.voices import Voices
    from omnistage.request import StageInput

_TOKEN: Final = re.compile(r"(<[^<>\s{}]+>)")
_FIELD: Final = re.compile(r"\{(\w*)\}")
FIELDS: Final = ("text", "voice", "reference", "codes")
"""What a template may name: the text, the voice's name, the words of its recording and a space, the
codes of its recording."""


class Template:
    """A prompt with a model's tokens in it, by name, and fields in braces.

    ``<custom_token_3>{voice}: {text}<|eot_id|>`` is one. ``{codes}``, if it is there, is the end.

    Args:
        text: The template.
        tokens: The ids of the model's tokens, by name.
        where: Names the checkpoint in errors.

    Raises:
        ConfigError: A token that the model has not, or a field that is none.
    """

    def __init__(self, text: str, tokens: Mapping[str, int], where: str) -> None:
        self.fields = set(_FIELD.findall(text))
        if unknown := self.fields - set(FIELDS):
            raise ConfigError(
                f"a prompt has no field {sorted(unknown)[0]!r}; it may have {', '.join(FIELDS)}"
            )
        if "text" not in self.fields:
            raise ConfigError(f"the prompt {text!r} has no {{text}}")
        self.codes = "codes" in self.fields
        if self.codes and not text.endswith("{codes}"):
            raise ConfigError(f"{{codes}} must be the end of the prompt, not in {text!r}")
        parts = [part for part in _TOKEN.split(text.removesuffix("{codes}")) if part]
        self._parts: list[int | str] = []
        for part in parts:
            if _TOKEN.fullmatch(part):
                if part not in tokens:
                    raise ConfigError(
                        f"the prompt has {part}, which the tokenizer of {where} does not know"
                    )
                self._parts.append(tokens[part])
            else:
                self._parts.append(part)

    def ids(self, values: Mapping[str, str], encode: Callable[[str], list[int]]) -> list[int]:
        """The prompt's ids, without the codes.

        Args:
            values: What the fields are.
            encode: Tokenizes text.
        """
        ids: list[int] = []
        for part in self._parts:
            if isinstance(part, int):
                ids.append(part)
            else:
                ids += encode(_FIELD.sub(lambda name: values.get(name[1], ""), part))
        return ids


@dataclass(frozen=True)
class PromptInput:
    """An input adapter that makes a template's prompt of a text.

    Prompt ids are passed on.

    Args:
        checkpoint: Whose tokenizer it is.
        template: The prompt.
        sampling: Sampling fields that a request does not set itself.
        voices: What a request may ask for.
        first_code: The id of code 0, for the codes of a voice's recording.
        max_text: Characters of one request, at ``max_tokens`` of ``sampling``.
        phonemes: Language of the phonemes that the text is turned into, as espeak names it.
    """

    checkpoint: Checkpoint
    template: Template
    sampling: Mapping[str, Any]
    voices: Voices
    first_code: int
    max_text: int
    phonemes: str | None = None
    _spoken: dict[str, str] = field(default_factory=dict, init=False, repr=False, compare=False)

    async def start(self) -> None:
        """Load the tokenizer, and espeak where phonemes are wanted.

        Raises:
            ConfigError: A package is missing, or the tokenizer is none.
        """
        await to_thread.run_sync(self._load)

    def split(self, stage_input: StageInput) -> Sequence[StageInput]:
        """One request, or several where the caller wants a long text sentence by sentence.

        Raises:
            InvalidRequest: The text is longer than one request can say.
        """
        text = stage_input.prompt
        if not isinstance(text, str):
            return [stage_input]
        limit = self._limit(stage_input)
        if len(text) <= limit:
            return [stage_input]
        if not stage_input.by_sentence:
            raise InvalidRequest(
                f"the text has {len(text)} characters, this model says at most {limit} at once; "
                "by_sentence=True has a longer one said sentence by sentence",
                parameter="prompt",
            )
        return [replace(stage_input, prompt=piece) for piece in sentences(text, limit)]

    async def adapt(self, stage_input: StageInput) -> EngineInput:
        """Make the prompt, in a thread.

        Raises:
            InvalidRequest: No text, a voice that is not there, or a bad sampling field.
        """
        sampling = merge(self.sampling, stage_input)
        if own := (stage_input.sampling or {}).get("stop_token_ids"):
            # The end stays one, whatever else a request wants to end at.
            sampling["stop_token_ids"] = [*self.sampling["stop_token_ids"], *own]
        prompt = copy_prompt(stage_input.prompt)
        if not isinstance(prompt, str):
            return EngineInput(prompt=prompt, sampling=sampling)
        ids = await to_thread.run_sync(self.ids, prompt, stage_input.voice)
        return EngineInput(prompt=ids, sampling=sampling)

    def _limit(self, stage_input: StageInput) -> int:
        """Characters that a request's tokens are enough for."""
        own, asked = self.sampling.get("max_tokens"), (stage_input.sampling or {}).get("max_tokens")
        if type(own) is int and type(asked) is int and asked > own:
            return self.max_text * asked // own
        return self.max_text

    def _load(self) -> None:
        self._encode(self._say("Hello."))

    def ids(self, text: str, voice: str | None = None) -> list[int]:
        """The prompt's ids.

        Args:
            text: What to say.
            voice: Who says it.

        Raises:
            InvalidRequest: A voice that is not there, or nothing to say.
            ConfigError: A package is missing, or the tokenizer is none.
        """
        name = self.voices.name_of(voice)
        recorded = self.voices.reference(name)
        values = {"text": self._say(text.strip()), "voice": name or ""}
        if recorded is not None:
            values["reference"] = self._recorded_words(recorded.text) + " "
        ids = self.template.ids(values, self._encode)
        if recorded is not None and self.template.codes:
            ids += [self.first_code + code for code in recorded.codes]
        return ids

    def _recorded_words(self, text: str) -> str:
        if text not in self._spoken:
            self._spoken[text] = self._say(text)
        return self._spoken[text]

    def _say(self, text: str) -> str:
        if self.phonemes is None:
            return text
        from omnistage.models.phonemes import phonemes

        return phonemes(text, self.phonemes)

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    @cached_property
    def _tokenizer(self) -> Any:
        return plain_tokenizer(self.checkpoint)


def plain_tokenizer(checkpoint: Checkpoint) -> Any:
    """A checkpoint's tokenizer without its added tokens, as the ``tokenizers`` library has it.

    Raises:
        ConfigError: The library or the tokenizer is missing, or it is none.
    """
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise ConfigError(
            "prompts are made with tokenizers, which vLLM brings: install omnistage[cpu] or "
            "omnistage[gpu]"
        ) from error
    # What it adds on its own is the template's to say.
    own: dict[str, Any] = {
        "added_tokens": [],
        "post_processor": None,
        "truncation": None,
        "padding": None,
    }
    described = {**checkpoint.json("tokenizer.json"), **own}
    try:
        return Tokenizer.from_str(msgspec.json.encode(described).decode())
    except Exception as error:  # the library raises no other
        raise ConfigError(
            f"tokenizer.json of {checkpoint.where} cannot be read: {error}"
        ) from error

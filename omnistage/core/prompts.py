"""From an engine input to what vLLM takes: its prompt, and the tensors that travel beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from anyio import to_thread
from vllm.renderers.inputs.preprocess import parse_model_prompt

from omnistage.errors import InvalidRequest
from omnistage.payload import Payload
from omnistage.worker.conditioning import CONDITIONING, cache_salt, encode_conditioning

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vllm.v1.engine.async_llm import AsyncLLM

    from omnistage.worker.contract import ModelContract

_LARGE: Final = 1 << 20  # bytes that take milliseconds to copy and hash


class Prompts:
    """Makes vLLM's prompts for one engine.

    Args:
        llm: The engine.
        contract: What its model declares, where that is known.
    """

    def __init__(self, llm: AsyncLLM, contract: ModelContract | None) -> None:
        self._llm = llm
        self._contract = contract
        self.vocabulary: int = llm.vllm_config.model_config.get_vocab_size()

    async def render(self, prompt: Any, salt: str | None = None) -> Any:
        """A prompt as the engine takes it: tokenized, its ids within the vocabulary.

        Args:
            prompt: Text, ids, or embeddings, [positions, hidden size].
            salt: What keeps its part of the prefix cache apart.

        Raises:
            InvalidRequest: Ids beyond the vocabulary, or embeddings that do not suit the model.
        """
        given: dict[str, Any]
        if isinstance(prompt, Payload):
            given = {"prompt_embeds": await _aside(self._embeddings, prompt, len(prompt.data))}
        elif isinstance(prompt, list):
            self.check_ids(prompt, "prompt")
            given = {"prompt_token_ids": prompt}
        else:
            given = {"prompt": prompt}
        if salt is not None:
            given["cache_salt"] = salt
        parsed = parse_model_prompt(self._llm.model_config, given)
        (rendered,) = await self._llm.renderer.render_cmpl_async([parsed])
        return rendered

    async def pack(self, conditioning: Mapping[str, Payload]) -> tuple[dict[str, Any], str | None]:
        """A request's conditioning as it travels.

        Returns:
            Items of its ``extra_args``, and the salt of its prompt: requests of equal conditioning
            share the prefix cache, others never do.

        Raises:
            InvalidRequest: The model takes none.
        """
        if not conditioning:
            return {}, None
        contract = self._contract
        if contract is None or not contract.preprocesses:
            model = "the model" if contract is None else contract.model
            raise InvalidRequest(
                f"{model} takes no conditioning: its class has no omni_preprocess; leave "
                f"{', '.join(conditioning)} out",
                parameter="conditioning",
            )
        size = sum(len(payload.data) for payload in conditioning.values())
        raw, salt = await _aside(_encode, conditioning, size)
        return {CONDITIONING: raw}, salt

    def check_ids(self, ids: Sequence[int], parameter: str) -> None:
        """Refuse ids beyond the vocabulary, of which some would kill vLLM's engine.

        Raises:
            InvalidRequest: There is one.
        """
        if ids and not (min(ids) >= 0 and max(ids) < self.vocabulary):
            bad = next(i for i in ids if not 0 <= i < self.vocabulary)
            raise InvalidRequest(
                f"{parameter} holds {bad}, the model's vocabulary ends at {self.vocabulary - 1}",
                parameter=parameter,
            )

    def _embeddings(self, given: Payload) -> torch.Tensor:
        model = self._llm.model_config
        if not model.enable_prompt_embeds:
            raise InvalidRequest(
                "the engine takes no embeddings as a prompt; start the stage with engine_args "
                "enable_prompt_embeds=True",
                parameter="prompt",
            )
        rows, width = given.shape
        if width != model.get_inputs_embeds_size():
            raise InvalidRequest(
                f"the prompt's embeddings have {width} numbers a position, the model's "
                f"{model.get_inputs_embeds_size()}",
                parameter="prompt",
            )
        if rows >= model.max_model_len:
            raise InvalidRequest(
                f"the prompt has {rows} positions; with one sampled id at most "
                f"{model.max_model_len} fit",
                parameter="prompt",
            )
        # A copy: torch cannot say that a tensor is read-only.
        flat = torch.frombuffer(bytearray(given.data), dtype=getattr(torch, given.dtype))
        made = flat.reshape(given.shape).to(model.dtype)
        if not made.isfinite().all():
            raise InvalidRequest(
                f"the prompt's embeddings exceed what {model.dtype} holds", parameter="prompt"
            )
        return made


def _encode(conditioning: Mapping[str, Payload]) -> tuple[bytes, str]:
    raw = encode_conditioning(conditioning)
    return raw, cache_salt(raw)


async def _aside(make: Any, given: Any, size: int) -> Any:
    """Make something of bytes: in a thread if they are many, for a thread has its price too."""
    return await to_thread.run_sync(make, given) if size > _LARGE else make(given)

"""From sampling fields to vLLM's parameters, of which some would kill its engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from vllm.exceptions import VLLMClientError
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from omnistage.core.ends import Ends
from omnistage.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm.v1.engine.async_llm import AsyncLLM

    from omnistage.core.prompts import Prompts


class Sampling:
    """Makes vLLM's sampling parameters for one engine.

    Args:
        llm: The engine.
        prompts: What knows its vocabulary.
    """

    def __init__(self, llm: AsyncLLM, prompts: Prompts) -> None:
        config = llm.vllm_config
        self._splits_prefill = bool(config.scheduler_config.enable_chunked_prefill)
        self._prompts = prompts
        declared = config.model_config.try_get_generation_config().get("eos_token_id")
        self._ends = Ends(declared, llm.renderer.tokenizer, prompts.vocabulary)

    @property
    def ends(self) -> bool:
        """Whether the model can end by itself."""
        return self._ends.reachable

    def params(
        self, sampling: Mapping[str, Any], extra: dict[str, Any] | None, *, text: bool
    ) -> SamplingParams:
        """A request's parameters.

        Args:
            sampling: Fields of them.
            extra: Its ``extra_args``.
            text: Whether its text is read as it comes.

        Raises:
            InvalidRequest: vLLM refuses a field, or its engine would die of it.
        """
        if sampling.get("seed") is not None and current_platform.is_cpu() and self._splits_prefill:
            raise InvalidRequest(
                "vLLM's CPU runner dies when a seeded request's prefill is split; start the stage "
                "with engine_args enable_chunked_prefill=False, or leave the seed out",
                parameter="seed",
            )
        for name in sampling:
            if str(name).startswith("_"):
                raise InvalidRequest(
                    f"{name!r} is no public sampling field of vLLM", parameter="sampling"
                )
        if text and sampling.get("n", 1) != 1:
            raise InvalidRequest("n > 1 has no one text; submit the request n times", parameter="n")
        kind = RequestOutputKind.DELTA if text else RequestOutputKind.FINAL_ONLY
        # max_tokens=None: up to the model's length. vLLM's own default of 16 is a fraction of a
        # word.
        fields: dict[str, Any] = {"max_tokens": None, "detokenize": text, **sampling}
        try:
            params = SamplingParams(**fields, output_kind=kind, extra_args=extra)
        except (TypeError, ValueError, VLLMClientError) as error:
            raise InvalidRequest(
                f"vLLM refuses the sampling fields: {error}",
                parameter=getattr(error, "parameter", None) or "sampling",
            ) from error
        self._check_sendable(params)
        # Masking an id beyond the head, as min_tokens does with stop ids, kills the engine.
        self._prompts.check_ids(params.stop_token_ids or [], "stop_token_ids")
        self._ends.check(params)
        return params

    @staticmethod
    def _check_sendable(params: SamplingParams) -> None:
        """Send the parameters to ourselves first.

        vLLM checks values, not always types, and its engine's input thread dies of a field that
        does not decode, after which no request is ever answered.
        """
        try:
            MsgpackDecoder(SamplingParams).decode(MsgpackEncoder().encode(params))
        except (msgspec.MsgspecError, TypeError, ValueError, OverflowError) as error:
            raise InvalidRequest(
                f"a sampling field has a type or size that vLLM cannot take: {error}",
                parameter="sampling",
            ) from error

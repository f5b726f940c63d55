"""Whether a request can end by itself: the ids at which vLLM stops and the model can sample."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from omnistage.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm.sampling_params import SamplingParams


class Ends:
    """The ids at which a model ends without being asked to, as its checkpoint declares them.

    Args:
        declared: ``eos_token_id`` of its generation config.
        tokenizer: Its tokenizer, if the engine has one.
        vocabulary: How many ids it can sample from.
    """

    def __init__(
        self, declared: int | Iterable[int] | None, tokenizer: Any, vocabulary: int
    ) -> None:
        self._vocabulary = vocabulary
        self._ids = {declared} if isinstance(declared, int) else {*(declared or ())}
        own = getattr(tokenizer, "eos_token_id", None)
        if own is not None:
            self._ids.add(own)

    @property
    def reachable(self) -> bool:
        """Whether the model can end by itself."""
        return any(map(self._can_be_sampled, self._ids))

    def check(self, params: SamplingParams) -> None:
        """Refuse a request that could not end, or whose end vLLM cannot hold back.

        Raises:
            InvalidRequest: Nothing would end it, or ``min_tokens`` would mask an id that is none.
        """
        beyond = [i for i in self._ids if not self._can_be_sampled(i)]
        if params.min_tokens and beyond:
            raise InvalidRequest(
                f"vLLM's engine dies of min_tokens where the model's end id, {beyond[0]}, is "
                "outside its vocabulary; leave min_tokens out",
                parameter="min_tokens",
            )
        unlimited = params.max_tokens is None and not params.ignore_eos
        if unlimited and not (self.reachable or params.stop_token_ids):
            raise InvalidRequest(
                "the model declares no end id that it can sample, so that the request would not "
                "end by itself; set stop_token_ids or max_tokens",
                parameter="max_tokens",
            )

    def _can_be_sampled(self, token: int) -> bool:
        return 0 <= token < self._vocabulary

"""Keeping a request's per-step outputs back: nobody reads them before the last one.

A request with a consumer runs FINAL_ONLY: vLLM's front-end would only pile up what each step sends.
Held back here, the ids cross once, with the output that ends the request, and neither the engine's
output thread nor the application's event loop has work for every token.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any, Final

from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput

_IDS: Final = {"request_id", "new_token_ids", "trace_headers", "num_nans_in_logits"}
# All else that an output may carry, what a later vLLM adds included.
_OTHERS: Final = [name for name in EngineCoreOutput.__struct_fields__ if name not in _IDS]
_others = attrgetter(*_OTHERS)
_NOTHING: Final = (None,) * len(_OTHERS)


def may_withhold(request: Any, *, log_stats: bool) -> bool:
    """Whether nothing would miss a request's outputs before the last.

    Args:
        request: vLLM's request.
        log_stats: Whether the engine keeps statistics, which count tokens as they come.
    """
    params = request.sampling_params
    return (
        not log_stats
        and not request.resumable
        and params.output_kind is RequestOutputKind.FINAL_ONLY
        and not params.detokenize
        and not params.stop
        and params.logprobs is None
        and params.prompt_logprobs is None
    )


def is_plain(output: Any) -> bool:
    """Whether an output carries ids and nothing else, as all but the first and the last do."""
    try:
        return bool(_others(output) == _NOTHING) and not output.num_nans_in_logits
    except (ValueError, RuntimeError):
        # An array or a tensor, which will not be compared as a whole.
        return False

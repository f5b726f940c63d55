"""What a worker knows of the requests it runs: what they want, what they brought, how they began.

Read off each step's ``SchedulerOutput``, in the order of the steps.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from omnistage.worker.conditioning import CONDITIONING, decode_conditioning
from omnistage.worker.payload import WANTS_PAYLOAD

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from vllm.v1.core.sched.output import SchedulerOutput

    from omnistage.worker.reader import Batch

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Span:
    """One request's rows of a forward pass, as a model's hooks get them.

    Args:
        request_id: vLLM's own id of it.
        start: Its first row in the batch.
        stop: The one behind its last.
        position: Absolute position of its first row in the request.
        prompt_tokens: How many positions its prompt has.
        conditioning: The tensors that it brought, the same objects at every step of it.
        state: The model's own notes on it: empty when it begins and, because its positions are
            computed anew, when it is resumed after a preemption; gone when it ends.
    """

    request_id: str
    start: int
    stop: int
    position: int
    prompt_tokens: int
    conditioning: Mapping[str, torch.Tensor]
    state: dict[Any, Any]


@dataclass(slots=True)
class _Known:
    prompt_tokens: int
    conditioning: Mapping[str, torch.Tensor] = field(default_factory=dict)
    state: dict[Any, Any] = field(default_factory=dict)


class WorkerRequests:
    """The live requests of a worker.

    Args:
        all_of_them: Whether a model's hooks get spans, so that every request is known.

    Attributes:
        wanted: Those whose payload is wanted, and the length of each one's prompt.
    """

    def __init__(self, *, all_of_them: bool) -> None:
        self.wanted: dict[str, int] = {}
        self._all = all_of_them
        self._known: dict[str, _Known] = {}

    def __len__(self) -> int:
        return len(self._known) + len(self.wanted)

    def note(self, scheduled: SchedulerOutput) -> None:
        """Take a step's news: who is over, new, or resumed."""
        if self.wanted or self._known:
            for request_id in scheduled.finished_req_ids:
                self.wanted.pop(request_id, None)
                self._known.pop(request_id, None)
        for new in scheduled.scheduled_new_reqs:
            extra = (new.sampling_params.extra_args if new.sampling_params else None) or {}
            if self._all:
                known = self._known.get(new.req_id)
                if known is None:
                    self._known[new.req_id] = _Known(_prompt(new), _conditioning(new, extra))
                else:  # resumed, or the next input of a streaming request
                    known.prompt_tokens = _prompt(new)
                    known.state.clear()
            if extra.get(WANTS_PAYLOAD) is True:
                self.wanted[new.req_id] = _prompt(new)
        if self._all:
            for request_id in scheduled.scheduled_cached_reqs.resumed_req_ids:
                if request_id in self._known:
                    self._known[request_id].state.clear()

    def spans(self, batch: Batch) -> list[Span]:
        """A batch's requests in its order, for a model's hooks.

        Raises:
            KeyError: No step began one of them.
        """
        spans, start = [], 0
        for name, count, first in zip(
            batch.request_ids, batch.counts, batch.first_rows, strict=True
        ):
            known = self._known[name]
            tokens, given = known.prompt_tokens, known.conditioning
            spans.append(Span(name, start, start + count, first, tokens, given, known.state))
            start += count
        return spans


def _prompt(new: Any) -> int:
    given = new.prompt_token_ids if new.prompt_token_ids is not None else new.prompt_embeds
    return 0 if given is None else len(given)


def _conditioning(new: Any, extra: Mapping[str, Any]) -> Mapping[str, torch.Tensor]:
    raw = extra.get(CONDITIONING)
    if raw is None:
        return {}
    try:
        return decode_conditioning(raw)
    except Exception:  # an AR stage checks it before; an exception would end the engine
        log.exception("request %s: its conditioning cannot be read", new.req_id)
        return {}

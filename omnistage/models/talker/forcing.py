"""The talker's structure enforced while vLLM samples: one logits processor for each model runner.

They are passed by class path (``logits_processors`` of vLLM's engine arguments) and hold no state
that could not be read again from a request's ids, so that preemption, moved rows and asynchronous
scheduling cannot put them out of step.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.sample.logits_processor import LogitsProcessor, MoveDirectionality
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as LogitsProcessorV2

from omnistage.models.talker.layout import read_layout
from omnistage.models.talker.structure import (
    FEWEST,
    FEWEST_AT_THE_END,
    MOST,
    Progress,
    constrain,
    units_of,
)

if TYPE_CHECKING:
    from torch import Tensor
    from vllm.config import VllmConfig
    from vllm.sampling_params import SamplingParams
    from vllm.v1.sample.logits_processor import BatchUpdate
    from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext, LogitsProcRequestState


class TalkerForcing(LogitsProcessor):
    """For Model Runner V1: rows of the batch, moved as vLLM says."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self._layout = read_layout(Path(vllm_config.model_config.model))
        self._device = device
        self._rows: dict[int, Progress] = {}

    def is_argmax_invariant(self) -> bool:
        """It is not: the likeliest id may be one that must not come."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow the batch: removed, added, then moved, as vLLM asks."""
        if batch_update is None:
            return
        for row in batch_update.removed:
            self._rows.pop(row, None)
        for row, _, prompt, output in batch_update.added:
            self._rows.pop(row, None)
            if units := units_of(self._layout, prompt):
                self._rows[row] = Progress(self._layout, units, output)
        for source, target, how in batch_update.moved:
            moved, replaced = self._rows.pop(source, None), self._rows.pop(target, None)
            if moved is not None:
                self._rows[target] = moved
            if replaced is not None and how is MoveDirectionality.SWAP:
                self._rows[source] = replaced

    def apply(self, logits: Tensor) -> Tensor:
        """Constrain the rows of talker requests; their ids are read here, where all are known."""
        if not self._rows:
            return logits
        rows = [row for row in self._rows if row < len(logits)]
        verdicts = torch.tensor([self._rows[row].following() for row in rows]).to(self._device)
        following, may, must = verdicts[:, 0], verdicts[:, 1].bool(), verdicts[:, 2].bool()
        index = torch.tensor(rows, device=self._device)
        chosen = logits[index]
        constrain(self._layout, chosen, following, may, must)
        logits[index] = chosen
        return logits


class TalkerForcingV2(LogitsProcessorV2):
    """For Model Runner V2: everything read from the token history on the device, row by row."""

    def __init__(self, vllm_config: VllmConfig, req_states: LogitsProcRequestState) -> None:
        self._layout = read_layout(Path(vllm_config.model_config.model))
        self._states = req_states

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        """Every request: which are the talker's is seen in their ids."""
        return True

    def apply(self, logits: Tensor, ctx: LogitsContext) -> Tensor:
        """Constrain the rows of talker requests, in place."""
        ours, following, may, must = self._verdicts(ctx)
        chosen = logits.clone()
        constrain(self._layout, chosen, following, may, must)
        logits.copy_(chosen.where(ours[:, None], logits))
        return logits

    def _verdicts(self, ctx: LogitsContext) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """For each row: whether it is a talker's, and :meth:`Progress.following`."""
        layout, states = self._layout, self._states
        slots = ctx.expanded_idx_mapping.long()
        tokens = _on_device(states.all_token_ids)[slots].long()  # [rows, positions]
        prompt = _on_device(states.prompt_len)[slots].long()[:, None]
        known = ctx.pos.long()[:, None] + 1
        at = torch.arange(tokens.shape[1], device=tokens.device)[None]
        unit = (tokens >= layout.first_word) & (tokens < layout.first_code)
        output = (at >= prompt) & (at < known)
        markers = output & unit
        count = markers.sum(-1, keepdim=True)
        latest = at.where(markers, torch.full_like(at, -1)).amax(-1, keepdim=True)
        codes = (output & (at > latest) & (tokens >= layout.first_code)).sum(-1, keepdim=True)
        ended = (output & (tokens == layout.eos)).any(-1, keepdim=True)
        units = prompt - 2
        inside = (at >= 1) & (at < prompt - 1)
        ours = (
            (prompt >= 3)
            & (tokens[:, :1] == layout.bos)
            & (tokens.gather(1, (prompt - 1).clamp(min=0)) == layout.audio)
            & (unit | ~inside).all(-1, keepdim=True)
        )
        last = count >= units
        following = tokens.gather(1, (count + 1).clamp(max=tokens.shape[1] - 1))
        following = following.masked_fill(last | ended | ~ours, layout.eos)
        fewest = torch.where(last, FEWEST_AT_THE_END, FEWEST)
        first = count == 0
        may = first | ended | (codes >= fewest)
        must = first | ended | (codes >= MOST)
        return ours[:, 0], following[:, 0], may[:, 0], must[:, 0]


def _on_device(buffer: Any) -> Tensor:
    tensor: Tensor = buffer.gpu
    return tensor

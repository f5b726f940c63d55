"""Qwen3-shaped models whose outputs say themselves where they come from.

Beside hidden states each returns integer rows of the position and the id that the model was given
there, so that a test can tell a row of another position, request or step from the right one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM

from omnistage.worker.requests import Span


class OmniPlain(Qwen3ForCausalLM):
    """Extends nothing: what vLLM's own class does, under a name from outside."""


class _SelfChecking(Qwen3ForCausalLM):
    """Returns (hidden, outputs); the outputs are those that a class declares."""

    omni_outputs: Mapping[str, str] = {}
    spans: Sequence[Span] = ()

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> Any:
        hidden = super().forward(input_ids, positions, intermediate_tensors, inputs_embeds)
        if not isinstance(hidden, torch.Tensor):
            return hidden  # of a pipeline stage that is not the last
        return hidden, self.outputs(input_ids, positions, hidden)

    def outputs(
        self, input_ids: torch.Tensor | None, positions: torch.Tensor, hidden: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """What a class adds."""
        rows = rows_of(input_ids, positions)
        return {key: rows for key, kind in self.omni_outputs.items() if kind != "request"}


def rows_of(input_ids: torch.Tensor | None, positions: torch.Tensor) -> torch.Tensor:
    """Each row's position and id, [rows, 2]; the id is -1 where embeddings were given."""
    ids = torch.full_like(positions, -1) if input_ids is None else input_ids
    return torch.stack([positions.long(), ids.long()], dim=1)


class OmniRows(_SelfChecking):
    """Rows of every position beside hidden states."""

    omni_outputs = {"codes": "token"}  # noqa: RUF012 as a model's author writes it


class OmniTokensOnly(_SelfChecking):
    """Codec rows, and hidden states that stay where they are."""

    omni_pooler_payload_include_hidden = False
    omni_outputs = {"codes": "token"}  # noqa: RUF012


class OmniPrefill(_SelfChecking):
    """Rows of the prompt, once."""

    omni_pooler_payload_include_hidden = False
    omni_outputs = {"prompt": "prefill"}  # noqa: RUF012


class OmniPostprocess(_SelfChecking):
    """Adds up the ids of each request from step to step.

    ``sums`` is a row a request: its last position, and the sum of all its ids up to there, or -1 if
    the model's state does not go back to its first.
    """

    omni_pooler_payload_include_hidden = False
    omni_outputs = {"codes": "token", "sums": "request"}  # noqa: RUF012

    def omni_preprocess(self, spans: Sequence[Span]) -> None:
        """Keep the batch for the forward pass that follows."""
        self.spans = list(spans)

    def outputs(
        self, input_ids: torch.Tensor | None, positions: torch.Tensor, hidden: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """What the state says of the steps before, and this one's ids."""
        rows = rows_of(input_ids, positions)
        sums = torch.full((max(len(self.spans), 1), 2), -1, dtype=torch.long)
        for i, span in enumerate(self.spans):
            before = 0 if span.position == 0 else span.state.get(span.position - 1)
            sums[i, 0] = span.position + span.stop - span.start - 1
            if before is not None:
                sums[i, 1] = before + rows[span.start : span.stop, 1].sum()
        return {"codes": rows, "sums": sums}

    def omni_postprocess(
        self, spans: Sequence[Span], hidden: torch.Tensor, outputs: Mapping[str, torch.Tensor]
    ) -> None:
        """Note the sum up to each position: drafts may be rejected."""
        for span in spans:
            total = 0 if span.position == 0 else span.state.get(span.position - 1)
            for position, token in outputs["codes"][span.start : span.stop].tolist():
                total = None if total is None else total + token
                span.state[position] = total


class OmniConditioned(_SelfChecking):
    """Adds a request's ``voice``, [hidden size], to the embeddings of its first two positions.

    One of [positions, hidden size] is added row by row, from position 0 on.

    ``voices`` is a row a request: its conditioning's first element in thousandths, or -1.
    """

    omni_outputs = {"codes": "token", "voices": "request"}  # noqa: RUF012

    def omni_preprocess(self, spans: Sequence[Span]) -> None:
        """Keep the batch for the forward pass that follows."""
        self.spans = list(spans)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> Any:
        if inputs_embeds is None and input_ids is not None:
            inputs_embeds = self.embed_input_ids(input_ids)
            for span in self.spans:
                voice = span.conditioning.get("voice")
                if voice is None:
                    continue
                rows = voice.expand(2, -1) if voice.dim() == 1 else voice
                rows = rows[span.position : span.position + span.stop - span.start]
                inputs_embeds[span.start : span.start + len(rows)] += rows.to(inputs_embeds)
        hidden = Qwen3ForCausalLM.forward(
            self, input_ids, positions, intermediate_tensors, inputs_embeds
        )
        if not isinstance(hidden, torch.Tensor):
            return hidden
        voices = torch.full((len(hidden), 1), -1, dtype=torch.long)
        for i, span in enumerate(self.spans):
            voice = span.conditioning.get("voice")
            if voice is not None:
                voices[i, 0] = round(1000 * float(voice.reshape(-1)[0]))
        return hidden, {"codes": rows_of(input_ids, positions), "voices": voices}


class OmniViews(_SelfChecking):
    """Gives its rows in every awkward way: all say their position and id, [rows, 2] of some dtype.

    ``static`` is a buffer that the next forward pass overwrites, and ``old`` what postprocess
    overwrites a step later; ``none`` has no columns.
    """

    omni_pooler_payload_include_hidden = False
    omni_outputs = {  # noqa: RUF012
        **dict.fromkeys(("static", "old", "strided", "none"), "token"),
        **dict.fromkeys(("bool", "uint8", "float8_e4m3fn", "float8_e5m2", "bfloat16"), "token"),
    }
    buffer: torch.Tensor | None = None
    before: Mapping[str, torch.Tensor] = {}

    def outputs(
        self, input_ids: torch.Tensor | None, positions: torch.Tensor, hidden: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """One set of rows, several times."""
        rows = rows_of(input_ids, positions)
        if self.buffer is None:
            self.buffer = torch.zeros(4096, 2, dtype=torch.long)
        self.buffer.fill_(-7)
        self.buffer[: len(rows)] = rows
        wide = rows.repeat_interleave(3, dim=1)
        exact = {
            name: (rows % 2).to(getattr(torch, name))
            for name in ("bool", "uint8", "float8_e4m3fn", "float8_e5m2", "bfloat16")
        }
        return {
            "static": self.buffer,
            "old": rows.clone(),
            "strided": wide.T.contiguous().T[:, ::3],
            "none": rows[:, :0],
            **exact,
        }

    def omni_postprocess(
        self, spans: Sequence[Span], hidden: torch.Tensor, outputs: Mapping[str, torch.Tensor]
    ) -> None:
        """Overwrite the last step's rows, which somebody may still be reading."""
        for tensor in self.before.values():
            tensor.zero_()
        self.before = {key: outputs[key] for key in ("old", "strided", "bfloat16")}


class OmniBroken(_SelfChecking):
    """Returns what it does not declare, or not all of what it does, as a request's first id says.

    Id 1000: a key too many. 1001: one too few. 1002: too few rows. Anything else is in order.
    """

    omni_outputs = {"codes": "token"}  # noqa: RUF012

    def outputs(
        self, input_ids: torch.Tensor | None, positions: torch.Tensor, hidden: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """What the ids ask for."""
        rows = rows_of(input_ids, positions)
        ids = set() if input_ids is None else set(input_ids.tolist())
        if 1000 in ids:
            return {"codes": rows, "surprise": rows}
        if 1001 in ids:
            return {}
        if 1002 in ids:
            return {"codes": rows[:-1]}
        return {"codes": rows}


class OmniRaises(OmniBroken):
    """Raises in a hook, on one rank: before the pass if a prompt has 103 ids, after it if 104.

    Else it is as broken as its base.
    """

    def omni_preprocess(self, spans: Sequence[Span]) -> None:
        """Raise for who asks for it."""
        if get_tensor_model_parallel_rank() == 0 and any(s.prompt_tokens == 103 for s in spans):
            raise RuntimeError("preprocess, on purpose")

    def omni_postprocess(
        self, spans: Sequence[Span], hidden: torch.Tensor, outputs: Mapping[str, torch.Tensor]
    ) -> None:
        """Raise for who asks for it."""
        if get_tensor_model_parallel_rank() == 0 and any(s.prompt_tokens == 104 for s in spans):
            raise RuntimeError("postprocess, on purpose")

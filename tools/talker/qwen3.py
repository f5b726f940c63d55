"""The talker's language model for training, with the names under which vLLM loads its weights.

Qwen3 as in its configuration; only what a small model needs.
"""

from __future__ import annotations

import msgspec
import torch
from torch import Tensor, nn
from torch.nn import functional


class Shape(msgspec.Struct, frozen=True):
    """The sizes in a config.json."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float


class _Norm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, x.shape[-1:], self.weight.to(x.dtype), self._eps)


class _Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width, head = shape.hidden_size, shape.head_dim
        self._head, self._shared = head, shape.num_attention_heads != shape.num_key_value_heads
        self.q_proj = nn.Linear(width, shape.num_attention_heads * head, bias=False)
        self.k_proj = nn.Linear(width, shape.num_key_value_heads * head, bias=False)
        self.v_proj = nn.Linear(width, shape.num_key_value_heads * head, bias=False)
        self.o_proj = nn.Linear(shape.num_attention_heads * head, width, bias=False)
        self.q_norm = _Norm(head, shape.rms_norm_eps)
        self.k_norm = _Norm(head, shape.rms_norm_eps)

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        query, key, value = (
            layer(x).unflatten(-1, (-1, self._head))
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        query = _turned(self.q_norm(query).transpose(1, 2), turn)
        key = _turned(self.k_norm(key).transpose(1, 2), turn)
        seen = functional.scaled_dot_product_attention(
            query, key, value.transpose(1, 2), is_causal=True, enable_gqa=self._shared
        )
        out: Tensor = self.o_proj(seen.transpose(1, 2).flatten(2))
        return out


class _Mlp(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width, inner = shape.hidden_size, shape.intermediate_size
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class _Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.self_attn = _Attention(shape)
        self.mlp = _Mlp(shape)
        self.input_layernorm = _Norm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = _Norm(shape.hidden_size, shape.rms_norm_eps)

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), turn)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class _Model(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(_Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = _Norm(shape.hidden_size, shape.rms_norm_eps)


class Qwen3(nn.Module):
    """Ids to hidden states, and those to logits through the embedding, which both share."""

    cosines: Tensor
    sines: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.model = _Model(shape)
        steps = torch.arange(0, shape.head_dim, 2) / shape.head_dim
        angles = torch.outer(
            torch.arange(shape.max_position_embeddings).float(), shape.rope_theta**-steps
        )
        self.register_buffer("cosines", angles.cos(), persistent=False)
        self.register_buffer("sines", angles.sin(), persistent=False)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                into_stream = name.endswith(("o_proj.weight", "down_proj.weight"))
                deviation = shape.hidden_size**-0.5 * (0.5 if into_stream else 1.0)
                nn.init.normal_(weight, 0, 0.02 if "embed" in name else deviation)

    def forward(self, ids: Tensor) -> Tensor:
        """Hidden states, [batch, length, width], of ids [batch, length]."""
        length = ids.shape[1]
        turn = (self.cosines[:length], self.sines[:length])
        x = self.model.embed_tokens(ids)
        for layer in self.model.layers:
            x = layer(x, turn)
        out: Tensor = self.model.norm(x)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of the ids that follow."""
        return functional.linear(hidden, self.model.embed_tokens.weight)


def _turned(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary positions, halves paired."""
    cosines, sines = (part.to(x.dtype) for part in turn)
    first, second = x.chunk(2, -1)
    return torch.cat([first * cosines - second * sines, second * cosines + first * sines], -1)

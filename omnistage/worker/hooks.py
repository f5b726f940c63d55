"""A model's own additions, between vLLM's runner and its forward pass.

The runner sees one tensor of hidden states whatever the model returns beside it; the model sees the
requests of its batch before and after the pass, where it asks for that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from omnistage.worker.contract import ModelContract, contract_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from omnistage.worker.requests import Span

NO_OUTPUTS: Mapping[str, Any] = {}


class ModelHooks:
    """What stands between a runner and its model.

    Args:
        model: The loaded model.
        include_hidden: What the stage's configuration says; see :func:`contract_of`.

    Attributes:
        contract: What the model's class declares.

    Raises:
        RuntimeError: Hooks of torch do not run on this model.
    """

    def __init__(self, model: nn.Module, include_hidden: bool | None) -> None:
        self.contract: ModelContract = contract_of(type(model), include_hidden)
        self._model: Any = model
        self._outputs: Mapping[str, Any] = NO_OUTPUTS
        if not self.contract.extends_vllm:
            return
        if type(model).__call__ is not nn.Module.__call__:
            raise RuntimeError(
                f"{type(model).__name__} replaces nn.Module.__call__, so that its outputs beside "
                "hidden states cannot be taken; compile what is inside it, as vLLM's models do"
            )
        model.register_forward_hook(self._split)

    def before_forward(self, call: Callable[[], None]) -> None:
        """Have ``call`` run before each forward pass, the warm-up's included."""
        self._model.register_forward_pre_hook(lambda *_: call())

    def take_outputs(self) -> Mapping[str, Any]:
        """What the last forward pass returned beside hidden states; once."""
        outputs, self._outputs = self._outputs, NO_OUTPUTS
        return outputs

    def preprocess(self, spans: Sequence[Span]) -> None:
        """Give the model its batch, before the forward pass."""
        self._model.omni_preprocess(spans)

    def postprocess(
        self, spans: Sequence[Span], hidden: torch.Tensor, outputs: Mapping[str, Any]
    ) -> None:
        """Give it the same and what it computed, after the forward pass."""
        # As vLLM runs the forward pass itself: elsewhere its tensors cannot be written to.
        with torch.inference_mode():
            self._model.omni_postprocess(spans, hidden, outputs)

    def _split(self, model: nn.Module, args: Any, output: Any) -> Any:
        self._outputs = NO_OUTPUTS
        if not (isinstance(output, tuple) and len(output) == 2):
            return output
        hidden, outputs = output
        if not isinstance(outputs, Mapping):
            raise TypeError(
                f"{type(model).__name__} returned ({type(hidden).__name__}, "
                f"{type(outputs).__name__}); expected (hidden states, mapping of keys to tensors)"
            )
        self._outputs = outputs
        return hidden

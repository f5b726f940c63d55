"""What an AR stage hands to its scheduler, through vLLM's ``additional_config``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec

from omnistage.adapters.processor import ChunkProcessor, row_keys
from omnistage.config import AUDIO
from omnistage.transport.owner import end_with
from omnistage.transport.publisher import PublisherConfig
from omnistage.worker.contract import HIDDEN, ModelContract

if TYPE_CHECKING:
    from omnistage.wire import Hello

HANDOVER_LIMIT: Final = 4096
"""Steps that may wait for the publisher thread before requests fail."""


class Wiring(msgspec.Struct, frozen=True, kw_only=True):
    """The engine side of an AR stage.

    Args:
        stage: The stage's name, for logs.
        channels: The processor of each channel.
        publisher: Where to publish.
        handover_limit: Steps that may wait for the publisher thread.
        takes_rows: The channels whose processors get payloads from the workers.
        contract: What the model declares, where it is known.
        prefix_rows: Whether the workers keep the rows of cached prefixes.
    """

    stage: str
    channels: Mapping[str, ChunkProcessor]
    publisher: PublisherConfig
    handover_limit: int = HANDOVER_LIMIT
    takes_rows: tuple[str, ...] = ()
    contract: ModelContract | None = None
    prefix_rows: bool = False

    @property
    def row_keys(self) -> frozenset[str]:
        """The keys of the tensors that its updates carry."""
        keys: frozenset[str] = frozenset()
        if self.takes_rows and self.contract is not None:
            keys = payload_keys(self.contract)
        return row_keys(self.channels[AUDIO], keys)


class WiredConfig(dict[str, Any]):
    """vLLM's ``additional_config`` with the wiring beside its items.

    vLLM makes the items part of its compile-cache key: endpoints differ from start to start and
    would make every start a cache miss, so they ride as an attribute.
    """

    def __init__(self, items: Mapping[str, Any], wiring: Wiring) -> None:
        super().__init__(items)
        self.omnistage = wiring
        self.served = False  # an AR stage has taken the engine
        self.hellos: dict[int, Hello] = {}  # of its publishers, who say it once

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Arrive in another process: an engine's, which spawning brings this to first of all."""
        self.__dict__.update(state)
        publisher = self.omnistage.publisher
        end_with(publisher.owner_pid, publisher.directory)


def payload_keys(contract: ModelContract) -> frozenset[str]:
    """The keys of what a model gives of each request that wants a payload."""
    return frozenset(contract.outputs) | ({HIDDEN} if contract.include_hidden else set())


def wiring_of(vllm_config: Any) -> Wiring | None:
    """The wiring in a ``VllmConfig``, or None if no AR stage made it."""
    wiring = getattr(getattr(vllm_config, "additional_config", None), "omnistage", None)
    return wiring if isinstance(wiring, Wiring) else None

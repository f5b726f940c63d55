"""A KV connector that moves nothing, and the threads in which vLLM asks it or runs a collective."""

from __future__ import annotations

import threading
from typing import Any, Final

import torch.distributed
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
)
from vllm.distributed.parallel_state import GroupCoordinator

THREADS: Final[dict[str, set[str]]] = {}
"""By what was called: the names of the threads that called it, in this process."""


def note(what: str) -> None:
    """Note the calling thread."""
    THREADS.setdefault(what, set()).add(threading.current_thread().name.partition("-")[0])


COLLECTIVES: Final = [
    *((torch.distributed, n) for n in ("all_reduce", "all_gather", "broadcast", "barrier")),
    *(
        (GroupCoordinator, name)
        for name in (
            *("all_reduce", "all_gather", "gather", "broadcast", "barrier"),
            *("broadcast_object", "broadcast_tensor_dict", "send_tensor_dict"),
        )
    ),
]
"""Where the collectives stand that a worker can run."""


def watched(call: Any) -> Any:
    """The same call, noted."""

    def noted(*args: Any, **kwargs: Any) -> Any:
        note("collective")
        return call(*args, **kwargs)

    return noted


class NothingConnector(KVConnectorBase_V1):
    """Stores and loads nothing."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing to load."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for."""

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to save."""

    def wait_for_save(self) -> None:
        """Nothing to wait for."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[None, None]:
        """What vLLM collects from every rank in every step."""
        note("connector")
        return None, None

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        """Nothing is found elsewhere."""
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Nothing to note."""

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Nothing to say."""
        return KVConnectorMetadata()

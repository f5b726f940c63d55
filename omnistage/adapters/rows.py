"""From one AR stage to the next: a request's rows, joined, and what makes a prompt of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from anyio import to_thread

from omnistage.adapters.input import EngineInput, merge
from omnistage.errors import InvalidRequest, ProtocolError, UpdatesLost, error_of_kind
from omnistage.payload import Payload, numbers, rows_from

if TYPE_CHECKING:
    from omnistage.request import StageInput, TokenUpdate

Project = Callable[[npt.NDArray[np.float32]], npt.NDArray[Any]]
"""From one model's rows, [rows, its hidden size], to embeddings, [positions, another's]."""


class RequestRows:
    """Joins one request's rows of one key, as a subscriber gets them.

    Args:
        key: The key.
    """

    def __init__(self, key: str = "hidden") -> None:
        self._key = key
        self._request_id: str | None = None
        self._kind: tuple[str, tuple[int, ...]] | None = None  # dtype, shape of a row
        self._pieces: list[bytes] = []
        self._first: int | None = None
        self._next = 0

    def __len__(self) -> int:
        return self._next - (self._first or 0)

    def take(self, update: TokenUpdate) -> bool:
        """Take the request's next update.

        Returns:
            Whether it was the last one.

        Raises:
            UpdatesLost: Rows are missing before these.
            ProtocolError: They are of another request, dtype or shape than those before.
            OmniStageError: What ended the request.
        """
        if update.request_id != (self._request_id or update.request_id):
            # One that is as long as these rows would go on with them unnoticed.
            raise ProtocolError(
                f"an update of {update.request_id} came among those of {self._request_id}; rows of "
                "several requests are joined by one RequestRows each",
                request_id=update.request_id,
            )
        self._request_id = update.request_id
        terminal = update.terminal
        if terminal is not None and terminal.error is not None:
            error = error_of_kind(terminal.kind, terminal.error)
            error.request_id = update.request_id
            raise error
        rows = update.tensors.get(self._key)
        if rows is not None:
            self._append(rows, update.request_id)
        return terminal is not None

    def joined(self, first: int = 0) -> Payload:
        """The rows so far, [rows, ...], from a position on.

        Raises:
            ProtocolError: There are none.
        """
        if self._kind is None or first >= self._next:
            raise ProtocolError(f"no row of {self._key!r} from {first} on came")
        dtype, shape = self._kind
        whole = Payload(dtype, (len(self), *shape), self._first or 0, b"".join(self._pieces))
        return rows_from(whole, first)

    def _append(self, rows: Payload, request_id: str) -> None:
        kind = (rows.dtype, rows.shape[1:])
        if self._first is None:
            self._first = self._next = rows.first_row  # a processor may leave a prompt's out
        if rows.first_row != self._next:
            raise UpdatesLost(
                f"rows of {self._key!r} from {rows.first_row} came where {self._next} was due",
                request_id=request_id,
            )
        if kind != (self._kind or kind):
            raise ProtocolError(
                f"rows of {self._key!r} became {kind}, they were {self._kind}",
                request_id=request_id,
            )
        self._kind = kind
        self._pieces.append(bytes(rows.data))
        self._next += rows.shape[0]


@dataclass(frozen=True, slots=True)
class RowsInput:
    """An input adapter whose prompts are rows of another AR stage, or other embeddings.

    Args:
        project: Makes embeddings of this stage's model of the rows, in a thread; None if they are
            embeddings of it already.
        sampling: Sampling fields that a request does not set itself.
    """

    project: Project | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)

    async def start(self) -> None:
        """Nothing to load."""

    async def adapt(self, stage_input: StageInput) -> EngineInput:
        """Project the rows, and lay the request's sampling over the defaults.

        Raises:
            InvalidRequest: The prompt is no rows, or they cannot be projected.
        """
        rows = stage_input.prompt
        if not isinstance(rows, Payload):
            raise InvalidRequest(
                f"this stage's prompts are rows of embeddings, got {type(rows).__name__}",
                parameter="prompt",
            )
        sampling = merge(self.sampling, stage_input)
        if self.project is None:
            return EngineInput(prompt=rows, sampling=sampling)
        given = numbers(rows).astype(np.float32)
        try:
            made = await to_thread.run_sync(self.project, given)
        except Exception as error:
            raise InvalidRequest(
                f"rows of shape {list(rows.shape)} cannot be projected: "
                f"{type(error).__name__}: {error}",
                parameter="prompt",
            ) from error
        return EngineInput(prompt=made, sampling=sampling)

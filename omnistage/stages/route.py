"""Ways through a pipeline: an AR stage and the branches that decode its requests."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final, Protocol

from omnistage.errors import StartupError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from omnistage.stages.base import AutoregressiveStage, PacedSink, Stage
    from omnistage.stages.branch import Branch

log = logging.getLogger(__name__)

_SUBSCRIBE_SECONDS: Final = 10.0


class Consumer(Protocol):
    """What a request knows of who gets its updates."""

    def open(
        self, request_id: str, sink: PacedSink, *, after: str | None = None, more: bool = False
    ) -> tuple[str, str]:
        """Expect a request, perhaps one that continues another, or that another may continue.

        Returns:
            The (channel, subscriber id) to publish its updates to.
        """
        ...

    def drop(self, request_id: str) -> None:
        """Forget a request: its sink is not called again, and none continues it. Idempotent."""
        ...

    def resume(self, request_id: str) -> None:
        """Its reader has read."""
        ...

    async def release(self, request_id: str) -> None:
        """Return when nothing of a dropped request is in its hands any more."""
        ...

    def has_ended(self, request_id: str) -> bool:
        """Whether its last update is there, its audio perhaps still on the way."""
        ...


class RequestBranch(Consumer, Protocol):
    """What a submission knows of a branch: one of this process, or decoder services."""

    name: str

    @property
    def sample_rate(self) -> int:
        """Samples a second of its audio."""
        ...

    @property
    def max_unread(self) -> float:
        """Seconds of audio that may be unread before more is made."""
        ...

    async def aclose(self) -> None:
        """Fail what is open and give everything back. Idempotent."""
        ...


class AnyRoute(Protocol):
    """An AR stage and its branches.

    Attributes:
        ar: The AR stage.
    """

    @property
    def ar(self) -> AutoregressiveStage:
        """The AR stage."""
        ...

    @property
    def branches(self) -> Sequence[RequestBranch]:
        """Everything behind it; each decodes every request."""
        ...

    @property
    def stages(self) -> Sequence[Stage]:
        """What is to be served while it runs."""
        ...

    async def start(self) -> None:
        """Come up.

        Raises:
            StartupError: A stage did not.
        """
        ...


class Route:
    """A route in this process.

    Args:
        ar: The AR stage.
        branches: Everything behind it.
    """

    def __init__(self, ar: AutoregressiveStage, branches: Sequence[Branch]) -> None:
        self.ar = ar
        self.branches = branches

    @property
    def stages(self) -> list[Stage]:
        """All its stages, in the direction of the data."""
        return [self.ar, *(stage for branch in self.branches for stage in branch.stages)]

    async def start(self) -> None:
        """Start every stage and have the decoders subscribe.

        Raises:
            ConfigError: A decoder takes rows that the AR stage does not give.
            StartupError: One did not come up.
        """
        # The engine first: it may be forked, and a decoder starts torch's threads.
        await self.ar.start()
        for branch in self.branches:
            await branch.start()
            await branch.subscribe(
                self.ar.publishers,
                within=_SUBSCRIBE_SECONDS,
                upstream=getattr(self.ar, "upstream", self.ar.name),
                rows=getattr(self.ar, "row_keys", None),
            )


async def start(routes: Sequence[AnyRoute]) -> None:
    """Start every route; one that comes up is enough, for the others may come later.

    Raises:
        StartupError: None did.
    """
    outcomes = await asyncio.gather(*(route.start() for route in routes), return_exceptions=True)
    failures = [outcome for outcome in outcomes if outcome is not None]
    for failure in failures:
        if len(failures) == len(routes) or not isinstance(failure, StartupError):
            raise failure
        log.warning("%s", failure)


async def close(routes: Sequence[AnyRoute]) -> None:
    """Close every part of every route, whatever the others do."""
    for route in routes:
        parts: list[RequestBranch | AutoregressiveStage] = [*route.branches, route.ar]
        for part in parts:
            try:
                await part.aclose()
            except Exception:
                log.exception("stage %s could not be closed", part.name)


def pick(routes: Sequence[AnyRoute]) -> AnyRoute:
    """The route for the next request: the one with the fewest, of those that take any."""
    open_ones = [route for route in routes if route.ar.closed is None]
    return min(open_ones, key=lambda route: len(route.ar), default=routes[0])

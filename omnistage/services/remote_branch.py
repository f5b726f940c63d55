"""The client's end of decoder services: those of one name at one AR service, as one branch."""

from __future__ import annotations

import asyncio
import logging
import random
from typing import TYPE_CHECKING, Final

from omnistage.config import AUDIO
from omnistage.errors import (
    DeadlineExceeded,
    OmniStageError,
    ProtocolError,
    StageClosed,
    UpdatesLost,
    error_of_kind,
)
from omnistage.services.audio import Inlet
from omnistage.transport.service_link import ServiceLink
from omnistage.transport.subscriber import Subscriber
from omnistage.wire import PROTOCOL_VERSION
from omnistage.wire_services import SPEECH, Abort, Aborted, Greet, Read

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from omnistage.stages.base import PacedSink
    from omnistage.transport.endpoints import Endpoints
    from omnistage.wire import Buffer, Update
    from omnistage.wire_services import DecoderInfo, ServiceMessage, Welcome

log = logging.getLogger(__name__)

_RELEASE_SECONDS: Final = 10.0
_SUBSCRIBE_SECONDS: Final = 10.0
_RETRY_SECONDS: Final = 1.0
_LEAVE_SECONDS: Final = 0.5
"""How long a decoder may be listed no more, if only its own connection was cut."""
_REMEMBERED: Final = 1024


class RemoteBranch:
    """The decoder services of one name at one AR service: each request is decoded by one of them.

    Args:
        endpoints: This process's sockets.
        name: The decoder stages' name.
        client: Our name at the decoders.
        on_change: Called when a decoder has come up or gone down.
    """

    def __init__(
        self, endpoints: Endpoints, name: str, client: str, on_change: Callable[[], None]
    ) -> None:
        self.name = name
        self.client = client
        self.changed = on_change
        self._endpoints = endpoints
        self._listed: Sequence[DecoderInfo] = ()
        self._closed = False
        self._replicas: dict[str, _Replica] = {}
        self._of: dict[str, _Replica] = {}  # those of requests that are open or being aborted
        self._past: dict[str, _Replica] = {}  # and of the latest that have ended

    @property
    def replicas(self) -> list[_Replica]:
        """Those that a request can go to."""
        return [replica for replica in list(self._replicas.values()) if replica.available]

    @property
    def sample_rate(self) -> int:
        """Samples a second of the audio.

        Raises:
            StageClosed: There is no decoder.
        """
        for replica in self._replicas.values():
            return replica.info.sample_rate
        raise StageClosed(f"no decoder {self.name!r} is joined", stage=self.name)

    @property
    def max_unread(self) -> float:
        """Seconds of audio that may be unread before the next piece of a text is submitted."""
        return min((r.info.max_unread for r in self._replicas.values()), default=30.0)

    def open(
        self, request_id: str, sink: PacedSink, *, after: str | None = None, more: bool = False
    ) -> tuple[str, str]:
        """Choose the decoder that has the fewest requests of ours, for the request's whole life.

        One that continues another stays with that one's decoder, which waits for it as it drains.

        Raises:
            StageClosed: There is none.
        """
        former = self._of.get(after or "") or self._past.get(after or "")
        replica = former if former is not None and former.up else self._choose()
        replica.open(request_id, sink)
        self._expect_no_more_after(after)
        if more:
            replica.expected.add(request_id)
        self._of[request_id] = replica
        return AUDIO, replica.info.subscriber

    def drop(self, request_id: str) -> None:
        """Forget a request: its sink is not called again. Idempotent."""
        self._expect_no_more_after(request_id)
        replica = self._of.get(request_id)
        if replica is not None and not replica.drop(request_id):
            del self._of[request_id]

    def resume(self, request_id: str) -> None:
        """Tell the decoder what was read."""
        replica = self._of.get(request_id)
        if replica is not None:
            replica.report_read(request_id)

    async def release(self, request_id: str) -> None:
        """Return when the decoder has nothing of a dropped request in its hands.

        Raises:
            DeadlineExceeded: It has not let go in time.
        """
        replica = self._of.pop(request_id, None)
        if replica is not None:
            await replica.release(request_id)

    def has_ended(self, request_id: str) -> bool:
        """Whether the rest is the decoder's business, which has deadlines of its own."""
        replica = self._of.get(request_id)
        return replica is not None and replica.has(request_id)

    def update(self, decoders: Sequence[DecoderInfo]) -> None:
        """Take the AR service's list of the decoders of our name."""
        self._listed = decoders
        infos = {info.subscriber: info for info in decoders}
        for subscriber, replica in list(self._replicas.items()):
            replica.listed = subscriber in infos
            replica.leave_if_done()
        for subscriber, info in infos.items():
            if subscriber not in self._replicas:
                try:
                    self._replicas[subscriber] = _Replica(self, self._endpoints, info)
                except OmniStageError as error:
                    log.warning("decoder %s cannot be used: %s", subscriber, error)

    def _expect_no_more_after(self, request_id: str | None) -> None:
        for replica in list(self._replicas.values()):
            if request_id in replica.expected:
                replica.expected.remove(request_id)
                replica.leave_if_done()

    def _choose(self) -> _Replica:
        replicas = self.replicas
        if not replicas:
            raise StageClosed(f"no decoder {self.name!r} is joined", stage=self.name)
        fewest = min(map(len, replicas))
        return random.choice([one for one in replicas if len(one) == fewest])  # noqa: S311

    def forget(self, request_id: str) -> None:
        """A request has ended at its decoder; called by that."""
        replica = self._of.pop(request_id, None)
        if replica is not None:
            self._past[request_id] = replica
            if len(self._past) > _REMEMBERED:
                del self._past[next(iter(self._past))]

    def let_go(self, request_id: str) -> None:
        """A decoder has let go of an aborted request; called by that."""
        self._of.pop(request_id, None)

    def remove(self, replica: _Replica) -> None:
        """Close a decoder that is listed no more, once it has nothing of ours."""
        self._replicas.pop(replica.info.subscriber, None)
        replica.close()

    def try_again(self, replica: _Replica) -> None:
        """Give up a decoder that does not confirm, and begin anew if it is listed a while later."""
        self.remove(replica)
        loop = asyncio.get_running_loop()
        loop.call_later(_RETRY_SECONDS, self._begin_anew)

    def _begin_anew(self) -> None:
        if not self._closed:
            self.update(self._listed)

    async def aclose(self) -> None:
        """Close every connection. Idempotent."""
        self._closed = True
        for replica in list(self._replicas.values()):
            self.remove(replica)


class _Open:
    """A request at a decoder."""

    def __init__(self, sink: PacedSink, inlet: Inlet) -> None:
        self.sink = sink
        self.inlet = inlet


class _Replica:
    """One decoder service: a link to it, and a subscription of its audio.

    Args:
        branch: The decoders of its name.
        endpoints: This process's sockets.
        info: What it is.

    Raises:
        ConfigError: An endpoint that cannot be one.
    """

    def __init__(self, branch: RemoteBranch, endpoints: Endpoints, info: DecoderInfo) -> None:
        self.info = info
        self.listed = True
        self.expected: set[str] = set()  # requests that others will continue
        self._branch = branch
        self._open: dict[str, _Open] = {}
        self._aborting: dict[str, asyncio.Event] = {}
        self._welcomed = False
        self._subscribed = False
        self._closed = False
        self._link = ServiceLink(
            endpoints, info.service, Greet(PROTOCOL_VERSION, branch.client), self
        )
        self._subscriber = Subscriber(endpoints, SPEECH, branch.client, self)
        self._subscribing = asyncio.get_running_loop().create_task(self._subscribe())

    def __len__(self) -> int:
        return len(self._open)

    @property
    def up(self) -> bool:
        """Whether it answers."""
        return self._welcomed and self._subscribed

    @property
    def available(self) -> bool:
        """Whether a new request can go there."""
        return self.listed and self.up

    def has(self, request_id: str) -> bool:
        """Whether a request is open here."""
        return request_id in self._open

    def open(self, request_id: str, sink: PacedSink) -> None:
        """Expect a request's audio."""
        self._open[request_id] = _Open(sink, Inlet(request_id, self._branch.name))

    def drop(self, request_id: str) -> bool:
        """Forget a request; False if it is not here any more."""
        if request_id in self._aborting:
            return True
        if self._open.pop(request_id, None) is None:
            return False
        if self._welcomed:
            self._aborting[request_id] = asyncio.Event()
            self._link.send(Abort(PROTOCOL_VERSION, request_id))
        return self._welcomed

    async def release(self, request_id: str) -> None:
        """Wait until a dropped request is let go of."""
        aborting = self._aborting.get(request_id)
        if aborting is None:
            return
        try:
            async with asyncio.timeout(_RELEASE_SECONDS):
                await aborting.wait()
        except TimeoutError:
            raise DeadlineExceeded(
                f"the decoder did not let go of the request within {_RELEASE_SECONDS:g} s",
                request_id=request_id,
                stage=self._branch.name,
            ) from None

    def report_read(self, request_id: str) -> None:
        """Say how far the reader has got."""
        request = self._open.get(request_id)
        if request is not None:
            read = request.inlet.read_samples(request.sink.unread_seconds)
            self._link.send(Read(PROTOCOL_VERSION, request_id, read))

    def close(self) -> None:
        """Fail what is open and close the connections. Idempotent."""
        self._closed, self._welcomed = True, False
        self._fail(StageClosed("the decoder is gone", stage=self._branch.name))
        self._subscribing.cancel()
        self._subscriber.close()
        self._link.close()

    def on_up(self, welcome: Welcome) -> None:
        """It has welcomed us, if it is the one that was listed."""
        decoder = welcome.decoder
        self._welcomed = decoder is not None and decoder.subscriber == self.info.subscriber
        self._branch.changed()

    def on_down(self, why: str) -> None:
        """It does not answer any more, or has restarted."""
        self._welcomed = False
        self._fail(StageClosed(why, stage=self._branch.name))
        self._branch.changed()
        self.leave_if_done()

    def on_message(self, message: ServiceMessage) -> None:
        """An answer to an abort."""
        if isinstance(message, Aborted):
            self._released(message.request_id)

    def on_update(self, update: Update, buffers: Sequence[Buffer], stamp: int) -> None:
        """The next audio of a request, or its end."""
        request = self._open.get(update.request_id)
        if request is None:
            return  # aborted or failed
        try:
            chunk = request.inlet.chunk(update, buffers)
        except ProtocolError as error:
            self.drop(update.request_id)
            error.request_id, error.stage = update.request_id, self._branch.name
            request.sink.on_error(error)
            return
        if chunk is not None:
            request.sink.on_chunk(chunk)
        terminal = update.terminal
        if terminal is None or update.request_id not in self._open:
            return
        self._forget(update.request_id)
        if terminal.error is None:
            request.sink.on_end(terminal)
        else:
            failure = error_of_kind(terminal.kind, terminal.error)
            failure.request_id, failure.stage = update.request_id, self._branch.name
            request.sink.on_error(failure)

    def on_lost(self, error: UpdatesLost) -> None:
        """Audio is missing; whose cannot be known."""
        self._fail(UpdatesLost(error.message, stage=self._branch.name))

    async def _subscribe(self) -> None:
        try:
            await self._subscriber.connect(self.info.publishers, within=_SUBSCRIBE_SECONDS)
        except OmniStageError as error:
            log.warning("decoder %s: %s", self.info.subscriber, error)
            self._branch.try_again(self)
        else:
            self._subscribed = True
            self._branch.changed()

    def _fail(self, error: OmniStageError) -> None:
        for request_id, request in list(self._open.items()):
            if request_id not in self._open:
                continue  # dropped with another piece of its text
            self._forget(request_id)
            request.sink.on_error(
                type(error)(error.message, request_id=request_id, stage=error.stage)
            )
        for request_id in list(self._aborting):
            self._released(request_id)
        self.expected.clear()

    def _forget(self, request_id: str) -> None:
        del self._open[request_id]
        self._branch.forget(request_id)
        self.leave_if_done()

    def leave_if_done(self) -> None:
        """Close, after a while, if it is listed no more and has nothing of ours."""
        if self._is_done:
            loop = asyncio.get_running_loop()
            loop.call_later(_LEAVE_SECONDS if self.up else 0.0, self._leave)

    @property
    def _is_done(self) -> bool:
        mine = self._open or self._aborting or self.expected
        return not (self.listed or mine or self._closed)

    def _leave(self) -> None:
        if self._is_done:
            self._branch.remove(self)

    def _released(self, request_id: str) -> None:
        aborting = self._aborting.pop(request_id, None)
        if aborting is not None:
            aborting.set()
            self._branch.let_go(request_id)
            self.leave_if_done()

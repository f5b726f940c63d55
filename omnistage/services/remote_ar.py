"""The client's end of an AR service, as a pipeline has an AR stage of its own."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, Final

import anyio

from omnistage.errors import (
    DeadlineExceeded,
    InvalidRequest,
    OmniStageError,
    ProtocolError,
    StageClosed,
    StartupError,
    StreamClosed,
)
from omnistage.payload import Payload
from omnistage.services.remote_branch import RemoteBranch
from omnistage.transport.service_link import ServiceLink
from omnistage.wire import PROTOCOL_VERSION
from omnistage.wire_services import (
    INPUTS,
    Abort,
    Aborted,
    Decoders,
    Done,
    Greet,
    Input,
    Pieces,
    Split,
    Submit,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from omnistage.request import StageInput, StageRequest, Usage
    from omnistage.transport.endpoints import Endpoints
    from omnistage.wire_services import ServiceMessage, Welcome

_RELEASE_SECONDS: Final = 10.0


class RemoteARStage:
    """An AR service as an :class:`~omnistage.AutoregressiveStage`.

    Args:
        endpoints: This process's sockets.
        endpoint: The service's.
        client: This client's name, its subscriber id at the decoders.
        roles: Names of the decoder stages that decode each request.
        within: Seconds that the start may take.
    """

    model_name = ""

    def __init__(
        self,
        endpoints: Endpoints,
        endpoint: str,
        *,
        client: str,
        roles: Sequence[str],
        within: float,
    ) -> None:
        self.name = endpoint
        self.client = client
        self.publishers: list[str] = []
        self.branches = [RemoteBranch(endpoints, role, client, self._changed) for role in roles]
        self._endpoint = endpoint
        self._endpoints = endpoints
        self._within = within
        self._link: ServiceLink | None = None
        self._why = "the stage is not started"
        self._draining = False
        self._service_drains = False
        self._calls = count()
        self._answers: dict[int, asyncio.Future[Pieces]] = {}
        self._running: dict[str, RemoteRequest] = {}
        self._listed = asyncio.Event()
        self._inputs: tuple[str, ...] = ()
        self._closed = False

    def __len__(self) -> int:
        return len(self._running)

    @property
    def closed(self) -> StageClosed | None:
        """Why no request can go there; None while some can."""
        if not self._up:
            return StageClosed(self._why, stage=self.name)
        if self._draining or self._service_drains:
            return StageClosed("the service is draining and takes no requests", stage=self.name)
        for branch in self.branches:
            if not branch.replicas:
                return StageClosed(
                    f"no decoder {branch.name!r} is joined to the AR service at {self._endpoint}; "
                    f"`omnistage stage decoder --connect {self._endpoint}` is one",
                    stage=self.name,
                )
        return None

    async def start(self) -> None:
        """Connect, and wait until each role has a decoder.

        A service that comes later is taken up all the same.

        Raises:
            StartupError: It refuses, or does not answer in time.
        """
        greeting = Greet(PROTOCOL_VERSION, self.client)
        self._link = ServiceLink(self._endpoints, self._endpoint, greeting, self)
        welcome = await self._link.answered(self._within)
        if welcome.ar is None:
            raise StartupError(f"the service at {self._endpoint} is no AR stage")
        with anyio.move_on_after(self._within):
            while self.closed is not None and not self._service_drains:
                self._listed.clear()
                await self._listed.wait()
        if (closed := self.closed) is not None:
            raise StartupError(closed.message, stage=self.name)

    async def split(self, asked: StageInput) -> Sequence[StageInput]:
        """Ask the service how its input adapter cuts the input; its tensors stay here.

        Raises:
            InvalidRequest: It cannot be served.
            StageClosed: The service is gone.
            DeadlineExceeded: It did not answer.
        """
        # What goes on with a text is taken while the service drains, and what begins one is not.
        if (closed := self.closed) is not None and not (asked.by_sentence and self._up):
            raise closed
        if isinstance(asked.prompt, Payload):
            return [asked]
        call = next(self._calls)
        answer: asyncio.Future[Pieces] = asyncio.get_running_loop().create_future()
        self._answers[call] = answer
        try:
            self._send(Split(PROTOCOL_VERSION, call, Input.of(replace(asked, conditioning=None))))
            async with asyncio.timeout(self._within):
                pieces = await answer
        except TimeoutError:
            raise DeadlineExceeded(
                f"the AR service did not answer within {self._within:g} s", stage=self.name
            ) from None
        finally:
            del self._answers[call]
        if pieces.fault is not None:
            raise pieces.fault.error()
        parts = [piece.stage_input() for piece in pieces.inputs]
        given = asked.conditioning
        return [p if p.conditioning else replace(p, conditioning=given) for p in parts]

    def submit(
        self, request: StageRequest, *, on_done: Callable[[Usage | OmniStageError], None]
    ) -> RemoteRequest:
        """Start a request; see :meth:`AutoregressiveStage.submit`."""
        if (closed := self.closed) is not None and not (request.after and self._up):
            raise closed
        given = Input.of(request.input)
        for name in INPUTS:
            if getattr(given, name) is not None and name not in self._inputs:
                raise InvalidRequest(
                    f"the AR service at {self._endpoint} is of an earlier release, which does not "
                    f"read {name}",
                    parameter="prompt" if name == "embeddings" else name,
                )
        self._send(
            Submit(
                PROTOCOL_VERSION,
                request.request_id,
                request.external_id,
                given,
                request.consumers,
                self.client,
                request.after,
                request.more,
            )
        )
        running = RemoteRequest(self, request.request_id, on_done, more=request.more)
        self._running[request.request_id] = running
        return running

    async def serve(self) -> None:
        """Nothing to do: the event loop's own callbacks read the sockets."""
        await asyncio.Event().wait()

    async def ended(self) -> None:
        """Never: a service that is gone may come back."""
        await asyncio.Event().wait()

    async def drain(self) -> None:
        """Refuse new requests and wait for the running ones."""
        self._draining = True
        await asyncio.gather(*(running.over() for running in list(self._running.values())))

    async def aclose(self) -> None:
        """Abort what is running and close the connections. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._draining = True
        aborts = [running.abort() for running in list(self._running.values())]
        await asyncio.gather(*aborts, return_exceptions=True)
        for branch in self.branches:
            await branch.aclose()
        if self._link is not None:
            self._link.close()
            self._why, self._link = "the stage is closed", None

    def abort(self, request_id: str) -> bool:
        """Have the service abort a request; False if there is no service to ask."""
        if self._link is None or not self._link.up:
            return False
        self._send(Abort(PROTOCOL_VERSION, request_id))
        return True

    def forget(self, request_id: str) -> None:
        """Drop a request that is over; called by its own handle."""
        self._running.pop(request_id, None)

    def on_up(self, welcome: Welcome) -> None:
        """The service has welcomed us."""
        if welcome.ar is not None:
            self.name, self.model_name = welcome.ar.name, welcome.ar.model
            self.publishers = list(welcome.ar.publishers)
            self._inputs = welcome.ar.inputs

    def on_down(self, why: str) -> None:
        """It does not answer any more, or has restarted: nothing that ran there will end."""
        self._why = why
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(StageClosed(why, stage=self.name))
        for running in list(self._running.values()):
            running.lose(StageClosed(why, stage=self.name))

    def on_message(self, message: ServiceMessage) -> None:
        """An answer, an outcome, or the list of decoders."""
        if isinstance(message, Done):
            running = self._running.get(message.request_id)
            if running is not None:
                running.finish(message.outcome())
        elif isinstance(message, Aborted):
            running = self._running.get(message.request_id)
            if running is not None:
                running.released(message)
        elif isinstance(message, Pieces):
            answer = self._answers.get(message.call)
            if answer is not None and not answer.done():
                answer.set_result(message)
        elif isinstance(message, Decoders):
            self._service_drains = message.draining
            for branch in self.branches:
                branch.update([one for one in message.decoders if one.name == branch.name])
            self._listed.set()

    @property
    def _up(self) -> bool:
        return self._link is not None and self._link.up

    def _changed(self) -> None:
        self._listed.set()

    def _send(self, message: ServiceMessage) -> None:
        if self._link is None:
            return
        try:
            self._link.send(message)
        except (ProtocolError, TypeError, ValueError, OverflowError) as error:
            raise InvalidRequest(f"an option of the request cannot be sent: {error}") from error


class RemoteRequest:
    """A request that an AR service runs.

    Args:
        stage: Where.
        request_id: Internal id.
        on_done: Called once, with the usage or with what went wrong.
        more: Whether the service waits for one that may continue it.
    """

    def __init__(
        self,
        stage: RemoteARStage,
        request_id: str,
        on_done: Callable[[Usage | OmniStageError], None],
        *,
        more: bool,
    ) -> None:
        self.request_id = request_id
        self._stage = stage
        self._more = more
        self._on_done: Callable[[Usage | OmniStageError], None] | None = on_done
        self._aborting = False
        self._fault: OmniStageError | None = None
        self._gone = asyncio.Event()

    async def abort(self) -> None:
        """Abort, and return when the service has let go. Idempotent.

        Raises:
            DeadlineExceeded: It has not in time.
            OmniStageError: Aborting failed there.
        """
        self._abort()
        if self._gone.is_set() and self._fault is None:
            return
        try:
            async with asyncio.timeout(_RELEASE_SECONDS):
                await self._gone.wait()
        except TimeoutError:
            raise DeadlineExceeded(
                f"the AR service did not let go of the request within {_RELEASE_SECONDS:g} s",
                request_id=self.request_id,
                stage=self._stage.name,
            ) from None
        if self._fault is not None:
            raise self._fault

    async def over(self) -> None:
        """Return when the service is done with it."""
        await self._gone.wait()

    def fail(self, error: OmniStageError) -> None:
        """Report ``error`` instead of the result, and abort."""
        self._report(error)
        self._abort()

    def lose(self, error: OmniStageError) -> None:
        """The service is gone, and the request with it."""
        self._report(error)
        self._end()

    def finish(self, outcome: Usage | OmniStageError) -> None:
        """The service is done with it."""
        self._report(outcome)
        if not self._aborting:  # else its answer to that is the end
            self._end()

    def released(self, answer: Aborted) -> None:
        """The service has let go of it."""
        if answer.fault is not None:
            self._fault = answer.fault.error(self.request_id)
        self._report(StreamClosed("the request was aborted", request_id=self.request_id))
        self._end()

    def _abort(self) -> None:
        if self._gone.is_set() and self._more:
            self._stage.abort(self.request_id)  # nothing will continue it
            self._more = False
        if self._aborting or self._gone.is_set():
            return
        self._aborting = True
        if not self._stage.abort(self.request_id):
            self._end()

    def _report(self, outcome: Usage | OmniStageError) -> None:
        on_done, self._on_done = self._on_done, None
        if on_done is not None:
            # Later: whoever calls fail() is not ready for an answer yet.
            asyncio.get_running_loop().call_soon(on_done, outcome)

    def _end(self) -> None:
        self._gone.set()
        self._stage.forget(self.request_id)


class RemoteRoute:
    """An AR service with its decoder services, as a pipeline has stages of its own.

    Args:
        ar: The AR service.
    """

    def __init__(self, ar: RemoteARStage) -> None:
        self.ar = ar
        self.branches = ar.branches
        self.stages = [ar]

    async def start(self) -> None:
        """See :meth:`RemoteARStage.start`."""
        await self.ar.start()

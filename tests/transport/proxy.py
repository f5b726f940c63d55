"""A proxy between a publisher and its subscribers that does to whole messages what networks do."""

from __future__ import annotations

import heapq
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count

import msgspec
import zmq

from omnistage.transport.endpoints import Endpoints
from omnistage.wire import Subscribed, decode_data, encode


class Faults(msgspec.Struct):
    """Shares of the messages that something happens to, from 0 to 1."""

    drop: float = 0.0
    double: float = 0.0
    delay: float = 0.0  # which reorders, as others are not
    truncate: float = 0.0
    most_ms: float = 30.0  # of a delay


class Proxy:
    """Forwards data and delivery of one publisher in a thread, through faults that can be changed.

    A confirmation passes unharmed but for the delivery endpoint in it, which becomes the proxy's,
    unless it is among the next ``unconfirmed``, which are dropped.
    """

    def __init__(self, endpoints: Endpoints, publisher: str, seed: int) -> None:
        self.faults = Faults()
        self.harmed = 0
        self.endpoint = endpoints.ipc()
        self.unconfirmed = 0
        self.silent = False  # nothing passes on the delivery sockets
        self._delivery = endpoints.ipc()
        self._publisher = publisher
        self._publishers_delivery = ""
        self._rng = random.Random(seed)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._late: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._cut = False
        self._stop = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def cut(self) -> None:
        """Close all connections on both sides; they are made again."""
        self._cut = True

    def close(self) -> None:
        self._stop = True
        self._thread.join()
        self._context.destroy(linger=0)

    def _open(self) -> None:
        self._sub, self._pub, self._front = (
            self._context.socket(kind) for kind in (zmq.XSUB, zmq.XPUB, zmq.ROUTER)
        )
        self._back: dict[bytes, zmq.Socket[bytes]] = {}
        self._pub.setsockopt(zmq.XPUB_VERBOSE, 1)
        self._front.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._poller = zmq.Poller()
        for socket in (self._sub, self._pub, self._front):
            socket.setsockopt(zmq.LINGER, 0)
            self._poller.register(socket, zmq.POLLIN)
        self._sub.connect(self._publisher)
        self._pub.bind(self.endpoint)
        self._front.bind(self._delivery)

    def _close(self) -> None:
        for socket in (self._sub, self._pub, self._front, *self._back.values()):
            socket.close()

    def _run(self) -> None:
        self._open()
        while not self._stop:
            if self._cut:
                self._cut = False
                self._late.clear()
                self._close()
                self._open()
            ready = dict(self._poller.poll(5))
            while self._late and self._late[0][0] <= time.monotonic():
                heapq.heappop(self._late)[2]()
            if self._pub in ready:
                self._sub.send_multipart(self._pub.recv_multipart())
            if self._sub in ready:
                self._down(self._sub.recv_multipart())
            if self._front in ready:
                peer, *frames = self._front.recv_multipart()
                back = self._back_of(peer)
                if not self.silent:
                    self._harm(frames, partial(send, back))
            for peer, back in self._back.items():
                if back in ready:
                    frames = back.recv_multipart()
                    if not self.silent:
                        self._harm(frames, partial(send, self._front, to=[peer]))
        self._close()

    def _down(self, frames: list[bytes]) -> None:
        message = decode_data(frames[1], frames[2:])
        if isinstance(message, Subscribed):
            self._publishers_delivery = message.delivery
            if self.unconfirmed:
                self.unconfirmed -= 1
                return
            ours = msgspec.structs.replace(message, delivery=self._delivery)
            self._pub.send_multipart([frames[0], encode(ours)])
        else:
            self._harm(frames, partial(send, self._pub), keep=1)

    def _back_of(self, peer: bytes) -> zmq.Socket[bytes]:
        back = self._back.get(peer)
        if back is None:
            back = self._back[peer] = self._context.socket(zmq.DEALER)
            back.setsockopt(zmq.LINGER, 0)
            back.setsockopt(zmq.ROUTING_ID, peer)
            back.connect(self._publishers_delivery)
            self._poller.register(back, zmq.POLLIN)
        return back

    def _harm(
        self, frames: list[bytes], pass_on: Callable[[list[bytes]], None], keep: int = 0
    ) -> None:
        """Pass a message on, or what is left of it; its first ``keep`` frames are the topic."""
        faults, rng = self.faults, self._rng
        dice = rng.random()
        times = 1
        if dice < faults.drop:
            times = 0
        elif dice < faults.drop + faults.double:
            times = 2
        elif dice < faults.drop + faults.double + faults.truncate:
            victim = rng.randrange(keep, len(frames))
            frames[victim] = frames[victim][: rng.randrange(len(frames[victim]))]
        self.harmed += times != 1
        for _ in range(times):
            if rng.random() < faults.delay:
                due = time.monotonic() + rng.random() * faults.most_ms / 1000
                call: Callable[[], None] = partial(pass_on, frames)
                heapq.heappush(self._late, (due, next(self._order), call))
            else:
                pass_on(frames)


def send(socket: zmq.Socket[bytes], frames: list[bytes], to: Sequence[bytes] = ()) -> None:
    if not socket.closed:
        socket.send_multipart([*to, *frames])


@contextmanager
def proxy(endpoints: Endpoints, publisher: str, seed: int = 0) -> Iterator[Proxy]:
    made = Proxy(endpoints, publisher, seed)
    try:
        yield made
    finally:
        made.close()

"""Subscribers that come and go for as long as a publisher lives."""

from __future__ import annotations

import asyncio

from omnistage.transport.endpoints import Endpoints
from tests.transport.test_transport import Handler, Site, Source


async def visit(site: Site, source: Source, endpoint: str, number: int) -> None:
    """Subscribe, be sent something, and leave, every other time with it still on its way."""
    handler = Handler()
    subscriber = await site.subscriber(handler, f"d-{number}", endpoint)
    source.send(subscriber.topic, number)
    if number % 2:
        await handler.wait_for(lambda: handler.ids == [number])
    subscriber.close()


async def test_100_subscribers_that_come_and_go_leave_the_publisher_as_it_was() -> None:
    with Endpoints() as endpoints:
        site = Site(endpoints, "ipc")
        source, endpoint = await site.publisher()
        for i in range(100):
            await visit(site, source, endpoint, i)
        async with asyncio.timeout(10):
            while site.publishers[0]._ledger.topics or site.publishers[0]._ledger.peers:
                await asyncio.sleep(0.005)
        handler = Handler()
        subscriber = await site.subscriber(handler, "d-0", endpoint)
        source.send(subscriber.topic, 7)
        await handler.wait_for(lambda: handler.ids == [7])
        assert not handler.lost
        subscriber.close()
        assert site.publishers[0].close(5)
        site.control.close()

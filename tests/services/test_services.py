"""Requests through services: the same as through stages of one's own, whoever comes and goes."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from prometheus_client import REGISTRY

from omnistage import ChunkPolicy, Pipeline, StageInput
from omnistage.errors import (
    ConfigError,
    DecoderError,
    EngineDead,
    InvalidRequest,
    OmniStageError,
    ServerError,
    StageClosed,
    StartupError,
    UpdatesLost,
)
from omnistage.request import FinishReason
from omnistage.testing import FakeDecoder, Script
from omnistage.transport.endpoints import Endpoints
from omnistage.transport.keys import Keys, make_keys
from omnistage.transport.service_link import ServiceLink
from omnistage.wire import PROTOCOL_VERSION
from omnistage.wire_services import Done, Greet, ServiceMessage, Tensor, Welcome
from tests.services.factories import Services

IDS = list(range(100, 140))
SLOW = Script(ids=IDS * 50, step_after=0.005)


def by_prompt(asked: StageInput) -> Script:
    """Each character of the prompt, ten times."""
    if asked.prompt == "refused":
        raise InvalidRequest("not this text", parameter="prompt")
    if asked.prompt == "breaks":
        return Script(ids=IDS, error=ServerError("it broke"))
    if asked.prompt == "slow":
        return SLOW
    return Script(ids=[ord(c) for c in str(asked.prompt) for _ in range(10)])


async def heard(pipeline: Pipeline, text: str, **options: Any) -> list[int]:
    async with pipeline.submit(text, **options) as stream:
        chunks = [chunk async for chunk in stream]
    assert [chunk.index for chunk in chunks] == list(range(len(chunks)))
    return FakeDecoder().indices(chunks)


async def nothing_is_left(*parts: Any) -> None:
    """Every service lets go within a second."""
    async with asyncio.timeout(5):
        while any(len(part) for part in parts):
            await asyncio.sleep(0.01)


async def test_a_request_is_the_same_as_with_stages_of_ones_own(services: Services) -> None:
    ar = await services.ar(by_prompt)
    decoder = await services.decoder(ar)
    async with Pipeline.connect(ar.endpoint) as pipeline:
        assert pipeline.sample_rate == 24_000
        assert pipeline.health().ok
        texts = ["a", "bc", "def", "ghij"]
        spoken = await asyncio.gather(*(heard(pipeline, text) for text in texts))
        for text, indices in zip(texts, spoken, strict=True):
            assert indices == [ord(c) for c in text for _ in range(10)]
        usage = await pipeline.submit("bc").finished()
    assert (usage.prompt_tokens, usage.output_tokens) == (2, 20)
    assert usage.finish_reason is FinishReason.STOP
    await nothing_is_left(ar, decoder)


async def test_over_tcp_as_well(services: Services) -> None:
    ar = await services.ar(by_prompt, bind="tcp://127.0.0.1:0")
    await services.decoder(ar, bind="tcp://127.0.0.1:0")
    assert ar.endpoint.startswith("tcp://127.0.0.1:")
    async with Pipeline.connect(ar.endpoint) as pipeline:
        assert await heard(pipeline, "a") == [ord("a")] * 10


async def test_the_services_own_input_adapter_cuts_a_text(services: Services) -> None:
    def words(asked: StageInput) -> Sequence[StageInput]:
        if asked.prompt == "-":
            raise InvalidRequest("nothing to say", parameter="prompt")
        return [replace(asked, prompt=word) for word in str(asked.prompt).split()]

    ar = await services.ar(by_prompt, split=words)
    await services.decoder(ar)
    async with Pipeline.connect(ar.endpoint) as pipeline:
        assert await heard(pipeline, "a b") == [ord("a")] * 10 + [ord("b")] * 10
        with pytest.raises(InvalidRequest, match="nothing to say") as caught:
            await pipeline.submit("-").finished()
    assert caught.value.parameter == "prompt"


async def test_options_reach_the_stages(services: Services) -> None:
    asked: list[StageInput] = []

    def script(given: StageInput) -> Script:
        asked.append(given)
        return Script(ids=IDS)

    ar = await services.ar(script)
    await services.decoder(ar)
    policy = ChunkPolicy(first=10, growth=1.0, steady=10)
    async with Pipeline.connect(ar.endpoint) as pipeline:
        stream = pipeline.submit(
            [1, 2, 3], sampling={"top_k": 5}, seed=7, voice="v", chunks=policy, priority=-3
        )
        async with stream:
            sizes = [len(chunk.pcm) async for chunk in stream]
    assert sizes == [40] * 4
    assert asked == [
        StageInput(
            prompt=[1, 2, 3], sampling={"top_k": 5}, seed=7, voice="v", chunks=policy, priority=-3
        )
    ]


async def test_tensors_reach_the_stage_with_every_part_of_a_split_text(services: Services) -> None:
    asked: list[StageInput] = []

    def script(given: StageInput) -> Script:
        asked.append(given)
        return Script(ids=IDS)

    def words(given: StageInput) -> list[StageInput]:
        assert given.conditioning is None  # the message of a split carries none
        return [StageInput(prompt=word) for word in str(given.prompt).split()]

    ar = await services.ar(script, split=words)
    await services.decoder(ar)
    given = {"voice": np.arange(6, dtype=np.int16).reshape(2, 3)}
    async with Pipeline.connect(ar.endpoint) as pipeline:
        await pipeline.submit("a b", conditioning=given).finished()
        rows = np.ones((3, 4), np.float32)
        usage = await pipeline.submit(rows, conditioning=given).finished()
    assert usage.prompt_tokens == 3
    assert asked == [StageInput(prompt=p, conditioning=given) for p in ("a", "b", rows)]


async def test_tensors_that_do_not_fit_a_message_or_an_earlier_service_are_refused_here(
    services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    ar = await services.ar(by_prompt)
    await services.decoder(ar)
    async with Pipeline.connect(ar.endpoint) as pipeline:
        large = {"voice": np.zeros(17 << 20, np.uint8)}
        with pytest.raises(InvalidRequest, match="at most 16777216"):
            await pipeline.submit("a", conditioning=large).finished()
        assert await heard(pipeline, "a") == [ord("a")] * 10
    monkeypatch.setattr("omnistage.services.ar.INPUTS", ())
    async with Pipeline.connect(ar.endpoint) as pipeline:
        for prompt, given, name in (
            ("a", {"voice": np.zeros(1)}, "conditioning"),
            (np.zeros((1, 1)), None, "prompt"),
        ):
            with pytest.raises(InvalidRequest, match="earlier release") as raised:
                await pipeline.submit(prompt, conditioning=given).finished()
            assert raised.value.parameter == name
        assert await heard(pipeline, "a") == [ord("a")] * 10


async def test_a_client_whose_tensors_are_none_hurts_nobody(services: Services) -> None:
    ar = await services.ar(by_prompt)
    await services.decoder(ar)
    async with Pipeline.connect(ar.endpoint) as pipeline:
        good = pipeline.submit("a", conditioning={"voice": np.zeros(2, np.uint8)})
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Tensor, "of", lambda given: Tensor("uint8", (3,), bytes(given.data)))
            with pytest.raises(InvalidRequest, match="has 2 bytes, not 3") as raised:
                await good.finished()
        assert raised.value.parameter == "conditioning"
        assert await heard(pipeline, "a") == [ord("a")] * 10


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [("refused", InvalidRequest, "not this text"), ("breaks", ServerError, "it broke")],
)
async def test_errors_cross_as_their_own_class(
    services: Services, text: str, error: type[OmniStageError], message: str
) -> None:
    ar = await services.ar(by_prompt)
    decoder = await services.decoder(ar)
    async with Pipeline.connect(ar.endpoint) as pipeline:
        stream = pipeline.submit(text)
        with pytest.raises(error, match=message) as caught:
            await stream.finished()
        assert caught.value.request_id == stream.request_id
        assert await heard(pipeline, "a") == [ord("a")] * 10
    await nothing_is_left(ar, decoder)


async def test_a_decoders_error_fails_its_request_alone(services: Services) -> None:
    ar = await services.ar(by_prompt)
    await services.decoder(ar, lambda: FakeDecoder(fails_on=ord("x")))
    async with Pipeline.connect(ar.endpoint) as pipeline:
        good, bad = await asyncio.gather(
            heard(pipeline, "abc"), heard(pipeline, "ax"), return_exceptions=True
        )
    assert good == [ord(c) for c in "abc" for _ in range(10)]
    assert isinstance(bad, DecoderError)
    assert bad.stage == "decoder"


async def test_what_cannot_be_sent_is_refused_here(services: Services) -> None:
    ar = await services.ar(by_prompt)
    await services.decoder(ar)
    async with Pipeline.connect(ar.endpoint) as pipeline:
        with pytest.raises(InvalidRequest, match="cannot be sent"):
            await pipeline.submit("a", sampling={"top_k": object()}).finished()
        with pytest.raises(InvalidRequest, match="cannot be sent"):
            await pipeline.submit("a" * (17 << 20)).finished()
        assert await heard(pipeline, "a") == [ord("a")] * 10


async def test_an_abort_returns_when_both_services_have_let_go(services: Services) -> None:
    ar = await services.ar(by_prompt)
    decoder = await services.decoder(ar)
    async with Pipeline.connect(ar.endpoint) as pipeline:
        for _ in range(20):
            async with pipeline.submit("slow") as stream:
                async for _ in stream:
                    break
            assert (len(ar), len(decoder)) == (0, 0)
        stream = pipeline.submit("slow")
        async with stream:
            pass  # aborted before the first update
        await nothing_is_left(ar, decoder)
        assert await heard(pipeline, "a") == [ord("a")] * 10


async def test_a_new_request_of_a_session_gets_no_sound_of_the_old_one(services: Services) -> None:
    def script(asked: StageInput) -> Script:
        return Script(ids=[ord(str(asked.prompt))] * 400, step_after=0.001)

    ar = await services.ar(script)
    await services.decoder(ar)
    async with Pipeline.connect(ar.endpoint) as pipeline:
        for letter in "abcdefgh":
            stream = pipeline.submit(letter, request_id="session")
            async with stream:
                taken = 0
                async for chunk in stream:
                    assert set(FakeDecoder().indices([chunk])) == {ord(letter)}
                    taken += 1
                    if taken == 5:
                        break


async def test_a_reader_that_does_not_read_holds_its_own_decoding(services: Services) -> None:
    def endless(asked: StageInput) -> Script:
        return Script(ids=[ord(c) for c in str(asked.prompt)] * 4000, ids_per_step=40)

    ar = await services.ar(endless)
    decoder = await services.decoder(ar, lambda: FakeDecoder(repeat=2400), max_unread=2.0)
    async with Pipeline.connect(ar.endpoint) as pipeline:
        async with pipeline.submit("a") as stream:
            first = await anext(aiter(stream))
            await asyncio.sleep(1.0)
            (outlet,) = decoder._outlets.values()
            assert 2.0 <= outlet.unread_seconds < 3.0
            # A neighbour does not wait for it.
            async with pipeline.submit("b") as other:
                async for chunk in other:
                    if chunk.index == 30:
                        break
            rest = [chunk async for chunk in stream]
        assert sum(len(chunk.pcm) for chunk in (first, *rest)) == 4000 * 2400


async def test_requests_are_spread_over_decoders_and_stay_there(services: Services) -> None:
    ar = await services.ar(by_prompt)
    decoders = [await services.decoder(ar) for _ in range(3)]
    async with Pipeline.connect(ar.endpoint) as pipeline:
        async with asyncio.timeout(5):
            while len(pipeline._routes[0].branches[0].replicas) < 3:  # type: ignore[attr-defined]
                await asyncio.sleep(0.01)
        streams = [pipeline.submit("slow") for _ in range(9)]
        for stream in streams:
            await stream.__aenter__()
            await anext(aiter(stream))
        assert Counter(map(len, decoders)) == {3: 3}
        for stream in streams:
            await stream.abort()
    await nothing_is_left(ar, *decoders)


async def test_several_ar_services_share_the_requests(services: Services) -> None:
    ars = [await services.ar(by_prompt) for _ in range(2)]
    for ar in ars:
        await services.decoder(ar)
    async with Pipeline.connect(*(ar.endpoint for ar in ars)) as pipeline:
        streams = [pipeline.submit("slow") for _ in range(6)]
        for stream in streams:
            await stream.__aenter__()
            await anext(aiter(stream))
        assert list(map(len, ars)) == [3, 3]
        for stream in streams:
            await stream.abort()


async def test_two_clients_do_not_hear_each_other(services: Services) -> None:
    ar = await services.ar(by_prompt)
    decoder = await services.decoder(ar)
    async with Pipeline.connect(ar.endpoint) as one, Pipeline.connect(ar.endpoint) as two:
        spoken = await asyncio.gather(
            *(heard(p, t) for t in ("ab", "cd") for p in (one, two) for _ in range(5))
        )
    assert sorted({tuple(indices) for indices in spoken}) == [
        tuple(ord(c) for c in text for _ in range(10)) for text in ("ab", "cd")
    ]
    await nothing_is_left(ar, decoder)


async def test_every_name_decodes_each_request(services: Services) -> None:
    ar = await services.ar(by_prompt)
    await services.decoder(ar, name="low")
    await services.decoder(ar, lambda: FakeDecoder(sample_rate=48_000), name="high")
    connected = Pipeline.connect(ar.endpoint, decoders=["low", "high"])
    async with connected as pipeline, pipeline.submit("a") as stream:
        chunks = [chunk async for chunk in stream]
    for name in ("low", "high"):
        own = [chunk for chunk in chunks if chunk.decoder == name]
        assert FakeDecoder().indices(own) == [ord("a")] * 10


async def test_without_decoders_a_request_ends_with_the_ar_stage(services: Services) -> None:
    ar = await services.ar(by_prompt)
    async with Pipeline.connect(ar.endpoint, decoders=[]) as pipeline:
        usage = await pipeline.submit("ab").finished()
    assert usage.output_tokens == 20


async def test_a_draining_service_refuses_and_ends_what_runs(services: Services) -> None:
    ar = await services.ar(by_prompt)
    await services.decoder(ar)
    async with Pipeline.connect(ar.endpoint) as pipeline:
        async with pipeline.submit("slow") as stream:
            await anext(aiter(stream))
            draining = asyncio.ensure_future(ar.drain())
            async with asyncio.timeout(5):
                while pipeline.health().ok:
                    await asyncio.sleep(0.01)
            with pytest.raises(StageClosed, match="draining"):
                await pipeline.submit("a").finished()
            assert not draining.done()
            assert (await anext(aiter(stream))).index == 1
        async with asyncio.timeout(5):
            await draining


async def test_a_decoder_that_leaves_ends_what_it_has(services: Services) -> None:
    ar = await services.ar(by_prompt)
    leaving = await services.decoder(ar)
    async with Pipeline.connect(ar.endpoint) as pipeline:
        async with pipeline.submit("slow") as stream:
            await anext(aiter(stream))
            draining = asyncio.ensure_future(leaving.drain())
            staying = await services.decoder(ar)
            async with asyncio.timeout(5):
                while len(ar._decoders) != 1 or not pipeline.health().ok:
                    await asyncio.sleep(0.01)
            assert await heard(pipeline, "a") == [ord("a")] * 10
            assert len(leaving) == 1
        async with asyncio.timeout(5):
            await draining
    await nothing_is_left(ar, leaving, staying)


async def test_a_decoder_that_closes_fails_its_requests_and_another_takes_the_next(
    services: Services,
) -> None:
    ar = await services.ar(by_prompt)
    first = await services.decoder(ar)
    async with Pipeline.connect(ar.endpoint) as pipeline:
        stream = pipeline.submit("slow")
        await stream.__aenter__()
        await anext(aiter(stream))
        second = await services.decoder(ar)
        await first.aclose()
        with pytest.raises((StageClosed, UpdatesLost)):
            await stream.finished()
        assert await heard(pipeline, "a") == [ord("a")] * 10
    await nothing_is_left(ar, second)


async def test_a_client_that_closes_frees_its_requests(services: Services) -> None:
    ar = await services.ar(by_prompt)
    decoder = await services.decoder(ar)
    pipeline = Pipeline.connect(ar.endpoint)
    await pipeline.__aenter__()
    streams = [pipeline.submit("slow") for _ in range(4)]
    for stream in streams:
        await stream.__aenter__()
        await anext(aiter(stream))
    await pipeline.aclose()
    await nothing_is_left(ar, decoder)
    for stream in streams:
        with pytest.raises(StageClosed):
            await stream.finished()


async def test_stages_that_do_not_fit_are_refused_at_the_start(services: Services) -> None:
    ar = await services.ar(by_prompt, codec="snac")
    with pytest.raises(StartupError, match="emits 'snac', decoder 'decoder' takes 'mimi'"):
        await services.decoder(ar, codec="mimi")
    await services.decoder(ar, codec="snac")
    with pytest.raises(StartupError, match="makes 24000 samples a second, this one 16000"):
        await services.decoder(ar, lambda: FakeDecoder(sample_rate=16_000))
    wide = await services.ar(by_prompt, codebooks=7)
    with pytest.raises(StartupError, match="frames of 7 ids, decoder 'decoder' takes 1"):
        await services.decoder(wide)


async def test_nobody_there_is_said_in_bounded_time(services: Services) -> None:
    with pytest.raises(StartupError, match=r"no service answers at tcp://127\.0\.0\.1:9"):
        await Pipeline.connect("tcp://127.0.0.1:9", within=0.5).__aenter__()
    ar = await services.ar(by_prompt)
    with pytest.raises(StartupError, match="no decoder 'decoder' is joined"):
        await Pipeline.connect(ar.endpoint, within=0.5).__aenter__()
    decoder = await services.decoder(ar)
    with pytest.raises(StartupError, match="is no AR stage"):
        await Pipeline.connect(decoder.endpoint, within=0.5).__aenter__()


@pytest.mark.parametrize(
    "endpoint",
    ["", "here", "tcp://host", "tcp://:1", "udp://h:1", "tcp://h:²", "tcp://h:" + "1" * 5000, 7],
)
def test_what_is_no_endpoint_is_refused(endpoint: Any) -> None:
    with pytest.raises(ConfigError, match="an endpoint is"):
        Pipeline.connect(endpoint)


def test_a_decoder_is_named_once() -> None:
    with pytest.raises(ConfigError, match="two decoders are named 'low'"):
        Pipeline.connect("tcp://127.0.0.1:9", decoders=["low", "high", "low"])


def test_a_pipeline_wants_at_least_one_service() -> None:
    with pytest.raises(ConfigError, match="no AR service"):
        Pipeline.connect()


async def test_one_service_is_enough_and_the_other_is_taken_up_when_it_comes(
    services: Services, unused_tcp_port: int
) -> None:
    late_endpoint = f"tcp://127.0.0.1:{unused_tcp_port}"
    ar = await services.ar(by_prompt)
    await services.decoder(ar)
    async with Pipeline.connect(ar.endpoint, late_endpoint, within=0.5) as pipeline:
        assert await heard(pipeline, "a") == [ord("a")] * 10
        late = await services.ar(by_prompt, bind=late_endpoint)
        await services.decoder(late)
        async with asyncio.timeout(10):
            while any(route.ar.closed for route in pipeline._routes):
                await asyncio.sleep(0.05)
        streams = [pipeline.submit("slow") for _ in range(4)]
        for stream in streams:
            await stream.__aenter__()
        await nothing_but(late, 2)
        for stream in streams:
            await stream.abort()


async def nothing_but(part: Any, count: int) -> None:
    async with asyncio.timeout(5):
        while len(part) != count:
            await asyncio.sleep(0.01)


def words(asked: StageInput) -> Sequence[StageInput]:
    return [replace(asked, prompt=word) for word in str(asked.prompt).split()]


async def test_what_continues_a_request_is_taken_while_both_drain(services: Services) -> None:
    def script(asked: StageInput) -> Script:
        return Script(ids=[ord(str(asked.prompt))] * 40, step_after=0.005)

    ar = await services.ar(script, split=words)
    decoder = await services.decoder(ar)
    async with Pipeline.connect(ar.endpoint) as pipeline:
        async with pipeline.submit("a b c d") as stream:
            chunks = [await anext(aiter(stream))]
            draining = [asyncio.ensure_future(part.drain()) for part in (ar, decoder)]
            chunks += [chunk async for chunk in stream]
        assert FakeDecoder().indices(chunks) == [ord(c) for c in "abcd" for _ in range(40)]
        async with asyncio.timeout(5):
            await asyncio.gather(*draining)


async def test_a_text_that_is_not_finished_leaves_nothing(services: Services) -> None:
    ar = await services.ar(by_prompt, split=words)
    decoder = await services.decoder(ar)
    async with Pipeline.connect(ar.endpoint) as pipeline:
        for _ in range(10):
            async with pipeline.submit("a b c slow d") as stream:
                await anext(aiter(stream))
        await nothing_is_left(ar, decoder)


async def test_over_tcp_with_keys_known_clients_only(tmp_path: Path) -> None:
    keys, other_keys = tmp_path / "keys", tmp_path / "others"
    make_keys(keys)
    make_keys(other_keys)
    bind = "tcp://127.0.0.1:0"
    async with AsyncExitStack() as stack:
        services = Services(stack, keys=Keys.load(keys))
        ar = await services.ar(by_prompt, bind=bind)
        await services.decoder(ar, bind=bind)
        async with Pipeline.connect(ar.endpoint, keys=keys) as pipeline:
            assert await heard(pipeline, "a") == [ord("a")] * 10
        with pytest.raises(StartupError, match="keys"):
            await Pipeline.connect(ar.endpoint, within=1.0).__aenter__()
        with pytest.raises(StartupError, match="keys"):
            await Pipeline.connect(ar.endpoint, keys=other_keys, within=1.0).__aenter__()


async def test_a_name_that_is_taken_is_refused(services: Services) -> None:
    ar = await services.ar(by_prompt)
    with Endpoints() as endpoints:
        links = [
            ServiceLink(endpoints, ar.endpoint, Greet(PROTOCOL_VERSION, "same"), Silent())
            for _ in range(2)
        ]
        welcomed = await asyncio.gather(
            *(link.answered(1.0) for link in links), return_exceptions=True
        )
        for link in links:
            link.close()
    assert sorted((type(outcome) for outcome in welcomed), key=str) == [StartupError, Welcome]


async def test_services_count_what_they_do(services: Services) -> None:
    def value(name: str, **labels: str) -> float:
        return REGISTRY.get_sample_value(f"omnistage:service_requests_{name}", labels) or 0.0

    ar = await services.ar(by_prompt)
    decoder = await services.decoder(ar, name="counted")
    before = value("ended_total", stage="counted", outcome="ok")
    async with Pipeline.connect(ar.endpoint, decoders=["counted"]) as pipeline:
        async with pipeline.submit("slow") as stream:
            await anext(aiter(stream))
            assert value("running", stage="counted") == 1
        await heard(pipeline, "a")
        with pytest.raises(ServerError):
            await pipeline.submit("breaks").finished()
    await nothing_is_left(ar, decoder)
    assert value("running", stage="counted") == 0
    assert value("ended_total", stage="counted", outcome="ok") == before + 1
    assert value("ended_total", stage="counted", outcome="aborted") >= 1


class Silent:
    """A link's handler that does nothing."""

    def on_up(self, welcome: Welcome) -> None:
        """Nothing."""

    def on_message(self, message: ServiceMessage) -> None:
        """Nothing."""

    def on_down(self, why: str) -> None:
        """Nothing."""


async def test_a_client_keeps_nothing_of_requests_that_are_over(services: Services) -> None:
    ar = await services.ar(by_prompt, split=words)
    await services.decoder(ar, lambda: FakeDecoder(fails_on=ord("x")))
    async with Pipeline.connect(ar.endpoint) as pipeline:
        route = pipeline._routes[0]
        stage, branch = cast("Any", route.ar), cast("Any", route.branches[0])
        for text in ("a b", "x", "a x", "refused", "a breaks", "a slow"):
            stream = pipeline.submit(text)
            with contextlib.suppress(OmniStageError):
                async for chunk in stream:
                    if text == "a slow" and chunk.index == 20:
                        await stream.abort()
        async with asyncio.timeout(5):
            while branch._of or stage._running:
                await asyncio.sleep(0.01)
        (replica,) = branch._replicas.values()
        kept = [replica._open, replica._aborting, stage._answers, pipeline._running]
        kept += [ar._running, ar._awaited, ar._continued]
        assert not any(kept)


async def test_what_a_service_says_last_is_heard_before_it_is_gone(services: Services) -> None:
    ar = await services.ar(by_prompt)
    await services.decoder(ar)
    async with Pipeline.connect(ar.endpoint) as pipeline:
        streams = [pipeline.submit("slow") for _ in range(16)]
        for stream in streams:
            await stream.__aenter__()
            await anext(aiter(stream))
        server = ar._server
        assert server is not None
        (client,) = (c for c in server.clients.values() if c.greeting.decoder is None)
        for request_id in ar._running:
            server.send(client, Done.of(request_id, EngineDead("the engine process is gone")))
        server.close()
        time.sleep(0.3)  # the words and the end of the connection are there, and nobody has looked
        outcomes = await asyncio.gather(*(s.finished() for s in streams), return_exceptions=True)
    assert {type(outcome) for outcome in outcomes} == {EngineDead}


async def test_keys_without_a_clients_are_refused_and_leave_no_socket(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys")
    for secret in (tmp_path / "keys" / "clients").glob("*_secret"):
        secret.unlink()
    with Endpoints(keys=Keys.load(tmp_path / "keys")) as endpoints:
        with pytest.raises(ConfigError, match=r"clients/NAME\.key_secret"):
            ServiceLink(endpoints, "tcp://127.0.0.1:9", Greet(PROTOCOL_VERSION, "me"), Silent())
        assert all(socket.closed for socket in endpoints.context._sockets)

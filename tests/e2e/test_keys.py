"""An AR stage over tcp with keys, on real vLLM: one with a key of it reads along, others do not."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from omnistage import DecoderStageConfig, Pipeline, subscribe
from omnistage.errors import StartupError
from omnistage.transport.keys import add_client, make_keys
from tests.e2e.conftest import PROMPT, IdDecoder, ar_config, generate, read, wait_until_idle

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session")]


async def test_updates_cross_tcp_encrypted_and_a_stranger_gets_none(tmp_path: Path) -> None:
    directory, there = tmp_path / "keys", tmp_path / "there"
    make_keys(directory)
    add_client(directory, "captions")
    (there / "clients").mkdir(parents=True)
    shutil.copy(directory / "server.key", there)
    shutil.copy(directory / "clients" / "captions.key_secret", there / "clients")
    config = ar_config(bind="tcp://127.0.0.1:0", keys=directory)
    sampling = {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True}
    decoder = DecoderStageConfig(build=IdDecoder)
    async with Pipeline(ar=config, decoder=decoder) as pipeline:
        expected = await generate(pipeline, PROMPT, **sampling)
        assert pipeline.endpoints[0].startswith("tcp://127.0.0.1:")
        with pytest.raises(StartupError, match="need keys"):
            await subscribe(pipeline.endpoints, within=0.5).__aenter__()
        got: list[int] = []
        async with subscribe(pipeline.endpoints, subscriber="captions", keys=there) as updates:
            stream = pipeline.submit(PROMPT, sampling=sampling, subscribers=["captions"])
            ids, _ = await read(stream)
            async with asyncio.timeout(20):
                async for update in updates:
                    got += update.ids
                    if update.terminal is not None:
                        break
        assert ids == got == list(expected.token_ids)
        await wait_until_idle(pipeline)


async def test_the_talker_speaks_over_tcp_with_keys(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys")
    changes = {"start_method": "fork", "bind": "tcp://127.0.0.1:0", "keys": tmp_path / "keys"}
    async with Pipeline.from_preset("talker", **changes) as pipeline:
        assert 0.4 < (await pipeline.submit("Hello world.", seed=1).collect()).seconds < 2

"""A decoder of rows in the decoder stage: each row once, as the float32 of its value."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from omnistage.errors import ConfigError, DecoderError, OmniStageError, ProtocolError, UpdatesLost
from omnistage.request import ChunkPolicy, FinishReason, Start, Terminal
from omnistage.stages.decoder import DecoderStage
from omnistage.wire import TensorInfo, Update
from tests.decoders.factories import RowMixer, random_rows
from tests.stages.factories import Sink, running

END = Terminal(FinishReason.STOP, 9)
CHUNKS = ChunkPolicy(first=2, growth=1.0, steady=2)


class Feed:
    """Sends one request's rows."""

    def __init__(self, stage: DecoderStage, request_id: str = "r", first: int = 0) -> None:
        self.sink = Sink()
        self._stage, self._id, self._next = stage, request_id, first
        self._start: Start | None = Start()
        stage.open(request_id, self.sink)

    def send(
        self,
        rows: Any = None,
        *,
        key: str = "hidden",
        dtype: str = "float32",
        skip: int = 0,
        terminal: Terminal | None = None,
    ) -> None:
        infos, buffers = (), ()
        if rows is not None:
            raw = rows if isinstance(rows, bytes) else rows.tobytes()
            shape = (len(rows), 3, 2) if isinstance(rows, np.ndarray) else (len(raw) // 12, 3, 2)
            at = self._next + skip
            others = TensorInfo("other", "uint8", (1,), 0, 0)
            infos, buffers = (others, TensorInfo(key, dtype, shape, at, 1)), (b"x", raw)  # type: ignore[assignment]
            self._next = at + shape[0]
        update = Update(self._id, tensors=infos, start=self._start, terminal=terminal)
        self._start = None
        self._stage.on_update(update, buffers, 0)

    async def end(self) -> Terminal | OmniStageError:
        return await self.sink.outcome


@pytest.mark.parametrize("first", [0, 5])
async def test_rows_are_decoded_in_chunks_and_sound_as_the_whole(first: int) -> None:
    """From whichever position they begin: a processor may leave a prompt's out."""
    rows = random_rows(RowMixer(), 11)
    async with running(RowMixer(), chunks=CHUNKS) as stage:
        assert stage.codebooks == 0
        feed = Feed(stage, first=first)
        for start, end in ((0, 1), (1, 6), (6, 6), (6, 11)):
            feed.send(rows[start:end])
        feed.send(terminal=END)
        assert await feed.end() == END
    from omnistage.decoders.window import WindowedDecoder

    whole = WindowedDecoder(RowMixer()).decode_clip(rows)
    np.testing.assert_allclose(np.array(feed.sink.pcm, np.float32), whole, atol=1e-6)
    assert [len(chunk.pcm) // 6 for chunk in feed.sink.chunks] == [2, 2, 2, 2, 2, 1]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
async def test_smaller_floats_are_widened_exactly(dtype: str) -> None:
    rows = torch.from_numpy(random_rows(RowMixer(), 4)).to(getattr(torch, dtype))
    sounds = []
    async with running(RowMixer()) as stage:
        for request_id, sent, as_dtype in (
            ("a", rows.view(torch.uint8).numpy().tobytes(), dtype),
            ("b", rows.float().numpy(), "float32"),
        ):
            feed = Feed(stage, request_id)
            feed.send(sent, dtype=as_dtype, terminal=END)
            assert await feed.end() == END
            sounds.append(feed.sink.pcm)
    assert sounds[0] == sounds[1]
    assert len(sounds[0]) == 24


@pytest.mark.parametrize(
    ("sent", "error", "message"),
    [
        ({"skip": 1}, UpdatesLost, "rows of 'hidden' from 2 came where 1 was due"),
        ({"skip": -1}, UpdatesLost, "from 0 came where 1 was due"),
        ({"dtype": "int32"}, DecoderError, "in float16, bfloat16, float32, got int32"),
        ({"rows": bytes(12), "dtype": "bfloat16", "skip": 1}, UpdatesLost, "from 2 came"),
        ({"rows": bytes(48), "dtype": "float64"}, DecoderError, "got float64"),
    ],
    ids=str,
)
async def test_rows_that_do_not_fit_fail_their_request_alone(
    sent: dict[str, Any], error: type[OmniStageError], message: str
) -> None:
    row = random_rows(RowMixer(), 1)
    async with running(RowMixer()) as stage:
        good, bad = Feed(stage, "good"), Feed(stage, "bad")
        for feed in (good, bad):
            feed.send(row)
        bad.send(**{"rows": row, **sent})
        outcome = await bad.end()
        assert isinstance(outcome, error)
        assert message in outcome.message
        assert outcome.request_id == "bad"
        good.send(row, terminal=END)
        assert await good.end() == END
        assert len(good.sink.pcm) == 12


async def test_a_request_without_a_row_of_the_key_is_an_error_unless_it_sampled_nothing() -> None:
    row = random_rows(RowMixer(), 1)
    async with running(RowMixer()) as stage:
        other = Feed(stage, "other")
        other.send(row, key="mel", terminal=END)
        outcome = await other.end()
        assert isinstance(outcome, ProtocolError)
        assert "takes rows of 'hidden', and none came" in outcome.message
        nothing = Feed(stage, "nothing")
        nothing.send(terminal=Terminal(FinishReason.STOP, 0))
        assert await nothing.end() == Terminal(FinishReason.STOP, 0)


async def test_an_ar_stage_without_the_key_is_refused_at_start() -> None:
    async with running(RowMixer()) as stage:
        for keys in ({"mel"}, ()):
            with pytest.raises(ConfigError, match="RowMixer takes rows of 'hidden', stage 'ar'"):
                await stage.subscribe((), "decoder", within=1, rows=keys)

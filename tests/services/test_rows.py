"""A decoder of rows as a service of its own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from omnistage import Emission, Pipeline, Step
from omnistage.decoders.window import WindowedDecoder
from omnistage.errors import ConfigError
from omnistage.request import FinishReason, Payload, Start
from omnistage.services.ar import ARService
from omnistage.testing import Script, scripted
from tests.decoders.factories import RowMixer
from tests.services.factories import Services, running


class RowsOfIds:
    """A row for each id, six times the id's hundredth, in bfloat16's own bits."""

    requires_token_updates = True
    row_keys = ("hidden",)

    def open(self, request_id: str, start: Start) -> None: ...

    def update(self, state: None, step: Step) -> Emission:
        halves = (rows_of(step.ids).view(np.uint32) >> 16).astype(np.uint16)
        tensor = Payload("bfloat16", (len(step.ids), 3, 2), step.position, halves.tobytes())
        return Emission(step.ids, {"hidden": tensor})

    def finish(self, state: None, reason: FinishReason) -> None: ...


class OthersOfIds(RowsOfIds):
    """Rows under another name."""

    row_keys = ("mel",)


def rows_of(ids: Any) -> np.ndarray:
    """Rows whose values bfloat16 holds exactly."""
    return np.repeat(np.array(ids, np.float32) / 128, 6).reshape(-1, 3, 2)


async def test_rows_reach_a_decoder_service_and_its_client(services: Services) -> None:
    ids = list(range(100, 140))
    make = scripted(Script(ids=ids), processor=RowsOfIds())
    async with running(lambda at: ARService(make(at), at, bind="ipc")) as ar:
        await services.decoder(ar, RowMixer)
        async with Pipeline.connect(ar.endpoint) as pipeline, pipeline.submit("a") as stream:
            pcm = np.concatenate([chunk.pcm async for chunk in stream])
    whole = WindowedDecoder(RowMixer()).decode_clip(rows_of(ids))
    np.testing.assert_allclose(pcm, whole, atol=1e-6)


@pytest.mark.parametrize("processor", [None, OthersOfIds()], ids=["none", "mel"])
async def test_a_decoder_whose_rows_the_ar_service_does_not_give_does_not_join(
    services: Services, processor: Any
) -> None:
    make = scripted(Script(ids=[1]), processor=processor)
    async with running(lambda at: ARService(make(at), at, bind="ipc")) as ar:
        with pytest.raises(ConfigError, match="takes rows of 'hidden', stage 'ar' gives"):
            await services.decoder(ar, RowMixer)

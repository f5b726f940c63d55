"""Whether a thinker and a talker fit together, found out when they start."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from omnistage.errors import ConfigError, InvalidRequest
from omnistage.payload import Payload
from omnistage.request import StageInput

if TYPE_CHECKING:
    from collections.abc import Collection

    from omnistage.adapters.input import InputAdapter
    from omnistage.config import ModelIO
    from omnistage.stages.base import AutoregressiveStage

HIDDEN: Final = "hidden"
"""The key of the rows that cross."""


def check_thinker(thinker: AutoregressiveStage) -> None:
    """Refuse a thinker without text, or without the rows that the talker needs of it.

    Raises:
        ConfigError: It is one.
    """
    io: ModelIO | None = getattr(thinker, "io", None)
    if io is not None and not io.has_tokenizer:
        raise ConfigError(
            "a thinker answers in text, and this one has no tokenizer; leave engine_args "
            "skip_tokenizer_init out and put the model's tokenizer into its directory",
            stage=thinker.name,
        )
    keys: Collection[str] | None = getattr(thinker, "row_keys", None)
    if keys is not None and HIDDEN not in keys:
        raise ConfigError(
            "a thinker's updates must carry rows of hidden states, and this one's do not; give it "
            "processor=HiddenStates(), and a model that includes them",
            stage=thinker.name,
        )


async def check_fit(thinker: AutoregressiveStage, talker: AutoregressiveStage) -> None:
    """Refuse a talker that cannot take the thinker's rows, by trying two on its input adapter.

    Raises:
        ConfigError: It cannot.
    """
    thinks: ModelIO | None = getattr(thinker, "io", None)
    adapter: InputAdapter | None = getattr(talker, "input_adapter", None)
    if thinks is None or adapter is None:
        return
    rows = np.random.default_rng(0).standard_normal((2, thinks.hidden_size), np.float32)
    try:
        made = (await adapter.adapt(StageInput(prompt=rows))).prompt
    except InvalidRequest as error:
        raise ConfigError(
            f"{type(adapter).__name__} makes no prompt of {thinker.name!r}'s rows of "
            f"{thinks.hidden_size} numbers: {error.message}; RowsInput does",
            stage=talker.name,
        ) from error
    speaks: ModelIO | None = getattr(talker, "io", None)
    if not isinstance(made, Payload) or speaks is None:
        return
    if speaks.embedding_size is None:
        raise ConfigError(
            "a talker's prompts are embeddings, and this one's engine takes none; start it with "
            "engine_args enable_prompt_embeds=True",
            stage=talker.name,
        )
    if made.shape[1] != speaks.embedding_size:
        raise ConfigError(
            f"rows of {thinker.name!r} become embeddings of {made.shape[1]} numbers, the model's "
            f"have {speaks.embedding_size}; RowsInput(project=...) makes one size of the other",
            stage=talker.name,
        )

"""Which token id of the talker means what, read from its checkpoint.

Plain numbers for the text step, the frames and the decoder; it knows no text and no audio.
"""

from __future__ import annotations

import functools
from pathlib import Path

import msgspec

from omnistage.errors import ConfigError

CHECKPOINT = Path(__file__).parent / "checkpoint"
"""The model directory as vLLM wants it; the decoder's weights are in a sub-folder of it."""


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """The talker's vocabulary: special ids, then words, phones and codes, each a block of ids.

    Words and phones together are the units: the prompt lists them and the output repeats each one
    as a marker in front of its codes.

    Args:
        bos: First id of a prompt.
        eos: Last id of an output.
        audio: Last id of a prompt.
        first_word: The id of word 0; word n starts the n-th word of a text.
        words: How many words there are.
        first_phone: The id of phone 0, the word gap.
        phones: Names of the phones, in the order of their ids.
        first_code: The id of code 0.
        codes: How many codes there are, one for 25 ms of speech.
    """

    bos: int
    eos: int
    audio: int
    first_word: int
    words: int
    first_phone: int
    phones: tuple[str, ...]
    first_code: int
    codes: int


class _Ids(msgspec.Struct):
    eos: int
    audio: int
    first_unit: int
    first_code: int
    num_codes: int


class _Config(msgspec.Struct):
    bos_token_id: int
    eos_token_id: int
    vocab_size: int
    talker: _Ids


class _Model(msgspec.Struct):
    vocab: dict[str, int]


class _Tokenizer(msgspec.Struct):
    model: _Model


@functools.cache
def read_layout(model: Path = CHECKPOINT) -> Layout:
    """The layout of the checkpoint in ``model``, from its config.json and tokenizer.json.

    Raises:
        ConfigError: A file is missing or not a talker's, or the two contradict each other.
    """
    try:
        config = msgspec.json.decode((model / "config.json").read_bytes(), type=_Config)
        vocab = msgspec.json.decode((model / "tokenizer.json").read_bytes(), type=_Tokenizer)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{model} holds no talker checkpoint: {error}") from error
    ids = config.talker
    names = {token: name for name, token in vocab.model.vocab.items()}
    units = [names.get(token, "") for token in range(ids.first_unit, ids.first_code)]
    words = sum(name == f"<w{index}>" for index, name in enumerate(units))
    layout = Layout(
        bos=config.bos_token_id,
        eos=ids.eos,
        audio=ids.audio,
        first_word=ids.first_unit,
        words=words,
        first_phone=ids.first_unit + words,
        phones=tuple(units[words:]),
        first_code=ids.first_code,
        codes=ids.num_codes,
    )
    last_code = ids.first_code + ids.num_codes - 1
    sound = (
        words > 0
        and all(layout.phones)
        and layout.eos == config.eos_token_id
        and names.get(layout.bos) == "<bos>"
        and names.get(layout.audio) == "<audio>"
        and names.get(ids.first_code) == "<c0>"
        and names.get(last_code) == f"<c{ids.num_codes - 1}>"
        and names.get(last_code + 1) != f"<c{ids.num_codes}>"
        and last_code < config.vocab_size
    )
    if not sound:
        raise ConfigError(f"config.json and tokenizer.json in {model} contradict each other")
    return layout

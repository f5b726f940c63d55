"""The codec decoders by name; each module is imported when its decoder is asked for."""

from __future__ import annotations

import importlib
from types import MappingProxyType
from typing import TYPE_CHECKING

from omnistage.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from omnistage.decoders.torch_codec import TorchCodec

DECODERS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "code2wav": ("omnistage.decoders.code2wav", "Code2WavDecoder"),
        "dac": ("omnistage.decoders.dac", "DacDecoder"),
        "encodec": ("omnistage.decoders.encodec", "EncodecDecoder"),
        "mimi": ("omnistage.decoders.mimi", "MimiDecoder"),
        "neucodec": ("omnistage.decoders.neucodec", "NeuCodecDecoder"),
        "snac": ("omnistage.decoders.snac", "SnacDecoder"),
        "xcodec2": ("omnistage.decoders.xcodec2", "Xcodec2Decoder"),
    }
)
"""Name to module and class."""


def decoder_class(name: str) -> type[TorchCodec]:
    """The decoder of a name, without its libraries.

    Raises:
        ConfigError: There is none of that name.
    """
    try:
        module, attribute = DECODERS[name]
    except KeyError:
        raise ConfigError(f"unknown decoder {name!r}; known: {', '.join(DECODERS)}") from None
    found: type[TorchCodec] = getattr(importlib.import_module(module), attribute)
    return found

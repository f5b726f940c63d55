"""NeuCodec, the codec of NeuTTS, through transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from omnistage.decoders.values import positive
from omnistage.decoders.xcodec2 import Xcodec2Decoder
from omnistage.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping


class NeuCodecDecoder(Xcodec2Decoder):
    """NeuCodec's decoder: XCodec2's layers that make 24 kHz, one index of 65536 a frame.

    As with XCodec2 no context is exact, and the deviation is the same: 10% (rms) with 50 frames
    back and 5 ahead, on full-size seeded weights. NeuTTS, which streams with these numbers, also
    blends neighbouring chunks into one another; here they are put end to end.
    """

    label = "NeuCodec"
    model_type = "neucodec"
    model_class = "NeuCodecModel"
    config_class = "NeuCodecConfig"

    @classmethod
    def _rate(cls, config: Mapping[str, Any], hop: int) -> tuple[int, int]:
        encoded = positive(config, "input_sampling_rate", 16000)
        decoded = positive(config, "output_sampling_rate", 24000)
        if hop * decoded % encoded:
            raise ConfigError(f"a frame of {hop} samples at {encoded} Hz is none at {decoded} Hz")
        return decoded, hop * decoded // encoded

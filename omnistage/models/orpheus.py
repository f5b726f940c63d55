"""Orpheus: Llama that speaks in frames of seven SNAC codes.

The prompt is a turn of the human's, its text behind the voice's name, and the beginning of speech;
the ids are those of the published tokenizer. Source: github.com/canopyai/Orpheus-TTS and the model
card of canopylabs/orpheus-3b-0.1-ft.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from omnistage.models.speech_lm import CodeRange, DecoderChoice, SpeechLM
from omnistage.request import ChunkPolicy

ORPHEUS: Final = SpeechLM(
    name="orpheus",
    summary="Orpheus 3B and its finetunes: Llama and SNAC 24 kHz, English, eight voices",
    licence="Apache-2.0; built on Llama 3.2, whose community licence holds too",
    model="canopylabs/orpheus-3b-0.1-ft",
    # 128259, <|begin_of_text|> and the text, 128009, 128260, 128261, 128257
    prompt=(
        "<custom_token_3><|begin_of_text|>{voice}: {text}"
        "<|eot_id|><custom_token_4><custom_token_5><custom_token_1>"
    ),
    end="<custom_token_2>",  # 128258
    # 128266 and seven times 4096 ids from there: which slot of a frame a code is for is in its id.
    codes=CodeRange(
        first="<custom_token_10>", last="<custom_token_28681>", codebooks=7, codebook_size=4096
    ),
    decoder=DecoderChoice(kind="snac", model="hubertsiuzdak/snac_24khz"),
    sample_rate=24_000,
    sampling=MappingProxyType(
        {"temperature": 0.6, "top_p": 0.8, "repetition_penalty": 1.3, "max_tokens": 1200}
    ),
    engine_args=MappingProxyType({"max_model_len": 4096}),
    # 1,200 tokens are 14.6 s; fast English has 16 characters a second.
    max_text=230,
    voices=("tara", "leah", "jess", "leo", "dan", "mia", "zac", "zoe"),
    # A frame plays for 85 ms.
    chunks=ChunkPolicy(first=2, growth=1.5, steady=12),
)

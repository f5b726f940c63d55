"""Speech LMs whose vocabulary has one id for each code of a codec with a single codebook.

``FLAT`` is what they have in common and knows no model: range, prompt and decoder come from the
model's own ``omnistage.json`` or as changes. ``LLASA`` and ``NEUTTS`` are the published ones.
Sources: the model cards of HKUSTAudio/Llasa-1B and neuphonic/neutts-air, and
github.com/neuphonic/neutts-air.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from omnistage.models.speech_lm import CodeRange, DecoderChoice, SpeechLM
from omnistage.request import ChunkPolicy

# A frame plays for 20 ms. NeuTTS' own streaming has chunks of 25 frames.
_CHUNKS: Final = ChunkPolicy(first=25, growth=1.3, steady=100)

FLAT: Final = SpeechLM(
    name="flat",
    summary="any LM with one token for each code of a single codebook; say which in omnistage.json",
    licence="the model's own",
    model="",
    sampling=MappingProxyType({"temperature": 0.8, "max_tokens": 1500}),
    engine_args=MappingProxyType({"max_model_len": 2048}),
    chunks=_CHUNKS,
    max_text=400,
)

LLASA: Final = SpeechLM(
    name="llasa",
    summary="Llasa 1B, 3B, 8B: Llama and XCodec2 16 kHz, English and Chinese, recorded voices",
    licence="CC-BY-NC-4.0",
    model="HKUSTAudio/Llasa-1B",
    # Llama 3.2's own chat template, with the date that it has where none is given.
    prompt=(
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n"
        "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nConvert the text to speech:"
        "<|TEXT_UNDERSTANDING_START|>{reference}{text}<|TEXT_UNDERSTANDING_END|><|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n<|SPEECH_GENERATION_START|>{codes}"
    ),
    end="<|SPEECH_GENERATION_END|>",
    codes=CodeRange(first="<|s_0|>", last="<|s_65535|>"),
    decoder=DecoderChoice(kind="xcodec2", model="HKUSTAudio/xcodec2-hf"),
    sample_rate=16_000,
    sampling=MappingProxyType({"temperature": 0.8, "top_p": 1.0, "max_tokens": 1500}),
    engine_args=MappingProxyType({"max_model_len": 2048}),
    # 1,500 tokens are 30 s.
    max_text=450,
    chunks=_CHUNKS,
)

NEUTTS: Final = SpeechLM(
    name="neutts",
    summary="NeuTTS Air and Nano: a small LM and NeuCodec 24 kHz, phonemes in, recorded voices",
    licence="Apache-2.0 (Air)",
    model="neuphonic/neutts-air",
    prompt=(
        "user: Convert the text to speech:<|TEXT_PROMPT_START|>{reference}{text}"
        "<|TEXT_PROMPT_END|>\nassistant:<|SPEECH_GENERATION_START|>{codes}"
    ),
    end="<|SPEECH_GENERATION_END|>",
    codes=CodeRange(first="<|speech_0|>", last="<|speech_65535|>"),
    decoder=DecoderChoice(kind="neucodec", model="neuphonic/neucodec"),
    sample_rate=24_000,
    sampling=MappingProxyType(
        {"temperature": 1.0, "top_k": 50, "min_tokens": 50, "max_tokens": 1000}
    ),
    engine_args=MappingProxyType({"max_model_len": 2048}),
    # 1,000 tokens are 20 s, and leave as much of the context to the recording and the phonemes.
    max_text=300,
    recorded=True,
    phonemes="en-us",
    chunks=_CHUNKS,
)

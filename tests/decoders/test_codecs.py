"""What holds for every codec decoder: its declaration, its checkpoint, its options, its errors."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from omnistage.decoders.base import Declaration, Decoder
from omnistage.decoders.registry import DECODERS, decoder_class
from omnistage.decoders.snac import SNAC_24KHZ
from omnistage.decoders.torch_codec import TorchCodec
from omnistage.decoders.transformers_codec import TransformersCodec
from omnistage.decoders.window import WindowedDecoder
from omnistage.errors import ConfigError
from omnistage.testing import DECODER_CONTRACT
from tests.decoders.factories import random_codes
from tools.checkpoints import codecs

NAMES = sorted(DECODERS)
TRANSFORMERS = [name for name in NAMES if name != "snac"]

PUBLISHED: dict[str, tuple[dict[str, Any], Declaration]] = {
    "code2wav": (
        {
            "model_type": "qwen3_omni_moe",
            "code2wav_config": {
                "codebook_size": 2048,
                "num_quantizers": 16,
                "sliding_window": 72,
                "upsample_rates": [8, 5, 4, 3],
                "upsampling_ratios": [2, 2],
            },
        },
        Declaration(
            sample_rate=24000,
            hop_length=1920,
            codebooks=16,
            codebook_size=2048,
            left_context=72,
            right_context=1,
        ),
    ),
    "dac": (
        {
            "model_type": "dac",
            "sampling_rate": 44100,
            "downsampling_ratios": [2, 4, 8, 8],
            "n_codebooks": 9,
            "codebook_size": 1024,
        },
        Declaration(
            sample_rate=44100,
            hop_length=512,
            codebooks=9,
            codebook_size=1024,
            left_context=10,
            right_context=10,
        ),
    ),
    "encodec": (
        {
            "model_type": "encodec",
            "sampling_rate": 24000,
            "audio_channels": 1,
            "chunk_length_s": None,
            "codebook_size": 1024,
            "kernel_size": 7,
            "pad_mode": "reflect",
            "target_bandwidths": [1.5, 3.0, 6.0, 12.0, 24.0],
            "upsampling_ratios": [8, 5, 4, 2],
            "use_causal_conv": True,
        },
        Declaration(
            sample_rate=24000,
            hop_length=320,
            codebooks=8,
            codebook_size=1024,
            left_context=25,
            right_context=6,
        ),
    ),
    "mimi": (
        {
            "model_type": "mimi",
            "sampling_rate": 24000,
            "frame_rate": 12.5,
            "num_quantizers": 32,
            "codebook_size": 2048,
            "sliding_window": 250,
            "upsampling_ratios": [8, 6, 5, 4],
            "use_causal_conv": True,
        },
        Declaration(
            sample_rate=24000,
            hop_length=1920,
            codebooks=32,
            codebook_size=2048,
            left_context=125,
            right_context=0,
        ),
    ),
    "neucodec": (
        {"model_type": "neucodec"},
        Declaration(
            sample_rate=24000,
            hop_length=480,
            codebooks=1,
            codebook_size=65536,
            left_context=50,
            right_context=5,
        ),
    ),
    "snac": (
        dict(SNAC_24KHZ),
        Declaration(
            sample_rate=24000,
            hop_length=2048,
            codebooks=7,
            codebook_size=4096,
            left_context=3,
            right_context=3,
        ),
    ),
    "xcodec2": (
        {"model_type": "xcodec2"},
        Declaration(
            sample_rate=16000,
            hop_length=320,
            codebooks=1,
            codebook_size=65536,
            left_context=50,
            right_context=5,
        ),
    ),
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Each codec's checkpoint, written once."""
    root = tmp_path_factory.mktemp("codecs")

    def write(name: str) -> Path:
        directory = root / name
        return directory if directory.exists() else getattr(codecs, name)(directory, seed=3)

    return write


@pytest.fixture(scope="module")
def loaded(written: Callable[[str], Path]) -> Callable[[str], TorchCodec]:
    """Each codec's decoder, loaded once."""
    return lru_cache(lambda name: decoder_class(name).from_pretrained(written(name)))


@pytest.fixture
def copied(written: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Path]:
    """A copy of a codec's checkpoint, to break."""
    return lambda name: shutil.copytree(written(name), tmp_path / name)


def weights_of(directory: Path) -> Path:
    [found] = [*directory.glob("*.safetensors"), *directory.glob("*.bin")]
    return found


def change_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize("name", NAMES)
def test_a_published_config_is_enough_for_the_declaration(name: str) -> None:
    config, expected = PUBLISHED[name]
    assert decoder_class(name).declare(config) == expected


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_what_a_config_leaves_out_is_as_in_transformers(name: str) -> None:
    kind = decoder_class(name)
    assert issubclass(kind, TransformersCodec)
    full = kind._published(kind._class(kind.config_class)())
    short: dict[str, Any] = {"model_type": kind.model_type}
    if name == "code2wav":
        short["code2wav_config"] = {}
    assert kind.declare(short) == kind.declare(full)


def test_declarations_import_no_library() -> None:
    program = (
        "import sys; from omnistage.decoders.registry import DECODERS, decoder_class\n"
        "for name in DECODERS: decoder_class(name)\n"
        f"decoder_class('snac').declare({dict(SNAC_24KHZ)!r})\n"
        "decoder_class('mimi').declare({'model_type': 'mimi'})\n"
        "print([n for n in ('torch', 'transformers', 'snac', 'safetensors') if n in sys.modules])"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert ran.stdout.strip() == "[]"


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"unknown decoder 'mimo'; known: code2wav, dac, encodec"):
        decoder_class("mimo")


@pytest.mark.parametrize("name", NAMES)
def test_the_class_names_the_extra_that_it_needs(name: str) -> None:
    assert decoder_class(name).extra == ("snac" if name == "snac" else "codecs")


@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_decodes_as_the_model_that_was_saved(
    name: str, written: Callable[[str], Path]
) -> None:
    kind = decoder_class(name)
    decoder = kind.from_pretrained(written(name))
    assert isinstance(decoder, Decoder)
    assert decoder.declaration == kind.declare(
        json.loads((written(name) / "config.json").read_text())
    )
    codes = random_codes(decoder, 5)
    audio = decoder.decode([codes])[0]
    assert np.std(audio) > 1e-3
    assert np.abs(audio).max() <= 1
    np.testing.assert_allclose(audio, fresh(name, written).decode([codes])[0], atol=1e-6)


def fresh(name: str, written: Callable[[str], Path]) -> TorchCodec:
    """A decoder of the same seed, that no file has been between."""
    kind = decoder_class(name)
    config = json.loads((written(name) / "config.json").read_text())
    make: Any = kind
    if not issubclass(kind, TransformersCodec):
        return make.from_config(config, seed=3)  # type: ignore[no-any-return]
    if name == "code2wav":
        config = config["code2wav_config"]
    options = {"codebooks": 8} if name == "encodec" else {}
    return make.from_config(kind._class(kind.config_class)(**config), seed=3, **options)  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("check", DECODER_CONTRACT)
def test_the_contract_of_decoders(
    name: str,
    check: Callable[[Any], None],
    loaded: Callable[[str], TorchCodec],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decoder = loaded(name)
    if name in ("neucodec", "xcodec2"):  # no context of theirs is exact, but that of a whole clip
        monkeypatch.setattr(decoder, "left_context", 60)
        monkeypatch.setattr(decoder, "right_context", 60)
    check(lambda: decoder)


@pytest.mark.parametrize("name", NAMES)
def test_what_only_encodes_is_let_go(name: str, loaded: Callable[[str], TorchCodec]) -> None:
    parts = {part for part, _ in loaded(name)._model.named_children()}
    assert not {part for part in parts if "encoder" in part or "semantic_" in part}


@pytest.mark.parametrize("name", NAMES)
def test_a_bound_on_frames_splits_a_batch_and_changes_no_audio(
    name: str,
    written: Callable[[str], Path],
    loaded: Callable[[str], TorchCodec],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decoder = decoder_class(name).from_pretrained(written(name), max_frames=16)
    calls: list[int] = []
    forward = decoder._forward

    def counted(codes: torch.Tensor) -> torch.Tensor:
        calls.append(codes.shape[0] * codes.shape[2])
        return forward(codes)

    monkeypatch.setattr(decoder, "_forward", counted)
    windows = [random_codes(decoder, length, length) for length in (5, 8, 8, 8, 40, 1, 5)]
    together = decoder.decode(windows)
    assert max(sorted(calls)[:-1]) <= 16
    assert max(calls) == 40  # a window that is too long by itself has a call of its own
    unbounded = loaded(name).decode(windows)
    for pcm, expected in zip(together, unbounded, strict=True):
        np.testing.assert_allclose(pcm, expected, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_half_the_memory_for_weights(
    name: str, written: Callable[[str], Path], loaded: Callable[[str], TorchCodec]
) -> None:
    decoder = decoder_class(name).from_pretrained(written(name), dtype="bfloat16")
    assert {weight.dtype for weight in decoder._model.parameters()} == {torch.bfloat16}
    codes = random_codes(decoder, 9)
    pcm = WindowedDecoder(decoder).decode_clip(codes)
    exact = WindowedDecoder(loaded(name)).decode_clip(codes)
    assert pcm.dtype == np.float32
    assert np.std(pcm - exact) < 0.3 * np.std(exact)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"device": "cuda:7"}, "device 'cuda:7' is not available to torch"),
        ({"device": "toaster"}, "device 'toaster' is not available to torch"),
        ({"dtype": "int8"}, "dtype must be one of float32, bfloat16, float16, got 'int8'"),
        ({"max_frames": 0}, "max_frames must be positive, got 0"),
    ],
)
def test_options_that_cannot_be_met_are_refused(
    name: str, options: dict[str, Any], sentence: str, written: Callable[[str], Path]
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        decoder_class(name).from_pretrained(written(name), **options)


@pytest.mark.parametrize("name", NAMES)
def test_a_model_that_is_not_there(name: str, tmp_path: Path) -> None:
    kind = decoder_class(name)
    with pytest.raises(ConfigError, match=f"no {kind.label} model could be loaded from"):
        kind.from_pretrained(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="nobody/none"):  # the suite is offline
        kind.from_pretrained("nobody/none")
    with pytest.raises(ConfigError, match=r"it has no config\.json"):
        kind.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"its config\.json cannot be read"):
        kind.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"its config\.json is no JSON object"):
        kind.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", NAMES)
def test_a_model_of_another_architecture(name: str, copied: Callable[[str], Path]) -> None:
    directory = copied(name)
    (directory / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ConfigError, match=f"{decoder_class(name).__name__} decodes .*'llama'"):
        decoder_class(name).from_pretrained(directory)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("left", [0, 100, -100])
def test_weights_that_are_cut_off(name: str, left: int, copied: Callable[[str], Path]) -> None:
    directory = copied(name)
    weights = weights_of(directory)
    weights.write_bytes(weights.read_bytes()[:left])
    with pytest.raises(ConfigError, match="model could be loaded from"):
        decoder_class(name).from_pretrained(directory)


@pytest.mark.parametrize("name", NAMES)
def test_weights_that_are_not_there(name: str, copied: Callable[[str], Path]) -> None:
    directory = copied(name)
    weights_of(directory).unlink()
    with pytest.raises(ConfigError, match="model could be loaded from"):
        decoder_class(name).from_pretrained(directory)


@pytest.mark.parametrize("name", NAMES)
def test_weights_that_are_not_all_there(name: str, copied: Callable[[str], Path]) -> None:
    directory = copied(name)
    drop_one_weight(weights_of(directory))
    with pytest.raises(ConfigError, match=r"(?i)missing"):
        decoder_class(name).from_pretrained(directory)


def drop_one_weight(path: Path) -> None:
    """Remove one that decoding needs."""
    from safetensors.torch import load_file, save_file

    binary = path.suffix == ".bin"
    weights = torch.load(path, weights_only=True) if binary else load_file(path)
    dropped = next(key for key in weights if "decoder" in key and "bias" in key)
    del weights[dropped]
    if binary:
        torch.save(weights, path)
    else:
        save_file(weights, path, metadata={"format": "pt"})


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_library_names_the_extra(
    name: str, written: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = decoder_class(name)
    for library in kind.packages:
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, library, None)
            with pytest.raises(ConfigError, match=rf"{library}.*omnistage\[{kind.extra}\]"):
                kind.from_pretrained(written(name))
            with pytest.raises(ConfigError, match=rf"{library}.*omnistage\[{kind.extra}\]"):
                kind.from_config()  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_a_transformers_without_the_model_says_so(
    name: str, written: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = decoder_class(name)
    monkeypatch.setattr(kind, "model_class", "NextYearsModel")
    with pytest.raises(ConfigError, match="needs a transformers that has NextYearsModel"):
        kind.from_pretrained(written(name))


@pytest.mark.parametrize("name", NAMES)
def test_weights_of_other_shapes(name: str, copied: Callable[[str], Path]) -> None:
    directory = copied(name)
    if name == "code2wav":
        config = json.loads((directory / "config.json").read_text())["code2wav_config"]
        change_config(directory, code2wav_config={**config, "codebook_size": 4096})
    else:
        key = "quantization_dim" if name in ("neucodec", "xcodec2") else "codebook_size"
        change_config(directory, **{key: 32})
    with pytest.raises(ConfigError, match="model could be loaded from"):
        decoder_class(name).from_pretrained(directory)

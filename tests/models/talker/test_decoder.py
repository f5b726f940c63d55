from __future__ import annotations

import random
import shutil
import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from omnistage.decoders.base import Decoder, Renderer
from omnistage.decoders.window import WindowedDecoder
from omnistage.errors import ConfigError, DecoderError
from omnistage.models.talker.decoder import TalkerDecoder
from omnistage.models.talker.layout import CHECKPOINT
from omnistage.models.talker.preset import TALKER
from tests.decoders.factories import stream_together
from tests.models.talker.samples import STOCKINGS, speech

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from omnistage.request import Codes


@pytest.fixture(scope="module")
def talker() -> TalkerDecoder:
    return TalkerDecoder(CHECKPOINT / "code2wav")


def endless(seed: int) -> Iterator[int]:
    rng = random.Random(seed)
    while True:
        yield rng.randrange(1 << 16)


def scrambled(frames: int, seed: int) -> Codes:
    """Frames of every code and phone, in no order that speech has."""
    rng = np.random.default_rng(seed)
    return np.stack([rng.integers(0, 1125, frames), rng.integers(0, 108, frames)], axis=1)


def test_it_is_a_decoder_and_a_renderer(talker: TalkerDecoder) -> None:
    assert isinstance(talker, Decoder)
    assert isinstance(talker, Renderer)
    assert (talker.sample_rate, talker.hop_length, talker.codebooks) == (24000, 600, 2)
    assert talker.codebook_size == 1125


class TestStreamingEqualsOneShot:
    @settings(deadline=None, max_examples=12)
    @given(
        lengths=st.lists(st.integers(0, 70), min_size=1, max_size=4),
        most=st.integers(1, 40),
        seed=st.integers(0, 10**6),
    )
    def test_for_any_frames_chunks_and_batch_mates(
        self, talker: TalkerDecoder, lengths: list[int], most: int, seed: int
    ) -> None:
        windowed = WindowedDecoder(talker)
        clips = [scrambled(length, seed + k) for k, length in enumerate(lengths)]
        audio = stream_together(windowed, clips, endless(seed), most)
        for index, (pcm, clip) in enumerate(zip(audio, clips, strict=True)):
            np.testing.assert_allclose(pcm, windowed.decode_clip(clip, seed=index), atol=1e-4)
            assert len(pcm) == len(clip) * 600

    def test_for_half_a_minute_of_speech(self, talker: TalkerDecoder) -> None:
        windowed = WindowedDecoder(talker)
        clip = np.concatenate([speech(), speech(STOCKINGS)] * 8)
        assert len(clip) > 40 * 25
        [pcm] = stream_together(windowed, [clip], endless(5), 33)
        np.testing.assert_allclose(pcm, windowed.decode_clip(clip), atol=1e-4)

    def test_because_the_declared_context_is_enough_and_needed(self, talker: TalkerDecoder) -> None:
        clip, at = speech(STOCKINGS), 60
        whole = talker.decode([clip])[0][2 * at : 2 * at + 2]

        def error(before: int, after: int) -> float:
            window = clip[at - before : at + 1 + after]
            rows = talker.decode([window])[0][2 * before : 2 * before + 2]
            return float(np.abs(rows - whole).max())

        left, right = talker.left_context, talker.right_context
        assert error(left, right) < 1e-6
        assert error(left - 10, right) > 1e-5  # the last few hardly matter
        assert error(left, right - 1) > 1e-2


def test_padding_changes_no_window_of_any_length(talker: TalkerDecoder) -> None:
    windows = [scrambled(length, length) for length in (1, 40, 2, 3, 17, 1)]
    for window, rows in zip(windows, talker.decode(windows), strict=True):
        assert rows.shape == (2 * len(window), 113)
        assert rows.dtype == np.float32
        np.testing.assert_allclose(rows, talker.decode([window])[0], rtol=1e-6, atol=1e-6)
    assert talker.decode([]) == []


def test_the_seed_makes_the_noise_and_nothing_else_does(talker: TalkerDecoder) -> None:
    windowed = WindowedDecoder(talker)
    clip = speech()
    torch.manual_seed(1)
    first = windowed.decode_clip(clip, seed=7)
    torch.manual_seed(2)
    np.testing.assert_array_equal(windowed.decode_clip(clip, seed=7), first)
    other = windowed.decode_clip(clip, seed=8)
    assert np.abs(other - first).max() > 1e-2


def test_sampled_ids_sound_like_speech(talker: TalkerDecoder) -> None:
    clip = speech()
    pcm = WindowedDecoder(talker).decode_clip(clip)
    pitch = talker.decode([clip])[0][:, -1]
    voiced = pitch > 0
    assert len(pcm) / 24000 == pytest.approx(1.175)
    assert 0.02 < np.sqrt(np.mean(pcm**2)) < 0.2
    assert 0.1 < np.abs(pcm).max() < 1.0
    assert 0.4 < voiced.mean() < 0.8
    assert 120 < np.median(pitch[voiced]) < 300
    # "Hello world." ends in silence.
    assert np.abs(pcm[-2400:]).max() < 0.02


def test_the_first_chunk_of_the_preset_is_200_ms_of_sound(talker: TalkerDecoder) -> None:
    windowed = WindowedDecoder(talker)
    stream = windowed.open()
    size = TALKER.chunks.size(0)
    stream.push(speech()[: size + talker.right_context])
    assert stream.ready(size)
    assert len(windowed.decode([(stream, size)])[0]) == 4800


def test_a_phone_that_does_not_exist_is_an_unknown_one(talker: TalkerDecoder) -> None:
    clip = speech()
    unknown, hostile = clip.copy(), clip.copy()
    unknown[:, 1], hostile[:, 1] = 108, 1124
    [first, second] = talker.decode([unknown, hostile])
    np.testing.assert_array_equal(first, second)
    assert np.abs(first - talker.decode([clip])[0]).max() > 0.1


def test_a_window_without_frames_is_an_error(talker: TalkerDecoder) -> None:
    with pytest.raises(DecoderError, match="without frames"):
        talker.decode([speech(), speech()[:0]])


def test_loading_leaves_torch_as_it_was() -> None:
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    TalkerDecoder(CHECKPOINT / "code2wav")
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.is_grad_enabled()


class TestBrokenCheckpoints:
    def test_that_are_missing(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"decoder\.safetensors"):
            TalkerDecoder(tmp_path)

    def test_that_are_cut_short(self, tmp_path: Path) -> None:
        weights = (CHECKPOINT / "code2wav" / "decoder.safetensors").read_bytes()
        (tmp_path / "decoder.safetensors").write_bytes(weights[:100_000])
        with pytest.raises(ConfigError, match="does not hold"):
            TalkerDecoder(tmp_path)

    def test_that_are_another_models(self, tmp_path: Path) -> None:
        shutil.copy(CHECKPOINT / "model.safetensors", tmp_path / "decoder.safetensors")
        with pytest.raises(ConfigError, match="does not hold"):
            TalkerDecoder(tmp_path)

    @pytest.mark.parametrize("damage", ["missing", "shape", "extra"])
    def test_with_wrong_tensors(self, tmp_path: Path, damage: str) -> None:
        weights = load_file(CHECKPOINT / "code2wav" / "decoder.safetensors")
        if damage == "missing":
            del weights["dec.up.weight"]
        elif damage == "shape":
            weights["dec.up.weight"] = weights["dec.up.weight"][:10].clone()
        else:
            weights["dec.more"] = torch.zeros(1)
        save_file(weights, tmp_path / "decoder.safetensors")
        with pytest.raises(ConfigError, match="does not hold"):
            TalkerDecoder(tmp_path)


@pytest.mark.parametrize("library", ["torch", "safetensors"])
def test_a_missing_library_names_the_extra(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "omnistage.models.talker.decoder")
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ConfigError, match=rf"{library}.*omnistage\[talker\]"):
        TALKER.decoder()

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnistage.decoders.window import WindowedDecoder
from omnistage.errors import ConfigError, DecoderError
from tests.decoders.factories import (
    Mixer,
    Oscillation,
    Oscillator,
    RowMixer,
    endless,
    random_codes,
    random_rows,
    stream_together,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from omnistage.decoders.base import Rows
    from omnistage.request import Codes, Pcm


lengths = st.lists(st.integers(0, 40), min_size=1, max_size=4)


class TestAnyChunkingEqualsTheWholeClip:
    @settings(deadline=None, max_examples=80)
    @given(
        lengths=lengths,
        left=st.integers(0, 5),
        right=st.integers(0, 5),
        most=st.integers(1, 12),
        seed=st.integers(0, 10**6),
    )
    def test_with_context_on_both_sides(
        self, lengths: list[int], left: int, right: int, most: int, seed: int
    ) -> None:
        decoder = Mixer(left=left, right=right)
        windowed = WindowedDecoder(decoder)
        clips = [random_codes(decoder, length, seed) for length in lengths]
        decoder.windows.clear()
        audio = stream_together(windowed, clips, endless(seed), most)
        assert all(length <= left + most + right for length in decoder.windows)
        for pcm, clip in zip(audio, clips, strict=True):
            np.testing.assert_allclose(pcm, windowed.decode_clip(clip), atol=1e-6)
            assert len(pcm) == len(clip) * decoder.hop_length

    @settings(deadline=None, max_examples=80)
    @given(
        lengths=lengths,
        left=st.integers(0, 5),
        right=st.integers(0, 5),
        most=st.integers(1, 12),
        seed=st.integers(0, 10**6),
    )
    def test_of_rows(self, lengths: list[int], left: int, right: int, most: int, seed: int) -> None:
        decoder = RowMixer(left=left, right=right)
        windowed = WindowedDecoder(decoder)
        clips = [random_rows(decoder, length, seed) for length in lengths]
        decoder.windows.clear()
        audio = stream_together(windowed, clips, endless(seed), most)
        assert all(length <= left + most + right for length in decoder.windows)
        assert decoder.dtypes <= {np.dtype(np.float32)}
        for pcm, clip in zip(audio, clips, strict=True):
            np.testing.assert_allclose(pcm, windowed.decode_clip(clip), atol=1e-6)
            assert len(pcm) == len(clip) * decoder.hop_length

    @settings(deadline=None, max_examples=80)
    @given(lengths=lengths, most=st.integers(1, 12), seed=st.integers(0, 10**6))
    def test_with_a_renderer(self, lengths: list[int], most: int, seed: int) -> None:
        decoder = Oscillator()
        windowed = WindowedDecoder(decoder)
        clips = [random_codes(decoder, length, seed) for length in lengths]
        audio = stream_together(windowed, clips, endless(seed), most)
        for index, (pcm, clip) in enumerate(zip(audio, clips, strict=True)):
            np.testing.assert_allclose(pcm, windowed.decode_clip(clip, seed=index), atol=1e-5)
            assert len(pcm) == len(clip) * decoder.hop_length

    @pytest.mark.parametrize("context", ["left_context", "right_context"])
    def test_unless_the_decoder_declares_less_context_than_it_uses(self, context: str) -> None:
        decoder = Mixer(left=4, right=2)
        setattr(decoder, context, getattr(decoder, context) - 1)
        windowed = WindowedDecoder(decoder)
        codes = random_codes(decoder, 30)
        [pcm] = stream_together(windowed, [codes], endless(1), 4)
        assert np.abs(pcm - windowed.decode_clip(codes)).max() > 1e-3


class TestReadiness:
    def test_a_chunk_waits_for_its_lookahead(self) -> None:
        stream = WindowedDecoder(Mixer(right=2)).open()
        stream.push(random_codes(Mixer(), 5))
        assert not stream.ready(4)
        assert stream.ready(3)
        stream.push(random_codes(Mixer(), 1))
        assert stream.ready(4)

    def test_more_than_is_there_decodes_what_can_be_decoded(self) -> None:
        windowed = WindowedDecoder(Mixer(right=2))
        stream = windowed.open()
        stream.push(random_codes(Mixer(), 5))
        [pcm] = windowed.decode([(stream, 100)])
        assert (len(pcm), stream.pending) == (3 * 4, 2)
        [pcm] = windowed.decode([(stream, 100)])
        assert len(pcm) == 0

    def test_the_end_makes_the_lookahead_frames_ready(self) -> None:
        windowed = WindowedDecoder(Mixer(right=2))
        stream = windowed.open()
        stream.push(random_codes(Mixer(), 2))
        assert not stream.ready(1)
        stream.finish()
        assert stream.ready(1)
        windowed.decode([(stream, 1)])
        assert (stream.done, stream.ready(1)) == (False, True)
        windowed.decode([(stream, 1)])
        assert (stream.done, stream.ready(1)) == (True, False)

    def test_an_empty_clip_is_done_at_once(self) -> None:
        for decoder in (Mixer(), Oscillator()):
            windowed = WindowedDecoder(decoder)
            stream = windowed.open()
            stream.finish()
            assert stream.done
            assert not stream.ready(1)
            assert len(windowed.decode([(stream, 4)])[0]) == 0
            assert len(windowed.decode_clip(random_codes(decoder, 0))) == 0

    def test_a_renderer_is_flushed_when_the_end_comes_after_the_last_chunk(self) -> None:
        decoder = Oscillator()
        decoder.right_context = 0
        windowed = WindowedDecoder(decoder)
        stream = windowed.open()
        stream.push(random_codes(decoder, 3))
        [first] = windowed.decode([(stream, 3)])
        stream.finish()
        assert (stream.pending, stream.done, stream.ready(1)) == (0, False, True)
        [tail] = windowed.decode([(stream, 1)])
        assert stream.done
        assert len(first) + len(tail) == 3 * 8
        assert len(tail) > 0

    def test_finishing_twice_changes_nothing(self) -> None:
        windowed = WindowedDecoder(Mixer())
        stream = windowed.open()
        stream.push(random_codes(Mixer(), 3))
        stream.finish()
        windowed.decode([(stream, 3)])
        stream.finish()
        assert stream.done


def test_seeds_separate_streams() -> None:
    windowed = WindowedDecoder(Oscillator())
    codes = random_codes(Oscillator(), 10)
    same = windowed.decode_clip(codes, seed=3)
    np.testing.assert_array_equal(same, windowed.decode_clip(codes, seed=3))
    assert np.abs(same - windowed.decode_clip(codes, seed=4)).max() > 1e-3


def test_a_stream_keeps_its_context_and_what_is_pending_only() -> None:
    windowed = WindowedDecoder(Mixer(left=3, right=2))
    stream = windowed.open()
    for _ in range(200):
        stream.push(random_codes(Mixer(), 5))
        while stream.ready(4):
            windowed.decode([(stream, 4)])
        held = stream._frames
        assert held.base is None
        assert len(held) <= 3 + 4 + 2 + 5


def test_what_is_pushed_is_copied() -> None:
    windowed = WindowedDecoder(Mixer())
    codes = random_codes(Mixer(), 10)
    expected = windowed.decode_clip(codes)
    stream = windowed.open()
    stream.push(codes)
    stream.finish()
    codes[:] = 0
    np.testing.assert_array_equal(windowed.decode([(stream, 10)])[0], expected)


def test_a_decoder_that_scribbles_on_its_windows_harms_nobody() -> None:
    class Scribbler(Mixer):
        def decode(self, windows: Sequence[Codes]) -> list[Rows]:
            result = super().decode(windows)
            for window in windows:
                window[:] = 0
            return result

    clips = [random_codes(Mixer(), 30)]
    [pcm] = stream_together(WindowedDecoder(Scribbler()), clips, endless(0), 5)
    np.testing.assert_allclose(pcm, WindowedDecoder(Mixer()).decode_clip(clips[0]), atol=1e-6)


def test_frames_may_arrive_while_another_thread_decodes() -> None:
    windowed = WindowedDecoder(Mixer())
    codes = random_codes(Mixer(), 4000)
    stream = windowed.open()
    pieces: list[Pcm] = []

    def decode() -> None:
        while not stream.done:
            if stream.ready(3):
                pieces.extend(windowed.decode([(stream, 3)]))

    thread = threading.Thread(target=decode)
    thread.start()
    for frame in codes:
        stream.push(frame[None])
    stream.finish()
    thread.join()
    np.testing.assert_allclose(np.concatenate(pieces), windowed.decode_clip(codes), atol=1e-6)


def test_overshoot_is_clipped_to_full_scale() -> None:
    class Loud(Mixer):
        def decode(self, windows: Sequence[Codes]) -> list[Rows]:
            return [np.full(len(window) * 4, 1.5, np.float32) for window in windows]

    pcm = WindowedDecoder(Loud()).decode_clip(random_codes(Mixer(), 3))
    np.testing.assert_array_equal(pcm, np.ones(12, np.float32))


class TestHostileFrames:
    @pytest.mark.parametrize(
        "codes",
        [
            np.zeros((3, 1), np.int64),
            np.zeros((3, 3), np.int64),
            np.zeros(4, np.int64),
            np.zeros((1, 2, 2), np.int64),
            np.zeros((2, 2), np.float32),
            np.full((1, 2), True),
            np.array([[0, 16]]),
            np.array([[-1, 0]]),
            np.array([[0, 2**63]], np.uint64),
            np.array([["a", "b"]]),
        ],
    )
    def test_are_refused_and_leave_the_stream_as_it_was(self, codes: Any) -> None:
        stream = WindowedDecoder(Mixer()).open()
        stream.push(random_codes(Mixer(), 2))
        with pytest.raises(DecoderError, match="Mixer"):
            stream.push(codes)
        assert stream.pending == 2

    @pytest.mark.parametrize(
        "rows",
        [
            np.zeros((3, 3), np.float32),
            np.zeros((3, 2, 3), np.float32),
            np.zeros((), np.float32),
            np.zeros((3, 3, 2), np.int64),
            np.zeros((3, 3, 2), bool),
            np.zeros((3, 3, 2), np.complex64),
        ],
    )
    def test_so_are_rows_of_another_shape_or_kind(self, rows: Any) -> None:
        stream = WindowedDecoder(RowMixer()).open()
        with pytest.raises(DecoderError, match=r"RowMixer takes float rows of shape \[n, 3, 2\]"):
            stream.push(rows)
        assert stream.pending == 0

    def test_after_the_end_are_refused(self) -> None:
        stream = WindowedDecoder(Mixer()).open()
        stream.finish()
        with pytest.raises(DecoderError, match="finished"):
            stream.push(random_codes(Mixer(), 1))


class Broken(Mixer):
    """Returns what it is told to."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self.result = result

    def decode(self, windows: Sequence[Codes]) -> list[Rows]:
        if isinstance(self.result, Exception):
            raise self.result
        made: list[Rows] = self.result(super().decode(windows))
        return made


class TestBrokenDecoders:
    @pytest.mark.parametrize(
        ("result", "words"),
        [
            (RuntimeError("out of cheese"), "out of cheese"),
            (lambda rows: [], "0 results for 1"),
            (lambda rows: [rows[0], rows[0]], "2 results for 1"),
            (lambda rows: [rows[0][:-1]], "15 samples for 4 frames"),
            (lambda rows: [np.append(rows[0], rows[0][:1])], "17 samples for 4 frames"),
            (lambda rows: [rows[0].astype(np.float64)], "float64"),
            (lambda rows: [rows[0].tolist()], "list"),
            (lambda rows: [rows[0][None]], "shape"),
            (lambda rows: [np.full_like(rows[0], np.nan)], "not finite"),
            (lambda rows: [np.full_like(rows[0], np.inf)], "not finite"),
        ],
    )
    def test_end_in_an_error_that_names_them(self, result: Any, words: str) -> None:
        with pytest.raises(DecoderError, match=f"decoder Broken.*{words}"):
            WindowedDecoder(Broken(result)).decode_clip(random_codes(Mixer(), 4))

    def test_a_failed_decode_moves_no_stream(self) -> None:
        decoder = Broken(RuntimeError("once"))
        windowed = WindowedDecoder(decoder)
        codes = random_codes(decoder, 10)
        streams = [windowed.open(), windowed.open()]
        for stream in streams:
            stream.push(codes)
            stream.finish()
        with pytest.raises(DecoderError, match="once"):
            windowed.decode([(stream, 10) for stream in streams])
        decoder.result = list
        for stream in streams:
            [pcm] = windowed.decode([(stream, 10)])
            np.testing.assert_allclose(pcm, windowed.decode_clip(codes), atol=1e-6)

    def test_a_renderer_that_fails_on_one_stream_costs_the_others_nothing(self) -> None:
        class Picky(Oscillator):
            def render(self, state: Oscillation, rows: Rows, *, final: bool) -> Pcm:
                if state.rows is poison:
                    raise ValueError("poisoned")
                return super().render(state, rows, final=final)

        poison: Any = np.zeros((0, 2), np.float32)
        windowed = WindowedDecoder(Picky())
        codes = random_codes(Picky(), 10)
        good, bad, last = (windowed.open(seed) for seed in range(3))
        bad._state.rows = poison
        for stream in (good, bad, last):
            stream.push(codes)
            stream.finish()
        with pytest.raises(DecoderError, match="poisoned"):
            windowed.decode([(stream, 10) for stream in (good, bad, last)])
        for seed, stream in ((0, good), (2, last)):
            assert not stream.done
            [pcm] = windowed.decode([(stream, 10)])
            np.testing.assert_allclose(pcm, windowed.decode_clip(codes, seed=seed), atol=1e-5)
            assert stream.done
        with pytest.raises(DecoderError, match="poisoned"):
            windowed.decode([(bad, 10)])

    @pytest.mark.parametrize("samples", [7, 9])
    def test_a_renderer_must_make_as_many_samples_as_it_promised(self, samples: int) -> None:
        class Miscounting(Oscillator):
            def render(self, state: Oscillation, rows: Rows, *, final: bool) -> Pcm:
                return np.zeros(samples, np.float32)

        with pytest.raises(DecoderError, match=f"{samples} samples from 1 frames"):
            WindowedDecoder(Miscounting()).decode_clip(random_codes(Oscillator(), 1))

    def test_one_stream_cannot_stand_twice_in_a_batch(self) -> None:
        windowed = WindowedDecoder(Mixer())
        stream = windowed.open()
        with pytest.raises(DecoderError, match="twice"):
            windowed.decode([(stream, 1), (stream, 1)])


class TestDeclarations:
    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("sample_rate", 0),
            ("hop_length", -1),
            ("codebooks", 1.0),
            ("codebook_size", None),
            ("left_context", -1),
            ("right_context", True),
            ("deterministic", "yes"),
        ],
    )
    def test_that_cannot_be_are_refused_by_name(self, name: str, value: Any) -> None:
        decoder = Mixer()
        setattr(decoder, name, value)
        with pytest.raises(ConfigError, match=name):
            WindowedDecoder(decoder)

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("rows_key", 5),
            ("row_shape", [2]),
            ("row_shape", (0,)),
            ("row_shape", None),
            ("hop_length", 0),
        ],
    )
    def test_of_rows_are_refused_likewise(self, name: str, value: Any) -> None:
        decoder = RowMixer()
        setattr(decoder, name, value)
        with pytest.raises(ConfigError, match=name):
            WindowedDecoder(decoder)

    def test_a_renderer_without_rows_is_refused(self) -> None:
        decoder = Oscillator()
        decoder.rows_per_frame = 0
        with pytest.raises(ConfigError, match="rows_per_frame"):
            WindowedDecoder(decoder)

    def test_something_that_cannot_decode_is_refused(self) -> None:
        decoder: Any = Mixer()
        decoder.decode = None
        with pytest.raises(ConfigError, match="decode"):
            WindowedDecoder(decoder)

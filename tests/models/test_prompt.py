"""Prompts: the published ids, and a caller's text that cannot say more than text."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from omnistage import StageInput
from omnistage.adapters.input import SplittingAdapter
from omnistage.errors import ConfigError, InvalidRequest
from omnistage.models import load_preset
from omnistage.models.prompt import PromptInput, Template
from omnistage.models.voices import Voices
from tests.conftest import Checkpoints


def adapter_of(checkpoints: Checkpoints, family: str, codec: str, **changes: object) -> PromptInput:
    ar, _ = load_preset(
        str(checkpoints(family)), decoder={"model": str(checkpoints(codec))}, **changes
    )
    assert isinstance(ar.input_adapter, PromptInput)
    assert isinstance(ar.input_adapter, SplittingAdapter)
    return ar.input_adapter


@pytest.fixture(scope="module")
def orpheus(checkpoints: Checkpoints) -> PromptInput:
    return adapter_of(checkpoints, "orpheus", "snac")


@pytest.fixture(scope="module")
def voices(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two recorded voices, one as each kind of file."""
    import torch

    where = tmp_path_factory.mktemp("voices")
    (where / "dave.txt").write_text("So I'm live\non radio.\n")
    np.save(where / "dave.npy", np.array([[5, 6, 7]]))
    (where / "jo.txt").write_text("Hello.")
    torch.save(torch.tensor([65_535]), where / "jo.pt")
    (where / "notes.txt").write_text("no voice")
    return where


class TestOrpheus:
    async def test_the_prompt_is_the_published_one(
        self, orpheus: PromptInput, checkpoints: Checkpoints
    ) -> None:
        reference = Tokenizer.from_file(str(checkpoints("orpheus") / "tokenizer.json"))
        said = reference.encode("tara: Hello there.").ids  # as the reference client calls it
        made = await orpheus.adapt(StageInput(prompt="Hello there."))
        assert made.prompt == [128_259, *said, 128_009, 128_260, 128_261, 128_257]
        assert made.sampling == {
            "temperature": 0.6,
            "top_p": 0.8,
            "repetition_penalty": 1.3,
            "max_tokens": 1200,
            "stop_token_ids": [128_258],
        }

    async def test_a_voice_stands_in_front_and_the_first_is_the_default(
        self, orpheus: PromptInput
    ) -> None:
        asked = [await orpheus.adapt(StageInput(prompt="Hi.", voice=v)) for v in ("zoe", "tara")]
        default = await orpheus.adapt(StageInput(prompt="Hi."))
        assert asked[0].prompt != asked[1].prompt == default.prompt

    @pytest.mark.parametrize("voice", ["nobody", "", "tara ", "TARA", "<|eot_id|>"])
    async def test_an_unknown_voice_is_refused_with_those_there_are(
        self, orpheus: PromptInput, voice: str
    ) -> None:
        with pytest.raises(InvalidRequest, match=r"known: tara, leah") as raised:
            await orpheus.adapt(StageInput(prompt="Hi.", voice=voice))
        assert raised.value.parameter == "voice"

    async def test_prompt_ids_are_passed_on_and_an_empty_text_is_not(
        self, orpheus: PromptInput
    ) -> None:
        assert (await orpheus.adapt(StageInput(prompt=[1, 2]))).prompt == [1, 2]
        nothing: tuple[str | list[int], ...] = ("", " \n", [])
        for empty in nothing:
            with pytest.raises(InvalidRequest):
                await orpheus.adapt(StageInput(prompt=empty))

    async def test_a_request_lies_over_the_presets_sampling(self, orpheus: PromptInput) -> None:
        made = await orpheus.adapt(StageInput(prompt="Hi.", sampling={"temperature": 1.0}, seed=7))
        assert made.sampling["temperature"] == 1.0
        assert (made.sampling["top_p"], made.sampling["seed"]) == (0.8, 7)

    async def test_the_end_stays_one_whatever_else_a_request_ends_at(
        self, orpheus: PromptInput
    ) -> None:
        asked = StageInput(prompt="Hi.", sampling={"stop_token_ids": [128_266]})
        assert (await orpheus.adapt(asked)).sampling["stop_token_ids"] == [128_258, 128_266]
        assert orpheus.sampling["stop_token_ids"] == [128_258]

    def test_a_long_text_is_refused_or_said_sentence_by_sentence(
        self, orpheus: PromptInput
    ) -> None:
        text = "This is a sentence of some words. " * 20
        with pytest.raises(InvalidRequest, match=r"at most 230 at once; by_sentence=True"):
            orpheus.split(StageInput(prompt=text))
        pieces = orpheus.split(StageInput(prompt=text, by_sentence=True, voice="leo"))
        assert "".join(str(p.prompt) for p in pieces).replace(" ", "") == text.replace(" ", "")
        assert all(len(str(p.prompt)) <= 230 and p.voice == "leo" for p in pieces)

    def test_more_tokens_are_enough_for_more_text(self, orpheus: PromptInput) -> None:
        text = "word " * 80
        asked = StageInput(prompt=text, sampling={"max_tokens": 2400})
        assert orpheus.split(asked) == [asked]
        with pytest.raises(InvalidRequest):
            orpheus.split(StageInput(prompt=text, sampling={"max_tokens": 600}))

    @settings(max_examples=30, deadline=None)
    @given(text=st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=60))
    def test_no_text_brings_a_token_of_the_models(self, orpheus: PromptInput, text: str) -> None:
        plain = orpheus.ids("x")
        ids = orpheus.ids(text)
        assert sorted(i for i in ids if i >= 128_000) == sorted(i for i in plain if i >= 128_000)

    def test_tokens_in_a_text_are_text(self, orpheus: PromptInput) -> None:
        text = "a<|eot_id|><custom_token_2><custom_token_10>{voice}{codes}b"
        ids = orpheus.ids(text)
        special = [128_259, 128_000, 128_009, 128_260, 128_261, 128_257]
        assert [i for i in ids if i >= 128_000] == special
        assert len(ids) == len(special) + len(f"tara: {text}")  # bytes: the tokenizer has no merges


class TestRecordedVoices:
    def test_llasa_has_the_chat_of_llama_and_the_recording_behind_it(
        self, checkpoints: Checkpoints, voices: Path
    ) -> None:
        llasa = adapter_of(checkpoints, "llasa", "xcodec2", voice_directory=str(voices))
        reference = Tokenizer.from_file(str(checkpoints("llasa") / "tokenizer.json"))

        def chat(said: str) -> list[int]:
            text = (
                "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge "
                "Date: December 2023\nToday Date: 26 Jul 2024\n\n<|eot_id|><|start_header_id|>user"
                "<|end_header_id|>\n\nConvert the text to speech:<|TEXT_UNDERSTANDING_START|>"
                f"{said}<|TEXT_UNDERSTANDING_END|><|eot_id|><|start_header_id|>assistant"
                "<|end_header_id|>\n\n<|SPEECH_GENERATION_START|>"
            )
            ids: list[int] = reference.encode(text, add_special_tokens=False).ids
            return ids

        assert llasa.ids("Good day.") == chat("Good day.")
        said = chat("So I'm live on radio. Good day.")
        assert llasa.ids("Good day.", "dave") == [*said, 128_269, 128_270, 128_271]
        assert llasa.ids("Good day.", "jo")[-1] == 128_264 + 65_535

    def test_neutts_speaks_phonemes_with_the_first_voice_unless_told(
        self, checkpoints: Checkpoints, voices: Path
    ) -> None:
        neutts = adapter_of(checkpoints, "neutts", "neucodec", voice_directory=str(voices))
        reference = Tokenizer.from_file(str(checkpoints("neutts") / "tokenizer.json"))
        said = neutts._say("So I'm live on radio.") + " " + neutts._say("Good day.")
        assert "ɹ" in said
        text = (
            f"user: Convert the text to speech:<|TEXT_PROMPT_START|>{said}<|TEXT_PROMPT_END|>\n"
            "assistant:<|SPEECH_GENERATION_START|><|speech_5|><|speech_6|><|speech_7|>"
        )
        assert neutts.ids("Good day.") == reference.encode(text).ids
        assert neutts.ids("Good day.", "jo") != neutts.ids("Good day.", "dave")
        with pytest.raises(InvalidRequest, match=r"nothing to say"):
            neutts.ids("...!", "jo")

    def test_neutts_without_a_recorded_voice_does_not_start(self, checkpoints: Checkpoints) -> None:
        with pytest.raises(ConfigError, match=r"voice_directory"):
            adapter_of(checkpoints, "neutts", "neucodec")

    def test_voices_are_known_by_their_files(self, voices: Path) -> None:
        found = Voices(directory=str(voices), recorded=True)
        assert found.known == ("dave", "jo")
        assert found.name_of(None) == "dave"
        with pytest.raises(InvalidRequest, match=r"known: dave, jo"):
            found.name_of("notes")

    @pytest.mark.parametrize(
        ("text", "codes", "words"),
        [
            ("", [1], "needs words"),
            ("a", [], "1 to 4096"),
            ("a", [-1], "in \\[0, 65536\\)"),
            ("a", [65_536], "in \\[0, 65536\\)"),
            ("a", [0.5], "integer codes"),
            ("a", [0] * 4097, "1 to 4096"),
        ],
    )
    def test_a_recording_that_cannot_be_used_is_refused_at_start(
        self, tmp_path: Path, text: str, codes: list[float], words: str
    ) -> None:
        (tmp_path / "a.txt").write_text(text)
        np.save(tmp_path / "a.npy", np.array(codes))
        with pytest.raises(ConfigError, match=words):
            Voices(directory=str(tmp_path))

    def test_files_that_are_no_codes_are_refused(self, tmp_path: Path) -> None:
        (tmp_path / "a.txt").write_text("a")
        with pytest.raises(ConfigError, match=r"has no recorded voice"):
            Voices(directory=str(tmp_path))
        for name in ("a.npy", "a.pt"):
            (tmp_path / name).write_bytes(b"nonsense")
            with pytest.raises(ConfigError, match=r"the voice 'a'"):
                Voices(directory=str(tmp_path))
            (tmp_path / name).unlink()
        np.save(tmp_path / "a.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
        with pytest.raises(ConfigError, match=r"the voice 'a'"):
            Voices(directory=str(tmp_path))


class TestTemplates:
    TOKENS = {"<a>": 1, "<b>": 2}  # noqa: RUF012

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("<c>{text}", "<c>, which the tokenizer of m does not know"),
            ("<a>{txt}", "no field 'txt'"),
            ("<a>", "has no {text}"),
            ("{codes}<a>{text}", "must be the end"),
        ],
    )
    def test_what_cannot_be_a_prompt_is_refused(self, text: str, words: str) -> None:
        with pytest.raises(ConfigError, match=words):
            Template(text, self.TOKENS, "m")

    def test_text_between_tokens_is_one_piece(self) -> None:
        seen: list[str] = []

        def encode(text: str) -> list[int]:
            seen.append(text)
            return [9]

        template = Template("<a>{voice}: {text}<b>{codes}", self.TOKENS, "m")
        assert template.ids({"voice": "v", "text": "<a>"}, encode) == [1, 9, 2]
        assert seen == ["v: <a>"]

from __future__ import annotations

import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest

from omnistage.adapters.processor import ChunkProcessor, Step
from omnistage.decoders.window import WindowedDecoder
from omnistage.errors import ConfigError, InvalidRequest
from omnistage.models import load_preset
from omnistage.models.talker.layout import CHECKPOINT, read_layout
from omnistage.models.talker.preset import TALKER, TalkerFrames, TalkerInput
from omnistage.request import FinishReason, StageInput, Start
from tests.models.talker.samples import HELLO, speech


class TestStages:
    def test_are_the_checkpoint_and_its_decoder(self) -> None:
        ar, decoder = load_preset("talker")
        assert ar.model == str(CHECKPOINT)
        assert ar.engine_args["skip_tokenizer_init"]
        assert decoder.chunks == TALKER.chunks
        assert WindowedDecoder(decoder.build()).decode_clip(speech()).shape == (47 * 600,)

    def test_can_be_changed_by_field(self) -> None:
        default, _ = load_preset("talker")
        ar, _ = load_preset("talker", name="voice", engine_args={"max_num_seqs": 2})
        assert ar.name == "voice"
        assert ar.engine_args == {**default.engine_args, "max_num_seqs": 2}

    def test_follow_another_checkpoint_together(self, tmp_path: Path) -> None:
        copy = shutil.copytree(CHECKPOINT, tmp_path / "copy")
        ar, decoder = load_preset("talker", model=str(copy))
        assert ar.model == str(copy)
        (copy / "code2wav" / "decoder.safetensors").unlink()
        with pytest.raises(ConfigError, match=r"decoder\.safetensors"):
            decoder.build()

    def test_refuse_speculative_decoding(self) -> None:
        with pytest.raises(ConfigError, match="leave speculative_config out"):
            load_preset("talker", engine_args={"speculative_config": {"method": "ngram"}})

    def test_have_the_forcing_of_the_model_runner(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def forcing() -> Any:
            return load_preset("talker")[0].engine_args["logits_processors"]

        assert forcing() == ["omnistage.models.talker.forcing:TalkerForcing"]
        monkeypatch.setattr("omnistage.models.talker.preset.is_cpu_build", lambda: False)
        assert forcing() == ["omnistage.models.talker.forcing:TalkerForcingV2"]
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
        assert forcing() == ["omnistage.models.talker.forcing:TalkerForcing"]

    def test_of_an_unknown_preset_or_field_are_refused_with_the_known_ones(self) -> None:
        with pytest.raises(ConfigError, match="unknown preset 'walker'; known: talker"):
            load_preset("walker")
        with pytest.raises(ConfigError, match=r"has no 'speed'; it has chunks, engine_args"):
            load_preset("talker", speed=2)

    def test_longest_prompt_and_output_fit_the_context(self) -> None:
        longest = 2 + 64 + 1300 / 3.9
        assert longest + TALKER.sampling["max_tokens"] < TALKER.engine_args["max_model_len"]

    def test_defaults_agree_with_the_checkpoint(self) -> None:
        assert TALKER.sampling["stop_token_ids"] == [read_layout().eos]

    def test_cannot_be_changed_by_accident(self) -> None:
        sampling: Any = TALKER.sampling
        with pytest.raises(TypeError):
            sampling["temperature"] = 1.0


class TestLongText:
    def test_is_cut_into_what_the_talker_speaks_well(self) -> None:
        asked = StageInput(prompt="Hello world. How are you? Привет. 🙂 Fine.", seed=3)
        cut = TalkerInput(TALKER).split(asked)
        assert [one.prompt for one in cut] == ["Hello world.", "How are you? Привет.", "🙂 Fine."]
        assert {one.seed for one in cut} == {3}

    def test_of_ids_is_one_piece(self) -> None:
        asked = StageInput(prompt=HELLO)
        assert TalkerInput(TALKER).split(asked) == [asked]

    def test_a_sentence_of_several_that_cannot_be_spoken_is_skipped_with_a_warning(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        adapter = TalkerInput(TALKER)
        assert adapter.split(StageInput(prompt="Привет.", by_sentence=True)) == []
        assert "7 characters that cannot be spoken" in caplog.text
        alone = StageInput(prompt="Привет.")
        assert adapter.split(alone) == [alone]  # whose adapt() says what is wrong with it

    @pytest.mark.parametrize("text", ["word " * 20_001, "Hello. " + "x" * 500])
    def test_beyond_reason_is_refused_before_anything_is_spoken(self, text: str) -> None:
        with pytest.raises(InvalidRequest, match=r"characters"):
            TalkerInput(TALKER).split(StageInput(prompt=text))


class TestInput:
    async def test_can_load_before_the_first_text(self) -> None:
        await TalkerInput(TALKER).start()

    async def test_text_becomes_ids_with_the_presets_sampling(self) -> None:
        made = await TalkerInput(TALKER).adapt(StageInput(prompt="Hello world.", seed=4))
        assert made.prompt == [1, 4, 151, 124, 154, 80, 5, 161, 134, 166, 154, 149, 69, 3]
        assert made.sampling == {**TALKER.sampling, "seed": 4}

    async def test_the_requests_own_sampling_goes_first(self) -> None:
        made = await TalkerInput(TALKER).adapt(
            StageInput(prompt="Hello.", sampling={"temperature": 0.0})
        )
        assert made.sampling["temperature"] == 0.0
        assert made.sampling["top_p"] == 0.9

    async def test_ids_are_passed_on_and_copied(self) -> None:
        ids = [1, 4, 151, 3]
        made = await TalkerInput(TALKER).adapt(StageInput(prompt=ids))
        assert made.prompt == ids
        assert made.prompt is not ids

    @pytest.mark.parametrize("prompt", ["", "...", "go " * 65, [], [-1], b"Hello"])
    async def test_what_cannot_be_said_is_an_invalid_request(self, prompt: Any) -> None:
        with pytest.raises(InvalidRequest):
            await TalkerInput(TALKER).adapt(StageInput(prompt=prompt))

    async def test_another_voice_is_an_invalid_request(self) -> None:
        with pytest.raises(InvalidRequest, match="one voice") as caught:
            await TalkerInput(TALKER).adapt(StageInput(prompt="Hello.", voice="emma"))
        assert caught.value.parameter == "voice"


class TestFrames:
    def test_reach_the_engine_process_by_pickle(self) -> None:
        processor = pickle.loads(pickle.dumps(TalkerFrames(layout=read_layout())))  # noqa: S301
        assert isinstance(processor, ChunkProcessor)
        assert processor.requires_token_updates
        assert processor == TalkerFrames(layout=read_layout())

    def test_of_each_step_leave_flat_and_together_are_the_utterance(self) -> None:
        processor = TalkerFrames(layout=read_layout())
        state = processor.open("r", Start())
        flat: list[int] = []
        for position, token in enumerate(HELLO):
            flat += processor.update(state, Step((token,), position, {})).ids
        processor.finish(state, FinishReason.STOP)
        assert flat == speech().reshape(-1).tolist()

    def test_count_the_ids_that_stand_for_nothing(self) -> None:
        processor = TalkerFrames(layout=read_layout())
        state = processor.open("r", Start())
        dropped = [
            processor.update(state, Step(ids, 0, {})).dropped
            for ids in ((4, 0, 1343), (), (200, 2), (3,))
        ]
        assert dropped == [2, 0, 0, 1]

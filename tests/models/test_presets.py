"""Presets: found by name, directory or hub id, changed piece by piece, and checked at start."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from omnistage import ChunkPolicy, CodecFrames, Pipeline
from omnistage.config import ARStageConfig, DecoderStageConfig
from omnistage.errors import ConfigError
from omnistage.models import catalog, describe_preset, load_preset
from omnistage.models.orpheus import ORPHEUS
from omnistage.models.speech_lm import SpeechLM
from tests.conftest import Checkpoints

FAMILIES = {"orpheus": "snac", "llasa": "xcodec2"}


@pytest.fixture
def orpheus(checkpoints: Checkpoints, tmp_path: Path) -> Path:
    """One that may be broken."""
    return shutil.copytree(checkpoints("orpheus"), tmp_path / "orpheus")


@pytest.fixture
def load(checkpoints: Checkpoints) -> Callable[..., tuple[ARStageConfig, DecoderStageConfig]]:
    """Loads Orpheus with the small SNAC."""

    def load(asked: object, /, **changes: Any) -> tuple[ARStageConfig, DecoderStageConfig]:
        decoder = {"model": str(checkpoints("snac")), **changes.pop("decoder", {})}
        return load_preset(str(asked), decoder=decoder, **changes)

    return load


Load = Callable[..., tuple[ARStageConfig, DecoderStageConfig]]


class TestFinding:
    def test_by_name(self) -> None:
        assert catalog.names()[:5] == ["talker", "orpheus", "llasa", "neutts", "flat"]
        assert catalog.find("orpheus") is ORPHEUS
        assert Pipeline.from_preset("talker")

    def test_an_unknown_name_lists_the_known_ones(self) -> None:
        with pytest.raises(ConfigError, match=r"known: talker, orpheus.*Did you mean 'orpheus'"):
            catalog.find("orfeus")

    @pytest.mark.parametrize("family", FAMILIES)
    def test_a_directory_is_recognized_by_its_tokens(
        self, checkpoints: Checkpoints, family: str
    ) -> None:
        found = catalog.find(str(checkpoints(family)))
        assert (found.name, found.model) == (family, str(checkpoints(family)))

    def test_the_talkers_directory_is_recognized_by_its_configuration(self) -> None:
        where = catalog.get("talker").model
        assert catalog.find(where).name == "talker"
        assert load_preset(where)[0].processor == load_preset("talker")[0].processor

    def test_a_published_hub_id_needs_no_look(self) -> None:
        assert catalog.find("HKUSTAudio/Llasa-1B").name == "llasa"

    def test_another_model_is_of_no_known_family(self, orpheus: Path) -> None:
        tokenizer = json.loads((orpheus / "tokenizer.json").read_text())
        tokenizer["added_tokens"] = tokenizer["added_tokens"][:300]
        (orpheus / "tokenizer.json").write_text(json.dumps(tokenizer))
        with pytest.raises(ConfigError, match=r"of no family that omnistage knows.*--set model="):
            catalog.find(str(orpheus))

    def test_a_directory_without_a_tokenizer_says_that(self, orpheus: Path) -> None:
        (orpheus / "tokenizer.json").unlink()
        with pytest.raises(ConfigError, match=r"has no tokenizer.json"):
            catalog.find(str(orpheus))

    def test_a_directory_may_say_itself_what_it_is(
        self, orpheus: Path, checkpoints: Checkpoints
    ) -> None:
        shutil.copytree(checkpoints("snac"), orpheus / "snac")
        settings = {
            "preset": "orpheus",
            "voices": ["ana", "bo"],
            "decoder": {"model": "snac"},
            "sampling": {"temperature": 0.4},
        }
        (orpheus / "omnistage.json").write_text(json.dumps(settings))
        found = catalog.find(str(orpheus))
        assert getattr(found, "voices", None) == ("ana", "bo")
        assert found.sampling == {**ORPHEUS.sampling, "temperature": 0.4}
        described = describe_preset(str(orpheus))
        assert described["decoder"]["model"] == str(orpheus / "snac")

    @pytest.mark.parametrize(
        ("settings", "words"),
        [
            ({}, 'needs a "preset"'),
            ({"preset": "nobody"}, "unknown preset 'nobody'"),
            ({"preset": "orpheus", "loud": 1}, "has no 'loud'"),
        ],
    )
    def test_settings_that_are_none_are_refused(
        self, orpheus: Path, settings: dict[str, Any], words: str
    ) -> None:
        (orpheus / "omnistage.json").write_text(json.dumps(settings))
        with pytest.raises(ConfigError, match=words):
            catalog.find(str(orpheus))


class TestOtherPackages:
    @pytest.fixture
    def entry(self, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
        """Adds an entry point."""

        def add(name: str, value: str) -> None:
            point = metadata.EntryPoint(name, value, catalog.GROUP)
            monkeypatch.setattr(metadata, "entry_points", lambda group: (point,))

        return add

    def test_an_entry_point_adds_a_preset(self, entry: Callable[[str, str], None]) -> None:
        entry("mine", f"{__name__}:MINE")
        assert catalog.names()[-1] == "mine"
        assert catalog.find("mine") is MINE
        entry("made", f"{__name__}:make_mine")
        assert catalog.find("made") is MINE

    def test_it_cannot_take_a_name_of_ours(self, entry: Callable[[str, str], None]) -> None:
        entry("orpheus", f"{__name__}:MINE")
        assert catalog.find("orpheus") is ORPHEUS

    @pytest.mark.parametrize("what", ["nothing", "fails", "no_preset"])
    def test_one_that_cannot_be_loaded_is_named_and_harms_no_other(
        self,
        entry: Callable[[str, str], None],
        what: str,
        checkpoints: Checkpoints,
    ) -> None:
        entry("bad", f"{__name__}:{what}")
        with pytest.raises(ConfigError, match=r"preset 'bad' of .* (cannot be|is no)"):
            catalog.find("bad")
        assert catalog.find(str(checkpoints("orpheus"))).name == "orpheus"


MINE = dataclasses.replace(ORPHEUS, name="mine", end="<custom_token_0>")


def make_mine() -> object:
    return MINE


def fails() -> object:
    raise RuntimeError("no luck")


def no_preset() -> object:
    return 3


class TestChanging:
    def test_pieces_are_laid_over_and_stage_fields_replaced(
        self, load: Load, checkpoints: Checkpoints
    ) -> None:
        ar, decoder = load(
            checkpoints("orpheus"),
            sampling={"temperature": 0.1},
            engine_args={"enforce_eager": True},
            chunks={"first": 1},
            voices=["ana"],
            end=128_001,
            start_method="fork",
            name="speech",
        )
        assert (ar.start_method, ar.name) == ("fork", "speech")
        assert ar.engine_args["enforce_eager"]
        assert ar.engine_args["max_model_len"] == 4096
        assert decoder.chunks == ChunkPolicy(first=1, growth=1.5, steady=12)
        sampling = getattr(ar.input_adapter, "sampling", {})
        assert sampling["stop_token_ids"] == [128_001]
        assert (sampling["temperature"], sampling["top_p"]) == (0.1, 0.8)

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"loud": 1}, "has no 'loud'; it has .*voices.*AR stage .*start_method"),
            ({"sampling": 3}, "orpheus.sampling is a mapping"),
            ({"decoder": {"speed": 1}}, "orpheus.decoder has no 'speed'; it has kind, model"),
            ({"codes": {"codebooks": "7"}}, "orpheus.codes.codebooks is a int"),
            ({"chunks": {"first": 0}}, "chunk sizes must satisfy"),
            ({"max_text": "long"}, "orpheus.max_text is a int"),
            *(({name: None}, rf"orpheus.{name} is a") for name in ("codes", "prompt")),
            ({"max_text": 0}, "orpheus.max_text is a int"),
            ({"max_text": True}, "orpheus.max_text is a int"),
            ({"prompt": 5}, "orpheus.prompt is a str"),
            ({"decoder": {"model": 5}}, "orpheus.decoder.model is a str"),
            ({"decoder": {"max_frames": 0}}, "orpheus.decoder.max_frames is a"),
            ({"voices": [1]}, "orpheus.voices is a list of str"),
            ({"voices": "ana"}, "orpheus.voices is a tuple"),
            ({"decoder": {"kind": "vocoder"}}, "unknown decoder 'vocoder'; known: code2wav"),
        ],
    )
    def test_what_cannot_be_is_refused(
        self, load: Load, checkpoints: Checkpoints, changes: dict[str, Any], words: str
    ) -> None:
        with pytest.raises(ConfigError, match=words):
            load(checkpoints("orpheus"), **changes)

    def test_the_generic_preset_says_what_it_must_be_told(self) -> None:
        with pytest.raises(ConfigError, match=r"does not say model, prompt, end, codes.first"):
            load_preset("flat")

    def test_the_generic_preset_runs_what_it_is_told(self, checkpoints: Checkpoints) -> None:
        where = checkpoints("neutts")
        ar, _ = load_preset(
            "flat",
            model=where,
            prompt="<|TEXT_PROMPT_START|>{text}<|SPEECH_GENERATION_START|>",
            end="<|SPEECH_GENERATION_END|>",
            codes={"first": "<|speech_0|>", "last": "<|speech_65535|>"},
            decoder={"kind": "neucodec", "model": str(checkpoints("neucodec"))},
        )
        assert ar.processor == CodecFrames(first_id=151_652, codebook_size=65_536)


class TestChecks:
    """What is wrong with a checkpoint is said before an engine starts."""

    def test_a_sound_one_has_its_stages(self, load: Load, checkpoints: Checkpoints) -> None:
        ar, decoder = load(checkpoints("orpheus"))
        assert ar.processor == CodecFrames(
            first_id=128_266, codebook_size=4096, codebooks=7, stride=4096
        )
        assert decoder.build().codebooks == 7  # type: ignore[union-attr]

    def test_the_head_must_have_every_code(self, load: Load, orpheus: Path) -> None:
        _edit(orpheus, vocab_size=156_900)
        with pytest.raises(ConfigError, match=r"codes .* ids 128266 to 156937, .* has 156900"):
            load(orpheus)

    def test_the_head_must_have_the_end(self, load: Load, orpheus: Path) -> None:
        with pytest.raises(ConfigError, match=r"has 156940 ids: no request would ever end"):
            load(orpheus, end=156_940)
        with pytest.raises(ConfigError, match=r"is one of the codes"):
            load(orpheus, end=128_266)

    def test_range_and_codebooks_must_agree(self, load: Load, orpheus: Path) -> None:
        with pytest.raises(ConfigError, match=r"has 28672 ids, 6 codebooks of 4096 need 24576"):
            load("orpheus", model=orpheus, codes={"codebooks": 6})

    def test_range_and_decoder_must_agree(
        self, load: Load, orpheus: Path, checkpoints: Checkpoints
    ) -> None:
        snac = checkpoints("snac")
        config = json.loads((snac / "config.json").read_text())
        other = orpheus / "other"
        for change, words in (
            ({"vq_strides": [2, 1]}, "codebooks 3, preset 'orpheus' needs 7"),
            ({"codebook_size": 1024}, "codebook_size 1024, preset 'orpheus' needs 4096"),
            ({"sampling_rate": 32_000}, "sample_rate 32000, preset 'orpheus' needs 24000"),
        ):
            other.mkdir(exist_ok=True)
            shutil.copy(snac / "pytorch_model.bin", other)
            (other / "config.json").write_text(json.dumps({**config, **change}))
            with pytest.raises(ConfigError, match=words):
                load(orpheus, decoder={"model": str(other)})

    def test_a_decoder_of_another_kind_or_none_is_refused(
        self, load: Load, orpheus: Path, checkpoints: Checkpoints
    ) -> None:
        with pytest.raises(ConfigError, match=r"SNAC"):
            load(orpheus, decoder={"model": str(checkpoints("neucodec"))})
        with pytest.raises(ConfigError, match=r"neither a directory nor a hub id"):
            load(orpheus, decoder={"model": "/nowhere"})

    def test_a_tokenizer_that_is_another_models_is_refused(
        self, load: Load, orpheus: Path, checkpoints: Checkpoints
    ) -> None:
        shutil.copy(checkpoints("llasa") / "tokenizer.json", orpheus)
        with pytest.raises(ConfigError, match=r"no checkpoint of preset 'orpheus'.*does not know"):
            load("orpheus", model=orpheus)

    def test_weights_are_looked_at(self, load: Load, orpheus: Path) -> None:
        shard = orpheus / "model-00001-of-00002.safetensors"
        shard.write_bytes(shard.read_bytes()[:-100])
        with pytest.raises(ConfigError, match=r"not copied to its end"):
            load(orpheus)

    def test_a_vocabulary_size_must_be_said(self, load: Load, orpheus: Path) -> None:
        _edit(orpheus, vocab_size=None)
        with pytest.raises(ConfigError, match=r"has no vocab_size"):
            load(orpheus)


def test_a_description_says_what_would_run(checkpoints: Checkpoints) -> None:
    told = describe_preset(str(checkpoints("orpheus")), decoder={"model": str(checkpoints("snac"))})
    assert told["codes"] == {
        "first_id": 128_266,
        "codebooks": 7,
        "codebook_size": 4096,
        "end_id": 128_258,
    }
    assert told["voices"][0] == "tara"
    assert told["decoder"]["hop_length"] == 2048
    assert told["max_audio_seconds"] == 14.59
    assert json.dumps(told)


def _edit(where: Path, **changes: Any) -> None:
    path = where / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize("most", [None, "many"])
def test_a_description_says_nothing_of_a_length_that_is_not_said(
    checkpoints: Checkpoints, most: object
) -> None:
    told = describe_preset(
        str(checkpoints("orpheus")),
        decoder={"model": str(checkpoints("snac"))},
        sampling={"max_tokens": most},
    )
    assert told["max_audio_seconds"] is None


class TestPages:
    """What docs/presets says of a preset is what it has."""

    PAGES = Path(__file__).parents[2] / "docs" / "presets"

    def test_every_preset_has_a_page_and_every_field_a_row(self) -> None:
        index = (self.PAGES / "index.md").read_text()
        for name in catalog._OWN:
            assert f"| `{name}` |" in index
            assert (self.PAGES / f"{name}.md").is_file()
        for field in ORPHEUS.changeable():
            assert re.search(rf"^\|[^|]*`{field}`", index, re.M), field

    @pytest.mark.parametrize("name", [name for name in catalog._OWN if name != "talker"])
    def test_limits_voices_and_licences_are_as_said(self, name: str) -> None:
        preset = catalog.get(name)
        assert isinstance(preset, SpeechLM)
        page = (self.PAGES / f"{name}.md").read_text()
        assert f"{preset.max_text} characters a request" in page or name == "flat"
        assert f"{preset.sampling['max_tokens']:,} tokens" in page
        for voice in preset.voices:
            assert f"`{voice}`" in page
        if preset.model:
            assert preset.model in page

"""A checkpoint's small files: what is missing or broken is said before anything is loaded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from omnistage.checkpoint import Checkpoint, is_hub_id
from omnistage.errors import ConfigError
from tests.conftest import Checkpoints


@pytest.fixture
def orpheus(checkpoints: Checkpoints, tmp_path: Path) -> Path:
    """One that may be broken."""
    return shutil.copytree(checkpoints("orpheus"), tmp_path / "orpheus")


def test_a_sound_one_says_its_configuration_tokens_and_size(orpheus: Path) -> None:
    checkpoint = Checkpoint(orpheus, "language")
    assert checkpoint.config()["architectures"] == ["LlamaForCausalLM"]
    tokens = checkpoint.tokens()
    assert (tokens["<|begin_of_text|>"], tokens["<custom_token_10>"]) == (128_000, 128_266)
    files = sum(path.stat().st_size for path in orpheus.glob("*.safetensors"))
    assert checkpoint.weight_bytes() == files


@pytest.mark.parametrize("where", ["/nowhere", "nobody", "a/b/c", "", "..", "a b/c"])
def test_what_is_neither_a_directory_nor_a_hub_id_is_refused(where: str, tmp_path: Path) -> None:
    if where in {"", ".."}:
        where = str(tmp_path / "no" / where)
    with pytest.raises(ConfigError, match=r"is neither a directory nor a hub id"):
        Checkpoint(where, "language")


def test_hub_ids_have_an_owner_and_a_name() -> None:
    assert is_hub_id("canopylabs/orpheus-3b-0.1-ft")
    assert not any(map(is_hub_id, ["orpheus", "/abs/path", "./rel", "a/b/c", "a/", "../x"]))


def test_a_hub_id_that_is_not_cached_is_an_error_without_a_traceback() -> None:
    with pytest.raises(ConfigError, match=r"from nobody/nothing: it is no directory here"):
        Checkpoint("nobody/nothing", "language").config()


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("config.json", None, "it has no config.json"),
        ("config.json", b"{", "its config.json cannot be read"),
        ("config.json", b"[1]", "is no JSON object"),
        ("config.json", b'"\xff"', "its config.json cannot be read"),
        ("tokenizer.json", None, "has no tokenizer.json"),
        ("tokenizer.json", b'{"added_tokens": 3}', "its tokenizer.json cannot be read"),
    ],
)
def test_a_missing_or_broken_file_is_named(
    orpheus: Path, name: str, content: bytes | None, words: str
) -> None:
    (orpheus / name).unlink()
    if content is not None:
        (orpheus / name).write_bytes(content)
    checkpoint = Checkpoint(orpheus, "language")
    with pytest.raises(ConfigError, match=words):
        checkpoint.config() if name == "config.json" else checkpoint.tokens()


class TestWeights:
    def test_a_truncated_file_is_noticed_by_its_length(self, orpheus: Path) -> None:
        shard = orpheus / "model-00001-of-00002.safetensors"
        whole = shard.read_bytes()
        for cut in (0, 4, 100, len(whole) - 1):
            shard.write_bytes(whole[:cut])
            with pytest.raises(ConfigError, match=r"not copied to its end|no safetensors file"):
                Checkpoint(orpheus, "language").weight_bytes()

    def test_a_file_that_is_none_is_noticed(self, orpheus: Path) -> None:
        # What git-lfs leaves where a file was not fetched.
        pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n"
        for content in (pointer, b"\x02\0\0\0\0\0\0\0[]", b"\x09\0\0\0\0\0\0\0" + b'{"a":{}} '):
            (orpheus / "model-00002-of-00002.safetensors").write_bytes(content)
            with pytest.raises(ConfigError, match=r"safetensors"):
                Checkpoint(orpheus, "language").weight_bytes()

    def test_a_shard_that_the_index_names_must_be_there(self, orpheus: Path) -> None:
        (orpheus / "model-00002-of-00002.safetensors").unlink()
        with pytest.raises(ConfigError, match=r"model-00002.*is missing"):
            Checkpoint(orpheus, "language").weight_bytes()

    def test_there_must_be_some(self, orpheus: Path) -> None:
        for path in orpheus.glob("*.safetensors*"):
            path.unlink()
        with pytest.raises(ConfigError, match=r"has no weights"):
            Checkpoint(orpheus, "language").weight_bytes()
        (orpheus / "pytorch_model.bin").write_bytes(b"12345")
        assert Checkpoint(orpheus, "language").weight_bytes() == 5

    def test_an_index_without_files_has_none(self, orpheus: Path) -> None:
        (orpheus / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {}}))
        with pytest.raises(ConfigError, match=r"has no weights"):
            Checkpoint(orpheus, "language").weight_bytes()

"""The embedded talker's weights under the name of one of the test models."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import omnistage

TALKER = Path(omnistage.__file__).parent / "models" / "talker" / "checkpoint"


def draft_checkpoint(directory: Path) -> str:
    """The talker as a draft of itself that is wrong now and then: its weights with some noise."""
    where = directory / "Draft"
    if not where.exists():
        where.mkdir(parents=True)
        for file in TALKER.iterdir():
            if file.name != "model.safetensors":
                (where / file.name).symlink_to(file)
        generator = torch.Generator().manual_seed(5)
        weights = {
            name: (w.float() * (1 + 0.25 * torch.randn(w.shape, generator=generator))).to(w.dtype)
            for name, w in load_file(TALKER / "model.safetensors").items()
        }
        save_file(weights, where / "model.safetensors")
    return str(where)


def checkpoint(directory: Path, name: str, *, bytewise: bool = False) -> str:
    """A checkpoint directory whose model is ``tests.omni_models.models.<name>``.

    Args:
        directory: Where to make it.
        name: Name of the model's class.
        bytewise: Whether its tokenizer is one of bytes, which a grammar can be made for.
    """
    where = directory / (f"{name}-bytewise" if bytewise else name)
    where.mkdir(parents=True, exist_ok=True)
    for file in TALKER.iterdir():
        target = where / file.name
        if file.name == "config.json":
            config = json.loads(file.read_text())
            target.write_text(json.dumps({**config, "architectures": [name]}))
        elif not target.exists() and not (bytewise and file.name.startswith("tokenizer")):
            target.symlink_to(file)
    if bytewise:
        _write_tokenizer(where)
    return str(where)


def _write_tokenizer(where: Path) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(where / "tokenizer.json"))
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>"}
    (where / "tokenizer_config.json").write_text(json.dumps(kind))

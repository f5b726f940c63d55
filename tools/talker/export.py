"""The trained weights as a model directory that stock vLLM and the package's preset load."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file, save_file

from omnistage.models.talker.layout import CHECKPOINT
from tools.talker import talker, training
from tools.talker.network import load_codec
from tools.talker.settings import written

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from tools.talker.settings import Run

# What the ids mean and how large the model is does not change with the training.
_SAME = ("config.json", "tokenizer.json", "generation_config.json", "tokenizer_config.json")


def export(run: Run) -> Path:
    """Write ``export/`` in the run's folder, and return it.

    Of a language model that began with another's weights it is the mean of both, which predicts
    better than either: 1.716 a code instead of 1.743 and 1.751 when this was tried.

    Raises:
        StageError: A training is missing or not at its end.
    """
    folder = run.folder / "export"
    codec = load_codec(run)
    codec.dec.load_state_dict(training.finished(run, "decoder", run.settings.decoder_steps))
    parts = {"st": codec.st, "dec": codec.dec}
    decoder = {
        f"{part}.{name}": value
        for part, module in parts.items()
        for name, value in module.state_dict().items()
    }
    model = talker.load(run).state_dict()
    if run.begin:
        first = load_file(run.begin / "model.safetensors")
        model = {name: (value + first[name].float()) / 2 for name, value in model.items()}
    _save(folder / "model.safetensors", model, torch.bfloat16)
    # In a folder of its own, since vLLM loads every safetensors file beside config.json.
    _save(folder / "code2wav" / "decoder.safetensors", decoder, torch.float16)
    for name in _SAME:
        shutil.copyfile(CHECKPOINT / name, folder / name)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    run.log("export", f"{folder}: {size:,} bytes")
    return folder


def _save(path: Path, weights: dict[str, Tensor], dtype: torch.dtype) -> None:
    stored = {name: value.to(dtype).contiguous() for name, value in weights.items()}
    with written(path) as draft:
        save_file(stored, draft, metadata={"format": "pt"})
        draft.chmod(0o644)  # safetensors' own is the owner's alone, and a wheel keeps it

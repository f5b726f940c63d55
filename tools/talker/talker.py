"""Trains the language model on the ids: given the prompt, the output's units and codes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np
import torch
from safetensors.torch import load_file
from torch.nn import functional

from omnistage.models.talker.layout import CHECKPOINT, read_layout
from tools.talker import tokens, training
from tools.talker.qwen3 import Qwen3, Shape
from tools.talker.settings import SEED

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor, nn

    from omnistage.models.talker.layout import Layout
    from tools.talker.settings import Run

_SHORT = 4  # words
_LONGEST = 700  # ids of a sequence; longer ones would make their batch slow
_SORTED = 1500  # sequences that are sorted by length together, so that batches hold little padding


def shape() -> Shape:
    """The sizes of the shipped talker, which this trains anew."""
    return msgspec.json.decode((CHECKPOINT / "config.json").read_bytes(), type=Shape)


def plan(lengths: list[int], total: int, batch: int) -> list[list[int]]:
    """Which sequences every step takes: epochs in random order, batches of about equal length.

    Args:
        lengths: Of the sequences.
        total: When to end: ids seen, padding counted.
        batch: The most ids of a step, padding counted.
    """
    steps: list[list[int]] = []
    seen, epoch = 0, 0
    while seen < total:
        rng = np.random.default_rng((SEED, epoch))
        order = rng.permutation(len(lengths)).tolist()
        for start in range(0, len(order), _SORTED):
            batches: list[list[int]] = [[]]
            for index in sorted(order[start : start + _SORTED], key=lengths.__getitem__):
                if batches[-1] and lengths[index] * (len(batches[-1]) + 1) > batch:
                    batches.append([])
                batches[-1].append(index)
            for choice in rng.permutation(len(batches)).tolist():
                if seen >= total:
                    break
                steps.append(batches[choice])
                seen += max(lengths[index] for index in batches[choice]) * len(batches[choice])
        epoch += 1
    return steps


def train(run: Run) -> None:
    """Muon for the matrices, AdamW for the rest.

    Raises:
        StageError: The ids are not made.
    """
    torch.manual_seed(SEED)
    device, layout = training.device(), read_layout()
    model = Qwen3(shape()).to(device)
    if run.begin:
        model.load_state_dict(load_file(run.begin / "model.safetensors"))
        run.log("talker", f"begins with the weights in {run.begin}")
    sequences = tokens.read(run)
    kept = _kept_back(run, sequences)
    steps = _steps(run, sequences)
    run.log("talker", f"{len(sequences) - kept} utterances to learn, {kept} to measure with")

    def predict(batch: list[tokens.Sequence]) -> tuple[Tensor, Tensor]:
        ids, asked = (part.to(device) for part in _batch(batch))
        with torch.autocast(device.type, torch.bfloat16):
            logits = model.logits(model(ids)[:, :-1][asked])
        return logits.float(), ids[:, 1:][asked]

    def loss(step: int) -> Tensor:
        return functional.cross_entropy(*predict([sequences[index] for index in steps[step]]))

    def measure() -> str:
        said = []
        for name, part in _by_length(sequences[:kept], layout).items():
            batches = [part[start : start + 8] for start in range(0, len(part), 8)]
            said.append(f"{name} {_errors(map(predict, batches), layout)}")
        return "; ".join(said)

    training.train(
        run,
        training.Training(
            name="talker",
            module=model,
            optimizers=_optimizers(model, run.settings.talker_rate),
            steps=len(steps),
            loss=loss,
            measure=measure,
            warm_up=60,
            hold=0.35,
            floor=0.02,
        ),
    )


def load(run: Run) -> Qwen3:
    """The trained model.

    Raises:
        StageError: It is not trained, or not to the end.
    """
    model = Qwen3(shape())
    model.load_state_dict(training.finished(run, "talker", len(_steps(run, tokens.read(run)))))
    return model.eval()


def _optimizers(model: Qwen3, rate: float) -> tuple[torch.optim.Optimizer, ...]:
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, weight in model.named_parameters():
        (matrices if weight.dim() == 2 and "embed" not in name else others).append(weight)
    return (
        torch.optim.Muon(
            matrices, rate, weight_decay=0.05, momentum=0.95, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(others, 2 * rate, betas=(0.9, 0.97), weight_decay=0.0),
    )


def _kept_back(run: Run, sequences: list[tokens.Sequence]) -> int:
    return min(run.settings.kept_back, len(sequences) // 4)


def _steps(run: Run, sequences: list[tokens.Sequence]) -> list[list[int]]:
    """Every step's utterances, none of those that are kept back."""
    layout, settings = read_layout(), run.settings
    learned = [
        at
        for at in range(_kept_back(run, sequences), len(sequences))
        if len(sequences[at].ids) <= _LONGEST
        for _ in range(settings.short_repeats if _is_short(sequences[at], layout) else 1)
    ]
    lengths = [len(sequences[at].ids) for at in learned]
    planned = plan(lengths, settings.talker_tokens, settings.batch_tokens)
    return [[learned[index] for index in step] for step in planned]


def _batch(batch: list[tokens.Sequence]) -> tuple[Tensor, Tensor]:
    """Ids, [batch, length], and which of them ask for an id of the output as their next."""
    length = max(len(one.ids) for one in batch)
    ids = torch.zeros(len(batch), length, dtype=torch.long)
    asked = torch.zeros(len(batch), length - 1, dtype=torch.bool)
    for row, one in enumerate(batch):
        ids[row, : len(one.ids)] = torch.from_numpy(one.ids.astype(np.int64))
        asked[row, one.prompt - 1 : len(one.ids) - 1] = True
    return ids, asked


def _is_short(one: tokens.Sequence, layout: Layout) -> bool:
    return int((one.ids[1 : one.prompt - 1] < layout.first_phone).sum()) <= _SHORT


def _by_length(
    sequences: list[tokens.Sequence], layout: Layout
) -> dict[str, list[tokens.Sequence]]:
    """Those of up to four words, and the others."""
    parts: dict[str, list[tokens.Sequence]] = {}
    for one in sequences:
        parts.setdefault("short" if _is_short(one, layout) else "long", []).append(one)
    return dict(sorted(parts.items()))


def _errors(predictions: Iterable[tuple[Tensor, Tensor]], layout: Layout) -> str:
    """Cross-entropy of codes and of units with the end, and how many of the units come first."""
    code, unit, right = [], [], []
    for logits, target in predictions:
        entropy = functional.cross_entropy(logits, target, reduction="none")
        is_code = target >= layout.first_code
        code.append(entropy[is_code])
        unit.append(entropy[~is_code])
        best = logits[~is_code][:, : layout.first_code].argmax(-1)
        right.append((best == target[~is_code]).float())
    means = (torch.cat(part).mean().item() for part in (code, unit, right))
    return "codes {:.3f}, units {:.4f}, of which right {:.4f}".format(*means)

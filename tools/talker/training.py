"""One loop for all three trainings: steps that depend on their number alone, and going on.

A run that was stopped takes its last checkpoint and makes the same steps that it would have made.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from tools.talker.settings import StageError, written

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor, nn

    from tools.talker.settings import Run

_LARGEST_GRADIENT = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What one training is made of.

    Args:
        name: The stage's, for its log and its checkpoint.
        module: What is trained.
        optimizers: Over the module's parameters; their learning rates are the highest ones.
        steps: How many steps.
        loss: The loss of a step, from the step's number alone.
        measure: What to say about the module between two steps.
        warm_up: Steps until the highest learning rate.
        hold: Part of the steps at that rate.
        floor: What is left of it at the end, after a straight fall.
    """

    name: str
    module: nn.Module
    optimizers: tuple[torch.optim.Optimizer, ...]
    steps: int
    loss: Callable[[int], Tensor]
    measure: Callable[[], str]
    warm_up: int
    hold: float
    floor: float

    def rate(self, step: int) -> float:
        """A step's part of the highest learning rate."""
        done = step / self.steps
        falling = 1.0 if done < self.hold else max(self.floor, (1 - done) / (1 - self.hold))
        return min(1.0, (step + 1) / self.warm_up) * falling


def device() -> torch.device:
    """A GPU if there is one; the settings are such that two CPU cores do."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def checkpoint(run: Run, name: str) -> Path:
    """Where a training keeps its state."""
    return run.folder / f"{name}.pt"


def train(run: Run, training: Training) -> None:
    """Make the steps that are left; the module then holds the result.

    Writes a checkpoint and a line of the log every now and then and at the end.
    """
    path, module = checkpoint(run, training.name), training.module
    highest = [group["lr"] for group in _groups(training)]
    start = _load(path, training)
    run.log(training.name, f"steps {start} to {training.steps}")
    began = reported = time.monotonic()
    losses: list[Tensor] = []
    for step in range(start, training.steps):
        for group, rate in zip(_groups(training), highest, strict=True):
            group["lr"] = rate * training.rate(step)
        loss = training.loss(step)
        for optimizer in training.optimizers:
            optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), _LARGEST_GRADIENT)
        for optimizer in training.optimizers:
            optimizer.step()
        losses.append(loss.detach())
        now, last = time.monotonic(), step + 1 == training.steps
        if last or now - reported >= run.settings.report:
            module.eval()
            with torch.inference_mode():
                measured = training.measure()
            module.train()
            mean = torch.stack(losses).mean().item()
            run.log(
                training.name,
                f"step {step + 1}, {now - began:.0f} s, {time.process_time():.0f} cpu s, "
                f"loss {mean:.4f}; {measured}",
            )
            _save(path, training, step + 1)
            losses, reported = [], time.monotonic()
    module.eval()


def finished(run: Run, name: str, steps: int) -> dict[str, Tensor]:
    """What a training came to.

    Raises:
        StageError: It has steps left, or never began.
    """
    path = checkpoint(run, name)
    saved: dict[str, Any] = {"step": 0}
    if path.exists():
        saved = torch.load(path, map_location="cpu", weights_only=True)
    if saved["step"] < steps:
        raise StageError(
            f"{name} has made {saved['step']} of {steps} steps: run the stage `{name}` first"
        )
    module: dict[str, Tensor] = saved["module"]
    return module


def _groups(training: Training) -> list[dict[str, float]]:
    return [group for optimizer in training.optimizers for group in optimizer.param_groups]


def _save(path: Path, training: Training, step: int) -> None:
    with written(path) as draft:
        torch.save(
            {
                "step": step,
                "module": training.module.state_dict(),
                "optimizers": [optimizer.state_dict() for optimizer in training.optimizers],
            },
            draft,
        )


def _load(path: Path, training: Training) -> int:
    if not path.exists():
        return 0
    state = torch.load(path, map_location="cpu", weights_only=True)
    training.module.load_state_dict(state["module"])
    for optimizer, saved in zip(training.optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    step: int = state["step"]
    return step

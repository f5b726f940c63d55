"""The training loop: it goes on where it was stopped, and to the same end."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.tools.talker.runs import SMALLEST
from tools.talker import training
from tools.talker.settings import Run, StageError


class Stopped(Exception):
    """What a test stops a training with."""


def small_training(*, steps: int = 9, stop_at: int | None = None) -> training.Training:
    torch.manual_seed(3)
    module = nn.Linear(4, 1)

    def loss(step: int) -> Tensor:
        if step == stop_at:
            raise Stopped
        inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        error: Tensor = (module(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        return error

    return training.Training(
        name="trial",
        module=module,
        optimizers=(torch.optim.AdamW(module.parameters(), 0.1),),
        steps=steps,
        loss=loss,
        measure=lambda: "fine",
        warm_up=2,
        hold=0.5,
        floor=0.1,
    )


def weights(one: training.Training) -> Tensor:
    return torch.cat([value.flatten() for value in one.module.state_dict().values()])


def test_a_stopped_training_goes_on_to_the_same_weights(tmp_path: Path) -> None:
    whole = small_training()
    training.train(Run(tmp_path / "whole", SMALLEST), whole)
    run = Run(tmp_path / "stopped", SMALLEST)
    with pytest.raises(Stopped):
        training.train(run, small_training(stop_at=4))
    second = small_training()
    training.train(run, second)
    assert torch.equal(weights(whole), weights(second))
    assert "steps 4 to 9" in (run.folder / "logs" / "trial.log").read_text()


def test_what_is_trained_to_the_end_is_not_trained_again(tmp_path: Path) -> None:
    run = Run(tmp_path, SMALLEST)
    training.train(run, small_training())
    training.train(run, small_training(stop_at=0))  # would raise if it made a step


def test_a_training_that_has_steps_left_is_not_finished(tmp_path: Path) -> None:
    run = Run(tmp_path, SMALLEST)
    with pytest.raises(StageError, match="0 of 9 steps: run the stage `trial` first"):
        training.finished(run, "trial", 9)
    with pytest.raises(Stopped):
        training.train(run, small_training(stop_at=4))
    with pytest.raises(StageError, match="4 of 9 steps"):
        training.finished(run, "trial", 9)
    one = small_training()
    training.train(run, one)
    assert training.finished(run, "trial", 9).keys() == one.module.state_dict().keys()


def test_the_rate_rises_holds_and_falls_to_its_floor() -> None:
    one = small_training(steps=100)
    rates = [one.rate(step) for step in range(100)]
    assert rates[0] == 0.5
    assert rates[1] == rates[49] == 1.0
    assert rates[50:] == sorted(rates[50:], reverse=True)
    assert math.isclose(rates[-1], 0.1)

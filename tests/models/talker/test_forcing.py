"""The talker's structure while sampling: both logits processors against a plain rule."""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, MoveDirectionality
from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext, LogitsProcRequestState

from omnistage.models.talker.forcing import TalkerForcing, TalkerForcingV2
from omnistage.models.talker.layout import CHECKPOINT, read_layout
from omnistage.models.talker.structure import (
    FEWEST,
    FEWEST_AT_THE_END,
    MOST,
    Progress,
    constrain,
    units_of,
)

LAYOUT = read_layout()
CODE, UNIT = LAYOUT.first_code, LAYOUT.first_word
VOCABULARY = 1344
CONFIG: Any = SimpleNamespace(model_config=SimpleNamespace(model=str(CHECKPOINT)))
CPU = torch.device("cpu")


def prompt_of(units: Sequence[int]) -> list[int]:
    return [LAYOUT.bos, *units, LAYOUT.audio]


def allowed(units: Sequence[int], output: Sequence[int]) -> set[int]:
    """What may come after an output, said as plainly as it can be."""
    codes = set(range(CODE, CODE + LAYOUT.codes))
    if LAYOUT.eos in output:
        return {LAYOUT.eos}
    markers = [i for i, token in enumerate(output) if UNIT <= token < CODE]
    if not markers:
        return {units[0]}
    spoken = len(output) - 1 - markers[-1]
    last = len(markers) >= len(units)
    following = {LAYOUT.eos} if last else {units[len(markers)]}
    if spoken >= MOST:
        return following
    return codes | following if spoken >= (FEWEST_AT_THE_END if last else FEWEST) else codes


def utterance(units: Sequence[int], random: random.Random, length: int) -> list[int]:
    """A well-formed output, cut after ``length`` ids."""
    output: list[int] = []
    while len(output) < length:
        following = sorted(allowed(units, output))
        marker = [t for t in following if t < CODE]
        leave = marker and (len(following) == 1 or random.random() < 0.2)
        output.append(random.choice(marker if leave else [t for t in following if t >= CODE]))
    return output


def finite(row: torch.Tensor) -> set[int]:
    return set(torch.isfinite(row).nonzero()[:, 0].tolist())


units_lists = st.lists(st.integers(UNIT, CODE - 1), min_size=1, max_size=6)


@settings(deadline=None, max_examples=50)
@given(units=units_lists, seed=st.integers(0, 10**6), length=st.integers(0, 60))
def test_any_output_allows_what_the_rule_says(units: list[int], seed: int, length: int) -> None:
    output = utterance(units, random.Random(seed), length)
    following, may, must = Progress(LAYOUT, units, output).following()
    logits = torch.randn(1, VOCABULARY, generator=torch.Generator().manual_seed(seed))
    constrain(LAYOUT, logits, torch.tensor([following]), torch.tensor([may]), torch.tensor([must]))
    assert finite(logits[0]) == allowed(units, output)


@settings(deadline=None, max_examples=50)
@given(units=units_lists, seed=st.integers(0, 10**6), data=st.data())
def test_progress_is_the_same_read_at_once_or_as_it_grows_is_cut_or_replaced(
    units: list[int], seed: int, data: st.DataObject
) -> None:
    whole = utterance(units, random.Random(seed), 80)
    output: list[int] = []
    progress = Progress(LAYOUT, units, output)
    for length in data.draw(st.lists(st.integers(0, 80), max_size=12)):
        output[:] = whole[:length]  # longer, shorter or the same
        if data.draw(st.booleans()):
            output.append(-1)  # not known yet
        assert progress.following() == Progress(LAYOUT, units, whole[:length]).following()


def test_the_mass_of_all_that_is_no_code_goes_to_the_one_marker() -> None:
    units = [UNIT, UNIT + 1]
    logits = torch.randn(1, VOCABULARY)
    before = logits.clone()
    progress = Progress(LAYOUT, units, [UNIT, CODE])
    following, may, must = progress.following()
    constrain(LAYOUT, logits, torch.tensor([following]), torch.tensor([may]), torch.tensor([must]))
    assert following == UNIT + 1
    assert logits[0, following] == pytest.approx(before[0, :CODE].logsumexp(0).item(), abs=1e-5)
    assert torch.equal(logits[0, CODE : CODE + 10], before[0, CODE : CODE + 10])


def test_a_row_is_never_left_without_any_id() -> None:
    """A request's own options may have masked whatever was left."""
    for may in (True, False):
        logits = torch.full((1, VOCABULARY), float("-inf"))
        constrain(LAYOUT, logits, torch.tensor([UNIT]), torch.tensor([may]), torch.tensor([False]))
        assert finite(logits[0]) == {UNIT}
        assert torch.isfinite(logits.softmax(-1)).all()


@pytest.mark.parametrize(
    "prompt",
    [None, [], [LAYOUT.bos, LAYOUT.audio], [LAYOUT.bos, UNIT, CODE], [UNIT, LAYOUT.audio, 9]],
)
def test_a_prompt_that_is_no_talkers_is_left_alone(prompt: list[int] | None) -> None:
    assert units_of(LAYOUT, prompt) == []
    forcing = TalkerForcing(CONFIG, CPU, False)
    forcing.update_state(update(added=[(0, prompt, [])]))
    logits = torch.randn(1, VOCABULARY)
    assert torch.equal(forcing.apply(logits.clone()), logits)


def update(
    added: Sequence[tuple[int, Any, list[int]]] = (),
    removed: Sequence[int] = (),
    moved: Sequence[Any] = (),
) -> BatchUpdate:
    params = SamplingParams()
    rows = [(row, params, prompt, output) for row, prompt, output in added]
    return BatchUpdate(batch_size=8, removed=removed, added=rows, moved=moved)


@settings(deadline=None, max_examples=50)
@given(seed=st.integers(0, 10**6))
def test_rows_that_come_go_swap_and_move_keep_their_own_place(seed: int) -> None:
    """The batch as vLLM keeps it, beside a plain model of who is in which row."""
    draw = random.Random(seed)
    forcing = TalkerForcing(CONFIG, CPU, False)
    batch: dict[int, tuple[list[int], list[int]]] = {}  # row -> units, output; units [] for others
    for _ in range(12):
        removed = [row for row in batch if draw.random() < 0.15]
        for row in removed:
            del batch[row]
        added = []
        for row in range(8):
            if row not in batch and draw.random() < 0.3:
                units = [draw.randrange(UNIT, CODE) for _ in range(draw.randrange(1, 4))]
                talker = draw.random() < 0.8
                output = utterance(units, draw, draw.randrange(20))  # a resumed one has some
                batch[row] = (units if talker else [], output)
                added.append((row, prompt_of(units) if talker else [5, 6], output))
        moved = []
        if len(batch) > 1 and draw.random() < 0.5:
            a, b = draw.sample(sorted(batch), 2)
            batch[a], batch[b] = batch[b], batch[a]
            moved.append((a, b, MoveDirectionality.SWAP))
        free = [row for row in range(8) if row not in batch]
        if batch and free and draw.random() < 0.5:
            a, b = draw.choice(sorted(batch)), draw.choice(free)
            batch[b] = batch.pop(a)
            moved.append((a, b, MoveDirectionality.UNIDIRECTIONAL))
        forcing.update_state(update(added, removed, moved) if added or removed or moved else None)
        logits = torch.randn(8, VOCABULARY)
        after = forcing.apply(logits.clone())
        for row in range(8):
            units, output = batch.get(row, ([], []))
            if units:
                assert finite(after[row]) == allowed(units, output)
                output.append(draw.choice(sorted(allowed(units, output))))
            else:
                assert torch.equal(after[row], logits[row])


def states(histories: Sequence[tuple[list[int], list[int]]], length: int) -> Any:
    """Model Runner V2's buffers for requests in slots that are not their rows."""
    tokens = torch.full((len(histories) + 2, length), 7, dtype=torch.int32)
    prompts = torch.zeros(len(histories) + 2, dtype=torch.int32)
    for slot, (prompt, output) in enumerate(histories, start=1):
        known = [*prompt, *output]
        tokens[slot, : len(known)] = torch.tensor(known, dtype=torch.int32)
        prompts[slot] = len(prompt)
    buffer: Any = SimpleNamespace
    return LogitsProcRequestState(
        device=CPU,
        max_num_reqs=len(tokens),
        vocab_size=VOCABULARY,
        all_token_ids=buffer(gpu=tokens),
        prompt_len=buffer(gpu=prompts),
        prefill_len=buffer(gpu=prompts),
        total_len=buffer(gpu=prompts),
    )


@settings(deadline=None, max_examples=50)
@given(seed=st.integers(0, 10**6))
def test_model_runner_v2_is_given_the_same_answers(seed: int) -> None:
    draw = random.Random(seed)
    histories: list[tuple[list[int], list[int]]] = []
    for _ in range(draw.randrange(1, 6)):
        units = [draw.randrange(UNIT, CODE) for _ in range(draw.randrange(1, 5))]
        output = utterance(units, draw, draw.randrange(50))
        prompt = prompt_of(units) if draw.random() < 0.8 else [LAYOUT.bos, CODE, LAYOUT.audio]
        histories.append((prompt, output))
    forcing = TalkerForcingV2(CONFIG, states(histories, 120))
    rows = list(range(len(histories)))
    draw.shuffle(rows)
    slots = torch.tensor([row + 1 for row in rows], dtype=torch.int32)
    context = LogitsContext(
        expanded_idx_mapping=slots,
        idx_mapping=slots,
        idx_mapping_np=slots.numpy(),
        expanded_local_pos=torch.zeros_like(slots),
        input_ids=slots,
        pos=torch.tensor([len(histories[r][0]) + len(histories[r][1]) - 1 for r in rows]),
        seq_lens_upper_bound_np=slots.numpy(),
    )
    logits = torch.randn(len(rows), VOCABULARY)
    after = forcing.apply(logits.clone(), context)
    for row, history in enumerate(rows):
        prompt, output = histories[history]
        units = units_of(LAYOUT, prompt)
        if units:
            assert finite(after[row]) == allowed(units, output)
        else:
            assert torch.equal(after[row], logits[row])
    assert forcing.add_request(0, SamplingParams())


def test_it_changes_what_is_likeliest() -> None:
    assert not TalkerForcing(CONFIG, CPU, False).is_argmax_invariant()

"""What is trained is what the package and vLLM load."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from omnistage.models.talker import decoder as shipped
from omnistage.models.talker.layout import CHECKPOINT, read_layout
from tests.tools.talker.runs import SMALLEST
from tools.talker import network, talker, tokens
from tools.talker.qwen3 import Qwen3
from tools.talker.settings import Run


def test_the_decoder_in_training_is_the_packages_network() -> None:
    torch.manual_seed(0)
    trained, loaded = network.Decoder(), shipped._Network()
    loaded.load_state_dict(trained.state_dict())
    points, phones = torch.randn(2, 20, 4), torch.randint(0, 109, (2, 20))
    inside = torch.ones(2, 20, 1)
    inside[1, 15:] = 0
    torch.testing.assert_close(trained(points, phones, inside), loaded(points, phones, inside))


def test_the_shipped_decoder_has_the_trained_ones_weights_and_scales() -> None:
    codec = network.Codec()
    ours = {
        name: value.shape
        for name, value in codec.state_dict().items()
        if not name.startswith("enc.")
    }
    with safe_open(CHECKPOINT / "code2wav" / "decoder.safetensors", "pt") as file:
        theirs = {name: file.get_tensor(name).shape for name in file.keys()}  # noqa: SIM118 - no mapping
    assert ours == theirs


def test_the_encoders_codes_are_the_decoders() -> None:
    torch.manual_seed(0)
    encoder = network.Encoder()
    features = torch.randn(3, 60, network.COLUMNS)
    with torch.no_grad():
        assert torch.equal(network.lattice()[encoder.codes(features)], encoder(features))


def test_rounding_lets_the_gradient_through() -> None:
    encoder = network.Encoder()
    encoder(torch.randn(1, 8, network.COLUMNS)).sum().backward()
    assert encoder.first.weight.grad is not None
    assert encoder.first.weight.grad.abs().sum() > 0


def test_a_voiceless_rows_voice_does_not_reach_the_encoder() -> None:
    scale = network.Scale()
    bands, pitch = torch.randn(40, 112), torch.tensor([0.0, 200.0]).repeat(20)
    scale.fit(bands, pitch)
    features = scale(bands, pitch)
    assert torch.equal(features[::2, :56], torch.full((20, 56), -3.0))
    assert torch.equal(features[:, -1], (pitch > 0).float())


def test_the_language_model_has_the_shipped_ones_weights() -> None:
    ours = {name: value.shape for name, value in Qwen3(talker.shape()).state_dict().items()}
    with safe_open(CHECKPOINT / "model.safetensors", "pt") as file:
        theirs = {name: file.get_tensor(name).shape for name in file.keys()}  # noqa: SIM118 - no mapping
    assert ours == theirs
    assert json.loads((CHECKPOINT / "config.json").read_text())["tie_word_embeddings"]


@pytest.mark.slow  # transformers takes its time to import
def test_the_language_model_computes_what_transformers_does(tmp_path: Path) -> None:
    from transformers import Qwen3ForCausalLM

    theirs = Qwen3ForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32).eval()
    ours = Qwen3(talker.shape())
    weights = {name: value for name, value in theirs.state_dict().items() if "lm_head" not in name}
    ours.load_state_dict(weights)
    ids = torch.randint(0, 1344, (2, 50))
    with torch.no_grad():
        torch.testing.assert_close(ours.logits(ours(ids)), theirs(ids).logits, rtol=1e-3, atol=1e-3)


def test_an_utterance_is_laid_out_as_prompt_then_units_with_their_codes() -> None:
    layout = read_layout()
    word, phone = layout.first_word, layout.first_phone + 40
    sequence = tokens.lay_out(
        layout, np.array([word, phone], np.int16), np.array([1, 2], np.int16), np.array([7, 8, 9])
    )
    first = layout.first_code
    assert sequence.ids[: sequence.prompt].tolist() == [layout.bos, word, phone, layout.audio]
    assert sequence.ids[sequence.prompt :].tolist() == [
        word, first + 7, phone, first + 8, first + 9, layout.eos,
    ]  # fmt: skip


def test_the_plan_takes_every_utterance_once_an_epoch_in_batches_that_fit() -> None:
    lengths = [30 + 7 * index % 90 for index in range(200)]
    steps = talker.plan(lengths, 2 * sum(lengths), 400)
    seen = [index for step in steps for index in step]
    assert all(seen.count(index) >= 1 for index in range(len(lengths)))
    assert all(max(lengths[i] for i in step) * len(step) <= 400 for step in steps)
    assert steps == talker.plan(lengths, 2 * sum(lengths), 400)
    assert (
        steps[: len(steps) // 2] == talker.plan(lengths, 9 * sum(lengths), 400)[: len(steps) // 2]
    )


def test_short_utterances_come_more_often_and_kept_back_ones_never(tmp_path: Path) -> None:
    layout = read_layout()
    word, phone = layout.first_word, layout.first_phone + 40

    def say(words: int) -> tokens.Sequence:
        units = np.asarray([word, phone] * words, np.int16)
        return tokens.lay_out(layout, units, np.ones_like(units), np.arange(len(units)))

    sequences = [say(words) for words in (2, 6, 2, 9)]  # a quarter is kept back, the first
    total = sum(len(one.ids) for one in sequences[1:]) + 2 * len(sequences[2].ids)
    settings = dataclasses.replace(SMALLEST, talker_tokens=total, batch_tokens=1)
    steps = talker._steps(Run(tmp_path, settings), sequences)
    assert sorted(steps) == [[1], [2], [2], [2], [3]]

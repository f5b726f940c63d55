"""The talker's evaluation: what it counts and reports, from utterances and times that are known."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from omnistage.cli.timeline import Timeline
from tools.talker import recogniser
from tools.talker.evaluate import Speed, Utterance, main, report, sentences, speed_of
from tools.talker.recogniser import Errors, rate
from tools.talker.settings import StageError

JUDGES = ("whisper_normalizer", "jiwer")


def utterance(text: str, errors: int, words: int, seconds: float = 1.0) -> Utterance:
    return Utterance(text, text.upper(), errors, words, seconds, 0, 1.0)


def test_the_held_out_sentences_are_what_the_issue_asks_for() -> None:
    texts = sentences()
    lengths = [len(text.split()) for text in texts]
    assert len(texts) >= 100
    assert sum(length < 5 for length in lengths) >= 40
    assert sum(length >= 5 for length in lengths) >= 60
    assert max(lengths) <= 20
    assert texts[0] == "Hello world."
    assert len({text.lower() for text in texts}) == len(texts)
    assert not any(text.startswith("#") for text in texts)


def test_a_rate_is_of_all_words_together() -> None:
    assert rate([(1, 1), (0, 9)]) == 0.1
    assert rate([]) == 0.0


def test_speed_is_taken_from_each_streams_chunks() -> None:
    timelines = [
        Timeline(chunks=[(0.1, 0.5), (0.4, 0.5)]),  # 0.2 s left, 0.4 s for 1 s
        Timeline(chunks=[(0.2, 0.5), (0.8, 1.5)]),  # 0.1 s too late, 0.8 s for 2 s
        Timeline(chunks=[(0.3, 1.0)]),
    ]
    speed = speed_of(timelines, 3)
    assert speed == Speed(
        streams=3,
        real_time_factor=0.4,
        first_audio_ms=200.0,
        first_audio_p95_ms=200.0,
        least_slack_ms=-100.0,
    )


def test_the_report_has_both_groups_the_demo_and_the_ten_worst() -> None:
    long = [utterance(f"long {n}", errors=n, words=20, seconds=0.8) for n in range(12)]
    short = [utterance("short one", errors=1, words=2, seconds=1.5)]
    speed = Speed(8, 0.3, 90.0, 120.0, 5.0)
    text = report([*long, *short], [utterance("Hello world.", 0, 2)], [speed])
    assert "| 12 of 5 words and more | 240 | 27.5% | 0.0% |" in text
    assert "| 1 of 1 to 4 words | 2 | 50.0% | 0.0% |" in text
    assert "| 8 | 0.30 | 90 ms | 120 ms | 5 ms |" in text
    assert "Length over the teacher's: 0.80 to 1.50, median 0.80." in text
    assert "'Hello world.' understood as 'HELLO WORLD.': 0 errors" in text
    worst = text.partition("The ten worst:")[2].strip().splitlines()
    assert len(worst) == 10
    assert "11 of 20" in worst[0]
    assert "1 of 2" in worst[2]


@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in JUDGES),
    reason="needs omnistage[train], which the suite's environment does not have",
)
def test_numbers_contractions_and_spelling_are_no_errors() -> None:
    count = Errors()
    assert count("Twenty-three people can't come.", "23 people can not come") == (0, 5)
    assert count("My favourite colour.", "my favorite color") == (0, 3)
    assert count("The old grey cat.", "") == (4, 4)
    assert count("The cat sat.", "The cat has sat down") == (2, 3)


def test_a_missing_package_is_named_with_its_cure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(module: str) -> None:
        raise ImportError(name=module)

    monkeypatch.setattr("importlib.import_module", missing)
    with pytest.raises(StageError, match=r"faster_whisper is missing: .*\[train\]"):
        recogniser.Recogniser(tmp_path)
    assert main(["--folder", str(tmp_path)]) == 3
    assert "faster_whisper is missing" in capsys.readouterr().err

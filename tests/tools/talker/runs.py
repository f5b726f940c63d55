"""Runs of the talker's training that are small enough for a test."""

from __future__ import annotations

from pathlib import Path

from tools.talker.settings import Run, Settings

SMALLEST = Settings(
    examples=4,
    definitions=2,
    templates=3,
    words=2,
    phrases=3,
    short_templates=2,
    shard=8,
    kept_back=4,
    codec_shards=2,
    codec_steps=3,
    decoder_steps=3,
    talker_tokens=1_600,
    batch_tokens=500,
    report=0.0,
)

WORDNET = {
    "noun": (
        "00001740 03 n 01 clay_pot 0 000 | a round vessel of baked earth that is used for cooking "
        'and for storing food; "the clay pot stood on the shelf"; "he dropped a pot"',
        '00001930 03 n 01 lantern 0 000 | a light in a case; "hello world!"; '
        '"carry the lantern to the end of the garden"; "a green light"',
    ),
    "verb": (
        "00002137 03 v 01 wander 0 000 | go about without a plan; "
        '"she wandered through town in the rain"',
    ),
    "adj": (
        "00002452 03 a 01 very_cold 0 000 | of a temperature that most people would call "
        'uncomfortably low for going out without a coat; "a cold day at the lake (1999)"; '
        '"the cold water took my breath away"',
    ),
    "adv": (
        "00002684 03 r 01 at_once 0 000 | without any delay whatever; "
        '"come here at once, Tom, and bring it"',
    ),
}


def small_run(folder: Path) -> Run:
    """A run with a WordNet of a few lines."""
    unpacked = folder / "wordnet" / "usr/share/wordnet"
    unpacked.mkdir(parents=True)
    for part, lines in WORDNET.items():
        licence = "  1 This software and database is being provided | to you\n"
        (unpacked / f"data.{part}").write_text(licence + "\n".join(lines) + "\n")
    return Run(folder, SMALLEST)

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest

from omnistage.errors import ConfigError
from omnistage.models.talker.layout import CHECKPOINT, read_layout

if TYPE_CHECKING:
    from pathlib import Path


def test_the_shipped_checkpoint_is_read() -> None:
    layout = read_layout()
    assert (layout.bos, layout.eos, layout.audio) == (1, 2, 3)
    assert (layout.first_word, layout.words) == (4, 64)
    assert (layout.first_phone, len(layout.phones)) == (68, 108)
    assert (layout.first_code, layout.codes) == (176, 1125)
    assert layout.phones[:5] == ("<sil>", ".", ",", "?", "!")
    assert len(set(layout.phones)) == len(layout.phones)


def copy(tmp_path: Path, **changes: Any) -> Path:
    config = json.loads((CHECKPOINT / "config.json").read_text())
    config["talker"].update(changes)
    (tmp_path / "config.json").write_text(json.dumps(config))
    shutil.copy(CHECKPOINT / "tokenizer.json", tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "changes",
    [
        {"first_code": 177},
        {"first_code": 175},
        {"first_unit": 5},
        {"num_codes": 1124},
        {"num_codes": 5000},
        {"audio": 0},
        {"eos": 1},
        {"first_unit": 176},
        {"first_code": -1},
    ],
)
def test_a_config_that_contradicts_the_tokenizer_is_refused(
    tmp_path: Path, changes: dict[str, int]
) -> None:
    with pytest.raises(ConfigError, match="contradict"):
        read_layout(copy(tmp_path, **changes))


def test_a_directory_without_a_talker_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no talker checkpoint"):
        read_layout(tmp_path)
    copy(tmp_path, first_code="many")
    with pytest.raises(ConfigError, match="no talker checkpoint"):
        read_layout(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="no talker checkpoint"):
        read_layout(tmp_path)

"""The public surface: every name that is promised is there, and loads neither torch nor vllm."""

from __future__ import annotations

import subprocess
import sys

import pytest

import omnistage


@pytest.mark.parametrize("name", omnistage.__all__)
def test_a_public_name_is_importable_and_documented(name: str) -> None:
    value = getattr(omnistage, name)
    assert name == "__version__" or value.__doc__


def test_the_names_and_their_homes_agree() -> None:
    assert sorted([*omnistage._HOMES, "__version__"]) == sorted(omnistage.__all__)
    assert dir(omnistage) == sorted(omnistage.__all__)
    with pytest.raises(AttributeError, match="no attribute 'pipelines'"):
        _ = omnistage.pipelines  # type: ignore[attr-defined]


def test_all_public_names_together_load_neither_torch_nor_vllm() -> None:
    code = (
        "import sys, omnistage\n"
        "for name in omnistage.__all__: getattr(omnistage, name)\n"
        "print([m for m in ('torch', 'vllm', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

"""``--set FIELD=VALUE``: pieces of a preset, replaced from the command line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from omnistage.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Sequence


def parse_settings(settings: Sequence[str]) -> dict[str, Any]:
    """What settings say, nested by the dots of their names.

    ``decoder.device=cuda`` is ``{"decoder": {"device": "cuda"}}``. A value is JSON if it is valid
    JSON, and else a string.

    Raises:
        InvalidRequest: One is no FIELD=VALUE, or contradicts another.
    """
    changes: dict[str, Any] = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        parts = name.split(".")
        if not equals or not all(part.isidentifier() for part in parts):
            raise InvalidRequest(
                f"--set is FIELD=VALUE, as in sampling.temperature=0.7, got {setting!r}",
                parameter="set",
            )
        inner: Any = changes
        for part in parts[:-1]:
            inner = inner.setdefault(part, {}) if isinstance(inner, dict) else None
        if not isinstance(inner, dict) or parts[-1] in inner:
            raise InvalidRequest(f"--set says {name} twice", parameter="set")
        inner[parts[-1]] = _value(text)
    return changes


def _value(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeEncodeError):
        return text

"""``omnistage models``: the presets that there are."""

from __future__ import annotations

import sys
from typing import Any

import msgspec
from rich.console import Console
from rich.markup import escape

from omnistage.errors import ConfigError
from omnistage.models.catalog import get, names


def run(*, json: bool) -> int:
    """List them.

    Returns:
        The exit code: 3 if another package's cannot be loaded.
    """
    found: list[dict[str, Any]] = []
    problems: list[str] = []
    for name in names():
        try:
            preset = get(name)
        except ConfigError as error:
            problems.append(str(error))
            continue
        found.append(
            {
                "name": name,
                "summary": preset.summary,
                "model": preset.model,
                "voices": list(getattr(preset, "voices", ())),
                "licence": preset.licence,
            }
        )
    if json:
        sys.stdout.write(msgspec.json.encode({"models": found}).decode() + "\n")
    else:
        console = Console(highlight=False, soft_wrap=True)
        for one in found:
            where = "comes with omnistage" if one["name"] == "talker" else one["model"] or "yours"
            name = f"{one['name']:<8}"
            console.print(f"[bold]{escape(name)}[/bold]  {escape(one['summary'])}")
            console.print(f"    {escape(where)}; weights: {escape(one['licence'])}")
    for problem in problems:
        Console(stderr=True).print(f"[red]error:[/red] {escape(problem)}", soft_wrap=True)
    return 3 if problems else 0

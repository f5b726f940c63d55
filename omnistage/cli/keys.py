"""``omnistage keys``: CURVE keys for stages on several hosts, and which of them goes where."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
from rich.console import Console
from rich.markup import escape

from omnistage.errors import ConfigError
from omnistage.transport.keys import DEFAULT_CLIENT, add_client, make_keys

USAGE = 2


class Made(msgspec.Struct, frozen=True):
    """What ``omnistage keys --json`` prints; no secret is in it.

    Args:
        directory: Where the keys are.
        client: The client that was added.
        files: What was written.
        copy: What a host needs that connects as that client, below the directory.
    """

    directory: str
    client: str
    files: list[str]
    copy: list[str]


def run(directory: Path, client: str | None, *, json: bool) -> int:
    """Make a directory of keys, or add a client to one.

    Returns:
        The exit code.
    """
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        files = make_keys(directory) if client is None else add_client(directory, client)
    except ConfigError as error:
        console.print(f"[red]error:[/red] {escape(str(error))}")
        return USAGE
    name = client or DEFAULT_CLIENT
    made = Made(
        directory=str(directory),
        client=name,
        files=[str(file) for file in files],
        copy=["server.key", f"clients/{name}.key_secret"],
    )
    if json:
        sys.stdout.write(msgspec.json.encode(made).decode() + "\n")
        return 0
    for file in made.files:
        console.print(escape(file))
    console.print(f"A host that connects as {name} needs {' and '.join(made.copy)} of it.")
    return 0

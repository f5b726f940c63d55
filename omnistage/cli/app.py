"""The commands and their options; each one's work is in a module that is imported when called."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import omnistage

app = typer.Typer(
    name="omnistage",
    help="Speech and omni models in stages: an AR model in vLLM, decoders beside it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object to standard output.")]


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(omnistage.__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Options of the command itself."""


@app.command()
def speak(
    text: Annotated[str, typer.Argument(help="What to say; '-' reads standard input.")],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The wav file to write.", dir_okay=False)
    ],
    seed: Annotated[
        int | None, typer.Option(min=0, help="Makes the same speech again, on the same machine.")
    ] = None,
    timeline: Annotated[
        Path | None,
        typer.Option(help="Draw when ids and chunks came: a png, svg or pdf file.", dir_okay=False),
    ] = None,
    json: Json = False,
) -> None:
    """Speak TEXT with the embedded talker, into a wav file."""
    from omnistage.cli.speak import run

    raise typer.Exit(run(text, output, seed=seed, timeline=timeline, json=json))


@app.command()
def keys(
    directory: Annotated[
        Path, typer.Argument(help="A new directory; with --client, one made before.")
    ],
    client: Annotated[str | None, typer.Option(help="Add this client's keys to it.")] = None,
    json: Json = False,
) -> None:
    """Make the keys of stages that talk over tcp, in DIRECTORY."""
    from omnistage.cli.keys import run

    raise typer.Exit(run(directory, client, json=json))


@app.command()
def check(json: Json = False) -> None:
    """Say what is installed, what runs here, and what would not and why."""
    from omnistage.cli.check import run

    raise typer.Exit(run(json=json))

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
Model = Annotated[
    str | None,
    typer.Option(
        help="A preset of `omnistage models`, or the directory or hub id of a model of its kind.",
    ),
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="FIELD=VALUE",
        help="Replace a piece of the preset, as in decoder.device=cuda; may be given again.",
    ),
]


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
    model: Model = None,
    settings: Set = None,
    voice: Annotated[str | None, typer.Option(help="A voice of the model's.")] = None,
    by_sentence: Annotated[
        bool, typer.Option(help="Say a long text sentence by sentence, as one.")
    ] = False,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Makes the same speech again, on the same machine.")
    ] = None,
    timeline: Annotated[
        Path | None,
        typer.Option(help="Draw when ids and chunks came: a png, svg or pdf file.", dir_okay=False),
    ] = None,
    connect: Annotated[
        list[str] | None,
        typer.Option(help="Speak with the AR stage that listens there; may be given again."),
    ] = None,
    keys: Annotated[
        Path | None,
        typer.Option(help="Directory of keys for --connect, from `omnistage keys`."),
    ] = None,
    json: Json = False,
) -> None:
    """Speak TEXT, with the embedded talker or another model, into a wav file."""
    from omnistage.cli.speak import Asked, run

    asked = Asked(
        text=text,
        output=output,
        model=model,
        settings=settings or [],
        voice=voice,
        by_sentence=by_sentence,
        seed=seed,
        timeline=timeline,
        connect=connect or [],
        keys=keys,
        json=json,
    )
    raise typer.Exit(run(asked))


stages = typer.Typer(
    name="stage",
    help="Run one stage as a process; `omnistage speak --connect` and Pipeline.connect join them.",
    no_args_is_help=True,
)
app.add_typer(stages)

Config = Annotated[
    str | None,
    typer.Option(help="MODULE:NAME of a stage's configuration, in place of a preset."),
]
Bind = Annotated[str, typer.Option(help="Where to listen: ipc, or tcp://ADDRESS:PORT.")]
Keys = Annotated[
    Path | None,
    typer.Option(help="Directory of keys for tcp, from `omnistage keys`.", file_okay=False),
]
Metrics = Annotated[
    str | None, typer.Option(help="ADDRESS:PORT to serve /metrics and /health at, over HTTP.")
]
Drain = Annotated[
    float, typer.Option(min=0, help="Seconds that running requests have at SIGTERM or Ctrl-C.")
]


@stages.command("ar")
def stage_ar(
    model: Model = None,
    settings: Set = None,
    config: Config = None,
    bind: Bind = "ipc",
    keys: Keys = None,
    metrics: Metrics = None,
    drain: Drain = 30.0,
    json: Json = False,
) -> None:
    """Run an AR stage, and print its endpoint when it takes requests."""
    from omnistage.cli.stage import Options, run_ar

    options = Options(
        model=model,
        settings=settings or [],
        config=config,
        bind=bind,
        keys=keys,
        metrics=metrics,
        drain=drain,
        json=json,
    )
    raise typer.Exit(run_ar(options))


@stages.command("decoder")
def stage_decoder(
    connect: Annotated[str, typer.Option(help="The AR stage's endpoint.")],
    within: Annotated[
        float, typer.Option(min=0, help="Seconds to wait for it; it may be starting.")
    ] = 60.0,
    model: Model = None,
    settings: Set = None,
    config: Config = None,
    bind: Bind = "ipc",
    keys: Keys = None,
    metrics: Metrics = None,
    drain: Drain = 30.0,
    json: Json = False,
) -> None:
    """Run a decoder stage for an AR stage; several share its requests."""
    from omnistage.cli.stage import Options, run_decoder

    options = Options(
        model=model,
        settings=settings or [],
        config=config,
        bind=bind,
        keys=keys,
        metrics=metrics,
        drain=drain,
        json=json,
    )
    raise typer.Exit(run_decoder(options, connect=connect, within=within))


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
def models(json: Json = False) -> None:
    """List the presets: the models that --model knows."""
    from omnistage.cli.models import run

    raise typer.Exit(run(json=json))


@app.command()
def check(model: Model = None, settings: Set = None, json: Json = False) -> None:
    """Say what is installed and what runs here; with --model, what that model would do."""
    from omnistage.cli.check import run, run_model

    if model is None and not settings:
        raise typer.Exit(run(json=json))
    raise typer.Exit(run_model(model or "talker", settings or [], json=json))

"""When things happened to an utterance, and a picture of it: ids, chunks, a player's reserve."""

from __future__ import annotations

import asyncio
import secrets
import time
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from omnistage.errors import ClientError, UpdatesLost
from omnistage.subscription import subscribe

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

    from omnistage.pipeline import Pipeline
    from omnistage.request import AudioChunk

FORMATS: Final = (".png", ".svg", ".pdf")
SUBSCRIBER: Final = f"timeline-{secrets.token_hex(4)}"
"""What a submission names, ``subscribers=[SUBSCRIBER]``, to be recorded; this process's own."""

_LAST_UPDATE_SECONDS: Final = 2.0

_TEXT: Final = "#333333"
_IDS: Final = "#4477aa"
_CHUNKS: Final = ("#228833", "#88bb66")
_SLACK: Final = "#aa3377"


@dataclass(slots=True)
class Timeline:
    """One request: seconds from its submission to each thing.

    Args:
        steps: (seconds, ids) of each step that sampled any.
        chunks: (seconds, seconds of audio) of each chunk.
        label: Names it in the picture.
    """

    steps: list[tuple[float, int]] = field(default_factory=list)
    chunks: list[tuple[float, float]] = field(default_factory=list)
    label: str = ""
    _began: int = field(default_factory=time.monotonic_ns)

    def start(self) -> None:
        """The request is submitted now."""
        self._began = time.monotonic_ns()

    def sampled(self, stamp: int, ids: int) -> None:
        """A step that ended at ``stamp`` (monotonic ns) sampled so many ids."""
        if ids:
            self.steps.append(((stamp - self._began) / 1e9, ids))

    def heard(self, chunk: AudioChunk) -> None:
        """A chunk is here now."""
        self.chunks.append(((time.monotonic_ns() - self._began) / 1e9, chunk.seconds))

    def slack(self) -> list[tuple[float, float]]:
        """(seconds, seconds of audio that a player has left) as each chunk but the first comes.

        The player starts with the first chunk and plays without a pause as long as there is audio;
        a negative value is the pause that a listener heard before that chunk.
        """
        left: list[tuple[float, float]] = []
        played_until: float | None = None
        for arrived, seconds in self.chunks:
            if played_until is None:
                played_until = arrived
            else:
                left.append((arrived, played_until - arrived))
            played_until = max(played_until, arrived) + seconds
        return left

    @property
    def first_id(self) -> float | None:
        """Seconds to the first sampled id."""
        return self.steps[0][0] if self.steps else None

    @property
    def least_slack(self) -> float | None:
        """The smallest of :meth:`slack`; None with fewer than two chunks."""
        return min((seconds for _, seconds in self.slack()), default=None)


@asynccontextmanager
async def recording(
    pipeline: Pipeline, timeline: Timeline, keys: Path | None = None
) -> AsyncIterator[Callable[[int], Awaitable[None]]]:
    """Record the steps of the one submission inside that names :data:`SUBSCRIBER`.

    Yields:
        What to await with the number of ids that the submission sampled, to have them all recorded.
    """
    async with subscribe(pipeline.endpoints, subscriber=SUBSCRIBER, keys=keys) as updates:
        ended = 0
        news = asyncio.Event()

        async def listen() -> None:
            nonlocal ended
            # To the end of the block: a subscription that nobody reads holds the decoder up too.
            while True:
                with suppress(UpdatesLost):  # a gap in the picture; what follows is worth having
                    update = await anext(updates)
                    timeline.sampled(update.stamp, len(update.ids))
                    if update.terminal is not None:
                        ended += update.terminal.tokens
                        news.set()

        async def complete(sampled: int) -> None:
            with suppress(TimeoutError):
                async with asyncio.timeout(_LAST_UPDATE_SECONDS):
                    while ended < sampled:
                        news.clear()
                        await news.wait()

        listening = asyncio.ensure_future(listen())
        try:
            yield complete
        finally:
            listening.cancel()
            await asyncio.wait([listening])


def check_drawable(path: Path) -> None:
    """Fail before anything has started.

    Raises:
        ClientError: An unknown format, or matplotlib is not installed.
    """
    if path.suffix.lower() not in FORMATS:
        raise ClientError(f"{path} must end in {', '.join(FORMATS)}")
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        raise ClientError("the timeline is drawn with matplotlib; install omnistage[plot]")


def draw(timelines: Sequence[Timeline], path: Path, title: str) -> None:
    """Draw requests one below the other, and the slack of all of them under them.

    Args:
        timelines: The requests.
        path: An image file; its ending says which format.
        title: Stands above it.

    Raises:
        OSError: The file cannot be written.
        ValueError: matplotlib cannot draw it.
    """
    from matplotlib.figure import Figure

    lanes = len(timelines)
    figure = Figure(figsize=(10, 2.6 + 0.7 * lanes), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[0.9 + 0.7 * lanes, 1.7])
    figure.suptitle(_plain(title), fontsize=11, parse_math=False)
    for lane, timeline in enumerate(timelines):
        _draw_lane(top, timeline, float(lanes - 1 - lane))
        times = [1000 * at for at, _ in timeline.slack()]
        bottom.plot(times, [1000 * s for _, s in timeline.slack()], "o-", color=_SLACK, ms=3, lw=1)
    labels = [_plain(timeline.label) for timeline in reversed(timelines)]
    top.set_yticks(range(lanes), labels, parse_math=False)
    top.set_ylim(-0.6, lanes - 0.1)
    top.axvline(0, color=_TEXT, lw=1)
    top.annotate("text in", (0, 1), xycoords=("data", "axes fraction"), **_note(0))
    bottom.axhline(0, color=_TEXT, lw=1)
    bottom.set_ylabel("left to play, ms")
    bottom.set_xlabel("ms since the request")
    bottom.set_title(
        "slack: what a player has left as each chunk comes; below zero it falls silent",
        fontsize=9,
        loc="left",
    )
    for axes in (top, bottom):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="x", alpha=0.3)
    figure.savefig(path, dpi=120)


def _draw_lane(axes: Any, timeline: Timeline, y: float) -> None:
    """Ids as ticks; each chunk as a bar from its arrival to the end of its playing."""
    axes.plot(
        [1000 * at for at, _ in timeline.steps],
        [y + 0.3] * len(timeline.steps),
        "|",
        color=_IDS,
        ms=7,
        label="ids",
    )
    playing = 0.0
    for number, (arrived, seconds) in enumerate(timeline.chunks):
        begins = max(playing, arrived)
        playing = begins + seconds
        color = _CHUNKS[number % 2]
        axes.barh(y - 0.05, 1000 * seconds, left=1000 * begins, height=0.22, color=color)
        axes.plot([1000 * arrived], [y - 0.28], "^", color=color, ms=5)
    first = timeline.first_id
    if first is not None:
        axes.annotate(f"first id {1000 * first:.0f} ms", (1000 * first, y + 0.3), **_note(6))
    if timeline.chunks:
        at = 1000 * timeline.chunks[0][0]
        axes.annotate(f"first audio {at:.0f} ms", (at, y - 0.28), **_note(-9))


def _plain(text: str) -> str:
    """What a font can be asked for: what is no UTF-8 becomes a question mark."""
    return text.encode(errors="replace").decode()


def _note(up: float) -> dict[str, Any]:
    return {
        "xytext": (4, up),
        "textcoords": "offset points",
        "fontsize": 8,
        "color": _TEXT,
    }

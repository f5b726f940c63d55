"""The documents against the code: what they must name, and that what they name is there."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
import typer.main
from prometheus_client import CollectorRegistry

import omnistage
from omnistage import errors, wire, wire_services
from omnistage.cli.app import app
from omnistage.cli.check import Report
from omnistage.cli.keys import Made
from omnistage.cli.speak import Spoken
from omnistage.metrics import Metrics
from omnistage.pipeline import Pipeline
from omnistage.request import ChunkPolicy, FinishReason, Start, Terminal
from omnistage.transport.publisher import MAX_TOPICS
from omnistage.wire import PROTOCOL_VERSION, Admission, Data, TensorInfo, Update
from tests.examples.documents import (
    DOCS,
    PAGES,
    ROOT,
    anchors,
    blocks,
    first_column,
    links,
    python_blocks,
)

PROTOCOL = DOCS / "protocol.md"
SERVICES = DOCS / "protocol-services.md"
ERRORS = [
    value
    for value in vars(errors).values()
    if isinstance(value, type) and issubclass(value, errors.OmniStageError)
]
MESSAGES: list[Any] = [
    message
    for kind in (wire.DataMessage, wire.ControlMessage, wire.DeliveryMessage)
    for message in get_args(kind)
]
OF_SERVICES: list[Any] = [
    *get_args(wire_services.ServiceMessage),
    wire_services.ARInfo,
    wire_services.DecoderInfo,
    wire_services.Input,
    wire_services.Tensor,
    wire_services.Fault,
]
INNER: list[Any] = [Update, Start, ChunkPolicy, Terminal, TensorInfo, Admission]
IDS = [str(page.relative_to(ROOT)) for page in PAGES]


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_every_link_leads_somewhere(page: Path) -> None:
    for path, anchor in links(page):
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), path
        assert not anchor or anchor in anchors(target), f"{path}#{anchor}"


WITH_CODE = [
    DOCS / "models.md",
    DOCS / "decoders.md",
    *sorted((DOCS / "presets").glob("*.md")),
    *sorted((DOCS / "guides").glob("*.md")),
]


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda p: p.stem)
def test_the_code_of_a_guide_runs(page: Path, tmp_path: Path) -> None:
    code = tmp_path / f"{page.stem.replace('-', '_')}.py"
    code.write_text("\n".join(python_blocks(page)))
    runpy.run_path(str(code), run_name=code.stem)


def test_every_error_is_documented_under_its_branch() -> None:
    page = DOCS / "reference" / "errors.md"
    concept = (DOCS / "concepts.md").read_text()
    branches = (errors.OmniStageError, errors.ClientError, errors.ServerError)
    for branch in branches[1:]:
        below = {e.__name__ for e in ERRORS if issubclass(e, branch) and e is not branch}
        assert set(first_column(page, f"## `{branch.__name__}`")) == below
    for error in ERRORS:
        assert error.__name__ in page.read_text()
        assert f" {error.__name__}\n" in concept or error is errors.OmniStageError


def test_every_command_and_option_is_documented() -> None:
    text = (DOCS / "reference" / "cli.md").read_text()
    group = typer.main.get_command(app)
    commands = vars(group)["commands"]
    stages = vars(commands.pop("stage"))["commands"]
    commands = {**commands, **{f"stage {name}": stage for name, stage in stages.items()}}
    for name, command in {"": group, **commands}.items():
        assert f"`omnistage {name}`" in text or not name
        for parameter in command.params:
            for option in parameter.opts:
                spelled = option if option.startswith("-") else option.upper()
                assert f"`{spelled}`" in text, f"{name} {option}"
    for field in (*Spoken.__dataclass_fields__, *Report.__struct_fields__, *Made.__struct_fields__):
        assert f"`{field}`" in text


@pytest.mark.parametrize(
    ("page", "message"),
    [(PROTOCOL, m) for m in (*MESSAGES, *INNER)] + [(SERVICES, m) for m in OF_SERVICES],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_every_message_is_documented_field_by_field_in_order(page: Path, message: Any) -> None:
    tag = message.__struct_config__.tag
    heading = f"### `{message.__name__}`" + (f", tag `{tag}`" if tag else "\n")
    assert first_column(page, heading) == list(message.__struct_fields__)


def test_the_protocols_numbers_and_names_are_the_codes() -> None:
    text = PROTOCOL.read_text()
    assert text.startswith(f"# Wire protocol {PROTOCOL_VERSION}\n")
    limits = (wire.MAX_HEADER_BYTES, wire.MAX_BUFFER_BYTES, wire.MAX_BUFFERS, MAX_TOPICS)
    for limit in limits:
        assert f"| {limit:,}" in text
    for name in (*wire.ITEM_BYTES, *FinishReason):
        assert f"`{name}`" in text


def test_the_protocols_example_is_a_message() -> None:
    (example,) = blocks(PROTOCOL, "json")
    header = msgspec.msgpack.encode(json.loads(example))
    message = wire.decode_data(header)
    assert isinstance(message, Data)
    assert wire.encode(message) == header
    first, second = message.updates
    assert (first.start is not None, second.terminal is not None) == (True, True)
    assert first.position == 0 < second.position


def test_every_difference_names_tests_that_exist() -> None:
    text = (DOCS / "differences.md").read_text()
    rows = re.findall(r"^\| (?!difference|---).*\|$", text, re.MULTILINE)
    assert rows
    for row in rows:
        assert "::test_" in row, row
    for path, name in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text):
        assert re.search(rf"^(async )?def {name}\(", (ROOT / path).read_text(), re.MULTILINE), name


def test_every_part_of_the_package_has_its_line() -> None:
    text = (DOCS / "structure.md").read_text()
    package = ROOT / "omnistage"
    for path in package.iterdir():
        if path.suffix == ".py":
            assert f"`omnistage/{path.name}`" in text
        elif (path / "__init__.py").exists():
            assert f"`omnistage/{path.name}/`" in text
    for path in re.findall(r"`((?:\w+/)+(?:\w+\.py)?)`", text):
        assert (ROOT / path).exists() or (package / path).exists(), path


def test_every_metric_is_documented() -> None:
    text = (DOCS / "reference" / "metrics.md").read_text()
    registry = CollectorRegistry()
    Metrics(registry)
    for family in registry.collect():
        assert f"`{family.name}`" in text


def test_every_option_of_submit_is_documented() -> None:
    text = (DOCS / "getting-started.md").read_text()
    for option in list(Pipeline.submit.__kwdefaults__ or {}):
        assert f"| `{option}` |" in text


def test_every_make_target_that_is_named_exists() -> None:
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        named = set(re.findall(r"`make (\w+)`|\$ make (\w+)", page.read_text()))
        assert {name for pair in named for name in pair if name} <= targets, page.name


def test_the_changelog_begins_with_what_is_next_and_knows_this_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    versions = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert versions[:2] == ["Unreleased", omnistage.__version__]
    sections = re.findall(r"^### (.+)$", text, re.MULTILINE)
    assert sections == ["Breaking", "Added", "Changed", "Fixed"] * (len(sections) // 4)

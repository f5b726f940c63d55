"""AR-INV-001 to 003, read off the code: what it must not touch, know or make."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import omnistage

PACKAGE = Path(omnistage.__file__).parent
ENGINE_SIDE = [
    *sorted((PACKAGE / "core").glob("*.py")),
    *sorted((PACKAGE / "worker").glob("*.py")),
    PACKAGE / "stages" / "ar.py",
    PACKAGE / "models" / "talker" / "forcing.py",
]
# By file, because the same name is vLLM's elsewhere.
OURS = {
    ("core/collector.py", "record"): "core/events.py, Record",
    ("core/output_adapter.py", "channel"): "_Channel",
    ("core/output_adapter.py", "request"): "_Open",
    ("core/engine.py", "wired"): "core/wiring.py, WiredConfig",
    ("stages/ar.py", "self._adopted"): "core/wiring.py, WiredConfig",
    ("stages/ar.py", "error"): "errors.py, OmniStageError",
    ("worker/build.py", "taken"): "Taken",
    ("worker/requests.py", "known"): "_Known",
}
# Each is a row of docs/differences.md.
WRITTEN = {
    "scheduler.scheduler_cls": "the scheduler class",
    "parallel.worker_cls": "the worker class",
    "vllm_config.additional_config": "the wiring, and what workers are told",
    "params.extra_args": "a request's record and conditioning",
    "runner.intermediate_tensors": "what vLLM's CPU runner lacks",
    "setattr(output, PAYLOAD_ATTRIBUTE, payload)": "a step's payload, on the runner's output",
    "output.new_token_ids": "ids that were withheld, on a request's last output",
    "engine_outputs.outputs": "without those that are withheld",
}


def written() -> Iterator[tuple[str, str]]:
    """(file, target) of every attribute that is set on something else than ``self``."""
    for path in ENGINE_SIDE:
        for node in ast.walk(ast.parse(path.read_text())):
            sets = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del)
            calls = isinstance(node, ast.Call) and getattr(node.func, "id", "") in {
                "setattr",
                "delattr",
            }
            if (
                (sets and not ast.unparse(node).startswith("self."))
                or calls
                or (sets and ast.unparse(node).count(".") > 1)
            ):
                yield path.relative_to(PACKAGE).as_posix(), ast.unparse(node)


def test_no_attribute_of_vllms_is_written_but_those_that_are_listed() -> None:
    found = [(file, target, target.rpartition(".")[0]) for file, target in written()]
    assert {target for file, target, base in found if (file, base) not in OURS} == set(WRITTEN)
    assert {(file, base) for file, _, base in found if base} >= set(OURS)  # none of them is stale


def test_what_extends_vllms_classes_adds_names_of_its_own_and_sets_none_of_theirs() -> None:
    for name in ("core/scheduler.py", "worker/mixin.py", "worker/cpu.py", "worker/gpu.py"):
        for part in ast.walk(ast.parse((PACKAGE / name).read_text())):
            if not isinstance(part, ast.ClassDef) or part.name == "PayloadOutput":
                continue
            stored = {
                node.attr
                for node in ast.walk(part)
                if isinstance(node, ast.Attribute)
                and isinstance(node.ctx, ast.Store | ast.Del)
                and ast.unparse(node.value) == "self"
            }
            assert {
                attribute for attribute in stored if not attribute.startswith("_omni_")
            } == set()


def test_what_is_written_is_in_the_list_of_differences() -> None:
    page = (PACKAGE.parent / "docs" / "differences.md").read_text()
    words = ["scheduler_cls", "worker_cls", "additional_config", "extra_args", "withheld"]
    words += ["intermediate_tensors", "omnistage_payload"]
    assert [word for word in words if word not in page] == []


def test_there_is_no_request_status_but_vllms() -> None:
    """Ours read one of them and set none; what finishes a request is vLLM's own call."""
    for path in ENGINE_SIDE:
        text = path.read_text()
        assert not re.search(r"class \w+\(.*RequestStatus", text)
        assert not re.search(r"\.status\s*=[^=]", text)
        assert set(re.findall(r"RequestStatus\.(\w+)", text)) <= {"PREEMPTED"}


def test_a_worker_knows_no_endpoint_channel_or_stage() -> None:
    """Nor who subscribes: neither as a name, nor in what it reads, nor in what it imports."""
    strange = re.compile(
        r"endpoint|channel|subscri|topic|socket|zmq|publish|wiring|stage(?!s? that)"
    )
    for path in sorted((PACKAGE / "worker").glob("*.py")):
        tree = ast.parse(path.read_text())
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        names |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        names |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
        imported = {
            alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom | ast.Import)
            for alias in node.names
        }
        modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        own = {m for m in modules if m and m.startswith("omnistage")}
        assert own <= {
            *(m for m in own if m.startswith("omnistage.worker")),
            *("omnistage.errors", "omnistage.request", "omnistage.payload", "omnistage.config"),
        }, path
        assert [n for n in names | imported if strange.search(n.removeprefix("omnistage"))] == []

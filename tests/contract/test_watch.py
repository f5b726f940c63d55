"""The watch over vLLM's names: it has them all, and says what has become of one."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import enum
import hashlib
import inspect
import json
import logging
import math
import mmap
import multiprocessing
import os
import select
import shutil
import signal
import socket
import tempfile
import threading
import time
import traceback
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest
import torch
from anyio import to_thread

import omnistage
from tools import watch

PACKAGE = Path(omnistage.__file__).parent
READERS = [
    *sorted((PACKAGE / "core").glob("*.py")),
    *sorted((PACKAGE / "worker").glob("*.py")),
    PACKAGE / "stages" / "ar.py",
    PACKAGE / "models" / "talker" / "forcing.py",
]
# Whose attributes are not vLLM's.
OTHERS: list[Any] = [
    *("", b"", [], {}, set(), (), 0, BaseException(), enum, hashlib, hashlib.sha256(), math),
    *(asyncio, asyncio.AbstractEventLoop, asyncio.Event, asyncio.Task, contextlib, to_thread),
    *(logging, logging.getLogger(), mmap, mmap.mmap, memoryview(b""), msgspec, msgspec.Struct),
    *(msgspec.msgpack, torch.nn, psutil, psutil.Process, select, select.poll()),
    *(multiprocessing, os, shutil, signal, socket, tempfile, threading, time, weakref),
    *(
        traceback,
        traceback.FrameSummary,
        torch,
        torch.Tensor,
        torch.cuda.streams.Stream,
        torch.nn.Module,
    ),
    *(np, np.ndarray, Path),
]
# What our own model contract asks of a model, and msgspec of its structs.
OWN = {"gpu", "omni_preprocess", "omni_postprocess", "__struct_fields__", "itemsize", "omnistage"}


def trees() -> Iterator[ast.AST]:
    for path in READERS:
        yield ast.parse(path.read_text())


def imported() -> set[str]:
    """What the package imports of vLLM, as the watch writes it."""
    found = set()
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm"):
                found |= {f"{node.module}:{alias.name}" for alias in node.names}
    return found


def own_names() -> set[str]:
    """What the package defines itself."""
    found: set[str] = set()
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found.add(node.target.id)
            elif isinstance(node, ast.Assign):
                found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
            elif (
                isinstance(node, ast.Attribute)
                and isinstance(node.ctx, ast.Store)
                and isinstance(node.value, ast.Name)
                and node.value.id == "self"
            ):
                found.add(node.attr)
    return found


def attributes() -> set[str]:
    """What is read of objects where vLLM's are read."""
    found = set()
    for tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                found.add(node.attr)
            elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "getattr":
                name = node.args[1]
                if isinstance(name, ast.Constant):
                    found.add(str(name.value))
    return found


def test_vllm_is_what_it_was_when_it_was_read() -> None:
    known = json.loads(watch.WATCHED.read_text())
    assert [f"{c.name} {c.what}" for c in watch.changes(watch.look(), known["names"])] == []


def test_every_name_that_is_imported_of_vllm_is_watched() -> None:
    watched = set(watch.names())
    unwatched = {
        name
        for name in imported()
        if name not in watched
        and name.replace(":", ".") not in watched
        and name not in watch.FUNCTIONS
        # The same class under the package that gives it out.
        and not any(w.rpartition(":")[2] == name.rpartition(":")[2] for w in watched)
    }
    assert unwatched == set()


def test_every_attribute_that_is_read_of_vllms_objects_is_watched() -> None:
    watched = {name.rpartition(".")[2] for name in watch.names()}
    unknown = {
        name
        for name in attributes() - own_names() - watched - OWN
        if not any(hasattr(other, name) for other in OTHERS)
    }
    assert unknown == set()


def test_a_name_that_changed_is_said_with_what_has_become_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watch, "FUNCTIONS", {"a": ("f", "g", "h", "new")})
    monkeypatch.setattr(watch, "FIELDS", {"b": ("x",)})
    known = {
        "a.f": {"signature": "(self)", "code": "1"},
        "a.g": {"signature": "(self)", "code": "1"},
        "a.h": {"signature": "(self)", "code": "1"},
        "b": {},
        "b.x": {},
    }
    found = {
        "a.f": {"signature": "(self, more)", "code": "2"},
        "a.g": {"signature": "(self)", "code": "2"},
        "a.h": {"signature": "(self)", "code": "1"},
        "a.new": {"signature": "()", "code": "1"},
        "b": {},
    }
    assert [f"{c.name} {c.what}" for c in watch.changes(found, known)] == [
        "a.f had the signature (self), and has (self, more)",
        "a.g has other code",
        "a.new has not been accepted yet",
        "b.x is gone",
    ]


def with_comments(x: int) -> int:
    """Add."""
    return x + 1  # really


def test_comments_and_docstrings_are_not_code(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = "def with_comments(x: int) -> int:\n    return x + 1\n"
    written = watch._read(with_comments)
    assert written["signature"] == "(x: int) -> int"
    monkeypatch.setattr(inspect, "getsource", lambda _: plain)
    assert watch._read(with_comments) == written
    monkeypatch.setattr(inspect, "getsource", lambda _: plain.replace("1", "2"))
    assert watch._read(with_comments)["code"] != written["code"]

"""What a process removes of those that were killed before it, and what it must not touch."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from omnistage.transport import endpoints
from omnistage.transport.endpoints import Endpoints


@pytest.fixture
def parent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with room in its path for sockets."""
    return tmp_path_factory.mktemp("t")


def left_by_a_killed_process(directory: Path) -> None:
    directory.mkdir()
    (directory / endpoints._LOCK).touch()
    (directory / "socket").touch()


def test_what_a_killed_process_left_is_removed(parent: Path) -> None:
    left_by_a_killed_process(parent / "omni-dead")
    with Endpoints(parent) as living, Endpoints(parent):
        assert not (parent / "omni-dead").exists()
        assert living.directory.is_dir()
    assert not list(parent.iterdir())


def test_nothing_else_is(parent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = parent / "omni-project"
    mine.mkdir()
    (mine / "lock").touch()
    left_by_a_killed_process(tmp_path / "pointed-at")
    (parent / "omni-link").symlink_to(tmp_path / "pointed-at")
    (parent / "omni-file").touch()
    lured = parent / "omni-lured"
    lured.mkdir()
    (lured / endpoints._LOCK).symlink_to(mine / "lock")
    with Endpoints(parent):
        assert (mine / "lock").exists()
        assert (tmp_path / "pointed-at" / "socket").exists()
        assert (parent / "omni-file").exists()
        assert lured.exists()
    left_by_a_killed_process(parent / "omni-theirs")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with Endpoints(parent):
        assert (parent / "omni-theirs" / "socket").exists()

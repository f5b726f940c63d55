"""``omnistage keys`` as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

from omnistage.transport.keys import Keys
from tests.cli.sandbox import COMMAND, Sandbox


def test_keys_are_made_once_and_clients_are_added(tmp_path: Path) -> None:
    sandbox = Sandbox(tmp_path)
    directory = sandbox.output / "keys"
    first = sandbox.run(COMMAND, "keys", "keys")
    assert (first.code, first.stdout) == (0, "")
    assert "needs server.key and clients/default.key_secret of it" in first.stderr
    again = sandbox.run(COMMAND, "keys", "keys")
    assert again.code == 2
    assert "keys/server.key exists and is not overwritten" in again.stderr
    added = sandbox.run(COMMAND, "keys", "keys", "--client", "decoder-1", "--json")
    assert added.code == 0
    assert json.loads(added.stdout) == {
        "directory": "keys",
        "client": "decoder-1",
        "files": ["keys/clients/decoder-1.key", "keys/clients/decoder-1.key_secret"],
        "copy": ["server.key", "clients/decoder-1.key_secret"],
    }
    keys = Keys.load(directory, "decoder-1")
    secrets = [keys.server_pair()[1], keys.client_pair()[1]]
    for done in (first, again, added):
        assert not any(secret.decode() in done.stdout + done.stderr for secret in secrets)
    bad = sandbox.run(COMMAND, "keys", "keys", "--client", "a/b")
    assert bad.code == 2
    assert "client's name" in bad.stderr
    assert sandbox.run(COMMAND, "keys", "new", "--client", "a").code == 2
    assert not (sandbox.output / "new").exists()

"""Key files: what is made, for whom, and what is refused."""

from __future__ import annotations

import os
import pickle
import resource
import shutil
import stat
from pathlib import Path

import pytest
import zmq.auth

from omnistage.errors import ConfigError
from omnistage.transport.endpoints import Endpoints, check_bind
from omnistage.transport.keys import Keys, add_client, load_keys, make_keys
from omnistage.transport.publisher import PublisherConfig


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    make_keys(tmp_path / "keys")
    return tmp_path / "keys"


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_what_is_made_is_private_whatever_the_umask_and_zeromqs_own_format(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        files = make_keys(tmp_path / "keys")
    finally:
        os.umask(before)
    names = ["server.key", "server.key_secret", "clients/default.key", "clients/default.key_secret"]
    assert files == [tmp_path / "keys" / name for name in names]
    assert {mode(file) for file in files} == {0o600}
    assert mode(tmp_path / "keys") == mode(tmp_path / "keys" / "clients") == 0o700
    for public, secret in (files[:2], files[2:]):
        assert zmq.auth.load_certificate(public)[1] is None
        pair = zmq.auth.load_certificate(secret)
        assert pair[1] is not None
        assert zmq.curve_public(pair[1]) == pair[0] == zmq.auth.load_certificate(public)[0]


def test_no_key_is_ever_overwritten(directory: Path) -> None:
    before = {file: file.read_bytes() for file in directory.rglob("*.key*")}
    with pytest.raises(ConfigError, match=r"server\.key exists and is not overwritten"):
        make_keys(directory)
    with pytest.raises(ConfigError, match=r"default\.key exists and is not overwritten"):
        add_client(directory, "default")
    (directory / "server.key").unlink()
    with pytest.raises(ConfigError, match=r"server\.key_secret exists"):
        make_keys(directory)
    del before[directory / "server.key"]
    assert before == {file: file.read_bytes() for file in directory.rglob("*.key*")}


def test_a_directory_that_is_open_to_others_gets_no_keys(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    with pytest.raises(ConfigError, match="chmod 700"):
        make_keys(tmp_path / "open")
    assert list((tmp_path / "open").iterdir()) == []


@pytest.mark.parametrize("where", ["no/such", "a file"])
def test_where_no_directory_can_be_made_a_sentence_says_so(tmp_path: Path, where: str) -> None:
    (tmp_path / "a file").touch()
    with pytest.raises(ConfigError, match="no keys were made"):
        make_keys(tmp_path / where)


def test_a_client_is_added_to_keys_that_are_there(directory: Path, tmp_path: Path) -> None:
    add_client(directory, "decoder-1")
    keys = Keys.load(directory, "decoder-1")
    assert keys.admits(keys.client_pair()[0])
    assert keys.client_pair() != Keys.load(directory).client_pair()
    with pytest.raises(ConfigError, match="omnistage keys"):
        add_client(tmp_path / "none", "decoder-1")
    for name in ("", "../x", ".hidden", "a/b"):
        with pytest.raises(ConfigError, match="client's name"):
            add_client(directory, name)


def test_a_host_that_connects_needs_two_files(directory: Path, tmp_path: Path) -> None:
    add_client(directory, "decoder-1")
    here = tmp_path / "copied"
    (here / "clients").mkdir(parents=True)
    shutil.copy(directory / "server.key", here)
    with pytest.raises(ConfigError, match="holds no secret key"):
        Keys.load(here)
    shutil.copy(directory / "clients" / "decoder-1.key_secret", here / "clients")
    keys = Keys.load(here)
    assert (keys.client, keys.can_listen) == ("decoder-1", False)
    with pytest.raises(ConfigError, match=r"no server\.key_secret"):
        check_bind("tcp://127.0.0.1:0", keys)
    shutil.copy(directory / "clients" / "default.key_secret", here / "clients" / "b.key_secret")
    with pytest.raises(ConfigError, match="several clients, b, decoder-1"):
        Keys.load(here)


def test_a_host_that_only_listens_needs_no_client(directory: Path) -> None:
    (directory / "clients" / "default.key_secret").unlink()
    keys = Keys.load(directory)
    assert (keys.client, keys.can_listen) == ("", True)
    with pytest.raises(ConfigError, match=r"clients/NAME\.key_secret"):
        keys.client_pair()


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("server.key", None, "cannot be used as a key"),
        ("server.key", "nothing", "cannot be used as a key"),
        ("server.key", 'public-key = "short"', "no pair"),
        ("clients/default.key_secret", f'public-key = "{"a" * 40}"', "holds no secret key"),
        ("clients/default.key_secret", f'public-key = "{"a" * 40}"\nsecret-key = "b"', "as a key"),
    ],
)
def test_a_file_that_is_no_key_is_named(
    directory: Path, file: str, text: str | None, words: str
) -> None:
    if text is None:
        (directory / file).unlink()
    else:
        (directory / file).write_text(text)
    with pytest.raises(ConfigError, match=words) as error:
        Keys.load(directory)
    assert file in str(error.value)


def test_a_secret_that_everybody_may_read_is_refused(directory: Path) -> None:
    secret = directory / "clients" / "default.key_secret"
    secret.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        Keys.load(directory)


def test_a_client_that_is_missing_is_named(directory: Path) -> None:
    with pytest.raises(ConfigError, match=r"nobody\.key_secret"):
        Keys.load(directory, "nobody")


def test_a_broken_file_keeps_no_other_client_out(directory: Path) -> None:
    (directory / "clients" / "a.key").write_text("nothing")
    keys = Keys.load(directory)
    assert keys.admits(keys.client_pair()[0])
    assert not keys.admits(keys.server_public())


def test_while_files_run_out_nobody_is_admitted_and_nothing_is_raised(directory: Path) -> None:
    keys = Keys.load(directory)
    public = keys.client_pair()[0]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        admitted = keys.admits(public)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert not admitted
    assert keys.admits(public)


def test_what_travels_holds_no_secret(directory: Path) -> None:
    keys = Keys.load(directory)
    config = PublisherConfig(bind="ipc", directory="d", control="c", owner_pid=1, keys=keys)
    assert pickle.loads(pickle.dumps(config)) == config  # noqa: S301
    secrets = [keys.server_pair()[1], keys.client_pair()[1]]
    for text in (pickle.dumps(config), repr(config).encode(), str(keys).encode()):
        assert not any(secret in text for secret in secrets)


def test_keys_that_went_bad_leave_no_directory_of_sockets(
    directory: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    short = tmp_path_factory.mktemp("s")  # for the sockets' paths
    keys = Keys.load(directory)
    (directory / "server.key").write_text("nothing")
    with pytest.raises(ConfigError, match=r"server\.key"):
        Endpoints(short, keys=keys)
    assert list(short.iterdir()) == []


def test_no_directory_means_no_keys() -> None:
    assert load_keys(None) is None


@pytest.mark.parametrize("bind", ["tcp://192.0.2.2:0", "tcp://[fd00::2]:5", "tcp://10.1.2.3:5555"])
def test_another_address_than_loopback_needs_keys(directory: Path, bind: str) -> None:
    with pytest.raises(ConfigError, match="omnistage keys"):
        check_bind(bind)
    assert check_bind(bind, Keys.load(directory)) == bind


@pytest.mark.parametrize("bind", ["tcp://0.0.0.0:5", "tcp://*:5", "tcp://[::]:5", "tcp://host:5"])
def test_with_keys_it_must_still_be_one_address(directory: Path, bind: str) -> None:
    with pytest.raises(ConfigError, match="one address of this host"):
        check_bind(bind, Keys.load(directory))


@pytest.mark.parametrize("bind", ["ipc", "tcp://127.0.0.1:0", "tcp://[::1]:5", "tcp://localhost:5"])
def test_loopback_needs_none(bind: str) -> None:
    assert check_bind(bind) == bind

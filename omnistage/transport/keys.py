"""CURVE keys on disk: made once, copied to the hosts that need them, read where a socket is made.

Secrets stay in their files: what travels between processes is where those are.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final

import msgspec
import zmq
from zmq.auth import load_certificate

from omnistage.errors import ConfigError
from omnistage.request import check_name

DEFAULT_CLIENT: Final = "default"


class Keys(msgspec.Struct, frozen=True):
    """Where a host's keys are. It holds no secret, so that it may be logged, pickled and sent.

    Make it with :meth:`load`, which looks whether the keys are there and usable.

    Args:
        directory: Absolute path of the directory.
        client: Whose key this host connects with; empty if it has none and only listens.
    """

    directory: str
    client: str

    @classmethod
    def load(cls, directory: str | Path, client: str | None = None) -> Keys:
        """The keys in ``directory``.

        Args:
            directory: What ``omnistage keys`` made, or the files of it that this host needs.
            client: Whose key to connect with; None takes ``default``, or the only one there is.

        Raises:
            ConfigError: A file that is missing, is no key, or is a secret that everybody may read.
        """
        keys = cls(str(Path(directory).absolute()), _client(Path(directory), client))
        _public(keys.server)
        if keys.client:
            keys.client_pair()
        elif not keys.can_listen:
            raise ConfigError(
                f"{directory} holds no secret key; copy clients/NAME.key_secret there to connect"
            )
        return keys

    @property
    def server(self) -> Path:
        """The file of the listening side's public key."""
        return Path(self.directory, "server.key")

    @property
    def can_listen(self) -> bool:
        """Whether the listening side's secret key is here."""
        return _secret_of(self.server).exists()

    def server_public(self) -> bytes:
        """The listening side's public key."""
        return _public(self.server)

    def server_pair(self) -> tuple[bytes, bytes]:
        """The listening side's public and secret key."""
        return _pair(_secret_of(self.server))

    def client_pair(self) -> tuple[bytes, bytes]:
        """Public and secret key of this host's client."""
        if not self.client:
            raise ConfigError(f"{self.directory} has no clients/NAME.key_secret to connect with")
        return _pair(_secret_of(_clients(self.directory) / f"{self.client}.key"))

    def admits(self, public: bytes) -> bool:
        """Whether a client may connect: its public key is in ``clients``, as of now.

        Never raises: what cannot be read, for instance while files run out, admits nobody.
        """
        try:
            return any(_is_key(path, public) for path in _clients(self.directory).glob("*.key"))
        except OSError:
            return False


def load_keys(directory: str | Path | None, client: str | None = None) -> Keys | None:
    """As :meth:`Keys.load`, and None for no directory.

    Raises:
        ConfigError: As there.
    """
    return None if directory is None else Keys.load(directory, client)


def make_keys(directory: Path) -> list[Path]:
    """Make a directory with the listening side's keys and those of a client named ``default``.

    Returns:
        The files.

    Raises:
        ConfigError: There are keys, or the directory cannot be made or is open to others.
    """
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
        if stat.S_IMODE(directory.stat().st_mode) & 0o077:
            raise ConfigError(f"{directory} is open to others; chmod 700 it, or name a new one")
        return [*_write_pair(directory / "server.key"), *add_client(directory, DEFAULT_CLIENT)]
    except OSError as error:
        raise ConfigError(f"no keys were made: {error}") from error


def add_client(directory: Path, name: str) -> list[Path]:
    """Add a client's keys to a directory that has the listening side's.

    Returns:
        The files.

    Raises:
        ConfigError: The client has keys, there are no others, or the name cannot be one.
    """
    check_name(name, "a client's name")
    if not _secret_of(directory / "server.key").exists():
        raise ConfigError(f"{directory} has no server.key_secret; make it with `omnistage keys`")
    try:
        _clients(directory).mkdir(mode=0o700, exist_ok=True)
        return _write_pair(_clients(directory) / f"{name}.key")
    except OSError as error:
        raise ConfigError(f"no keys were made: {error}") from error


def _client(directory: Path, name: str | None) -> str:
    if name is not None:
        return check_name(name, "a client's name")
    found = sorted(path.stem for path in _clients(directory).glob("*.key_secret"))
    if len(found) > 1 and DEFAULT_CLIENT not in found:
        raise ConfigError(f"{directory} has keys of several clients, {', '.join(found)}; name one")
    return DEFAULT_CLIENT if DEFAULT_CLIENT in found else "".join(found)


def _clients(directory: str | Path) -> Path:
    return Path(directory, "clients")


def _secret_of(public: Path) -> Path:
    return public.with_suffix(".key_secret")


def _write_pair(public_file: Path) -> list[Path]:
    """Write a pair in the files of ZeroMQ's certificate format; both are new, or none is made."""
    secret_file = _secret_of(public_file)
    for file in (public_file, secret_file):
        if file.exists():
            raise ConfigError(f"{file} exists and is not overwritten")
    public, secret = (key.decode() for key in zmq.curve_keypair())
    text = f'curve\n    public-key = "{public}"\n'
    _write_new(secret_file, f'{text}    secret-key = "{secret}"\n')
    _write_new(public_file, text)
    return [public_file, secret_file]


def _write_new(file: Path, text: str) -> None:
    # Private from its first moment on, and never one that somebody else put there meanwhile.
    fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(fd, "w") as stream:
        stream.write(text)


def _read(file: Path) -> tuple[bytes, bytes | None]:
    try:
        public, secret = load_certificate(file)
        if len(public) != 40 or (secret is not None and zmq.curve_public(secret) != public):
            raise ValueError("the keys in it are no pair")
    except (OSError, ValueError, zmq.ZMQError) as error:
        raise ConfigError(f"{file} cannot be used as a key: {error}") from error
    return public, secret


def _public(file: Path) -> bytes:
    return _read(file)[0]


def _pair(file: Path) -> tuple[bytes, bytes]:
    public, secret = _read(file)
    if secret is None:
        raise ConfigError(f"{file} holds no secret key")
    if file.stat().st_mode & stat.S_IROTH:
        raise ConfigError(f"{file} is a secret that everybody may read; chmod 600 it")
    return public, secret


def _is_key(file: Path, public: bytes) -> bool:
    try:
        return _public(file) == public
    except ConfigError:  # a file that is no key keeps nobody else out
        return False

"""The files of a published checkpoint, looked at without loading its weights.

Knows the formats that Hugging Face's libraries write: ``config.json``, ``tokenizer.json`` and
safetensors; it knows no preset.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from omnistage.errors import ConfigError

SMALL_FILES: Final = ("*.json", "*.txt", "*.model", "*.jinja")
"""What a hub id's checkpoint is looked at by; its weights are vLLM's to fetch."""

_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_MAX_HEADER: Final = 100_000_000  # as the safetensors library has it


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _BaseModel(msgspec.Struct, frozen=True):
    vocab: dict[str, int] | list[Any] = msgspec.field(default_factory=dict)


class _TokenizerFile(msgspec.Struct):
    added_tokens: list[_AddedToken] = msgspec.field(default_factory=list)
    model: _BaseModel = _BaseModel()


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model directory, or what is here of a hub id's.

    Args:
        where: What the user called it, a directory or a hub id.
        directory: Where its small files are.
        local: Whether the weights must be there too.
    """

    where: str
    directory: Path
    local: bool

    def config(self) -> dict[str, Any]:
        """Its ``config.json``.

        Raises:
            ConfigError: There is none, or it is no JSON object.
        """
        return self.json("config.json")

    def json(self, name: str) -> dict[str, Any]:
        """A JSON file of it.

        Raises:
            ConfigError: There is none, or it is no JSON object.
        """
        try:
            found = msgspec.json.decode((self.directory / name).read_bytes())
        except FileNotFoundError as error:
            raise ConfigError(f"{self.where} has no {name}; it is no model directory") from error
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{name} of {self.where} cannot be read: {error}") from error
        if not isinstance(found, dict):
            raise ConfigError(f"{name} of {self.where} holds no JSON object")
        return found

    def has(self, name: str) -> bool:
        """Whether it has a file of that name."""
        return (self.directory / name).is_file()

    def tokens(self) -> dict[str, int]:
        """The ids of its tokenizer's tokens, by name.

        Raises:
            ConfigError: It has no ``tokenizer.json``, or that is none.
        """
        path = self.directory / "tokenizer.json"
        try:
            file = msgspec.json.decode(path.read_bytes(), type=_TokenizerFile)
        except FileNotFoundError as error:
            raise ConfigError(
                f"{self.where} has no tokenizer.json, which its prompts are made with; copy the "
                "tokenizer's files there"
            ) from error
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"tokenizer.json of {self.where} cannot be read: {error}") from error
        vocab = file.model.vocab
        names = dict(vocab) if isinstance(vocab, dict) else {}
        names.update((token.content, token.id) for token in file.added_tokens)
        return names

    def weight_bytes(self) -> int | None:
        """The size of its weights, each file's length checked against its own header.

        Returns:
            Bytes; None where they are not here, but on the hub.

        Raises:
            ConfigError: There are none, one that the index names is missing, or one is truncated.
        """
        index = "model.safetensors.index.json"
        if self.has(index):
            names = sorted(set(self.json(index).get("weight_map", {}).values()))
            if not names:
                raise ConfigError(f"{index} of {self.where} names no file")
        else:
            names = [path.name for path in sorted(self.directory.glob("*.safetensors"))]
        paths = [self.directory / str(name) for name in names]
        if not self.local and not all(path.is_file() for path in paths):
            return None
        if not paths:
            if not self.local:
                return None
            if others := [*self.directory.glob("*.bin"), *self.directory.glob("*.gguf")]:
                return sum(path.stat().st_size for path in others)
            raise ConfigError(f"{self.where} has no weights: there is no *.safetensors file")
        return sum(_checked_size(path) for path in paths)


def is_hub_id(where: str) -> bool:
    """Whether it can be the name of a model on a hub: an owner and a name."""
    return _HUB_ID.fullmatch(where) is not None


def open_checkpoint(where: str, *, revision: str | None = None) -> Checkpoint:
    """Look at a checkpoint; the small files of a hub id's are fetched, or found in the cache.

    Args:
        where: A directory or a hub id.
        revision: Of a hub id.

    Raises:
        ConfigError: There is none, or it could not be fetched.
    """
    directory = Path(where).expanduser()
    if directory.is_dir():
        return Checkpoint(where, directory, local=True)
    if directory.exists() or not is_hub_id(where):
        raise ConfigError(f"{where} is neither a model directory nor a hub id (OWNER/NAME)")
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    except ImportError as error:
        raise ConfigError(
            f"{where} is no directory here, and fetching it needs {error.name}, which vLLM brings: "
            "install omnistage[cpu] or omnistage[gpu]"
        ) from error
    try:
        # The type of its result depends on arguments that are not given.
        found: Any = snapshot_download(where, revision=revision, allow_patterns=list(SMALL_FILES))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        raise ConfigError(
            f"{where} is neither a directory here nor in the hub's cache, and could not be "
            f"fetched: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
        ) from error
    return Checkpoint(where, Path(found), local=False)


def _checked_size(path: Path) -> int:
    """The length of a safetensors file, if it is what its header says.

    The format: 8 bytes with the header's length, the header (JSON), and the tensors' bytes.

    Raises:
        ConfigError: It is missing, no such file, or shorter or longer than it should be.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(8)
            (length,) = struct.unpack("<Q", head) if len(head) == 8 else (0,)
            if not 0 < length <= min(_MAX_HEADER, size):
                raise ConfigError(f"{path} is no safetensors file, or was not copied to its end")
            header = msgspec.json.decode(file.read(length))
            ends = [
                entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"
            ]
    except FileNotFoundError as error:
        raise ConfigError(f"{path} is missing; the checkpoint was not copied whole") from error
    except (OSError, msgspec.DecodeError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} is no safetensors file: {error}") from error
    wanted = 8 + length + max(ends, default=0)
    if size != wanted:
        raise ConfigError(
            f"{path} has {size} bytes, its header says {wanted}; it was not copied to its end"
        )
    return size

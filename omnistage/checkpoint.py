"""The files of a published model, in a directory or on a hub, looked at without loading weights.

Knows the formats that Hugging Face's libraries write: ``config.json``, ``tokenizer.json`` and
safetensors; it knows no preset, no codec and no torch.
"""

from __future__ import annotations

import re
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from omnistage.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

_INDEX: Final = "model.safetensors.index.json"
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


class Checkpoint:
    """A published model's files: a directory's, or those of a hub id, fetched one by one.

    Args:
        where: A directory, or a hub id, OWNER/NAME.
        label: Names the kind of model in errors.
        revision: Of a hub id.

    Raises:
        ConfigError: It is neither.
    """

    def __init__(self, where: str | Path, label: str, *, revision: str | None = None) -> None:
        self.where = str(where)
        self.label = label
        self._revision = revision
        self._tokens: dict[str, int] | None = None
        directory = Path(where).expanduser()
        self.directory = directory if directory.is_dir() else None
        if self.directory is None and (directory.exists() or not is_hub_id(self.where)):
            raise self.failure("it is neither a directory nor a hub id (OWNER/NAME)")

    def find(self, name: str) -> Path | None:
        """The path of a file, or None if the model has none of that name.

        Raises:
            ConfigError: There is no such model, or it cannot be fetched.
        """
        if self.directory is not None:
            path = self.directory / name
            return path if path.is_file() else None
        try:
            from huggingface_hub import hf_hub_download, try_to_load_from_cache
            from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
        except ImportError as error:
            raise self.failure(
                f"it is no directory here, and fetching it needs {error.name}, which vLLM brings"
            ) from error
        try:
            return Path(hf_hub_download(self.where, name, revision=self._revision))
        except LocalEntryNotFoundError as error:  # offline, or the hub did not answer
            known = try_to_load_from_cache(self.where, "config.json", revision=self._revision)
            if isinstance(known, str) and name != "config.json":
                return None
            raise self.failure(
                f"it is no directory here, {name} is not in the hub's cache, and it could not be "
                f"fetched: {error}"
            ) from error
        except EntryNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise self.failure(error) from error

    def file(self, name: str) -> Path:
        """The path of a file that every such model has.

        Raises:
            ConfigError: It is not there.
        """
        path = self.find(name)
        if path is None:
            raise self.failure(f"it has no {name}{self._here}")
        return path

    def json(self, name: str) -> dict[str, Any]:
        """What a JSON file of it says.

        Raises:
            ConfigError: It is not there, or no JSON object.
        """
        try:
            found = msgspec.json.decode(self.file(name).read_bytes())
        except (OSError, ValueError) as error:
            raise self.failure(f"its {name} cannot be read: {error}") from error
        if not isinstance(found, dict):
            raise self.failure(f"its {name} is no JSON object")
        return found

    def config(self) -> dict[str, Any]:
        """What config.json says.

        Raises:
            ConfigError: It is not there, or no JSON object.
        """
        return self.json("config.json")

    def tokens(self) -> Mapping[str, int]:
        """The ids of its tokenizer's tokens, by name; read once, and kept.

        Raises:
            ConfigError: It has no ``tokenizer.json``, or that is none.
        """
        if self._tokens is not None:
            return self._tokens
        path = self.find("tokenizer.json")
        if path is None:
            raise self.failure(
                f"it has no tokenizer.json{self._here}, which prompts are made with; copy the "
                "tokenizer's files there"
            )
        try:
            file = msgspec.json.decode(path.read_bytes(), type=_TokenizerFile)
        except (OSError, ValueError) as error:
            raise self.failure(f"its tokenizer.json cannot be read: {error}") from error
        vocab = file.model.vocab
        names = dict(vocab) if isinstance(vocab, dict) else {}
        names.update((token.content, token.id) for token in file.added_tokens)
        self._tokens = names
        return names

    def weight_bytes(self) -> int | None:
        """The size of its weights; each file of a directory is compared with its own header.

        Returns:
            Bytes; None where a hub id's files do not say it.

        Raises:
            ConfigError: There are none, one that the index names is missing, or one is truncated.
        """
        index = self.json(_INDEX) if self.find(_INDEX) is not None else None
        if self.directory is None:
            about = (index or {}).get("metadata")
            size = about.get("total_size") if isinstance(about, dict) else None
            return size if isinstance(size, int) else None
        if index is not None:
            of_tensor = index.get("weight_map")
            if not isinstance(of_tensor, dict):
                raise self.failure(f"{_INDEX} has no weight_map")
            names = {str(name) for name in of_tensor.values()}
            paths = [self.directory / name for name in sorted(names)]
        else:
            paths = sorted(self.directory.glob("*.safetensors"))
        if paths:
            return sum(map(self._checked_size, paths))
        if others := [*self.directory.glob("*.bin"), *self.directory.glob("*.gguf")]:
            return sum(path.stat().st_size for path in others)
        raise self.failure("it has no weights: there is no *.safetensors file")

    @property
    def _here(self) -> str:
        return "" if self.directory is not None else " in the hub's cache"

    def failure(self, reason: object) -> ConfigError:
        """The error that says what could not be loaded and why."""
        text = " ".join(str(reason).split())
        return ConfigError(f"no {self.label} model could be loaded from {self.where}: {text[:500]}")

    def _checked_size(self, path: Path) -> int:
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
                    raise self.failure(f"{path.name} was not copied to its end")
                header = msgspec.json.decode(file.read(length))
                header.pop("__metadata__", None)
                ends = [entry["data_offsets"][1] for entry in header.values()]
                wanted = 8 + length + max(ends, default=0)
        except FileNotFoundError as error:
            raise self.failure(f"{path.name} is missing") from error
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise self.failure(f"{path.name} is no safetensors file: {error}") from error
        if size != wanted:
            raise self.failure(
                f"{path.name} has {size} bytes, its header says {wanted}: it was not copied to its "
                "end"
            )
        return size


def is_hub_id(where: str) -> bool:
    """Whether it can be the name of a model on a hub: an owner and a name."""
    return _HUB_ID.fullmatch(where) is not None

"""What the codec decoders have in common: how they load, where they run, and how they batch.

A codec is a small class on top of this one, with its declaration and one call of its library.
torch and the codec's library are imported when a decoder is made.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from omnistage.checkpoint import Checkpoint
from omnistage.errors import ConfigError, DecoderError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    import torch

    from omnistage.decoders.base import Declaration
    from omnistage.request import Codes, Pcm

DTYPES = ("float32", "bfloat16", "float16")


class TorchCodec(ABC):
    """A torch model behind the :class:`~omnistage.decoders.base.Decoder` protocol.

    Args:
        model: The model in evaluation mode, on its device.
        declaration: What it declares.
        max_frames: The most frames, padding included, of one call of the model; more windows are
            decoded in several calls. A window that is longer by itself has a call of its own.

    Attributes:
        extra: The extra of omnistage that installs what it needs.
        packages: What that is, as imported.
        label: What the models are called.
        declaration: What it declares.

    Raises:
        ConfigError: ``max_frames`` is not positive.
    """

    extra: ClassVar[str] = "codecs"
    packages: ClassVar[tuple[str, ...]] = ("torch", "transformers")
    label: ClassVar[str]

    def __init__(
        self, model: Any, declaration: Declaration, *, max_frames: int | None = None
    ) -> None:
        if max_frames is not None and max_frames < 1:
            raise ConfigError(f"max_frames must be positive, got {max_frames}")
        self._model = model
        self._device = next(model.parameters()).device
        self._max_frames = max_frames
        self.declaration = declaration
        self.sample_rate = declaration.sample_rate
        self.hop_length = declaration.hop_length
        self.codebooks = declaration.codebooks
        self.codebook_size = declaration.codebook_size
        self.left_context = declaration.left_context
        self.right_context = declaration.right_context
        self.deterministic = declaration.deterministic

    @classmethod
    @abstractmethod
    def declare(cls, config: Mapping[str, Any], /, *args: Any, **options: Any) -> Declaration:
        """What a decoder of a model would declare; loads nothing.

        Args:
            config: The contents of the model's config.json.
            args: None; they let a codec name its options.
            options: The codec's own, as in :meth:`from_pretrained`.

        Raises:
            ConfigError: The model is of another architecture, or this decoder cannot stream it.
        """

    @classmethod
    def from_pretrained(
        cls,
        where: str | Path,
        *,
        device: str = "cpu",
        dtype: str = "float32",
        max_frames: int | None = None,
        **options: Any,
    ) -> Self:
        """A decoder with trained weights; the halves of the model that only encode are let go.

        Args:
            where: A directory, or the hub's name of a model.
            device: Where it runs, as torch names it: "cpu", "cuda", "cuda:1".
            dtype: Of the weights: "float32", "bfloat16" or "float16". What is said about exactness
                holds for float32.
            max_frames: As for the class.
            options: The codec's own, as in :meth:`declare`.

        Raises:
            ConfigError: A package, the model or the device is not there, the weights are cut off or
                not all of them, or as in :meth:`declare`.
        """
        cls._libraries()
        checkpoint = Checkpoint(where, cls.label)
        config = checkpoint.config()
        declaration = cls.declare(config, **options)
        place = torch_device(device)
        try:
            model = cls._load(checkpoint, config, torch_dtype(dtype))
        except ConfigError:
            raise
        except Exception as error:
            # transformers, safetensors and torch have an exception each for a broken file.
            raise checkpoint.failure(error) from error
        return cls(model.eval().to(place), declaration, max_frames=max_frames)

    @classmethod
    @abstractmethod
    def _load(cls, checkpoint: Checkpoint, config: Mapping[str, Any], dtype: torch.dtype) -> Any:
        """The model, on the CPU, without the halves that are not needed.

        Raises:
            ConfigError: Weights are missing.
            Exception: A file is broken.
        """

    @classmethod
    def _libraries(cls) -> None:
        for name in cls.packages:
            try:
                importlib.import_module(name)
            except ImportError as error:
                raise ConfigError(
                    f"{cls.__name__} needs {error.name}: install omnistage[{cls.extra}]"
                ) from error

    def decode(self, windows: Sequence[Codes]) -> list[Pcm]:
        """Decode windows of codes, each [frames, codebooks], into [frames * hop_length] samples.

        Raises:
            DecoderError: A window has no frames.
        """
        lengths = [len(window) for window in windows]
        if 0 in lengths:
            raise DecoderError(f"{type(self).__name__} cannot decode a window without frames")
        audio: list[Pcm] = [np.zeros(0, np.float32)] * len(windows)
        for batch in self._batches(lengths):
            for index, pcm in zip(batch, self._decode([windows[i] for i in batch]), strict=True):
                audio[index] = pcm
        return audio

    def _padding_group(self, length: int) -> int:
        """Windows of one group may be padded to one length; by default only equally long ones.

        Where a codec looks ahead, the padding would be heard in the window's last frames.
        """
        return length

    def _batches(self, lengths: Sequence[int]) -> Iterator[list[int]]:
        groups: dict[int, list[int]] = {}
        # Longest first: a call's size is known by its first window, and like goes with like.
        for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
            groups.setdefault(self._padding_group(lengths[index]), []).append(index)
        for group in groups.values():
            most = len(group)
            while group:
                if self._max_frames is not None:
                    most = max(1, self._max_frames // lengths[group[0]])
                yield group[:most]
                group = group[most:]

    def _decode(self, windows: list[Codes]) -> list[Pcm]:
        import torch

        longest = max(len(window) for window in windows)
        codes = np.zeros((len(windows), self.codebooks, longest), np.int64)
        for row, window in zip(codes, windows, strict=True):
            row[:, : len(window)] = window.T
        with torch.inference_mode():
            samples = self._forward(torch.from_numpy(codes).to(self._device))
            audio = samples.float().cpu().numpy()
        # Some codecs lose the end of a call, the same number of samples whatever its length. Only
        # the end of a clip is ever heard so; everywhere else the window's lookahead lies there.
        lost = max(0, longest * self.hop_length - audio.shape[1])
        cut = []
        for row, window in zip(audio, windows, strict=True):
            expected = len(window) * self.hop_length
            kept = row[: max(0, expected - lost)]
            cut.append(np.pad(kept, (0, expected - len(kept))) if lost else kept)
        return cut

    @abstractmethod
    def _forward(self, codes: torch.Tensor) -> torch.Tensor:
        """The model's call.

        Args:
            codes: int64, [windows, codebooks, frames].

        Returns:
            Samples [windows, frames * hop_length], or fewer where the codec loses some at the end.
        """


def torch_device(name: str) -> torch.device:
    """A device of torch.

    Raises:
        ConfigError: It is not there.
    """
    import torch

    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except Exception as error:
        # Every backend of torch has its own exception for not being there.
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"device {name!r} is not available to torch: {reason}") from error
    return device


def torch_dtype(name: str) -> torch.dtype:
    """A dtype of torch.

    Raises:
        ConfigError: Weights cannot have it.
    """
    import torch

    if name not in DTYPES:
        raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}, got {name!r}")
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)  # noqa: S101 for the type checker
    return dtype

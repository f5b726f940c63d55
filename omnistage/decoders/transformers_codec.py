"""Codecs of transformers: seeded weights from a configuration, trained ones from a checkpoint."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, ClassVar, Self

from omnistage.decoders.torch_codec import TorchCodec, torch_device, torch_dtype
from omnistage.decoders.values import check_architecture
from omnistage.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from transformers import PreTrainedConfig

    from omnistage.checkpoint import Checkpoint


class TransformersCodec(TorchCodec):
    """A codec of transformers.

    Attributes:
        model_type: What config.json calls the architecture.
        library: The module that has the two classes.
        model_class: The model's class.
        config_class: The configuration's class.
        unused: Modules that decoding does not use; they are not kept.
    """

    model_type: ClassVar[str]
    library: ClassVar[str] = "transformers"
    model_class: ClassVar[str]
    config_class: ClassVar[str]
    unused: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def from_config(
        cls,
        config: PreTrainedConfig | None = None,
        *,
        seed: int = 0,
        device: str = "cpu",
        dtype: str = "float32",
        max_frames: int | None = None,
        **options: Any,
    ) -> Self:
        """A decoder with random weights, equal for equal seeds.

        Args:
            config: The architecture; without one, transformers' default.
            seed: Where the weights come from; torch's global generator is left as it was.
            device: As in :meth:`from_pretrained`.
            dtype: As in :meth:`from_pretrained`.
            max_frames: As for the class.
            options: As in :meth:`declare`.

        Raises:
            ConfigError: A package or the device is missing, or as in :meth:`declare`.
        """
        cls._libraries()
        if config is None:
            config = cls._class(cls.config_class)()
        declaration = cls.declare(cls._published(config), **options)
        place = torch_device(device)
        model = cls.random_model(config, seed=seed, dtype=torch_dtype(dtype))
        for name in cls.unused:
            delattr(model, name)
        return cls(model.eval().to(place), declaration, max_frames=max_frames)

    @classmethod
    def random_model(
        cls, config: PreTrainedConfig, *, seed: int, dtype: torch.dtype | None = None
    ) -> Any:
        """The whole model of transformers with random weights.

        Args:
            config: The architecture.
            seed: Where the weights come from; torch's global generator is left as it was.
            dtype: Of the weights; float32 if none is given.
        """
        import torch

        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            model = cls._class(cls.model_class)._from_config(config, dtype=dtype or torch.float32)
            with torch.no_grad():
                cls._fill(model)
        return model

    @classmethod
    def _fill(cls, model: Any) -> None:
        """Give random values that can be heard to what transformers leaves silent."""

    @classmethod
    def _published(cls, config: PreTrainedConfig) -> Mapping[str, Any]:
        """What config.json would hold."""
        contents: dict[str, Any] = config.to_dict()
        return contents

    @classmethod
    def _check(cls, config: Mapping[str, Any]) -> None:
        check_architecture(config, cls.model_type, cls.__name__)

    @classmethod
    def _class(cls, name: str) -> Any:
        import transformers

        try:
            return getattr(importlib.import_module(cls.library), name)
        except (ImportError, AttributeError) as error:
            raise ConfigError(
                f"{cls.__name__} needs a transformers that has {name}; this is "
                f"{transformers.__version__}"
            ) from error

    @classmethod
    def _load(cls, checkpoint: Checkpoint, config: Mapping[str, Any], dtype: torch.dtype) -> Any:
        del config  # transformers reads it itself
        return cls._complete(checkpoint, checkpoint.where, dtype=dtype)

    @classmethod
    def _complete(cls, checkpoint: Checkpoint, where: str | None, **options: Any) -> Any:
        """What transformers' ``from_pretrained`` makes of weights that are all there.

        Raises:
            ConfigError: transformers would make some of them up; it only warns then.
            Exception: A file is broken.
        """
        model, found = cls._class(cls.model_class).from_pretrained(
            where, output_loading_info=True, **options
        )
        missing = sorted(
            key for key in found["missing_keys"] if key.split(".")[0] not in cls.unused
        )
        if missing:
            raise checkpoint.failure(f"{len(missing)} weights are missing, such as {missing[0]}")
        for name in cls.unused:
            delattr(model, name)
        return model


def reset_convolutions(model: Any) -> None:
    """Fill a model's convolutions as torch would: with transformers' values signals die or explode.

    Args:
        model: Its weights are drawn anew from torch's global generator.
    """
    from torch import nn

    for module in model.modules():
        if isinstance(module, nn.Conv1d | nn.ConvTranspose1d):
            module.reset_parameters()

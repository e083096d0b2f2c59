"""Image encoders: transformers' image classifiers without heads, whose parameters are named as in model files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch

from search_spaces.recipe import Recipe
from workers.merging.materialize import merged_tensors
from workers.models.config import MERGED_TOWERS, settled
from workers.models.merged_files import merged_config
from workers.models.modalities import IMAGE

if TYPE_CHECKING:
    from workers.merging.bank import Bank

__all__ = ["ImageEncoder", "new_encoder", "reference_encoder"]

HEAD = "classifier"


class ImageEncoder:
    """An image encoder, which computes features: a classifier of transformers without its head, or CLIP's vision tower.

    Attributes:
        module: The PyTorch module, in evaluation mode.
        parameters: The module's parameters, keyed by the names under which checkpoint files store them.
    """

    def __init__(self, module: Any) -> None:
        if hasattr(module, HEAD):
            setattr(module, HEAD, torch.nn.Identity())
        self.module = module.eval()
        self.parameters: dict[str, torch.nn.Parameter] = {}
        own = dict(module.named_parameters())
        names = list(own)
        for stored, name in zip(_stored_names(module, names), names, strict=True):
            canonical = IMAGE.canonical(module.config.to_dict(), stored)
            assert canonical is not None, f"{stored} is no part of an encoder"
            self.parameters[canonical] = own[name]
        self._parent, self._key = _layers_of(module)
        self._layers = list(getattr(self._parent, self._key))

    @property
    def max_layers(self) -> int:
        return len(self._layers)

    def use_layers(self, count: int) -> None:
        """Make the encoder compute with its first `count` layers only.

        `count` is from 1 to the attribute `max_layers`.
        """
        assert 1 <= count <= self.max_layers
        if len(getattr(self._parent, self._key)) != count:
            setattr(self._parent, self._key, torch.nn.ModuleList(self._layers[:count]))

    @torch.inference_mode()
    def features(self, pixels: torch.Tensor) -> torch.Tensor:
        """Compute the features [num_images, hidden_size] of images, in float32.

        `pixels` [num_images, channels, height, width] are the preprocessed images.
        """
        return self.differentiable_features(pixels)

    def differentiable_features(self, pixels: torch.Tensor) -> torch.Tensor:
        """Features of images as the method `features` returns them, with gradients if torch has gradients enabled."""
        parameter = next(iter(self.parameters.values()))
        found = self.module(pixel_values=pixels.to(parameter.device, parameter.dtype))
        features: torch.Tensor = found.logits if hasattr(found, "logits") else found.pooler_output
        return features.float()


def new_encoder(config: Mapping[str, Any], *, layers: int, dtype: torch.dtype, device: torch.device) -> ImageEncoder:
    """Make an encoder with `layers` layers for the model configuration `config`; its weights are NaN at first.

    Its computation is never random: dropout is off even in training mode.
    """
    settings = _tower(config)
    own = settled(_config({**settings, "num_hidden_layers": layers}))
    made = _mapping(settings)[type(own)](own)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.fill_(torch.nan)
    return ImageEncoder(made.to(device, dtype))


def reference_encoder(recipe: Recipe, bank: Bank, *, dtype: str) -> ImageEncoder:
    """Compute the merge of `recipe`, and load it into a new encoder of transformers on the CPU.

    The weights are rounded to `dtype`; the module computes in float32. Raises InvalidRecipe, InvalidModel or
    EvidenceMismatch if the merge cannot be computed.
    """
    settings = _tower(merged_config(recipe, bank.base, bank.views(recipe.models), dtype="float32"))
    config = _config(settings)
    state = {name: each.cpu().float() for name, each in merged_tensors(recipe, bank, getattr(torch, dtype))}
    if not _is_bare(settings):
        # A head that is taken away again; without one, transformers would warn of a missing one.
        state |= {f"{HEAD}.weight": torch.zeros(config.num_labels, config.hidden_size)}
        state |= {f"{HEAD}.bias": torch.zeros(config.num_labels)}
    model, found = _mapping(settings)[type(config)].from_pretrained(
        None, config=config, state_dict=state, dtype=torch.float32, output_loading_info=True
    )
    if found["missing_keys"] or found["unexpected_keys"]:
        raise RuntimeError(f"the merge does not fit its classifier: {found}")
    return ImageEncoder(model)


def _tower(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of the encoder: the vision tower's part of a CLIP configuration, or a copy of `config`."""
    tower = MERGED_TOWERS.get(config["model_type"])
    return dict(config) if tower is None else {**config[tower[0]], "model_type": tower[1]}


def _is_bare(config: Mapping[str, Any]) -> bool:
    """Whether `config` is the configuration of a vision tower, which has no classification head."""
    return config["model_type"] in {model_type for _, model_type in MERGED_TOWERS.values()}


def _mapping(config: Mapping[str, Any]) -> Any:
    """Select the mapping of transformers in which the model class for the configuration `config` is looked up.

    A vision tower without a classification head is looked up in MODEL_MAPPING, and an image classifier is looked up in
    MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING. Keys of both mappings are configuration classes.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING, MODEL_MAPPING

    return MODEL_MAPPING if _is_bare(config) else MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING


def _config(document: Mapping[str, Any]) -> Any:
    """Make transformers' configuration object from `document`, the content of a config.json.

    The document is written to a temporary file for this, because transformers reads infinite numbers only from files.
    """
    from transformers import AutoConfig

    with TemporaryDirectory(prefix="mergesearch-config-") as directory:
        (Path(directory) / "config.json").write_text(json.dumps(dict(document)))
        return AutoConfig.from_pretrained(directory, trust_remote_code=False)


def _stored_names(module: Any, names: list[str]) -> list[str]:
    """The name under which transformers stores each of the parameters `names` of a module, in their order.

    Since version 5 of transformers, parameters may have other names in a module than in checkpoint files.
    """
    from transformers.core_model_loading import revert_weight_conversion

    numbered = {name: torch.full((1,), number) for number, name in enumerate(names)}
    stored = {int(number): name for name, number in revert_weight_conversion(module, numbered).items()}
    if len(stored) != len(names):
        raise RuntimeError(f"{type(module).__name__}: transformers stores {len(stored)} of {len(names)} parameters")
    return [stored[number] for number in range(len(names))]


def _layers_of(module: Any) -> tuple[Any, str]:
    """Find the list of layers in `module`: return the submodule that contains it, and its attribute's name there."""
    lists = [name for name, each in module.named_modules() if isinstance(each, torch.nn.ModuleList)]
    if len(lists) != 1:
        raise RuntimeError(f"{type(module).__name__}: expected one list of layers, found {lists}")
    parent, _, key = lists[0].rpartition(".")
    return module.get_submodule(parent), key

"""Model configurations (config.json) with the key names that all model types share, and with defaults.

GPT-2 calls its number of layers n_layer, and many files leave out the defaults of their model type; transformers'
configuration classes define the other names and the defaults. The only check here is whether transformers knows the
model type.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from workers.cache import cached
from workers.errors import InvalidModel

__all__ = ["LAYERS_WITHOUT_EXPERTS", "MERGED_TOWERS", "in_common_names", "of_each_layer", "read_config", "settled"]


# The configuration field with the numbers of the layers that have no experts, in a mixture of experts.
LAYERS_WITHOUT_EXPERTS = "mlp_only_layers"

# Model types of several towers, of which one is merged: the key of its configuration, and that tower's own model type.
MERGED_TOWERS = {"clip": ("vision_config", "clip_vision_model")}

# Parts of the names of settings that make a forward pass random in training mode.
RANDOM = ("drop", "jitter")


def read_config(directory: str | Path) -> dict[str, Any]:
    """Read config.json of the model in `directory`, with key names that all model types share.

    The model was opened before, so the file is known to be valid. Raises InvalidModel if transformers does not know the
    model type.
    """
    config: dict[str, Any] = json.loads((Path(directory) / "config.json").read_text())
    return in_common_names(config)


def in_common_names(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json with added keys: names that all model types share, and the model type's defaults.

    Shared names are, for example, num_hidden_layers, hidden_size, num_attention_heads and tie_word_embeddings. For a
    model with several towers, such as CLIP, the result is the configuration of the tower that is merged. Raises
    InvalidModel if transformers does not know the model type: code that comes with a model is never run.
    """
    model_type = config.get("model_type")
    if isinstance(model_type, str) and model_type in MERGED_TOWERS:
        key, tower_type = MERGED_TOWERS[model_type]
        tower = config.get(key)
        if not isinstance(tower, Mapping):
            message = f"config.json: {key} is {tower!r:.80}; expected the configuration of the {tower_type}"
            raise InvalidModel((message,))
        model_type = tower_type
        config = {**tower, "model_type": model_type}
    common_names, defaults = _known(model_type if isinstance(model_type, str) else "")
    found = {**defaults, **config}
    return {common: found[own] for common, own in common_names.items() if own in found} | found


def settled(config: Any) -> Any:
    """Set the settings of `config` that make training random, such as dropout, to 0, and return `config`.

    `config` is a configuration of transformers.
    """
    for name, value in config.to_dict().items():
        if isinstance(value, float) and any(word in name for word in RANDOM):
            setattr(config, name, 0.0)
    return config


def of_each_layer(config: Mapping[str, Any], num_layers: int) -> dict[str, list[Any]]:
    """The entries of a config.json that are lists with one value for each layer, such as `layer_types`.

    `config` is the content of the file, whose keys are kept, and `num_layers` is the number of layers. If the file
    leaves out such a list, and transformers computes it, the computed list is included. A list of the indices of
    certain layers is not included, even if it has `num_layers` entries.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    known = CONFIG_MAPPING[config["model_type"]].from_dict(_with_all_numbers(config)).to_dict()
    return {
        name: value
        for name, value in {**known, **config}.items()
        if "layer" in name and name != LAYERS_WITHOUT_EXPERTS and isinstance(value, list) and len(value) == num_layers
    }


def _with_all_numbers(config: Mapping[str, Any]) -> dict[str, Any]:
    """Copy `config`, and replace transformers' notation for infinite numbers and NaN by floats.

    transformers writes such numbers to config.json as {"__float__": "Infinity"}.
    """

    def decoded(entry: dict[str, Any]) -> Any:
        return float(entry["__float__"]) if entry.keys() == {"__float__"} else entry

    found: dict[str, Any] = json.loads(json.dumps(dict(config)), object_hook=decoded)
    return found


@lru_cache
def _known(model_type: str) -> tuple[Mapping[str, str], Mapping[str, Any]]:
    """The names and defaults of the configuration keys of the model type `model_type`, as in transformers.

    The first result maps a common key, such as num_hidden_layers, to the model type's name for it. The second result
    has the defaults of configuration keys. Both are cached on disk, because importing transformers' configurations
    takes longer than merging a small model. Raises InvalidModel if transformers does not know the model type.
    """
    release = version("transformers")
    key = f"names and defaults of {model_type!r} in transformers {release}"
    if (record := cached(key)) is not None:
        names, defaults = json.loads(record)
        return names, defaults
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        raise InvalidModel(
            (
                f"config.json: model_type {model_type!r} is not one that transformers {release} knows; "
                "code that comes with a model is never run",
            )
        )
    kind = CONFIG_MAPPING[model_type]
    found = {field.name: field.default for field in dataclasses.fields(kind)}
    known = [kind.attribute_map, {name: value for name, value in found.items() if value is not dataclasses.MISSING}]
    with suppress(TypeError):  # raised for a default that JSON cannot express
        if json.loads(record := json.dumps(known)) == known:
            cached(key, record)
    return known[0], known[1]

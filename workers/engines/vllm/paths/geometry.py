"""Check that the layers of a family's models can be combined in any order in one model.

For this, the layers must be of one kind, and computed with the same settings. That their tensors have the same shapes
is checked before (module `workers.models.compatibility`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workers.models.config import of_each_layer
from workers.models.family import ResolvedFamily

__all__ = ["PATH_TYPES", "path_problems", "path_settings"]

# Model types that `model.LAYER_OF` has a layer for.
PATH_TYPES = ("llama", "mistral", "qwen2", "qwen3")

# Settings of a model's layers, in common names, and their defaults.
SETTINGS: Mapping[str, Any] = {
    "rms_norm_eps": None,
    "sliding_window": None,
    "attention_bias": False,
    "mlp_bias": False,
    "max_window_layers": None,
}


def path_problems(sources: ResolvedFamily) -> list[str]:
    """Reasons why the layers of a family's models cannot be combined freely in layer paths; empty if they can.

    `sources` are the base model and its experts. Each reason is a line of text that names the model and the field of
    its configuration.
    """
    problems = []
    base = sources.base.settings
    if (kind := base.get("model_type")) not in PATH_TYPES:
        problems.append(
            f"{sources.base.directory}: model_type is {kind!r}; other depths and orders of layers are scored for "
            f"{', '.join(PATH_TYPES)}"
        )
        return problems
    kinds = sorted(set(of_each_layer(sources.base.config, sources.layout.num_layers).get("layer_types", ())))
    if len(kinds) > 1:
        problems.append(
            f"{sources.base.directory}: layer_types has {' and '.join(kinds)}; in paths all layers must be of one kind"
        )
    expected = path_settings(base)
    for alias, checkpoint in sources.views.items():
        found = path_settings(checkpoint.settings)
        problems += [
            f"{alias}: {checkpoint.directory}: {name} is {_shown(found[name])}; the base has "
            f"{_shown(expected[name])}, and the layers of a path are computed with one value"
            for name in expected
            if found[name] != expected[name]
        ]
    return problems


def _shown(value: Any) -> str:
    return "none" if value is None else repr(value)


def path_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings in `config`, in common names, with which every layer of a layer path is computed."""
    found = {name: config.get(name, default) for name, default in SETTINGS.items()}
    if not config.get("use_sliding_window", True):
        found |= {"sliding_window": None, "max_window_layers": None}
    elif found["sliding_window"] is None:
        found["max_window_layers"] = None
    return found

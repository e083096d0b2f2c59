"""Statistics of each layer's weights, from which an HM3 policy can recognise similar layers of different models.

The statistics are computed over all weights of each component of a layer (attention, MLP, norms): the mean, the
logarithm of the standard deviation, the kurtosis, and the logarithm of the distance from the base's layer relative to
the base's norm. The HM3 paper embeds the layers' parameters without stating how. These statistics are a choice of this
project.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from search_spaces.recipe import COMPONENTS
from workers.cache import cached
from workers.models.checkpoints import Checkpoint
from workers.models.family import on_this_machine, open_sources
from workers.types import Family

__all__ = ["STATISTICS", "layer_descriptors"]

STATISTICS = ("mean", "log_std", "kurtosis", "log_distance")

# Replaces a distance of 0, and a standard deviation of 0.
SMALLEST = 1e-8


@lru_cache(maxsize=4)
def layer_descriptors(family: Family, models: tuple[str, ...]) -> Tensor:
    """Compute standardised statistics of the weights of each layer, [num_models, num_layers, num_components * 4].

    `family` is a base model and its experts, and `models` has the aliases of the models whose layers are described. A
    layer consists of components: its attention, its MLP and its norms. STATISTICS lists the four statistics of a
    component. Each statistic is standardised to mean 0 and standard deviation 1 over all layers of all models, or is 0
    if it is the same for all layers. Results are cached by the models' fingerprints.
    """
    key = "hm3 descriptors 1 " + json.dumps([family.fingerprints[alias] for alias in (family.base.alias, *models)])
    found = cached(key)
    if found is None:
        sources = open_sources(on_this_machine(family))
        found = cached(key, json.dumps([_of_model(sources.views[alias], sources.base) for alias in models]))
    raw = torch.tensor(json.loads(found or "[]"), dtype=torch.float64)
    flat = raw.flatten(0, 1)
    spread = flat.std(dim=0, unbiased=False)
    standard = (flat - flat.mean(dim=0)) / torch.where(spread > SMALLEST, spread, torch.inf)
    return standard.reshape(raw.shape).to(torch.float32)


def _of_model(model: Checkpoint, base: Checkpoint) -> list[list[float]]:
    return [
        [
            statistic
            for component in COMPONENTS
            for statistic in _of_component(model, base, model.layout.suffixes(component, layer), layer)
        ]
        for layer in range(model.layout.num_layers)
    ]


def _of_component(model: Checkpoint, base: Checkpoint, suffixes: Iterable[str], layer: int) -> Sequence[float]:
    names = [model.layout.name(suffix, layer) for suffix in suffixes]
    if not names:
        return (0.0,) * len(STATISTICS)
    values = torch.cat([model.read(name).flatten().double() for name in names])
    origin = torch.cat([base.read(name).flatten().double() for name in names])
    mean, std = float(values.mean()), float(values.std(unbiased=False))
    kurtosis = float(((values - mean) ** 4).mean()) / max(std**4, SMALLEST**2)
    distance = float((values - origin).norm() / origin.norm().clamp(min=SMALLEST))
    return mean, math.log(max(std, SMALLEST)), kurtosis, math.log(max(distance, SMALLEST))

"""Rotary embeddings of models, and one rotary embedding that turns channels as each of several models does.

A rotary embedding (RoFormer, arXiv:2104.09864) turns pairs of channels of a query or key. Pair i of a head of D
channels has the channels i and i + D / 2, and turns by a frequency: an angle in radians for each position.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from workers.errors import InvalidModel
from workers.models.checkpoints import Checkpoint
from workers.models.compatibility import structure

__all__ = ["ROTARY_SETTINGS", "Rotary", "common_rotary"]

# Entries of config.json that describe the rotary embedding.
ROTARY_SETTINGS = ("rope_parameters", "rope_scaling", "rope_theta")

# Types whose frequencies do not depend on the length of the text.
STATIC = ("default", "linear", "llama3", "yarn")

# Sizes of a head for which vLLM has attention on CPUs and GPUs.
HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256)

# Frequencies closer than this count as equal. They are computed in float32, whose precision is 6e-8.
TOLERANCE = 5e-7


@dataclass(frozen=True)
class Rotary:
    """The rotary embedding of a model's attention heads.

    - `frequencies`: of each pair of channels of a head, in radians for each position
    - `scale`: the factor on queries and keys, which is not 1 for the type "yarn"
    - `stated`: the settings in a common form, as JSON; heads of one size with equal ones have equal embeddings
    - `settings`: the entries of config.json that describe the embedding
    """

    frequencies: tuple[float, ...] = field(compare=False)
    scale: float = field(compare=False)
    stated: str
    settings: Mapping[str, Any] = field(compare=False)

    @classmethod
    def of(cls, model: Checkpoint) -> Rotary:
        """The rotary embedding of a Llama, Mistral, Qwen2 or Qwen3, for texts that its frequencies are made for."""
        from transformers import AutoConfig
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding  # the same as that of the other types

        own = {name: model.settings[name] for name in ROTARY_SETTINGS if model.settings.get(name) is not None}
        stated = structure(own, ())
        config = {name: value for name, value in model.config.items() if name != "model_type"}
        found = LlamaRotaryEmbedding(AutoConfig.for_model(model.config["model_type"], **config))
        names = (*ROTARY_SETTINGS, *(["max_position_embeddings"] if stated.get("rope_type") == "longrope" else []))
        settings = {name: model.config[name] for name in names if name in model.config}
        return cls(
            tuple(found.inv_freq.tolist()), float(found.attention_scaling), json.dumps(stated, sort_keys=True), settings
        )

    @property
    def kind(self) -> str:
        """The type in the words of transformers, such as "default" or "llama3"."""
        return str(json.loads(self.stated).get("rope_type"))

    @property
    def is_static(self) -> bool:
        """Whether the frequencies are the same for texts of any length."""
        stated = json.loads(self.stated)
        is_one = self.kind == "longrope" and stated["short_factor"] == stated["long_factor"]
        return self.kind in STATIC or is_one

    @property
    def is_complete(self) -> bool:
        """Whether the embedding follows from `settings`, without other entries of config.json."""
        return self.is_static and self.kind != "yarn"

    @cached_property
    def places(self) -> Mapping[float, int]:
        """The first pair with each frequency."""
        return {frequency: pair for pair, frequency in reversed([*enumerate(self.frequencies)])}

    def place(self, frequency: float) -> int | None:
        """The pair that turns by `frequency`; None if there is none."""
        if frequency in self.places:
            return self.places[frequency]
        near = (pair for own, pair in self.places.items() if abs(own - frequency) <= TOLERANCE * frequency)
        return next(near, None)

    def holds(self, other: Rotary) -> bool:
        return all(self.place(frequency) is not None for frequency in other.frequencies)

    def channels_of(self, other: Rotary) -> torch.Tensor:
        """For each channel of a head, the channel of a head of `other` that turns alike; -1 where there is none."""
        own, size = torch.full((2, len(self.frequencies)), -1), len(other.frequencies)
        for pair, frequency in enumerate(other.frequencies):
            place = self.place(frequency)
            assert place is not None
            own[0, place], own[1, place] = pair, pair + size
        return own.flatten()


def common_rotary(models: Sequence[Checkpoint]) -> Rotary:
    """A rotary embedding with the frequencies of all `models`.

    If that of one of the models has all frequencies, the result is that one. Otherwise it has a pair of channels for
    each frequency of any model, and is described as the type "longrope", which states them one by one.

    Raises:
        InvalidModel: The embeddings differ, and one of them depends on the length of the text, or heads would have more
            channels than vLLM's attention can have.
    """
    rotaries = [Rotary.of(model) for model in models]
    if len({(each.stated, len(each.frequencies)) for each in rotaries}) == 1:
        return rotaries[0]
    if problems := [
        f"{model.directory}: rope_type is {rotary.kind!r}, and the frequencies depend on the length of the text; "
        f"expected {', '.join(STATIC)}, unless all models have the same"
        for model, rotary in zip(models, rotaries, strict=True)
        if not rotary.is_static
    ]:
        raise InvalidModel(tuple(problems))
    for rotary in rotaries:
        if rotary.is_complete and all(map(rotary.holds, rotaries)):
            return rotary
    frequencies: list[float] = []
    for rotary in rotaries:
        known = _stated(frequencies, 1)
        frequencies += [frequency for frequency in rotary.frequencies if known.place(frequency) is None]
    size = next((size for size in HEAD_SIZES if size >= 2 * len(frequencies)), None)
    if size is None:
        names = ", ".join(str(model.directory) for model in models)
        raise InvalidModel(
            (
                f"{names}: their rotary embeddings have {len(frequencies)} different frequencies; expected at most "
                f"{HEAD_SIZES[-1] // 2}, for heads of {HEAD_SIZES[-1]} channels",
            )
        )
    # Pairs that no model has are zeros, whatever their frequency is.
    frequencies += [1.0] * (size // 2 - len(frequencies))
    return _stated(frequencies, min(int(model.settings["max_position_embeddings"]) for model in models))


def _stated(frequencies: Sequence[float], positions: int) -> Rotary:
    """The rotary embedding with these frequencies, for texts of at most `positions` tokens."""
    factors = [1 / frequency for frequency in frequencies]
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1.0,  # so that the factors alone are the frequencies
        "short_factor": factors,
        "long_factor": factors,
        "factor": 1.0,
        "attention_factor": 1.0,
        "original_max_position_embeddings": positions,
    }
    settings = {"rope_parameters": rope, "max_position_embeddings": positions}
    return Rotary(
        tuple(frequencies), 1.0, json.dumps(structure({"rope_parameters": rope}, ()), sort_keys=True), settings
    )

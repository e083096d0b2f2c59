"""Export of merges with alignments as checkpoints: their tensors, configuration and model class.

transformers cannot load this checkpoint without the model class, `modeling_aligned.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from search_spaces.errors import InvalidRecipe
from search_spaces.recipe import Recipe
from workers.alignments.recipes import PlacedAlignment, alignments_before, read_alignments
from workers.merging.bank import Bank

__all__ = ["CLASSES", "MODELING_FILE", "AlignedParts", "aligned_parts"]

# The module that is copied to the checkpoint.
MODELING_FILE = Path(__file__).with_name("modeling_aligned.py")

# The prefix of the class names in that module, by model type.
CLASSES = {"llama": "AlignedLlama", "mistral": "AlignedMistral", "qwen2": "AlignedQwen2", "qwen3": "AlignedQwen3"}


class AlignedParts:
    """Additional parts of an export with alignments: the alignments' tensors, and entries in config.json.

    An alignment is a map of the residual stream between two layers. `placed` has the alignments, in the dtype of the
    export, keyed by the index of the layer that follows each of them. `model_type` is the base model's type in
    transformers, such as "llama".
    """

    def __init__(self, placed: Mapping[int, PlacedAlignment], model_type: str) -> None:
        self._placed = placed
        self._model_type = model_type

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors of all alignments (maps of the residual stream), keyed by their names in the checkpoint."""
        return {
            f"model.layers.{index}.alignment.{name}": tensor
            for index, each in self._placed.items()
            for name, tensor in each.alignment.tensors().items()
        }

    def config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Make the config.json of an export with alignments from `config`, the configuration without alignments.

        The result replaces the values of `architectures` and `model_type`, and adds the keys `auto_map` and
        `alignments`. By the key `auto_map`, transformers loads the model class that applies alignments (maps of the
        residual stream). The key `alignments` describes the alignments to this class.
        """
        name = CLASSES[self._model_type]
        module = MODELING_FILE.stem
        return {
            **config,
            "architectures": [f"{name}ForCausalLM"],
            "model_type": f"aligned_{self._model_type}",
            "auto_map": {
                "AutoConfig": f"{module}.{name}Config",
                "AutoModelForCausalLM": f"{module}.{name}ForCausalLM",
            },
            "alignments": {
                str(index): {"tensors": [*each.alignment.tensors()], "factor": each.factor}
                for index, each in self._placed.items()
            },
        }


def aligned_parts(recipe: Recipe, bank: Bank, dtype: torch.dtype) -> AlignedParts | None:
    """Tensors and config.json entries that a recipe's alignments add to a checkpoint; None without alignments.

    An alignment is a map of the residual stream between two layers. `bank` has the weights of the recipe's models, and
    the path of the directory from which alignments are read. The alignments' tensors are rounded to `dtype`. Raises
    InvalidRecipe if an alignment does not fit the models, if its file is missing, or if merges of this model type
    cannot be exported with alignments (types that are not in the constant CLASSES).
    """
    if not any(alignments_before(recipe)):
        return None
    model_type = str(bank.base.config.get("model_type"))
    if model_type not in CLASSES:
        raise InvalidRecipe(
            f"alignments cannot be exported for models of type {model_type!r}; expected one of {', '.join(CLASSES)}"
        )
    return AlignedParts(read_alignments(recipe, bank, dtype), model_type)

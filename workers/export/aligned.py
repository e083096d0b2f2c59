"""What an export of a merge with alignments has beside an ordinary one: their tensors, the configuration, and the file
with the model class, `modeling_aligned.py`, without which transformers cannot load it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from search_spaces.errors import InvalidRecipe
from search_spaces.recipe import Recipe
from workers.merging.alignments import Alignment, alignments_before, read_alignment, unaligned
from workers.merging.bank import Bank
from workers.merging.residual_scales import branch_factors

__all__ = ["CLASSES", "MODELING_FILE", "AlignedParts", "aligned_parts"]

# The module that is written beside the weights.
MODELING_FILE = Path(__file__).with_name("modeling_aligned.py")

# By model type how its classes there are called.
CLASSES = {"llama": "AlignedLlama", "mistral": "AlignedMistral", "qwen2": "AlignedQwen2", "qwen3": "AlignedQwen3"}


class AlignedParts:
    """The alignments of a merge, by the layer that each stands before, in the dtype of the export."""

    def __init__(self, before: Mapping[int, Alignment], factors: Mapping[int, float], model_type: str) -> None:
        self._before = before
        self._factors = factors
        self._model_type = model_type

    def tensors(self) -> dict[str, torch.Tensor]:
        """By their names in the checkpoint."""
        return {
            f"model.layers.{index}.alignment.{name}": tensor
            for index, alignment in self._before.items()
            for name, tensor in alignment.tensors().items()
        }

    def config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The configuration of the merge without alignments, with what the model class reads, and its own names."""
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
                str(index): {"tensors": [*alignment.tensors()], "factor": self._factors[index]}
                for index, alignment in self._before.items()
            },
        }


def aligned_parts(recipe: Recipe, bank: Bank, dtype: torch.dtype) -> AlignedParts | None:
    """The alignments of a recipe, rounded to `dtype`; None if it has none. Raises InvalidRecipe if they do not fit, if
    their files are gone, and for models that there is no class for."""
    before = alignments_before(recipe)
    if not any(before):
        return None
    model_type = str(bank.base.config.get("model_type"))
    if model_type not in CLASSES:
        raise InvalidRecipe(
            f"alignments cannot be exported for models of type {model_type!r}; expected one of {', '.join(CLASSES)}"
        )
    factors = branch_factors(unaligned(recipe).layers, model_type=model_type)
    hidden = int(bank.base.config["hidden_size"])
    read = {
        index: read_alignment(bank.alignments_dir, digest, layer=index - 1, hidden_size=hidden).to(dtype=dtype)
        for index, digest in enumerate(before)
        if digest is not None
    }
    return AlignedParts(read, {index: factors[index] for index in read}, model_type)

"""Construction of a merge as a transformers model."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch

from search_spaces.recipe import Recipe
from workers.alignments.hooks import add_alignments
from workers.alignments.recipes import alignments_before, read_alignments, unaligned
from workers.merging.materialize import merged_tensors
from workers.merging.plan import plan_tensors
from workers.models.merged_files import merged_config

if TYPE_CHECKING:
    from workers.merging.bank import Bank

from workers.engines.transformers.backend import ATTENTION

__all__ = ["merged_model"]


def merged_model(recipe: Recipe, bank: Bank, *, dtype: str) -> Any:
    """Compute the merge of `recipe`, and return it as a transformers model on CPU.

    `bank` has the weights of the recipe's models. The number of layers may differ from the base's. The weights are
    rounded to `dtype`; the model computes in float32. If the recipe has alignments (maps of the residual stream before
    layers), the model applies them. Memory is needed for one copy of the weights. Raises InvalidRecipe, InvalidModel or
    EvidenceMismatch if the merge cannot be computed or an alignment cannot be used.
    """
    import transformers

    is_aligned = any(alignments_before(recipe))
    plan = plan_tensors(unaligned(recipe), bank)
    # Through a file, as in exports, because JSON has its own spelling of infinity.
    with TemporaryDirectory(prefix="mergesearch-config-") as directory:
        text = json.dumps(merged_config(recipe, bank.base, bank.views(recipe.models), dtype="float32"))
        (Path(directory) / "config.json").write_text(text)
        config = transformers.AutoConfig.from_pretrained(directory, trust_remote_code=False)
    kind = getattr(transformers, config.architectures[0])
    model, found = kind.from_pretrained(
        None,
        config=config,
        state_dict={name: tensor.cpu().float() for name, tensor in merged_tensors(plan, bank, getattr(torch, dtype))},
        dtype=torch.float32,
        attn_implementation=ATTENTION,
        output_loading_info=True,
    )
    if found["missing_keys"] or found["unexpected_keys"]:
        raise RuntimeError(f"the merge does not fit {config.architectures[0]}: {found}")
    if is_aligned:
        add_alignments(model, read_alignments(recipe, bank, getattr(torch, dtype)))
    return model.eval()

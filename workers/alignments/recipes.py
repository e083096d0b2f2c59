"""The alignments of a recipe: their tensors, and the layers before which they are applied."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from search_spaces.errors import InvalidRecipe
from search_spaces.recipe import COMPONENTS, LayerRecipe, Recipe, Source
from workers.alignments.files import read_alignment
from workers.merging.residual_scales import branch_factors

if TYPE_CHECKING:
    import torch

    from workers.alignments.alignment import Alignment
    from workers.merging.bank import Bank

__all__ = ["PlacedAlignment", "alignments_before", "read_alignments", "unaligned"]


@dataclass(frozen=True, eq=False)
class PlacedAlignment:
    """An alignment (a map of the residual stream) at its place before a certain layer of a merged model.

    `digest` is the name of the alignment in recipes. `factor` is a number by which the alignment's shift is multiplied:
    one over the product of the scales of all layers before the alignment.
    """

    digest: str
    alignment: Alignment
    factor: float


def alignments_before(recipe: Recipe) -> tuple[str | None, ...]:
    """The digest of the alignment before each layer of a recipe, or None if the layer has none.

    An alignment is a map of the residual stream between two layers. Raises InvalidRecipe, with the layer's index, for
    an alignment after the last layer, and for one between two layers that already follow each other in the source
    models.
    """
    layers = recipe.canonical().layers
    for index, layer in enumerate(layers):
        if layer.alignment is None:
            continue
        where = f"layer {index}: alignment {layer.alignment[:12]!r}"
        if index + 1 == len(layers):
            raise InvalidRecipe(f"{where}: no layer follows; expected none")
        if _follow(layer, layers[index + 1]):
            raise InvalidRecipe(
                f"{where}: layers {index} and {index + 1} follow each other in their own models; expected none"
            )
    return (None, *(layer.alignment for layer in layers[:-1]))


def _follow(layer: LayerRecipe, after: LayerRecipe) -> bool:
    """Whether layer `after` of a merge directly follows `layer` in the source models, so that they need no alignment.

    No alignment (map of the residual stream) is allowed between two such layers. The result is True if `after` has the
    same merges as `layer`, except that each source and base is the next layer of its model.
    """

    def next_to(source: Source) -> Source:
        return source if source.layer is None else Source(source.model, source.layer + 1)

    merges = [(layer.component(name), after.component(name)) for name in COMPONENTS]
    return all(
        replace(
            merge,
            sources=tuple(map(next_to, merge.sources)),
            base=None if merge.base is None else next_to(merge.base),
        )
        == following
        for merge, following in merges
    )


def unaligned(recipe: Recipe) -> Recipe:
    """Copy a recipe without its alignments, which are maps of the residual stream between layers."""
    if all(layer.alignment is None for layer in recipe.layers):
        return recipe
    return replace(recipe, layers=tuple(replace(layer, alignment=None) for layer in recipe.layers))


def read_alignments(recipe: Recipe, bank: Bank, dtype: torch.dtype) -> Mapping[int, PlacedAlignment]:
    """Read a recipe's alignments, rounded to `dtype`, keyed by the index of the layer after each alignment.

    An alignment is a map of the residual stream between two layers. `bank` has the weights of the recipe's models, and
    the path of the directory with the files of alignments (field `Family.alignments_dir`).

    Raises:
        InvalidRecipe: The recipe has an alignment at a place where none is allowed, an alignment's file is missing,
            damaged or of another size, or the recipe's layer scales cannot be folded into weights.
    """
    before, config = alignments_before(recipe), bank.base.config
    factors = branch_factors(unaligned(recipe).layers, model_type=str(config.get("model_type")))
    found = {}
    for index, (digest, of_layer) in enumerate(zip(before, factors, strict=True)):
        if digest is not None:
            stored = read_alignment(
                bank.alignments_dir, digest, layer=index - 1, hidden_size=int(config["hidden_size"])
            )
            found[index] = PlacedAlignment(digest, stored.to(dtype=dtype), of_layer.stream)
    return found

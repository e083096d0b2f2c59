from dataclasses import replace

from search_spaces.recipe import LayerRecipe, Merge, Recipe, Source
from search_spaces.spaces.layers import shared_merges, with_own_aliases


def recipe() -> Recipe:
    """A recipe with task vectors of math: some are differences from the base of the study, some from text."""
    outside = Merge("task_arithmetic", (Source("math"),), {"lambda": 0.5}, base=Source("text"))
    merge = Merge("task_arithmetic", (Source("math", 0),), {"lambda": 0.5}, base=Source("text", 0))
    models = {"base": "b" * 64, "math": "m" * 64, "text": "t" * 64}
    return Recipe(models, "base", (LayerRecipe(merge, merge, merge),), outside, outside)


def test_own_base_has_another_alias() -> None:
    """A merge with its own base keeps that model under another alias."""
    renamed = with_own_aliases(
        recipe(), base="start", fingerprints={"start": "b" * 64, "one": "m" * 64, "two": "t" * 64}
    )
    assert renamed is not None
    assert renamed.embedding.base == Source("two")
    assert renamed.layers[0].attention.base == Source("two", 0)
    assert renamed.digest == recipe().digest


def test_merges_with_a_base_of_their_own_are_shared_by_no_layers() -> None:
    layers = recipe().layers
    assert shared_merges(layers, start=0) is None
    usual = replace(layers[0].attention, base=None)
    assert shared_merges((LayerRecipe(usual, usual, usual),), start=0) is not None

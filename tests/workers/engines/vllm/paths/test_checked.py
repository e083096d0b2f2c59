from dataclasses import replace

from search_spaces.recipe import LayerRecipe, Merge, Recipe, Source
from workers.engines.vllm.paths.held import _Checked

CONTENTS = ["what layer 0 holds"]


def recipe() -> Recipe:
    merge = Merge("ties", (Source("math", 0), Source("text", 0)), {"lambda": 1.0, "k": 0.2})
    outside = Merge("passthrough", (Source("base"),))
    models = {"base": "b" * 64, "math": "m" * 64, "text": "t" * 64}
    return Recipe(models, "base", (LayerRecipe(merge, merge, merge),), outside, outside).canonical()


def test_known_layers_need_no_plan() -> None:
    checked = _Checked(most=4)
    assert checked.contents(recipe()) is None
    checked.add(recipe(), CONTENTS)
    assert checked.contents(replace(recipe(), layers=recipe().layers * 2)) == CONTENTS * 2


def test_layers_that_keep_all_equal_magnitudes_are_others() -> None:
    checked = _Checked(most=4)
    checked.add(recipe(), CONTENTS)
    of_format_1 = replace(recipe(), keeps_equal=True)
    assert checked.contents(of_format_1) is None
    checked.add(of_format_1, ["another"])
    assert checked.contents(of_format_1) == ["another"]
    assert checked.contents(recipe()) is None


def test_layers_with_another_base_are_others() -> None:
    checked = _Checked(most=4)
    checked.add(recipe(), CONTENTS)
    of_text = recipe().rewritten(lambda m: replace(m, base=Source("text", 0)) if m.method == "ties" else m)
    assert checked.contents(of_text) is None


def test_other_vocabularies_are_always_planned() -> None:
    checked = _Checked(most=4)
    padded = replace(recipe(), vocabulary={"pad_to_multiple_of": 64})
    checked.add(padded, CONTENTS)
    assert checked.contents(padded) is None
    checked.add(recipe(), CONTENTS)
    assert checked.contents(padded) is None

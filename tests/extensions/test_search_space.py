"""The recipe "Add a search space" of CONTRIBUTING.md: task arithmetic with one lambda for the whole model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.extensions.tree import Tree

MODULE = '''"""One lambda: task arithmetic with a single coefficient for all experts and tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from search_spaces.errors import InvalidStudy, Problem
from search_spaces.parameters import Configuration, Float, Parameters
from search_spaces.recipe import COMPONENTS, Merge, Recipe, Source
from search_spaces.spaces.base import SearchedModels, SpaceDescription, SpaceSection
from search_spaces.spaces.layers import split_layers, with_own_aliases

__all__ = ["SPACE", "OneLambdaSection", "OneLambdaSpace"]


class OneLambdaSection(SpaceSection):
    kind: Literal["one_lambda"]
    """one_lambda: task arithmetic with a single coefficient."""
    largest: float = 1.5
    """The largest lambda."""

    @property
    def merge_methods(self) -> tuple[str, ...]:
        return ("task_arithmetic",)

    def contradictions(self) -> Iterator[Problem]:
        if self.largest <= 0:
            yield Problem("search_space.largest", f"{self.largest:g} is not accepted; give a number above 0")

    def build(self, models: SearchedModels) -> OneLambdaSpace:
        return OneLambdaSpace(models, self.largest)


SPACE = OneLambdaSection


class OneLambdaSpace:
    """Task arithmetic with one lambda. Immutable."""

    kind = "one_lambda"

    def __init__(self, models: SearchedModels, largest: float) -> None:
        if not models.experts:
            raise InvalidStudy((Problem("models.experts", "there are no experts; name at least one"),))
        self._models = models
        self._largest = largest
        self.parameters = Parameters((Float("lambda", 0.0, largest),), roles={"lambda": "lambda"})

    def describe(self) -> SpaceDescription:
        layers = split_layers(self._models.num_layers, 1)
        return SpaceDescription(self.kind, layers, {"layer": COMPONENTS}, "task arithmetic with one lambda")

    def to_recipe(self, configuration: Configuration) -> Recipe:
        self.parameters.check(configuration)
        models = self._models
        sources = tuple(Source(expert) for expert in models.experts)
        merge = Merge("task_arithmetic", sources, {"lambda": configuration["lambda"]})
        return Recipe.uniform(
            merge,
            models=models.fingerprints,
            base=models.base,
            num_layers=models.num_layers,
            tokenizer=models.tokenizer,
        ).canonical()

    def from_recipe(self, recipe: Recipe) -> dict[str, Any] | None:
        models = self._models
        renamed = with_own_aliases(recipe.canonical(), base=models.base, fingerprints=models.fingerprints)
        if renamed is None:
            return None
        head = renamed.head
        if head.method == "task_arithmetic" and isinstance(head.coefficients.get("lambda"), tuple):
            return None
        lambda_ = head.number("lambda") if head.method == "task_arithmetic" else 0.0
        configuration = {"lambda": lambda_}
        is_inside = 0 <= lambda_ <= self._largest
        return configuration if is_inside and self.to_recipe(configuration).digest == recipe.digest else None
'''

SECTION = """\
## `one_lambda`

Task arithmetic with a single coefficient for all experts and tensors.

| option | default | meaning |
|---|---|---|
| `largest` | 1.5 | the largest lambda; above 0 |

"""

ROW = "| [`one_lambda`](#one_lambda) | one coefficient for the whole model | a first look |\n"

HASH = """
import hashlib, json
from tests.search_spaces.spaces.test_spaces import BUILT, draw
hashed = hashlib.sha256()
for seed in range(10):
    recipe = BUILT["one lambda"].to_recipe(draw(BUILT["one lambda"], seed))
    hashed.update(json.dumps([recipe.digest, recipe.to_json()], sort_keys=True).encode())
print(hashed.hexdigest())
"""

HASHES = "tests/search_spaces/spaces/recipe_hashes.json"


@pytest.mark.slow
def test_add_a_search_space(tmp_path: Path) -> None:
    """A space is one module, an example with its hash for the tests, and its places in two pages."""
    tree = Tree(tmp_path / "tree")
    tree.write("search_spaces/spaces/one_lambda.py", MODULE)
    tree.insert(
        "tests/search_spaces/spaces/test_spaces.py",
        '    "one lambda": described("one_lambda"),\n',
        after="EXAMPLES = {",
    )
    known = json.loads((tree.root / HASHES).read_text())
    known["one lambda"] = tree.run(HASH).splitlines()[-1]
    tree.replace(HASHES, (tree.root / HASHES).read_text(), json.dumps(known, indent=2) + "\n")
    tree.insert("docs/reference/spaces.md", SECTION, before="## `lfs`")
    tree.insert("docs/reference/spaces.md", ROW, after=r"\| \[`lfs`\].*")
    tree.replace(
        "docs/reference/study-file.md", "`dis`, `sfs` or `hm3`; each", "`dis`, `sfs`, `one_lambda` or `hm3`; each"
    )
    assert len(tree.changed) == 5
    # Of the tests of all spaces, those of this one: `space` alone would select all by their folder's name.
    selected = "lambda or every_kind_of_space or (test_pages and space)"
    tree.test("tests/search_spaces/spaces/test_spaces.py", "tests/docs/test_pages.py", "-k", selected)

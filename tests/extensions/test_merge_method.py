"""The recipe "Add a merge method" of CONTRIBUTING.md: the middle between the smallest and the largest element."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.extensions.tree import Tree

DECLARATION = """MIDRANGE = MergeMethod(
    name="midrange",
    source="Rider, The midrange of a sample as an estimator (1957)",
    variant="the middle between the smallest and the largest element; no weights",
    min_sources=2,
    is_itself_alone=True,
)
"""

FUNCTION = '''

@merges("midrange")
def midrange(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The middle between the smallest and the largest element of the models: (min_i theta_i + max_i theta_i) / 2."""
    stacked = torch.stack(list(tensors))
    return (stacked.amin(dim=0) + stacked.amax(dim=0)) / 2
'''

TABLE = "from workers.merging.methods.table import table; print(table(), end='')"
README = "workers/merging/methods/README.md"

USED = """
import json, torch
from search_spaces.study.file import parse_study, study_json_schema
from workers.merging.methods.plain import PLAIN
from workers.merging.methods.registry import FUNCTIONS
task = {"file": "/data.jsonl", "answer": "{{a}}"}
study = parse_study({
    "name": "s", "models": {"base": "/b", "experts": {"x": "/x", "y": "/y"}},
    "search_space": {"kind": "lfs", "methods": ["midrange"]}, "fidelity": {"scheduler": "none"},
    "objectives": [{"name": "a", "task": task, "metric": "exact_match"}],
})
assert "midrange" in json.dumps(study_json_schema())
assert "midrange" in PLAIN
found = FUNCTIONS["midrange"]([torch.tensor([1.0, 5.0]), torch.tensor([3.0, 1.0]), torch.tensor([2.0, 2.0])])
print(json.dumps([list(study.search_space.methods), found.tolist()]))
"""


@pytest.mark.slow
def test_add_a_merge_method(tmp_path: Path) -> None:
    """A method is a declaration and a function; the table of methods is made from them."""
    tree = Tree(tmp_path / "tree")
    tree.append("search_spaces/methods/averages.py", DECLARATION)
    tree.append("workers/merging/methods/averages.py", FUNCTION)
    tree.replace(README, (tree.root / README).read_text(), tree.run(TABLE))
    assert "`midrange`" in (tree.root / README).read_text()
    assert len(tree.changed) == 3
    assert json.loads(tree.run(USED).splitlines()[-1]) == [["midrange"], [2.0, 3.0]]
    tree.test("tests/workers/merging/methods/test_registry.py", "-k", "midrange or table")

"""The recipe "Add a searcher" of CONTRIBUTING.md, followed without and with options of the searcher's own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.extensions.tree import Tree

DECLARATION = '''"""Mutants of the best trial."""

from search_spaces.searchers.base import Feature, SearcherDeclaration

SEARCHER = SearcherDeclaration(
    learns=True,
    reference="none",
    handles=frozenset({Feature.CHOICES, Feature.CONSTRAINTS, Feature.PENDING}),
)
'''

ALGORITHM = '''"""Mutants of the best trial."""

from __future__ import annotations

from typing import Any

from service.tune.searchers.base import ProposalContext
from service.tune.searchers.encoding import Encoding
from service.tune.searchers.history import by_trial, merit

__all__ = ["SEARCHER", "MutantSearcher"]


class MutantSearcher:
    """Proposes the first mutant of the best trial that is not known."""

    def advance(self, context: ProposalContext) -> dict[str, Any]:
        rng = context.generator()
        scored = [trial for trial in by_trial(context.observations) if trial.costs is not None]
        if not scored:
            return context.sample_unseen(rng)
        encoding = Encoding(context.parameters)
        parents = encoding.encode([min(scored, key=merit).configuration] * 16)
        mutants = encoding.mutate(parents, rng, rate=0.5, step=STEP)
        mutant = encoding.first_unknown(mutants, context.known_configurations())
        return context.sample_unseen(rng) if mutant is None else encoding.decode(mutant)


SEARCHER = MutantSearcher()
'''

SECTION = '''class MutantsOptions(Section):
    step: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Standard deviation of a mutation, as a share of the parameter's range."""


'''

FIELD = '''    mutants: MutantsOptions = MutantsOptions()
    """Of algorithm: mutants."""
'''

# A study with the fake scorer for each section `search`; prints what was proposed in each.
STUDY = """
import json, tempfile
from pathlib import Path
from search_spaces.study.search import Search
from service.types import Origin
from tests.service.tune.harness import InlineProposer, coordinator_of, drive, new_study, space_of
from workers.serving.fake import FakeScorer

for section in {sections!r}:
    search = Search.model_validate(section)
    store, study = new_study(Path(tempfile.mkdtemp()))
    space = space_of("layerwise")
    proposer = InlineProposer(space, seed=3, algorithm=search.algorithm, options=search)
    drive(coordinator_of(store, study, space=space, proposer=proposer, max_trials=12), FakeScorer())
    trials = [trial for trial in store.trials(study) if trial.origin is Origin.SEARCH]
    assert all(trial.state.is_finished for trial in trials)
    print(json.dumps([dict(trial.configuration) for trial in trials]))
    store.close()
"""


def proposed(tree: Tree, *options: Mapping[str, Any]) -> list[list[Any]]:
    """The proposals of a study with each of the `options`, all in one process."""
    sections = [{"algorithm": "mutants", **each} for each in options]
    found = [json.loads(line) for line in tree.run(STUDY.format(sections=sections)).splitlines()]
    assert [len(each) for each in found] == [12] * len(options)
    return found


@pytest.mark.slow
def test_searcher_without_options(tmp_path: Path) -> None:
    """Two new files make a searcher that a study names, and that passes the tests of every searcher."""
    tree = Tree(tmp_path / "tree")
    tree.write("search_spaces/searchers/mutants.py", DECLARATION)
    tree.write("service/tune/searchers/mutants.py", ALGORITHM.replace("STEP", "0.1"))
    assert proposed(tree, {}) == proposed(tree, {})
    tree.test("tests/service/tune/test_searchers.py", "-k", "mutants")
    assert len(tree.changed) == 2


@pytest.mark.slow
def test_searcher_with_options(tmp_path: Path) -> None:
    """A section of its own in the study file is one file more; the searcher reads it from its setting."""
    tree = Tree(tmp_path / "tree")
    tree.write("search_spaces/searchers/mutants.py", DECLARATION)
    tree.write("service/tune/searchers/mutants.py", ALGORITHM.replace("STEP", "context.setting.options.mutants.step"))
    tree.insert("search_spaces/study/search.py", SECTION, before=r"class Search\(Section\):")
    tree.insert("search_spaces/study/search.py", FIELD, after=r'    """Options of algorithm: hm3."""')
    usual, same, larger = proposed(tree, {}, {"mutants": {"step": 0.1}}, {"mutants": {"step": 0.5}})
    assert usual == same
    assert usual != larger
    assert len(tree.changed) == 3

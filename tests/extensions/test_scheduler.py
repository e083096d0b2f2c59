"""The recipe "Add a scheduler" of CONTRIBUTING.md: one bracket, whose later results no proposal knows."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.extensions.tree import Tree

TABLE = '''"""Halving: one bracket, whose later results no proposal knows."""

from __future__ import annotations

from service.tune.schedulers.base import RungTable

__all__ = ["HalvingTable"]


class HalvingTable(RungTable):
    """Synchronous, over one bracket; a proposal knows the first evaluations of earlier trials and no later ones."""

    def _num_promoted_early(self, num_decided: int) -> int:
        return 0

    def _see_later(self, number: int, bracket: int) -> bool:
        return True

    def position(self) -> None:
        """None: trials are at different rungs at the same time."""
'''

# Prints how many trials each rung has; a study that is killed again and again has the same trials.
STUDY = """
import tempfile
from collections import Counter
from contextlib import suppress
from pathlib import Path
from search_spaces.study.fidelity import Fidelity
from service.types import Origin
from tests.service.tune.harness import Killed, coordinator_of, drive, killer, new_study, trial_list
from workers.serving.fake import FakeScorer

scheduler = Fidelity.model_validate({"scheduler": "halving", "rungs": [4, 12, 36]}).scheduler

def attempt(store, study, **changes):
    drive(coordinator_of(store, study, scheduler=scheduler, max_trials=18, **changes), FakeScorer())

store, study = new_study(Path(tempfile.mkdtemp()))
attempt(store, study)
other, killed = new_study(Path(tempfile.mkdtemp()))
for step in (20, 30, 40):
    with suppress(Killed):
        attempt(other, killed, observer=killer(step))
        raise AssertionError("it was not killed")
attempt(other, killed)
assert trial_list(other, killed) == trial_list(store, study)
print(Counter(r.rung for trial in store.trials(study) if trial.origin is Origin.SEARCH for r in trial.rungs))
store.close(), other.close()
"""


@pytest.mark.slow
def test_scheduler(tmp_path: Path) -> None:
    """A module, and its name in two lists, make a scheduler that passes the tests of every scheduler."""
    tree = Tree(tmp_path / "tree")
    tree.write("service/tune/schedulers/halving.py", TABLE)
    literal = 'Scheduler = Literal["hyperband", "asha", "racing", "successive_halving", "none"]\n'
    tree.replace("search_spaces/fidelity.py", literal, literal.replace('"none"', '"halving", "none"'))
    tree.insert(
        "service/tune/schedulers/__init__.py",
        "from service.tune.schedulers.halving import HalvingTable\n",
        after="from service.tune.schedulers.bound import Bound",
    )
    tree.insert("service/tune/schedulers/__init__.py", '    "halving": HalvingTable,\n', after='    "asha": AshaTable,')
    tree.insert(
        "service/tune/schedulers/__init__.py",
        "- `halving`: the best of one bracket\n",
        before="- `bound`: .*",
    )
    assert tree.run(STUDY) == "Counter({0: 18, 1: 6, 2: 2})\n"
    tree.test("tests/service/tune/schedulers/test_rung_table.py", "tests/test_maps.py", "-k", "halving or schedulers")
    assert len(tree.changed) == 3

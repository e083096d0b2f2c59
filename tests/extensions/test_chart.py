"""The recipe "Add a chart" of CONTRIBUTING.md: how many trials ended in which state."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.extensions.tree import Tree

SERIES = '''"""How many trials ended in which state."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from service.results.record import RunRecord
from service.results.series.base import chart

__all__ = ["StatesPlot", "states"]


@dataclass(frozen=True)
class StatesPlot:
    """Number of trials in each state."""

    plot: Literal["states"]
    trials: dict[str, int]
    longest: Annotated[int, Field(exclude=True)]


@chart(place=100)
def states(run: RunRecord) -> StatesPlot:
    """How many trials ended in which state."""
    counts = Counter(trial.state.value for trial in run.trials)
    return StatesPlot("states", dict(counts), max(counts.values(), default=0))
'''

PICTURE = '''"""Picture of the states of trials."""

from __future__ import annotations

from markupsafe import Markup

from service.results.record import RunRecord
from service.results.report.charts import Bar, stacked_bar
from service.results.series.states import states

__all__ = ["states_picture"]


def states_picture(run: RunRecord) -> Markup:
    """A bar with the share of each state."""
    counts = states(run).trials
    total = sum(counts.values())
    return stacked_bar([Bar(state, count / total, "background:var(--accent)") for state, count in counts.items()])
'''

USED = """
import json
from service.api.openapi import install_openapi
from service.api.routes import plots
from service.results.report import render_report
from service.results.series import CHARTS
from tests.service.synthetic_run import run_record
from fastapi import FastAPI

run = run_record(num_trials=20)
app = FastAPI()
app.include_router(plots.router)
install_openapi(app)
print(json.dumps({
    "names": list(CHARTS),
    "title": CHARTS["states"].title,
    "document": CHARTS["states"].document(run),
    "schema": app.openapi()["components"]["schemas"]["StatesPlot"]["properties"],
    "is_drawn": '<section id="states">' in render_report(run),
}))
"""

# What the recipe asks for: for the API, and to draw the chart in the report besides.
OF_THE_API = [
    "service/results/series/states.py",
    "service/results/series/__init__.py",
    "tests/service/results/series/test_charts.py",
]
OF_THE_REPORT = [
    "service/results/report/states_picture.py",
    "service/results/report/__init__.py",
    "service/results/report/page.py",
    "service/results/report/report.html.j2",
]


def add_series(tree: Tree) -> None:
    tree.write("service/results/series/states.py", SERIES)
    tree.insert("service/results/series/__init__.py", "- `states`: trials by state\n", after="- `base`: .*")
    tree.insert("tests/service/results/series/test_charts.py", '        "states",\n', after='        "rungs",')


def add_picture(tree: Tree) -> None:
    tree.write("service/results/report/states_picture.py", PICTURE)
    tree.insert("service/results/report/__init__.py", "- `states_picture`: trials by state\n", after="- `page`: .*")
    imported = "from service.results.report.states_picture import states_picture\n"
    tree.insert("service/results/report/page.py", imported, before="from service.results.report.texts import .*")
    tree.insert(
        "service/results/report/page.py", "        states=states_picture(run),\n", after=r" +path=path_picture\(run\),"
    )
    section = '<section id="states">\n  <h2>States</h2>\n  {{ states }}\n</section>\n\n'
    tree.insert("service/results/report/report.html.j2", section, before='<section id="failures">')


@pytest.mark.slow
def test_add_a_chart(tmp_path: Path) -> None:
    """A module and two names give a chart of the API, another module and four edits a section of the report."""
    tree = Tree(tmp_path / "repository")
    add_series(tree)
    assert tree.changed == OF_THE_API
    found = json.loads(tree.run(USED))
    assert found["names"][-1] == "states"
    assert found["title"] == "How many trials ended in which state."
    assert set(found["document"]) == set(found["schema"]) == {"plot", "trials"}
    assert sum(found["document"]["trials"].values()) > 20
    assert not found["is_drawn"]

    add_picture(tree)
    assert tree.changed == OF_THE_API + OF_THE_REPORT
    assert json.loads(tree.run(USED))["is_drawn"]
    tree.test(
        "tests/service/results/series/test_charts.py", "tests/service/results/report/test_page.py", "tests/test_maps.py"
    )

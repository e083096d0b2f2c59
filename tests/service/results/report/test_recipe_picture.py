"""The picture of a recipe."""

import pytest

from service.results.report.recipe_picture import recipe_picture
from service.results.selection import best_trial
from tests.service.synthetic_run import run_record


def test_recipe_picture_has_a_row_per_run_of_equal_layers():
    run = run_record()
    best = best_trial(run.trials, run.objectives)
    drawn = recipe_picture(best.recipe, experts=("text", "math"))
    assert [row["name"] for row in drawn["rows"]] == [
        "layers 0 to 1",
        "layers 2 to 3",
        "layers 4 to 5",
        "layers 6 to 7",
    ]
    assert drawn["models"] == ["text", "math", "lookup"]
    for row in drawn["contributions"]:
        assert sum(row["shares"]) == pytest.approx(1)

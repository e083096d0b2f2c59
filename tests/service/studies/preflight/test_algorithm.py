"""The choice of a study's searcher, and the message if the named searcher cannot search the study."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from search_spaces.errors import Problem
from search_spaces.searchers import SEARCHERS
from search_spaces.spaces.base import SearchSpace
from search_spaces.study.file import Study, parse_study
from search_spaces.study.search import GradientOptions
from service.studies.preflight.algorithm import Algorithm, FittedLosses, algorithm_of, check_refinement, fitted_losses
from tests.conftest import write_choices
from tests.search_spaces.spaces.families import models, space
from tests.vision import image_folder
from workers.types import TaskSpec

LFS = space("lfs")
LAYERWISE = space("layerwise")
EQUAL = {"sums": 0.5, "choices": 0.5}


@pytest.fixture
def tasks(tmp_path: Path) -> dict[str, TaskSpec]:
    file = tmp_path / "sums.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"{i}+1=", "answer": str(i + 1)}) + "\n" for i in range(5)))
    return {
        "sums": TaskSpec({"file": str(file), "max_tokens": 4}, "exact_match"),
        "choices": TaskSpec(str(write_choices(tmp_path)), "acc"),
    }


def study(algorithm: str, *, search_space: Any = None, **search: Any) -> Study:
    return parse_study(
        {
            "name": "s",
            "search_space": search_space or {},
            "models": {"base": "/b", "experts": {"math": "/m", "code": "/c", "text": "/t"}},
            "search": {"algorithm": algorithm, **search},
            "fidelity": {"scheduler": "none"},
            "objectives": [
                {"name": name, "task": {"file": f"/{name}.jsonl"}, "metric": "exact_match"}
                for name in ("sums", "choices")
            ],
        }
    )


def chosen(
    algorithm: str, over: SearchSpace, tasks: dict[str, TaskSpec], **search: Any
) -> tuple[Algorithm, list[Problem]]:
    problems: list[Problem] = []
    given = study(algorithm, **search)
    return algorithm_of(given, over, fitted_losses(given, tasks, problems), problems), problems


@pytest.mark.parametrize("named", ["auto", "gradient"])
def test_auto_descends_with_gradients(named: str, tasks: Any) -> None:
    """Where merges have gradients and tasks have references, `auto` is a gradient search."""
    found, problems = chosen(named, LAYERWISE, tasks)
    assert (found.name, problems) == ("gradient", [])


def test_auto_takes_smac_elsewhere(tasks: Any, tmp_path: Path) -> None:
    """Elsewhere `auto` says why it uses SMAC, and `gradient` is refused."""
    found, problems = chosen("auto", LFS, tasks)
    assert (found.name, problems) == ("smac", [])
    assert "a space of kind lfs have no gradients, those of layerwise and sfs do" in found.reason
    _, problems = chosen("gradient", LFS, tasks)
    assert any("gradient cannot be used: coefficients of a space of kind lfs" in p.message for p in problems)

    found, problems = chosen("auto", space("dis"), tasks)
    assert (found.name, problems) == ("smac", [])
    assert "which layers a merge has, and in which order, are discrete choices, which have no gradients" in found.reason

    (tmp_path / "other").mkdir()
    without = write_choices(tmp_path / "other", name="without", doc_to_target="{{'none of them'}}")
    lacking = {**tasks, "judged": TaskSpec(str(without), "acc")}
    found, problems = chosen("auto", LAYERWISE, lacking)
    assert (found.name, problems) == ("smac", [])
    assert "objective 'judged' has no reference answers: task without: its target names none" in found.reason
    _, problems = chosen("gradient", LAYERWISE, lacking)
    assert [p.field for p in problems] == ["search.algorithm"]
    assert "use auto or another searcher" in problems[0].message


def test_auto_takes_smac_without_room_for_gradients() -> None:
    """Where no device has room for gradients, `auto` takes SMAC and says why, and `gradient` is refused."""
    lack = "they need 32.6 GiB of memory beside the engines"
    for named, expected in (("auto", "smac"), ("gradient", "smac")):
        problems: list[Problem] = []
        found = algorithm_of(study(named), LAYERWISE, FittedLosses(), problems, lack_of_room=lack)
        assert found == Algorithm(expected, f"gradients cannot be used: {lack}")
        assert [problem.message for problem in problems] == (
            [f"gradient cannot be used: {lack}; use auto or another searcher"] if named == "gradient" else []
        )


def test_auto_takes_smac_for_a_warm_start(tasks: Any) -> None:
    """With the results of an earlier study `auto` is SMAC even where merges have gradients, and says why."""
    found, problems = chosen("auto", LAYERWISE, tasks, warm_start={"dir": "/runs/first"})
    assert (found.name, problems) == ("smac", [])
    assert "a descent cannot begin with results of another study (search.warm_start)" in found.reason


def test_a_searcher_that_is_named_is_taken(tasks: Any) -> None:
    assert chosen("random", LAYERWISE, tasks) == (Algorithm("random", "the study names it"), [])


def test_unused_preferences_are_refused(tasks: Any) -> None:
    """Searchers that do not use preference vectors refuse them."""
    for name, declared in SEARCHERS.items():
        if name in ("auto", "cmaes", "de", "es", "hm3"):  # auto chooses; of the others each takes one objective or
            continue  # another space
        _, problems = chosen(name, LAYERWISE, tasks, preferences={"lattice": 2})
        assert [problem.field for problem in problems] == ["search.preferences"] * (not declared.uses_preferences)
    _, (problem,) = chosen("smac", LAYERWISE, tasks, preferences={"lattice": 2})
    assert problem.message == (
        "smac does not use preference vectors; leave them out; searchers that use them: gradient, hm3"
    )


def test_merged_pool_takes_preferences(tasks: Any) -> None:
    """Every searcher may have preference vectors where they merge the pool."""
    family = replace(models(experts=("sums", "choices")), preferences=({"sums": 1.0, "choices": 0.0}, EQUAL))
    given = {"vectors": [{"sums": 1.0, "choices": 0.0}, EQUAL]}
    for name in ("moead", "random", "smac", "grid"):
        assert chosen(name, space("hm3", family, merged={}), tasks, preferences=given)[1] == []
        _, (problem,) = chosen(name, space("hm3", family), tasks, preferences=given)
        assert problem.field == "search.preferences"


def test_refinement_needs_reference_answers(tasks: Any) -> None:
    """A refinement uses preference vectors with any searcher, and refuses objectives without reference answers."""
    own = space("hm3", models(experts=("sums", "choices")))
    refined = {"preferences": {"lattice": 2}, "refinement": {}, "search_space": {"kind": "hm3"}}
    assert chosen("smac", own, tasks, **refined)[1] == []
    problems: list[Problem] = []
    given = study("smac", **refined)
    check_refinement(given, fitted_losses(given, tasks, problems), problems)
    assert problems == []
    judged = {**tasks, "judged": TaskSpec({"file": "none.jsonl"}, "exact_match")}
    lacking = fitted_losses(given, judged, problems)
    check_refinement(given, lacking, problems)
    ((field, message),) = [(problem.field, problem.message) for problem in problems]
    assert field == "search.refinement"
    assert message.startswith("objective 'judged' has no reference answers: ")
    check_refinement(study("smac"), lacking, problems)
    assert len(problems) == 1


def test_samples_to_fit_are_refused_by_searchers_that_fit_none(tasks: Any) -> None:
    assert chosen("auto", LAYERWISE, tasks, fit_share=0.5)[1] == []
    assert chosen("smac", LAYERWISE, tasks, fit_share=1.0)[1] == []
    for name, over, part in (
        ("smac", LAYERWISE, "leave a share of them out; searchers"),
        ("auto", LFS, "and auto is smac here as gr"),
    ):
        _, (problem,) = chosen(name, over, tasks, fit_share=0.5)
        assert problem.field == "search.fit_share"
        assert "smac fits no samples, and would only leave a share of them out" in problem.message
        assert part in problem.message
        assert problem.message.endswith("; searchers that fit samples: gradient")


def test_auto_explains_unused_preferences(tasks: Any) -> None:
    """Without gradients, `auto` says why it does not use preference vectors."""
    assert chosen("auto", LAYERWISE, tasks, preferences={"lattice": 2})[1] == []
    _, (problem,) = chosen("auto", LFS, tasks, preferences={"lattice": 2})
    assert problem.field == "search.preferences"
    assert "smac does not use preference vectors, and auto is smac here as gradients cannot be used" in problem.message


@pytest.mark.parametrize(
    ("search", "warned"),
    [
        # The 15 policies of the authors' setting play 4 iterations of 16 each: 0, 0, 10 and 20 % by the policy.
        (
            {"max_trials": 960, "hm3": {"elite_share": 0.0}},
            "its 15 policies would choose 72 of 960 trials, and 888 would",
        ),
        (
            {"max_trials": 960, "hm3": {"elite_share": 0.5}},
            "its 15 policies would choose 36 of 960 trials, and 564 would",
        ),
        ({"max_trials": 960, "hm3": {"policy": "conditioned", "explored": 10, "episodes": 30}}, ""),
        ({"max_trials": 320, "hm3": {"policy": "conditioned", "explored": 19}}, "its policy would choose 72 of 320"),
        ({"max_trials": 960, "hm3": {"start": {"dir": "/runs/first"}}}, ""),
    ],
)
def test_policies_that_choose_few_trials_are_warned_of(tasks: Any, search: dict[str, Any], warned: str) -> None:
    given = {"preferences": {"vectors": [{"sums": n / 14, "choices": 1 - n / 14} for n in range(15)]}, **search}
    found, problems = chosen("hm3", space("hm3"), tasks, **given)
    assert problems == []
    assert ("; warning: " in found.reason) == bool(warned)
    assert warned in found.reason


def test_distances_have_no_discount(tasks: Any) -> None:
    for gamma in (None, 1.0):
        given = {"hm3": {"scalarisation": "tchebycheff", "gamma": gamma}}
        assert chosen("hm3", space("hm3"), tasks, **given)[1] == []
    _, (problem,) = chosen("hm3", space("hm3"), tasks, hm3={"scalarisation": "tchebycheff", "gamma": 0.99})
    assert problem.field == "search.hm3.gamma"
    assert problem.message.startswith("0.99: with scalarisation: tchebycheff outcomes are distances")


def test_scales_of_layers_need_proto_actions(tasks: Any) -> None:
    over = space("hm3", scales=(0.8, 1.25))
    assert chosen("hm3", over, tasks)[1] == []
    _, (problem,) = chosen("hm3", over, tasks, hm3={"action": "categorical"})
    assert (problem.field, problem.message) == (
        "search.hm3.action",
        "categorical: scales of layers are drawn with a proto-action; write action: wolpertinger",
    )
    assert chosen("hm3", space("hm3"), tasks, hm3={"action": "categorical"})[1] == []


@pytest.mark.parametrize(("preferences", "most"), [(None, 16), ({"lattice": 2}, 32), ({"lattice": 4}, 64)])
def test_a_policy_learns_in_time(tasks: Any, preferences: dict[str, Any] | None, most: int) -> None:
    """Proposals of policies may run ahead only as far as results are known when a policy needs them."""
    over = space("hm3")
    given: dict[str, Any] = {"max_trials": 1000, **({} if preferences is None else {"preferences": preferences})}
    assert chosen("hm3", over, tasks, max_staleness=most, **given)[1] == []
    _, (problem,) = chosen("hm3", over, tasks, max_staleness=most + 1, **given)
    assert problem.field == "search.max_staleness"
    assert problem.message.endswith(f"not known; give at most {most}")


def test_the_loss_of_each_objective(tasks: Any, tmp_path: Path) -> None:
    """Tasks of images have cross-entropies or, if the study asks for them, entropies; texts have no entropies."""
    pictures = TaskSpec({"images": str(image_folder(tmp_path / "images")), "head": "math"}, "acc")
    both = {"pictures": pictures, "more": pictures}
    problems: list[Problem] = []
    assert fitted_losses(study("auto"), both, problems) == FittedLosses()
    asked = study("auto", gradient={"loss": "entropy"})
    assert fitted_losses(asked, both, problems) == FittedLosses(("pictures", "more"))
    assert not problems
    found = algorithm_of(asked, LAYERWISE, FittedLosses(("pictures", "more")), problems)
    assert found.name == "gradient"
    assert found.reason.endswith("the entropy of predictions is the loss of pictures, more")
    lacking = fitted_losses(asked, {**both, **tasks}, problems)
    assert lacking.lack == "objective 'sums' has no entropy of predictions"
    ((field, message),) = [(problem.field, problem.message) for problem in problems]
    assert field == "search.gradient.loss"
    assert message.startswith("entropy: objective 'sums' has none: its answers are texts")


def test_defaults_of_a_descent_on_entropies() -> None:
    """They are those of AdaMerging; what the study states is kept, and other descents keep theirs."""
    found = GradientOptions.model_validate({"loss": "entropy", "steps": 30})
    assert (found.steps, found.learning_rate, found.schedule, found.start) == (30, 1e-3, "constant", 0.3)
    plain = GradientOptions()
    assert (plain.steps, plain.learning_rate, plain.schedule, plain.start) == (48, 0.2, "linear", None)
    stored = study("auto", gradient={"loss": "entropy"}).canonical()
    assert parse_study(stored).canonical() == stored

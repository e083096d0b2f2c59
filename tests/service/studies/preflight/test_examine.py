"""The result of preflight for a valid study: correct numbers of samples and bytes of memory."""

from __future__ import annotations

import json
import pkgutil
import shutil
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from search_spaces.errors import InvalidStudy, Problem
from search_spaces.fidelity import Bracket
from search_spaces.searchers import SEARCHERS
from search_spaces.study.engine import EngineOptions
from search_spaces.study.file import Study, parse_study
from service.engine_machines import VARIABLE, EngineMachines
from service.jobs.search.dry_run import check
from service.merges.merge import check_merge
from service.resolved_study import ResolvedStudy
from service.studies.planning.here import profile_for
from service.studies.preflight import resources
from service.studies.preflight.dtype import engine_dtype
from service.studies.preflight.examine import examine
from service.studies.preflight.models import check_models
from service.studies.preflight.resources import (
    ENGINE_OVERHEAD_BYTES,
    GRADIENT_OVERHEAD_BYTES,
    OF_SEVERAL,
    scored_methods,
    uses_statistics,
)
from service.studies.preflight.result import ExpectedSamples, PreflightResult, StudyTasks
from service.tune.searchers.descents import descents_of
from service.types import Origin
from tests.builders import character_tokenizer, lora_adapter, tiny_family, tiny_qwen2, with_tokens
from tests.conftest import HIDDEN, write_choices
from tests.layouts import LAYOUTS, layout_family
from workers.engines.vllm.memory import kv_cache_bytes
from workers.engines.vllm.support import CapabilityProbe
from workers.errors import InvalidModel
from workers.evaluation.lm_eval_tasks import content_hash
from workers.evaluation.prompts import Prompts
from workers.merging.bank import Bank
from workers.merging.plan import check_recipe
from workers.models.family import locate_family, open_sources
from workers.training.memory import pass_bytes
from workers.types import Family

SIZES = {"sums": 40, "words": 38}
HOLDOUT = 20


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory with the models and data of this module's studies."""
    directory = tmp_path_factory.mktemp("preflight")
    tiny_family(directory, experts=("math", "text"), layers=3)
    sizes = {**SIZES, **{f"{name}_holdout": HOLDOUT for name in SIZES}}
    for name, size in sizes.items():
        lines = [json.dumps({"prompt": f"{name} {i}", "answer": str(i)}) for i in range(size)]
        (directory / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return directory


def study_of(root: Path, **sections: Any) -> Study:
    """A study with two objectives, rungs of 4, 12 and 36 samples, and 14 configurations."""
    document = {
        "name": "small",
        "models": {"base": "base", "experts": {"math": "math", "text": "text"}},
        "search_space": {"kind": "lfs", "layer_groups": 2},
        "search": {"max_trials": 14, "seed": 5},
        "fidelity": {"scheduler": "hyperband", "min_samples": 4, "max_samples": 36, "eta": 3},
        "objectives": [objective(name, name) for name in SIZES],
        "holdout": [objective(name, f"{name}_holdout") for name in SIZES],
        "engine": {"max_model_len": 64, "dtype": "float32"},
    }
    return parse_study({**document, **sections}, root)


def objective(name: str, file: str) -> dict[str, Any]:
    return {"name": name, "task": {"file": f"{file}.jsonl", "max_tokens": 8}, "metric": "exact_match"}


def examined(root: Path, **sections: Any) -> PreflightResult:
    return examine(study_of(root, **sections))


@pytest.mark.slow
def test_models_space_and_tasks_are_as_on_disk(root: Path) -> None:
    found = examined(root)
    assert [model.alias for model in found.models.family.models] == ["base", "math", "text"]
    assert found.models.num_layers == 3
    assert found.models.num_parameters == sum(
        t.numel() for t in load_file(root / "base" / "model.safetensors").values()
    )
    assert [group.label for group in found.space.describe().layer_groups] == ["layers 1-2", "layer 3"]
    assert {name: info.num_samples for name, info in found.tasks.search_infos.items()} == SIZES
    assert {name: info.num_samples for name, info in found.tasks.holdout_infos.items()} == dict.fromkeys(SIZES, HOLDOUT)
    assert found.tasks.search["sums"].content == content_hash(root / "sums.jsonl")
    assert {task.permutation_seed for task in found.tasks.search.values()} == {5}


CLASSIFIER = {"architectures": ["LlamaForSequenceClassification"]}


def config_of(directory: str | Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(directory, "config.json").read_text())
    return found


@pytest.fixture(scope="module")
def layouts(root: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Family]:
    """A family of each layout. vLLM was asked about all of them at once, and about a classifier."""
    directory = tmp_path_factory.mktemp("layouts")
    families = {name: layout_family(directory / name, name, hidden=HIDDEN) for name in LAYOUTS}
    configs = [config_of(family.base.directory) for family in families.values()]
    configs.append(config_of(root / "base") | CLASSIFIER)
    CapabilityProbe(configs).answers(dtype="float32")
    return families


@pytest.mark.slow
@pytest.mark.parametrize("model_type", LAYOUTS)
def test_every_layout_has_a_space_whose_points_are_merges_of_it(
    root: Path, layouts: dict[str, Family], model_type: str
) -> None:
    family = layouts[model_type]
    models = {
        "base": family.base.directory,
        "experts": {expert.alias: expert.directory for expert in family.experts},
    }
    found = examined(root, models=models)
    assert found.models.num_layers == 3
    assert found.models.family.fingerprints == family.fingerprints
    assert ("runs transformers' modules" in found.models.engine_note) == (model_type == "gpt_neox")
    point = found.space.parameters.sample(np.random.default_rng(0))
    check_recipe(found.space.to_recipe(point), Bank(found.models.family))


def test_rungs_and_brackets_are_those_of_hyperband(root: Path) -> None:
    found = examined(root)
    assert found.budget.rung_samples == tuple(dict.fromkeys(SIZES, size) for size in (4, 12, 36))
    assert found.budget.cycle == (Bracket(9, 0, 3, 3), Bracket(5, 1, 3, 3), Bracket(3, 2, 3, 3))
    found = examined(root, fidelity={"scheduler": "hyperband", "rungs": [10, 30]})
    assert found.budget.rung_samples == tuple(dict.fromkeys(SIZES, size) for size in (10, 30))
    assert found.budget.cycle == (Bracket(3, 0, 2, 3), Bracket(2, 1, 2, 3))


def test_one_rung_without_a_scheduler(root: Path) -> None:
    """Without a scheduler, there is one rung of all samples or of `max_samples`."""
    found = examined(root, fidelity={"scheduler": "none"})
    assert found.budget.rung_samples == (SIZES,)
    assert found.budget.cycle == (Bracket(14, 0, 1, 3),)
    found = examined(root, fidelity={"scheduler": "none", "max_samples": 38})
    assert found.budget.rung_samples == (dict.fromkeys(SIZES, 38),)


def test_asha_has_one_bracket_of_all_trials(root: Path) -> None:
    found = examined(root, fidelity={"scheduler": "asha", "min_samples": 4, "max_samples": 36})
    assert found.budget.cycle == (Bracket(14, 0, 3, 3),)
    plan = found.plan("s", found.resolved())
    assert (plan.scheduler, plan.eta) == ("asha", 3)


def test_new_study_chooses_among_the_filters_of_a_task(root: Path, tmp_path: Path) -> None:
    """A stored study has the first, which it was created with."""
    first, second = ({"name": name, "filter": [{"function": "take_first"}]} for name in ("strict", "flexible"))
    file = write_choices(tmp_path, filter_list=[first, second])
    spec = {"name": "choices", "task": str(file), "metric": "acc"}
    study = {"objectives": [spec], "holdout": [], "fidelity": {"scheduler": "none"}}
    with pytest.raises(InvalidStudy, match=r"objectives\.0\.filter: is missing; .*give one of strict, flexible"):
        examine(study_of(root, **study), is_new=True)
    assert examine(study_of(root, **study)).tasks.search["choices"].filter is None
    spec["filter"] = "flexible"
    assert examine(study_of(root, **study), is_new=True).tasks.search["choices"].filter == "flexible"


def test_objectives_may_have_rungs_of_their_own(root: Path) -> None:
    specs = [{**objective("sums", "sums"), "rungs": [5, 10, 40]}, objective("words", "words")]
    found = examined(root, objectives=specs)
    assert found.budget.rung_samples == ({"sums": 5, "words": 4}, {"sums": 10, "words": 12}, {"sums": 40, "words": 36})
    specs[1]["rungs"] = [6]
    with pytest.raises(InvalidStudy, match=r"objectives\.1\.rungs: \[6\] differs in length"):
        examined(root, objectives=specs)
    del specs[0]["rungs"]
    found = examined(root, objectives=specs, fidelity={"scheduler": "none"})
    assert found.budget.rung_samples == ({"sums": 40, "words": 6},)


def test_small_data_is_reported_at_objective(root: Path) -> None:
    """Data smaller than an objective's own rungs are reported at that objective."""
    specs = [{**objective(name, name), "rungs": [10, 39]} for name in SIZES]
    with pytest.raises(InvalidStudy) as caught:
        examined(root, objectives=specs, fidelity={})
    assert str(caught.value) == "objectives.1.rungs: 39 samples requested, objective 'words' has 38; use at most 38"


def test_last_rung_fits_the_smallest_data(root: Path) -> None:
    """The last rung may be as large as the smallest data and no larger."""
    assert examined(root, fidelity={"rungs": [10, 38]}).budget.rung_samples[1:] == (dict.fromkeys(SIZES, 38),)
    with pytest.raises(InvalidStudy) as caught:
        examined(root, fidelity={"rungs": [10, 39]})
    assert str(caught.value) == "fidelity.rungs: 39 samples requested, objective 'words' has 38; use at most 38"


def test_expected_samples_are_those_counted_by_hand(root: Path) -> None:
    """Both objectives together: rungs of 8, 24 and 72 samples; ten baselines pay 72 each.

    Nine configurations start at 8 (72), three go on for 16 more (48), one for 48 more: 168. Five start at 24 (120) and
    one goes on for 48 more: 168. Held out: ten recipes and about four finalists on 2 x 20 samples.
    """
    found = examined(root)
    assert len(found.baselines()) == 10
    assert found.expected_samples() == ExpectedSamples(10 * 72 + 168 + 168, 14 * 40, 24 * 72, 10 * 72, 10 * 40)


MERGEKIT = {
    "merge_method": "linear",
    "models": [{"model": "math", "parameters": {"weight": 0.8}}, {"model": "text", "parameters": {"weight": 0.2}}],
}


@pytest.mark.parametrize(
    ("changes", "search", "finalists", "algorithm"),
    [({}, 0, 0, "random"), ({"recipes_only": False}, 168 + 168, 4, "smac")],
    ids=["alone", "before a search"],
)
def test_given_recipes_are_planned(
    root: Path, changes: dict[str, Any], search: int, finalists: int, algorithm: str
) -> None:
    """A given recipe is one merge more beside the ten baselines; without `recipes_only: false` nothing is proposed."""
    given = {"recipes": [{"name": "mine", "recipe": MERGEKIT}], "max_trials": 14, **changes}
    found = examined(root, search=given)
    assert [label for origin, label, _ in found.baselines() if origin is Origin.USER] == ["mine"]
    expected = found.expected_samples()
    assert (expected.search, expected.holdout) == (11 * 72 + search, (11 + finalists) * 40)
    assert found.algorithm.name == algorithm


def test_given_recipes_are_part_of_the_least_samples(root: Path) -> None:
    """A limit that the baselines and the given recipe use up leaves nothing for the search."""
    given = {"recipes": [{"name": "mine", "recipe": MERGEKIT}], "recipes_only": False, "max_trials": 14}
    with pytest.raises(InvalidStudy, match=r"limits.max_samples: .* 10 baselines, 1 recipes and the first bracket"):
        examined(root, search=given, limits={"max_samples": 11 * 72})


def test_a_search_beside_given_recipes_needs_a_task(root: Path) -> None:
    """Recipes alone may be compared by their costs; a search would only find the smallest merge."""
    given = {"recipes": [{"name": "mine", "recipe": MERGEKIT}]}
    costs = [{"name": "parameters", "cost": "parameters"}]
    study_of(root, search=given, objectives=costs, holdout=[], fidelity={"scheduler": "none"})
    with pytest.raises(InvalidStudy, match="has costs only"):
        study_of(root, search={**given, "recipes_only": False}, objectives=costs, holdout=[])


def test_recipes_only_is_for_given_recipes(root: Path) -> None:
    with pytest.raises(InvalidStudy, match=r"search.recipes_only: false has no effect without search.recipes"):
        study_of(root, search={"recipes_only": False})
    given = {"recipes": [{"name": "mine", "recipe": MERGEKIT}], "preferences": {"dirichlet": {"count": 2}}}
    with pytest.raises(InvalidStudy, match=r"search.preferences: .* or set search.recipes_only to false"):
        study_of(root, search=given)


@pytest.mark.parametrize(
    ("max_trials", "search"),
    [
        (11, 10 * 72 + 168 + (2 * 24 + 48)),  # the second bracket is cut to two
        (17, 10 * 72 + 168 + 168 + 3 * 72),
        (20, 10 * 72 + 168 + 168 + 3 * 72 + (3 * 8 + 16 + 48)),  # and the first comes again, cut to three
    ],
)
def test_expected_samples_of_cut_and_repeated_brackets(root: Path, max_trials: int, search: int) -> None:
    assert examined(root, search={"max_trials": max_trials}).expected_samples().search == search


def test_asha_is_expected_to_promote_one_in_eta_of_all_trials(root: Path) -> None:
    """Fourteen start at 8 samples, four go on for 16 more, one for 48 more."""
    fidelity = {"scheduler": "asha", "min_samples": 4, "max_samples": 36}
    expected = examined(root, fidelity=fidelity).expected_samples()
    assert expected.search == 10 * 72 + 14 * 8 + 4 * 16 + 48


def test_without_a_scheduler_every_trial_pays_for_all_samples(root: Path) -> None:
    expected = examined(root, fidelity={"scheduler": "none"}, holdout=[]).expected_samples()
    assert expected == ExpectedSamples(24 * 78, 0, 24 * 78, baselines=10 * 78, holdout_baselines=0)


def test_baselines_come_first(root: Path) -> None:
    """The baselines come first and are of this family."""
    found = examined(root)
    origins = [origin for origin, _, _ in found.baselines()]
    assert origins == [Origin.SOURCE] * 3 + [Origin.PUBLISHED] * 7
    assert [label for _, label, _ in found.baselines()][:4] == ["base", "expert:math", "expert:text", "uniform average"]
    for _, _, recipe in found.baselines():
        assert len(recipe.layers) == 3
        assert set(recipe.models.values()) <= set(found.models.family.fingerprints.values())


def test_resolution_is_repeatable(root: Path) -> None:
    """The same study resolves to the same plain data."""
    resolved = examined(root).resolved()
    facts = resolved.to_json()
    assert json.loads(json.dumps(facts)) == json.loads(json.dumps(examined(root).resolved().to_json()))
    assert ResolvedStudy.from_json(json.loads(json.dumps(facts))) == resolved
    assert facts["num_layers"] == 3
    assert facts["rung_samples"] == [dict.fromkeys(SIZES, size) for size in (4, 12, 36)]
    assert facts["lag"] == 5
    assert [(o["name"], o["metric"], o["direction"]) for o in facts["objectives"]] == [
        ("sums", "exact_match", "maximize"),
        ("words", "exact_match", "maximize"),
    ]
    assert set(facts["fingerprints"]) == {"base", "math", "text"}


def test_constraints_are_stored(root: Path) -> None:
    """Constraints are those of their objectives and are stored with them."""
    texts = ["words >= base - 0.01", "sums >= 0.5", "words <= 0.9"]
    resolved = examined(root, search={"max_trials": 14, "seed": 5, "constraints": texts}).resolved()
    sums, words = resolved.objectives
    assert [constraint.text for constraint in sums.constraints] == ["sums >= 0.5"]
    assert [constraint.text for constraint in words.constraints] == ["words >= base - 0.01", "words <= 0.9"]
    facts = json.loads(json.dumps(resolved.to_json()))
    assert ResolvedStudy.from_json(facts) == resolved
    for objective in facts["objectives"]:
        del objective["constraints"]  # as earlier versions stored them
    assert ResolvedStudy.from_json(facts).objectives == examined(root).tasks.objectives


def test_resolution_follows_its_inputs(root: Path) -> None:
    """The resolved study follows the data, the models and the order of samples."""
    before = examined(root).resolved()
    other_data = examined(root, objectives=[objective("sums", "words"), objective("words", "words")]).resolved()
    assert other_data.tasks["sums"] != before.tasks["sums"]
    assert other_data.tasks["words"] == before.tasks["words"]
    other_seed = examined(root, search={"max_trials": 14, "seed": 6}).resolved()
    assert other_seed.tasks["words"] != before.tasks["words"]
    other_model = examined(root, models={"base": "base", "experts": {"math": "text", "text": "text"}}).resolved()
    assert other_model.fingerprints["math"] == before.fingerprints["text"]


def test_the_plan_keeps_the_staleness_that_the_study_began_with(root: Path) -> None:
    found = examined(root)
    plan = found.plan("s", replace(found.resolved(), max_staleness=11, open_brackets=4, batch=2))
    assert (plan.max_staleness, plan.open_brackets, plan.batch) == (11, 4, 2)
    assert (plan.seed, plan.max_trials, plan.eta) == (5, 14, 3)
    assert plan.holdout_samples == dict.fromkeys(SIZES, HOLDOUT)
    assert plan.bank_fingerprint == found.models.family.fingerprint
    assert found.concurrency == 3


@pytest.mark.parametrize(
    ("replicas", "stated", "expected"),
    [
        (1, None, (5, 2, 1)),
        (2, None, (11, 2, 1)),
        (16, None, (95, 16, 11)),
        (32, None, (191, 33, 23)),
        (1, 95, (95, 16, 11)),
        (16, 5, (5, 2, 1)),
        (16, 1, (1, 2, 1)),
    ],
)
def test_staleness_follows_replicas(
    root: Path, replicas: int, stated: int | None, expected: tuple[int, int, int]
) -> None:
    """The default staleness follows from the replicas; what the file states holds with any number of them."""
    found = replace(examined(root), study=study_in(root, replicas, stated))
    resolved = found.resolved()
    assert (resolved.max_staleness, resolved.open_brackets, resolved.batch) == expected
    plan = found.plan("s", resolved)
    assert (plan.max_staleness, plan.open_brackets, plan.batch) == expected
    assert found.search_setting(num_baselines=3, batch=plan.batch).batch == expected[2]


def study_in(root: Path, replicas: int, max_staleness: int | None) -> Study:
    """The study of `examined` with this number of replicas, for which this machine has no room."""
    study = examined(root).study
    search = study.search.model_copy(update={"max_staleness": max_staleness})
    return study.model_copy(update={"search": search, "engine": study.engine.model_copy(update={"replicas": replicas})})


def test_earlier_studies_keep_their_rules(root: Path) -> None:
    """A study stored without open brackets and batches keeps two brackets and proposals one by one."""
    found = replace(examined(root), study=study_in(root, 16, None))
    facts = found.resolved().to_json()
    assert facts.pop("open_brackets") == 16
    assert facts.pop("batch") == 11
    facts["lag"] = 50  # as earlier versions stored for 16 replicas
    plan = found.plan("s", ResolvedStudy.from_json(json.loads(json.dumps(facts))))
    assert (plan.max_staleness, plan.open_brackets, plan.batch) == (50, 2, 1)


def test_comparing_search_awaits_baselines(root: Path) -> None:
    """Only a search that compares baselines waits for all of them."""
    found = examined(root)
    of = {
        name: found.plan("s", replace(found.resolved(), algorithm=name)).waits_for_baselines
        for name, declared in SEARCHERS.items()
        if declared.alias_of is None
    }
    assert [name for name, waits in of.items() if waits] == ["gradient"]


def test_fitted_samples_are_not_scored(root: Path) -> None:
    """A share of the samples is fitted, and trials are scored on the others only."""
    fitted: dict[str, Any] = {"search_space": {"kind": "layerwise"}, "search": {"max_trials": 14, "fit_share": 0.25}}
    found = examined(root, **fitted, fidelity={"scheduler": "none"})
    assert found.algorithm.name == "gradient"
    rest = {"sums": 30, "words": 28}  # of 40 and 38
    assert found.budget.rung_samples == (rest,)
    setting = found.search_setting(num_baselines=9)
    parts = {name: (set(range(rest[name])), set(setting.fitted(name))) for name in SIZES}
    assert all(scored | fit == set(range(SIZES[name])) for name, (scored, fit) in parts.items())
    assert not any(scored & fit for scored, fit in parts.values())
    found = examined(root, **fitted, fidelity={"scheduler": "racing", "rungs": [5, 28], "rule": "bound"})
    plan = found.plan("s", found.resolved())
    assert plan.rung_samples == (dict.fromkeys(SIZES, 5), dict.fromkeys(SIZES, 28))
    assert plan.error_rate == 0.05

    with pytest.raises(InvalidStudy) as caught:
        examined(root, **fitted, fidelity={"scheduler": "none", "max_samples": 29})
    message = "29 samples requested, objective 'words' has 38, of which search.fit_share=0.25 leaves 28 to score"
    assert f"fidelity.max_samples: {message}; use at most 28" in str(caught.value)
    for share, what in ((0.99, "score"), (0.01, "fit")):
        fitted["search"] = {"fit_share": share}
        message = rf"search\.fit_share: {share} of the 40 .* 'sums' leaves none to {what}"
        with pytest.raises(InvalidStudy, match=message):
            examined(root, **fitted, fidelity={"scheduler": "none"})


def test_by_default_all_samples_are_fitted_and_scored(root: Path) -> None:
    found = examined(root, search_space={"kind": "layerwise"}, fidelity={"scheduler": "none"})
    assert found.budget.rung_samples == (SIZES,)
    setting = found.search_setting(num_baselines=9)
    assert {name: setting.fitted(name) for name in SIZES} == {name: range(size) for name, size in SIZES.items()}


def test_descents_end_within_the_trials(root: Path) -> None:
    """With too few trials, or more points than gradients, fewer points become trials; stored studies keep theirs."""
    space = {"search_space": {"kind": "layerwise"}, "fidelity": {"scheduler": "none"}}
    for search, points in (
        ({"max_trials": 2}, 2),
        ({"max_trials": 14}, 4),
        ({"algorithm": "gradient", "max_trials": 14, "gradient": {"steps": 3, "points": 9}}, 3),
        ({"max_trials": 14, "gradient": {"steps": 4, "points": 9}, "preferences": {"lattice": 2}}, 6),
    ):
        found = examined(root, **space, search=search)
        resolved = ResolvedStudy.from_json(found.resolved().to_json())
        assert resolved.descent_points == points
        setting = found.search_setting(num_baselines=9)
        descents = descents_of(setting.options.gradient, setting.vectors)
        ends = [descent.num_steps_to(point) for descent in descents for point in range(descent.num_points)]
        assert len(set(ends)) == points if len(descents) == 1 else sum(d.num_points for d in descents) == points
        assert ends[descents[0].num_points - 1] == setting.options.gradient.steps
        asked = found.study.search.gradient.points
        assert (f"; {points} points of descents" in found.algorithm.reason) == (points < asked)
        assert found.search_setting(num_baselines=9, descent_points=asked).options == found.study.search
    assert examined(root, search={"algorithm": "random", "max_trials": 2}).resolved().descent_points is None


def test_the_engine_is_started_as_the_study_says(root: Path) -> None:
    engine = {"max_model_len": 50, "dtype": "float16", "add_bos_token": False, "system_prompt": "be brief"}
    assert examined(root, engine=engine).engine_options == EngineOptions(
        max_model_len=50, dtype="float16", add_bos_token=False, system_prompt="be brief"
    )


# Directions.


def choices(directory: Path, higher_is_better: bool) -> dict[str, Any]:
    metrics = [{"metric": "acc", "aggregation": "mean", "higher_is_better": higher_is_better}]
    return {"name": "choices", "task": str(write_choices(directory, metric_list=metrics)), "metric": "acc"}


def test_direction_is_the_tasks_own(root: Path, tmp_path: Path) -> None:
    """The direction is the task's own unless the study sets another."""
    fidelity = {"scheduler": "none"}
    spec = {**choices(tmp_path, higher_is_better=False), "range": [0, 1]}
    (found,) = examined(root, fidelity=fidelity, objectives=[spec], holdout=[]).tasks.objectives
    assert (found.direction, found.range) == ("minimize", (0.0, 1.0))
    spec["direction"] = "maximize"
    (found,) = examined(root, fidelity=fidelity, objectives=[spec], holdout=[]).tasks.objectives
    assert found.direction == "maximize"
    spec = choices(tmp_path, higher_is_better=True)
    (found,) = examined(root, fidelity=fidelity, objectives=[spec], holdout=[]).tasks.objectives
    assert found.direction == "maximize"


def test_a_task_that_is_minimised_needs_a_range(root: Path, tmp_path: Path) -> None:
    spec = choices(tmp_path, higher_is_better=False)
    with pytest.raises(InvalidStudy, match=r"objectives\.0: .*range: \[0, 100\]"):
        examined(root, fidelity={"scheduler": "none"}, objectives=[spec], holdout=[])


# Memory.

COPIES = 0 if torch.cuda.is_available() else 2  # on CPU vLLM packs the weights, and the plain ones stay


def bank_bytes(root: Path) -> int:
    models = [load_file(root / alias / "model.safetensors") for alias in ("base", "math", "text")]
    return sum(tensor.nbytes for model in models for tensor in model.values())


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bfloat16", 2)])
def test_memory_is_the_bank_once_and_an_engine_for_every_replica(root: Path, dtype: str, size: int) -> None:
    study = study_of(root, engine={"max_model_len": 64, "dtype": dtype, "replicas": 1})
    found = examine(study, available_bytes=2**40)
    memory = found.memory
    assert memory.bank_bytes == bank_bytes(root)
    config = json.loads((root / "base" / "config.json").read_text())
    keys_and_values = kv_cache_bytes(config, 64, dtype) if COPIES else 0
    assert memory.engine_bytes == (
        COPIES * size * found.models.num_parameters + keys_and_values + ENGINE_OVERHEAD_BYTES
    )
    assert memory.needed_bytes == memory.bank_bytes + memory.engine_bytes
    assert memory.available_bytes == 2**40


def test_rank_cache_takes_two_bytes(root: Path) -> None:
    """A cache of ranks takes two bytes for each parameter of each expert."""
    plain, ranks = (
        examine(study_of(root, engine={"max_model_len": 64, "rank_cache": is_asked}), available_bytes=2**40)
        for is_asked in (False, True)
    )
    assert ranks.memory.engine_bytes - plain.memory.engine_bytes == 2 * 2 * plain.models.num_parameters


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the model is in the GPU's memory")
def test_memory_of_gradients(root: Path) -> None:
    """Gradients take the memory of one merged model, of its largest tensor's gradient, and of a pass."""
    found = examine(study_of(root, search_space={}), available_bytes=2**40)
    largest = max(tensor.nbytes for tensor in load_file(root / "base" / "model.safetensors").values())
    assert found.algorithm.name == "gradient"
    held = 4 * found.models.num_parameters + largest + GRADIENT_OVERHEAD_BYTES
    settings = open_sources(found.models.family).base.settings
    assert found.memory.gradient_bytes == held + pass_bytes(settings, 16_384, 4, recomputes=False)
    assert (
        found.memory.needed_bytes == found.memory.bank_bytes + found.memory.engine_bytes + found.memory.gradient_bytes
    )
    with pytest.raises(InvalidStudy, match=r"1 engine\(s\) of 2.0 GiB \+ 1.0 GiB for gradients; use fewer"):
        examine(study_of(root, search_space={}), available_bytes=2**31)


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the model is in the GPU's memory")
def test_auto_searches_without_gradients_for_lack_of_memory(root: Path) -> None:
    """A study that fits into memory only without gradients is searched without them, and says so before its start."""
    found = examine(study_of(root, search_space={}), available_bytes=5 * 2**29)
    assert (found.algorithm.name, found.gradients, found.memory.gradient_bytes) == ("smac", None, 0)
    assert found.algorithm.reason.startswith("gradients cannot be used: they need 1.0 GiB of memory beside the engines")
    with pytest.raises(InvalidStudy, match=r"search.algorithm: gradient cannot be used: they need 1.0 GiB"):
        examine(study_of(root, search_space={}, search={"algorithm": "gradient"}), available_bytes=5 * 2**29)


def test_gradients_are_planned_for_the_machines(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient actor gets a GPU where engines leave one or a share of one, else the CPU; the study says which."""
    unknown = "; the CPU computes them, as engines use the only GPU, and the memory of GPUs is not known"
    small = "; the CPU computes them, as engines use the only GPU, and beside an engine a GPU has no room for the "
    for nodes, device, share, said in (
        ("gpus=2,memory=8GiB,gpu_memory=80GB", "cuda", 0.0, "; a GPU without an engine computes them in "),
        ("gpus=1,memory=8GiB,gpu_memory=80GB", "cuda", 0.02, "; gradients share the GPU of an engine, in "),
        ("gpus=1,memory=8GiB", "cpu", 0.0, unknown),
        ("gpus=1,memory=8GiB,gpu_memory=3GB", "cpu", 0.0, small),
    ):
        monkeypatch.setenv(VARIABLE, nodes)
        found = examine(study_of(root, search_space={}))
        inputs = found.gradient_inputs()
        assert inputs is not None
        assert (found.algorithm.name, inputs.device, inputs.recomputes) == ("gradient", device, False)
        assert said in found.algorithm.reason
        assert ResolvedStudy.from_json(found.resolved().to_json()).gpu_share_left == found.engine_options.gpu_share_left
        assert inputs.options.gpu_share_left == found.engine_options.gpu_share_left == pytest.approx(share, abs=1e-3)
        assert (found.memory.gradient_bytes == GRADIENT_OVERHEAD_BYTES) == (device == "cuda")


@pytest.mark.parametrize("method", ["sce", "sce_mergekit", "arcee_fusion"])
def test_tables_of_several_experts_take_an_eighth_of_the_sources(root: Path, method: str) -> None:
    plain, tables = (
        examine(study_of(root, search_space={"kind": "lfs", "layer_groups": 2, "methods": methods}))
        for methods in (["linear"], ["linear", method])
    )
    assert tables.memory.engine_bytes - plain.memory.engine_bytes == bank_bytes(root) // 8


@pytest.mark.skipif(torch.cuda.is_available(), reason="several replicas need as many GPUs")
def test_replicas_share_the_bank(root: Path) -> None:
    memory = examine(study_of(root, engine={"replicas": 3, "max_model_len": 64}), available_bytes=2**40).memory
    assert memory.needed_bytes == memory.bank_bytes + 3 * memory.engine_bytes


def test_unfit_searcher_is_refused_early(root: Path) -> None:
    """A searcher that cannot handle the study is refused before the weights are read."""

    def not_reached(tasks: StudyTasks) -> None:
        raise AssertionError("the weights are looked at")

    study = study_of(root, search={"algorithm": "cmaes", "max_trials": 14})
    with pytest.raises(InvalidStudy) as caught:
        examine(study, before_weights=not_reached)
    (problem,) = caught.value.problems
    assert problem.field == "search.algorithm"
    assert problem.message.startswith(
        "cmaes does not handle conditional parameters and categorical parameters and several objectives, which this "
        "study has; searchers that do: auto, "
    )
    assert examined(root, search={"algorithm": "tpe", "max_trials": 14}).study.search.algorithm == "tpe"


def test_what_does_not_fit_is_refused_with_all_sizes(root: Path) -> None:
    needed = examine(study_of(root), available_bytes=2**40).memory.needed_bytes
    examine(study_of(root), available_bytes=needed)
    with pytest.raises(InvalidStudy) as caught:
        examine(study_of(root), available_bytes=2**30)
    assert str(caught.value) == (
        "engine: needs 2.0 GiB of memory, 1.0 GiB are available: source weights 0.0 GiB + 1 engine(s) of 2.0 GiB; "
        "use fewer replicas, a smaller dtype or a larger machine"
    )
    with pytest.raises(InvalidStudy, match="engine: needs"):
        examine(study_of(root), available_bytes=needed - 1)


def refusal_of(study: Study, **options: Any) -> str:
    with pytest.raises(InvalidStudy) as caught:
        examine(study, **options)
    return str(caught.value)


def test_memory_is_that_of_the_machines_for_engines(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a GPU that checks a study compares the memory of stated nodes, else of known ones."""
    monkeypatch.setattr(resources, "total_host_bytes", lambda: 2**30)
    study = study_of(root, engine={"max_model_len": 64, "replicas": 5})
    known = [EngineMachines(memory_bytes=2**30), EngineMachines(memory_bytes=2**40)]
    assert "needs 10.2 GiB of memory, 1.0 GiB are available" in refusal_of(study)
    assert examine(study, machines=known).memory.available_bytes == 2**40
    assert "needs 6.1 GiB of memory, 4.0 GiB" in refusal_of(study, machines=[EngineMachines(0, n) for n in (1, 2**32)])
    monkeypatch.setenv(VARIABLE, "gpus=0,memory=64GiB gpus=8,memory=2GiB,nodes=2 gpus=4,memory=16GiB,gpu_memory=1MB")
    memory = examine(study, machines=known).memory
    assert (memory.available_bytes, memory.replicas) == (16 * 2**30, 2), "those with GPUs, and of these one that fits"
    assert memory.engine_bytes == ENGINE_OVERHEAD_BYTES, "weights are in the memory of the GPU"
    monkeypatch.setenv(VARIABLE, "gpus=8,memory=2GiB gpus=4,memory=16GiB,gpu_memory=1KB")
    assert "the weights of a merge need 0.0 GiB of each GPU, which has 0.0 GiB" in refusal_of(study)
    monkeypatch.setenv(VARIABLE, "gpus=8,memory=2GiB gpus=4,memory=3GiB")
    assert "needs 6.0 GiB of memory, 3.0 GiB are available" in refusal_of(study)


def test_studies_wait_for_gpus_that_nobody_has_seen(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a build for GPUs, on a machine without any, memory is not compared, and a message says so."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(resources, "total_host_bytes", lambda: 2**30)
    told: list[str] = []
    study = study_of(root, engine={"max_model_len": 64, "replicas": 9})
    found = examine(study, machines=[EngineMachines(memory_bytes=2**30)], note=told.append)
    assert found.memory.available_bytes is None
    assert [text for text in told if f"state these machines in {VARIABLE}" in text]
    assert found.models.export_bytes == 2 * found.models.num_parameters, "engines compute in bfloat16"


def test_a_head_without_gpus_checks_for_the_gpus_of_the_cluster(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes of Ray decide dtype, packed copies and the place of gradients, in the checks of request and driver."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    study = study_of(root, engine={"max_model_len": 64, "replicas": 3}, search_space={})
    nodes = [EngineMachines(0, 2**40), EngineMachines(4, 2**40)]
    for memory in (None, sys.maxsize):  # the latter in the driver
        here = examine(study, available_bytes=memory)
        found = examine(study, machines=nodes, available_bytes=memory)
        assert (here.dtype, found.dtype) == ("float32", "bfloat16")
        stored = ResolvedStudy.from_json(found.resolved().to_json())
        assert (engine_dtype(study, stored), engine_dtype(study)) == ("bfloat16", "float32"), "exports are as scored"
        assert found.models.export_bytes * 2 == here.models.export_bytes
        assert found.memory.engine_bytes == ENGINE_OVERHEAD_BYTES < here.memory.engine_bytes, "nothing is packed"
        assert here.gradients is not None
        assert found.gradients is not None
        assert (here.gradients.device, found.gradients.device) == ("cpu", "cuda")
        assert found.machines == (replace(nodes[1], memory_bytes=memory or 2**40),)
        profile = profile_for(found.machines)
        assert (profile.gpus, profile.host_bytes) == (4, memory or 2**40)
        assert "as fast as H100s" in profile.name
    assert profile_for(here.machines).gpus == 0


def test_statistics_count_where_a_scored_merge_uses_them(root: Path) -> None:
    """Tables of magnitudes are planned for a space of sums only if published baselines such as TIES are scored."""
    known = open_sources(examine(study_of(root)).models.family)
    alone, beside = (
        scored_methods(study_of(root, search_space={}, search={"baselines": chosen}), known)
        for chosen in ("none", "published")
    )
    assert (uses_statistics(alone, {"magnitudes"}), uses_statistics(beside, {"magnitudes"})) == (False, True)
    assert not uses_statistics(beside, OF_SEVERAL)
    assert uses_statistics([*beside, "sce"], OF_SEVERAL)


def test_what_headers_tell_is_told_before_any_weights_are_read(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hashing large models takes minutes: nothing that is known before may wait for it."""
    again = shutil.copytree(root, tmp_path / "again")  # files that nothing is known of
    monkeypatch.setattr("hashlib.file_digest", lambda *_: pytest.fail("weights were read"))
    study = study_of(again, search_space={"kind": "lfs", "layer_groups": 9}, limits={"max_layers": 2})
    with pytest.raises(InvalidStudy) as caught:
        examine(study, available_bytes=2**30)
    assert [problem.field for problem in caught.value.problems] == [
        "limits.max_layers",
        "search_space.layer_groups",
        "engine",
    ]


@pytest.mark.slow
def test_a_model_that_vllm_cannot_run_is_told_with_all_else(
    root: Path, layouts: dict[str, Family], tmp_path: Path
) -> None:
    """And merged all the same where no engine is asked for."""
    again = shutil.copytree(root, tmp_path / "again")
    for model in ("base", "math", "text"):
        (again / model / "config.json").write_text(json.dumps(config_of(root / model) | CLASSIFIER))
    with pytest.raises(InvalidStudy) as caught:
        examine(study_of(again, limits={"max_layers": 2}), available_bytes=2**40)
    limit, engine = caught.value.problems
    assert limit.field == "limits.max_layers"
    assert engine.field == "models.base"
    assert engine.message.startswith(
        f"{again}/base: architecture LlamaForSequenceClassification (config.json): as LlamaForCausalLM in vLLM "
    )
    document = {"merge_method": "linear", "models": [{"model": str(again / name)} for name in ("math", "text")]}
    file = tmp_path / "merge.yml"
    file.write_text(json.dumps({**document, "dtype": "float32", "parameters": {"weight": 0.5}}))
    assert check_merge(file, {}, tmp_path / "out") is not None


def test_heads_are_shared_out_evenly_between_devices(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")  # of a cluster, which has as many devices as it has
    with pytest.raises(InvalidStudy) as caught:
        examine(study_of(root, engine={"tensor_parallel_size": 2, "max_model_len": 64}), available_bytes=2**40)
    assert [str(problem) for problem in caught.value.problems] == [
        "engine.tensor_parallel_size: 2 does not divide the models' 1 attention heads; use one of 1"
    ]


# The plan that people see.


def test_the_printed_plan_says_what_was_found(root: Path) -> None:
    plan = check(study_of(root), root)
    assert plan.samples == ExpectedSamples(1056, 560, 1728, baselines=720, holdout_baselines=400)
    assert plan.memory_bytes["needed"] == plan.memory_bytes["bank"] + plan.memory_bytes["engines"]
    assert 0 < plan.hours < 1
    text = plan.to_text()
    assert "rungs     4 -> 12 -> 36 samples of each objective, 2 objectives; scheduler: hyperband" in text
    assert "samples   1,056 in the search (39% fewer than 1,728 at full budget), about 560 held out" in text
    assert "min, by this machine's arithmetic speed" in text
    assert "trials    10 baselines for 720 samples and 400 held out, 14 searched" in text


def test_the_plan_has_the_chosen_baselines(root: Path) -> None:
    """The plan of a study without baselines, or with few, counts no samples for the others."""
    bare = study_of(root, search={"max_trials": 14, "baselines": "none"})
    assert examine(bare).baselines() == ()
    assert examine(bare).expected_samples() == ExpectedSamples(168 + 168, 4 * 40, 14 * 72, 0, 0)
    assert "trials    no baselines, 14 searched" in check(bare, root).to_text()
    few = study_of(root, search={"max_trials": 14, "baselines": ["task arithmetic 0.3", "base"]}, holdout=[])
    assert [label for _, label, _ in examine(few).baselines()] == ["base", "task arithmetic 0.3"]
    assert "trials    2 baselines for 144 samples, 14 searched" in check(few, root).to_text()
    for baselines, least in (("none", 168), ("all", 10 * 72 + 168)):
        limited = study_of(root, search={"max_trials": 14, "baselines": baselines}, limits={"max_samples": least - 1})
        with pytest.raises(InvalidStudy, match=f"give at least {least}"):
            examine(limited)


def test_a_plan_without_holdout_or_scheduler_promises_neither(root: Path) -> None:
    text = check(study_of(root, fidelity={"scheduler": "none"}, holdout=[]), root).to_text()
    assert "samples   1,872 in the search, none held out" in text
    assert "rungs     sums 40, words 38 samples; scheduler: none" in text


def test_a_plan_under_asha_promises_no_more_than_is_known(root: Path) -> None:
    fidelity = {"scheduler": "asha", "min_samples": 4, "max_samples": 36}
    text = check(study_of(root, fidelity=fidelity), root).to_text()
    assert "samples   at least 944 in the search (at most 45% fewer than 1,728 at full budget)" in text


def test_adapter_memory(root: Path) -> None:
    """An adapter is an expert that takes the memory of its matrices."""
    lora_adapter(root / "base", root / "tuned")
    sizes = {
        name: examine(
            study_of(root, models={"base": "base", "experts": {"math": "math", name: name}})
        ).memory.bank_bytes
        for name in ("text", "tuned")
    }
    adapter = sum(tensor.nbytes for tensor in load_file(root / "tuned" / "adapter_model.safetensors").values())
    one = sum(tensor.nbytes for tensor in load_file(root / "base" / "model.safetensors").values())
    assert sizes == {"text": 3 * one, "tuned": 2 * one + adapter}
    small = tiny_family(root / "small", experts=("math",), hidden=64).base.directory
    lora_adapter(small, root / "foreign")
    with pytest.raises(InvalidStudy) as caught:
        examine(study_of(root, models={"base": "base", "experts": {"math": "nowhere", "tuned": "foreign"}}))
    messages = [problem.message for problem in caught.value.problems if problem.field == "models"]
    assert len(messages) == 5
    assert any("expert 'math': " in message for message in messages)
    assert any("foreign/adapter_model.safetensors: an adapter of another model: " in message for message in messages)


def test_study_has_the_named_vocabulary(root: Path) -> None:
    """A study of models with other tokens has the vocabulary that it names."""
    with_tokens(root / "base", root / "tools", "<tool>", rows=130)
    models = {"base": "base", "experts": {"math": "math", "tools": "tools"}}
    counts = {}
    for tokenizer in ("base", "union", "tools"):
        found = examine(study_of(root, models={**models, "tokenizer": tokenizer}))
        counts[tokenizer] = found.models.num_parameters
        assert found.models.family.tokenizer == tokenizer
        recipes = [recipe for _, _, recipe in found.baselines()]
        recipes.append(found.space.to_recipe(found.space.parameters.sample(np.random.default_rng(0))))
        bank = Bank(found.models.family)
        for recipe in recipes:
            assert recipe.tokenizer == tokenizer
            check_recipe(recipe, bank)
    assert counts == {"base": counts["base"], "union": counts["base"], "tools": counts["base"] + 2 * 32}
    with pytest.raises(
        InvalidStudy, match=r"models.tokenizer: code is not a model of the study; give base, union, math, tools"
    ):
        study_of(root, models={**models, "tokenizer": "code"})


def test_tokenizer_refusal(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Preflight refuses a tokenizer only where an engine would refuse it.

    Under the class that transformers chooses for a Qwen2 a tokenizer of characters loses white space.
    """
    tiny_family(tmp_path, build=tiny_qwen2, experts=("math", "text"))
    character_tokenizer().save_pretrained(tmp_path / "base")
    study = study_of(tmp_path, objectives=[objective("sums", "sums")], holdout=[])
    located = locate_family(study.models.base, study.models.named)
    problems: list[Problem] = []
    sources = check_models(located, study, problems)
    assert problems == []
    assert sources is not None
    assert "the tokenizer is used as tokenizer.json says" in caplog.text
    prompts = Prompts(sources.result_dir, study.engine.options)
    assert prompts.decode([], prompts.encode("a b\n1 2", special_tokens=False)) == "a b\n1 2"
    (tmp_path / "base" / "tokenizer.json").write_text("{}")
    assert check_models(located, study, problems) is None
    assert "its tokenizer cannot be loaded" in problems[0].message
    with pytest.raises(InvalidModel, match="its tokenizer cannot be loaded"):
        _ = Prompts(sources.result_dir, study.engine.options).tokenizer


def test_plan_says_how_vllm_runs_models(root: Path, layouts: dict[str, Family]) -> None:
    """The printed plan says how vLLM runs models for which it has no code."""
    family = layouts["gpt_neox"]
    models = {"base": family.base.directory, "experts": {model.alias: model.directory for model in family.experts}}
    lines = check(study_of(root, models=models), root).to_text().splitlines()
    (line,) = [line for line in lines if line.startswith("engine ")]
    assert line.endswith("has no code of its own for GPTNeoXForCausalLM: it runs transformers' modules")
    assert not any(line.startswith("engine ") for line in check(study_of(root), root).to_text().splitlines())


def test_each_model_is_located_opened_and_fingerprinted_once(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(root / "text", tmp_path / "code")
    counts: Counter[str] = Counter()
    for module, name in (
        ("family", "locate"),
        ("family", "aligned"),
        ("family", "fingerprint"),
        ("family", "content_problems"),
        ("checkpoints", "read_headers"),
        ("modalities.text", "layout"),
    ):
        place = f"workers.models.{module}.{name}"
        function = pkgutil.resolve_name(place)

        def counted(*arguments: Any, _name: str = name, _function: Any = function, **options: Any) -> Any:
            counts[_name] += 1
            return _function(*arguments, **options)

        monkeypatch.setattr(place, counted)
    experts = {"math": "math", "text": "text", "code": str(tmp_path / "code")}
    found = examined(root, models={"base": "base", "experts": experts})
    assert len(found.models.family.models) == 4
    assert counts == {
        "locate": 4,
        "read_headers": 4,
        "layout": 4,
        "aligned": 1,
        "fingerprint": 4,
        "content_problems": 4,
    }

from __future__ import annotations

import copy
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from search_spaces.errors import InvalidStudy
from search_spaces.searchers import SEARCHERS
from search_spaces.spaces import SPACES
from search_spaces.study.engine import Verify
from search_spaces.study.file import Study, load_study, parse_study, same_but_limits, study_json_schema
from search_spaces.study.objectives import CostSpec, ObjectiveSpec
from search_spaces.study.search import RefinementOptions

DOCUMENT = yaml.safe_load("""
name: math-text-lookup
models: {base: ./base, experts: {math: owner/math, text: text, lookup: /models/lookup}}
search_space: {kind: lfs, layer_groups: 4, component_groups: 3, methods: [task_arithmetic, ties, slerp, linear]}
search: {algorithm: auto, max_trials: 60, seed: 0}
fidelity: {scheduler: hyperband, min_samples: 30, max_samples: 270, eta: 3}
objectives:
  - {name: math, task: gsm8k, metric: exact_match, filter: strict-match, split: train, num_fewshot: 5}
  - {name: text, task: {file: text.jsonl, prompt: "{{prompt}}", answer: "{{answer}}"}, metric: exact_match}
holdout:
  - {name: math, task: gsm8k, metric: exact_match, split: test}
  - {name: text, task: {file: text_holdout.jsonl}, metric: exact_match}
engine:
  {backend: vllm, replicas: 1, tensor_parallel_size: 1, dtype: auto, max_model_len: 2048,
   verify: {trials: 3, samples: 16}}
limits: {max_layers: 50, max_samples: 50000, max_gpu_hours: 24, max_wall_clock_s: 86400}
""")

AVAILABLE = ", ".join(SEARCHERS)
KINDS = ", ".join(SPACES)

SMALL = {
    "name": "small",
    "models": {"base": "b", "experts": {"e": "m"}},
    "search_space": {"kind": "lfs"},
    "fidelity": {"scheduler": "none"},
    "objectives": [{"name": "a", "task": "t", "metric": "acc"}],
}


def changed(place: str, value: Any, document: Any = DOCUMENT) -> Any:
    """A copy of `document` with `value` at the dotted `place`; `...` removes the place."""
    document = copy.deepcopy(document)
    *parents, last = [int(part) if part.isdigit() else part for part in place.split(".")]
    node = document
    for part in parents:
        node = node[part] if isinstance(part, int) else node.setdefault(part, {})
    if value is ...:
        del node[last]
    elif isinstance(last, int) and last == len(node):
        node.append(value)
    else:
        node[last] = value
    return document


def problems(document: Mapping[str, Any]) -> list[tuple[str, str]]:
    with pytest.raises(InvalidStudy) as caught:
        parse_study(document)
    return [(problem.field, problem.message) for problem in caught.value.problems]


def test_documented_study_is_accepted() -> None:
    """The documented study is accepted, and its canonical form is the same study."""
    study = parse_study(DOCUMENT)
    assert parse_study(study.canonical()) == study
    assert Study.model_validate(json.loads(json.dumps(study.canonical()))) == study


def test_what_may_be_left_out_has_the_documented_defaults() -> None:
    study = parse_study(SMALL)
    assert (study.search.algorithm, study.search.max_trials, study.search.seed) == ("auto", 60, 0)
    space: Any = study.search_space
    assert (space.layer_groups, space.component_groups) == (4, 3)
    assert study.engine.verify == Verify(trials=3, samples=16)
    assert study.holdout == ()


def test_spaces_that_were_stored_without_trim_are_the_same() -> None:
    """Options that a stored study does not have yet keep their defaults, so that it resumes."""
    later = {"trim", "orders", "k", "density"}
    for kind, new in (("m3", later), ("lfs", {"trim"}), ("layerwise", {"trim"})):
        given = parse_study(changed("search_space", {"kind": kind}, SMALL))
        document = given.canonical()
        document["search_space"] = {name: v for name, v in document["search_space"].items() if name not in new}
        assert same_but_limits(parse_study(document), given) == ()


def test_a_study_without_a_space_or_a_kind_is_layerwise() -> None:
    for document in (changed("search_space", ..., SMALL), changed("search_space", {}, SMALL)):
        space = parse_study(document).search_space
        assert space.model_dump(mode="json") == {
            "kind": "layerwise",
            "granularity": "auto",
            "layer_groups": None,
            "range": [-0.5, 1.5],
            "method": "task_arithmetic",
            "density": None,
            "trim": "tensor",
            "mask_seed": None,
            "layer_scales": False,
        }
    coarse = changed("search_space", {"granularity": "layer_group", "layer_groups": 2}, SMALL)
    assert (
        parse_study(coarse).search_space == parse_study(changed("search_space.kind", "layerwise", coarse)).search_space
    )


def test_a_study_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        parse_study(SMALL).name = "other"


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        # unknown keys and values, with the nearest known one
        ("serch", {}, 'unknown key; did you mean "search"? known keys: name, models, search_space, search'),
        (
            "search.max_trial",
            3,
            'unknown key; did you mean "max_trials"? known keys: algorithm, gradient, smac, hm3, max_trials',
        ),
        ("objectives.0.metrics", "x", 'unknown key; did you mean "metric"?'),
        ("objectives.1.task.max_token", 3, 'unknown key; did you mean "max_tokens"? known keys: file, prompt'),
        ("engine.verify.trial", 3, 'unknown key; did you mean "trials"? known keys: trials, samples'),
        ("search_space.kind", "llfs", f'"llfs" is not known; did you mean "lfs"? available: {KINDS}'),
        ("search_space.kind", 5, f"5 is not known; available: {KINDS}"),
        ("search_space", "lfs", '"lfs" is not accepted; give a mapping (key: value)'),
        (
            "search_space",
            {"granularity": "row"},
            '"row" is not known; available: auto, tensor, component, layer',
        ),
        (
            "search_space",
            {"kind": "layerwise", "metods": []},
            'unknown key; did you mean "method"? known keys: kind, granularity, layer',
        ),
        ("search_space.presets", "paper", 'unknown key; did you mean "preset"? known keys: kind, layer_groups'),
        ("search_space.methods.0", "tie", '"tie" is not known; did you mean "ties"? available: task_arithmetic, ties'),
        ("search.algorithm", "smak", f'"smak" is not known; did you mean "smac"? available: {AVAILABLE}'),
        ("engine.dtype", "fp16", '"fp16" is not known; available: auto, float32, bfloat16, float16'),
        ("search_space.component_groups", 2, "2 is not known; available: 1, 3"),
        ("search.hm3.start", {}, "has neither dir nor id; give one of the two"),
        ("search.hm3.start", "runs/first", '"runs/first" is not accepted; give a mapping (key: value)'),
        ("search.hm3.learns", False, "false: there is no trained policy that could propose paths; name"),
        # not available yet
        (
            "fidelity.scheduler",
            "race",
            '"race" is not known; did you mean "racing"? available: hyperband',
        ),
        ("search_space.methods.0", "fisher", '"fisher" is not known; available: task_arithmetic, ties'),
        ("engine.backend", "transformers", '"transformers" is not available yet; available: vllm, torch'),
        ("engine.backend", "torch", "torch scores tasks of images, of which the study has none; leave it out"),
        (
            "constraints",
            ["text >= base - 0.01"],
            "constraints are options of the search; write them as search.constraints",
        ),
        ("search.constraints", "text >= base", '"text >= base" is not accepted; give a list'),
        ("search.constraints", ["text >= 0.5", "text"], "'text' is not a constraint; write OBJECTIVE >= BOUND"),
        ("search.constraints", ["general >= 0.5"], "general is not an objective; give one of"),
        ("search.constraints", ["math >= expert:code"], "code is not an expert; give one of math, text"),
        ("search.constraints", ["math >= 0.9", "math <= 0.1"], "no value meets both math >= 0.9 and math <= 0.1"),
        ("search.constraints", ["math >= 1.5"], "no value of math meets math >= 1.5: its range is [0, 1]"),
        (
            "search.constraints",
            ["math >= base + 1.5"],
            "no value of math meets math >= base + 1.5: its range",
        ),
        # wrong types: the value and what is accepted
        ("name", "../x", '"../x" is not accepted; give 1 to 63 letters, digits, dots, dashes or underscores'),
        ("name", "", '"" is not accepted; give 1 to 63 letters'),
        ("name", "x" * 64, "is not accepted; give 1 to 63 letters"),
        ("name", ..., "is missing; give text"),
        ("models", "base", '"base" is not accepted; give a mapping (key: value)'),
        ("models.base", "a\0b", "is not accepted; give one line of text"),
        ("search.max_trials", "60", '"60" is not accepted; give a whole number'),
        ("search.max_trials", 2.5, "2.5 is not accepted; give a whole number"),
        ("search.max_trials", True, "true is not accepted; give a whole number"),
        ("search.max_trials", 0, "0 is not accepted; give at least 1"),
        ("search.seed", -1, "-1 is not accepted; give at least 0"),
        ("search.seed", 2**32, "4294967296 is not accepted; give less than 4294967296"),
        ("fidelity.eta", 1, "1 is not accepted; give at least 2"),
        ("objectives", [], "is empty; give at least 1"),
        ("objectives", {"a": 1}, '{"a": 1} is not accepted; give a list'),
        ("objectives.0.task", 5, "5 is not accepted; give the name of an lm-eval task, a YAML file or {file"),
        ("objectives.0.num_fewshot", -1, "-1 is not accepted; give at least 0"),
        ("objectives.1.task.until", [""], "is empty; give at least 1"),
        ("models.experts", {}, "is empty; give at least 1"),
        ("models.experts", ..., "is missing; give a mapping"),
        ("engine.verify", True, "true is not accepted; give false or {trials: 3, samples: 16}"),
        ("engine.chat_template", 3, "3 is not accepted; give true, false or the name of a template"),
        ("engine.replicas", 0, "0 is not accepted; give at least 1"),
        ("limits.max_samples", 0, "0 is not accepted; give at least 1"),
        ("limits.max_samples", 1.5, "1.5 is not accepted; give a whole number"),
        ("limits.max_gpu_hours", 0, "0 is not accepted; give more than 0"),
        ("limits.max_gpu_hours", float("inf"), "Infinity is not accepted; give a finite number"),
        ("limits.max_wall_clock_s", float("nan"), "NaN is not accepted; give a finite number"),
        ("search_space.layer_groups", 0, "0 is not accepted; give at least 1"),
        ("search.preferences", {"latice": 2}, 'unknown key; did you mean "lattice"? known keys: lattice, corners, int'),
        ("search.preferences", {"lattice": 0}, "0 is not accepted; give at least 1"),
        ("search.preferences", {"dirichlet": {"count": 2, "alpha": 0}}, "0 is not accepted; give at least 0.01"),
        ("search.preferences", {"dirichlet": {}}, "is missing; give a whole number"),
        ("search.preferences", {"vectors": []}, "is empty; give at least 1"),
        ("search.preferences", {"vectors": [{"math": "1"}]}, '"1" is not accepted; give a number'),
        # contradictions
        (
            "search.preferences",
            {"lattice": 1, "corners": False},
            "false: lattice 1 has no other vectors; leave",
        ),
        (
            "search.preferences",
            {"vectors": [{"math": 1}], "corners": False},
            "false: there is no lattice; leave",
        ),
        (
            "search.preferences",
            {"vectors": [{"math": 1}], "interior": True},
            "true: there is no lattice; leave it out",
        ),
        (
            "search.preferences",
            {"lattice": 4, "corners": False, "interior": True},
            "true: it leaves the corners out, too; leave corners out",
        ),
        (
            "search.preferences",
            {"lattice": 1, "interior": True},
            "true: lattice 1 has no vector of 2 objectives without a weight of 0; give lattice: 2 or more",
        ),
        ("search.preferences", {}, "has none of lattice, dirichlet, vectors; give one of them"),
        (
            "search.preferences",
            {"lattice": 2, "vectors": [{"math": 1}]},
            "has lattice and vectors of lattice, dirichlet, vectors; give one of them",
        ),
        (
            "search.preferences",
            {"vectors": [{"math": 0.5, "text": 0.5}, {"math": 0.6, "text": 0.6}]},
            "math=0.6, text=0.6 sum to 1.2, not to 1; for the same proportions: math=0.5, text=0.5",
        ),
        ("search.preferences", {"vectors": [{"mth": 1}]}, "'mth' is not an objective; give weights of math, text"),
        (
            "search.preferences",
            {"vectors": [{"math": -1, "text": 2}]},
            "math=-1 is not accepted; give a number from 0 to 1",
        ),
        ("search.preferences", {"vectors": [{"math": 1}, {"math": 1, "text": 0}]}, "is also vectors.0; leave out one"),
        ("search.preferences", {"lattice": 1000}, "1000 makes more than 1000 vectors of 2 objectives; give a smaller"),
        (
            "search",
            {"max_trials": 5, "preferences": {"lattice": 5}},
            "5 is below the 6 points of 6 descents that become trials; give at least 6, or fewer preference vectors",
        ),
        ("search.gradient", {"steps": 8, "warm_steps": 9}, "9 is above steps=8; give at most 8"),
        ("search_space", {"range": [1, 1]}, "[1.0, 1.0] is empty; give [lowest, highest]"),
        ("search_space", {"layer_groups": 2}, "has no effect with granularity: auto; leave it out, or write"),
        ("search_space", {"density": 0.5}, "has no effect with method: task_arithmetic; leave it out"),
        (
            "search_space",
            {"method": "ties_peft", "mask_seed": 1},
            "has no effect with method: ties_peft, which draws no",
        ),
        ("search_space.methods", ["ties", "slerp", "ties"], "ties is given twice"),
        ("search_space", {"kind": "m3", "alphas": [1, 2, 1]}, "1.0 is given twice"),
        ("search_space", {"kind": "m3", "scale": [0, 1]}, "[0.0, 1.0] is not accepted; give [lowest, highest] above 0"),
        ("search_space", {"kind": "m3", "methods": ["ties"]}, 'did you mean "m3_ties"? available: linear, task_arith'),
        ("search_space", {"kind": "m3", "alphas": [0]}, "0 is not accepted; give more than 0"),
        ("fidelity.min_samples", 300, "min_samples=300 is above max_samples=270"),
        ("fidelity.min_samples", 200, "leaves one rung at eta=3; widen the range, or write `scheduler: none`"),
        ("fidelity.max_samples", ..., "30 is given without max_samples; give both, or rungs"),
        ("fidelity.min_samples", ..., "270 is given without min_samples; give both, or rungs"),
        ("fidelity", {}, "racing needs min_samples and max_samples, or rungs; write `scheduler: none`"),
        ("fidelity", {"rungs": [30, 30]}, "[30, 30] does not increase"),
        ("fidelity", {"rungs": []}, "is empty; give at least 1"),
        ("fidelity", {"rungs": [0, 30]}, "0 is not accepted; give at least 1"),
        ("fidelity", {"rungs": [30, 90], "max_samples": 90}, "is given as well as rungs; leave out one of the two"),
        ("fidelity", {"scheduler": "none", "min_samples": 3}, "has no effect with scheduler: none, which has one rung"),
        ("fidelity", {"scheduler": "none", "rungs": [1, 2]}, "[1, 2]: scheduler: none has one rung; give [2]"),
        ("fidelity", {"scheduler": "none", "eta": 3}, "has no effect with scheduler: none, which has one rung; leave"),
        ("fidelity", {"scheduler": "asha"}, "asha needs min_samples and max_samples, or rungs"),
        ("fidelity", {"scheduler": "asha", "rungs": [9]}, "[9]: asha needs two rungs or more; give smaller ones first"),
        ("objectives.0.rungs", [], "is empty; give at least 1"),
        ("objectives.0.rungs", [1, 0, 3], "0 is not accepted; give at least 1"),
        (
            "objectives.0.rungs",
            [1, 3, 2],
            "[1, 3, 2] shrinks; give each rung at least as many samples as the one before",
        ),
        ("fidelity.rule", "bound", "bound is a rule of scheduler: racing and has no effect with hyperband; leave"),
        ("fidelity.rule", "sure", '"sure" is not known; available: behind, bound'),
        ("fidelity.error_rate", 0.1, "has no effect with rule: behind; write rule: bound, or leave it out"),
        ("fidelity.error_rate", 1.0, "1.0 is not accepted; give less than 1"),
        ("objectives.0.rungs", [1, 2], "[1, 2] differs in length from [30, 90, 270] of fidelity; all objectives need"),
        ("holdout.0.rungs", [1, 2, 3], "held-out data are scored whole, not rung by rung; leave it out"),
        (
            "objectives.2",
            {"name": "text", "task": "t", "metric": "acc"},
            "text is also objectives.1; give another name",
        ),
        ("objectives.0.range", [1, 0], "[1.0, 0.0] is empty; give [lowest, highest]"),
        ("objectives.0.direction", "minimize", "is missing; exact_match is minimised, so give its [lowest, highest]"),
        ("objectives.1.split", "test", "is for lm-eval tasks; a JSONL task has none; leave it out"),
        ("holdout.0.name", "mth", "mth is not an objective; a holdout entry has the name of the objective"),
        (
            "search.baselines",
            "soures",
            '"soures" is not known; did you mean "sources"? available: none, sources, published, m3, all',
        ),
        ("search.baselines", [], "is empty; give at least 1"),
        ("search.baselines", 3, "3 is not accepted; give none, sources, published, m3, all, or a list of baselines"),
        ("search.baselines", ["base", "base"], "base is also search.baselines.0; give it once"),
        (
            "search.baselines",
            ["expert:code"],
            "expert:code is not a baseline of this study; give one of sources, publi",
        ),
        ("search.smac.surrogate", "low", '"low" is not known; available: all_rungs, highest_budget, auto'),
        ("search.smac.random_share", 1.5, "1.5 is not accepted; give at most 1"),
        ("holdout.0.metric", "acc", "acc is not the metric of objective math; give exact_match"),
        ("holdout.0.split", "train", "is the search data of objective math; holdout data must be different"),
        ("holdout.1.task.file", "text.jsonl", "is the search data of objective text"),
    ],
)
def test_message_names_value_and_accepted(place: str, value: Any, message: str) -> None:
    """A message names what is wrong, its value and what is accepted."""
    found = problems(changed(place, value))
    assert len(found) == 1, found
    field, text = found[0]
    assert message in text
    assert field.split(".")[0] == place.split(".")[0]


def test_a_preference_vector_that_is_refused_is_named() -> None:
    vectors = [{"math": 1.0}, {"math": 0.3, "text": 0.6}, {"code": 1.0}]
    assert [field for field, _ in problems(changed("search.preferences", {"vectors": vectors}))] == [
        "search.preferences.vectors.1",
        "search.preferences.vectors.2",
    ]


@pytest.mark.parametrize(
    ("baselines", "constraint", "lacking"),
    [
        ("none", "text >= base - 0.01", "base"),
        ("published", "text >= expert:text", "expert:text"),
        (["base", "expert:text", "published"], "text >= best expert - 0.1", "expert:math, expert:lookup"),
        (["base"], "text >= base", ""),
        ("sources", "text >= best expert", ""),
        ("none", "text >= 0.5", ""),
    ],
)
def test_constraints_need_their_sources(baselines: Any, constraint: str, lacking: str) -> None:
    """A bound relative to a model that is not scored is refused, and the message names the option."""
    document = changed("search", {"baselines": baselines, "constraints": [constraint]})
    if not lacking:
        assert parse_study(document).search.constraints == (constraint,)
        return
    hint = "write search.baselines: sources, or a list with what is missing"
    message = f"{constraint} needs the score of {lacking}, which search.baselines leaves out; {hint}"
    assert problems(document) == [("search.constraints.0", message)]


def test_baselines_of_a_study_are_fixed() -> None:
    """A study is resumed with the baselines that it began with; a file of an earlier version has all."""
    study = parse_study(DOCUMENT)
    assert study.search.baselines == "all"
    listed = parse_study(changed("search.baselines", ["base", "expert:math"]))
    assert listed.search.baselines == ("base", "expert:math")
    assert parse_study(listed.canonical()) == listed
    assert same_but_limits(study, listed) == ("search.baselines", "search.baselines.0", "search.baselines.1")


def test_a_race_by_the_bound_has_no_constraints() -> None:
    race = changed("fidelity", {"scheduler": "racing", "rungs": [30, 90], "rule": "bound"})
    assert parse_study(race).fidelity.bound_error_rate == 0.05
    assert parse_study(changed("fidelity.error_rate", 0.2, race)).fidelity.bound_error_rate == 0.2
    assert parse_study(changed("fidelity.rule", "behind", race)).fidelity.bound_error_rate is None
    message = "bound cannot compare constraints, which this study has; write behind"
    assert problems(changed("search.constraints", ["text >= base"], race)) == [("fidelity.rule", message)]


def test_one_objective_has_no_preferences() -> None:
    document = changed("search", {"preferences": {"lattice": 2}}, SMALL)
    assert problems(document) == [("search.preferences", "has no effect with one objective; leave it out")]


def test_preference_vectors_are_a_lattice_draws_or_written_out() -> None:
    def weights(seed: int = 0, **given: Any) -> tuple[tuple[float, ...], ...]:
        preferences = parse_study(changed("search.preferences", given)).search.preferences
        assert preferences is not None
        found = preferences.weights(("math", "text"), seed=seed)
        assert len(found) == preferences.size(2)
        return found

    assert weights(lattice=4) == ((0.0, 1.0), (0.25, 0.75), (0.5, 0.5), (0.75, 0.25), (1.0, 0.0))
    assert weights(lattice=4, corners=False) == ((0.25, 0.75), (0.5, 0.5), (0.75, 0.25))
    assert weights(lattice=4, interior=True) == ((0.25, 0.75), (0.5, 0.5), (0.75, 0.25))
    assert weights(vectors=[{"text": 1}, {"math": 0.6, "text": 0.4}]) == ((0.0, 1.0), (0.6, 0.4))
    drawn = weights(dirichlet={"count": 5})
    assert drawn == weights(dirichlet={"count": 5})
    assert drawn != weights(dirichlet={"count": 5}, seed=1)
    narrow = weights(dirichlet={"count": 50, "alpha": 1000})
    assert all(abs(first - 0.5) < 0.1 for first, _ in narrow)
    assert weights(dirichlet={"count": 2, "alpha": 0.01})[0] != (0.5, 0.5)


def test_an_expert_cannot_be_called_base() -> None:
    document = changed("models.experts.base", "x")
    assert problems(document) == [
        ("models.experts.base", 'an expert cannot be called "base"; that is the base model; rename it')
    ]


def test_the_tokenizer_is_the_bases_an_experts_or_of_all() -> None:
    for tokenizer in ("base", "union", "math"):
        assert parse_study(changed("models.tokenizer", tokenizer)).models.tokenizer == tokenizer
    (problem,) = problems(changed("models.tokenizer", "code"))
    assert problem[0] == "models.tokenizer"
    assert problem[1].startswith("code is not a model of the study; give base, union, math")
    assert problems(changed("models.experts.union", "x")) == [
        ("models.experts.union", 'an expert cannot be called "union"; that is a tokenizer; rename it')
    ]


def test_an_alias_that_is_no_name_is_refused() -> None:
    (problem,) = problems(changed("models.experts", {"a/b": "x"}))
    assert problem[0] == "models.experts.a/b"


def test_unknown_space_is_refused_alone() -> None:
    """An unknown kind of space is refused without complaints about its keys."""
    space = {"kind": "hm4", "max_path_length": 40, "min_path_length": 8, "alignment": "mlp"}
    assert problems(changed("search_space", space)) == [
        ("search_space.kind", f'"hm4" is not known; did you mean "hm3"? available: {KINDS}')
    ]


def test_refinement_is_of_paths_without_alignments() -> None:
    """A refinement is refused in other spaces than hm3, and with alignments."""
    place, found = "search.refinement", changed("search.refinement", {})
    assert problems(found) == [
        (
            place,
            "a space of kind lfs has no paths whose coefficients are fixed; leave it out, or search a space of kind "
            "hm3",
        )
    ]
    of_paths = changed("search_space", {"kind": "hm3", "alignment": "mlp"}, found)
    assert problems(of_paths) == [
        (
            place,
            "losses along paths with alignment: mlp have no gradients; leave it out, or write alignment: none",
        )
    ]
    study = parse_study(changed("search_space", {"kind": "hm3"}, found))
    assert study.search.refinement == RefinementOptions()
    assert parse_study(changed("search_space", {"kind": "hm3"})).search.refinement is None
    assert same_but_limits(study, parse_study(changed("search_space", {"kind": "hm3"}))) != ()


DEPTH = {"name": "depth", "cost": "layers"}


def paths(place: str | None = None, value: Any = None) -> Any:
    document = changed("search_space", {"kind": "dis"})
    return document if place is None else changed(place, value, document)


def test_cost_objective_needs_no_task() -> None:
    """A cost objective needs no task where the space changes layers."""
    study = parse_study(paths("objectives.2", DEPTH))
    third = study.objectives[2]
    assert isinstance(third, CostSpec)
    assert third.cost == "layers"
    assert sorted(study.scored_objectives) == [0, 1]
    assert parse_study(study.canonical()) == study


@pytest.mark.parametrize("cost", ["layers", "parameters"])
def test_constant_cost_objective_is_refused(cost: str) -> None:
    """A cost objective is refused where all merges have the same cost."""
    assert problems(changed("objectives.2", {"name": "depth", "cost": cost})) == [
        (
            "objectives.2.cost",
            f"{cost}: all merges of the space lfs have the same number; leave the objective out, or search a space "
            "that changes them: dis, hm3",
        )
    ]


@pytest.mark.parametrize(
    ("document", "field", "message"),
    [
        (
            paths("objectives.2", {"name": "depth", "cost": "flops"}),
            "objectives.2.cost",
            '"flops" is not known; available: layers, parameters',
        ),
        (
            paths("objectives.2", {**DEPTH, "task": "gsm8k"}),
            "objectives.2.task",
            "unknown key; known keys: name, cost",
        ),
        (
            paths("objectives.2", {"name": "math", "cost": "layers"}),
            "objectives.2.name",
            "math is the name of two objectives; give another name",
        ),
        (
            paths("objectives", [DEPTH]) | {"holdout": []},
            "objectives",
            "has costs only, which are least for the smallest merge; add one with a task",
        ),
        (
            paths("holdout.0", DEPTH),
            "holdout.0.cost",
            "a cost follows from the recipe and needs no held-out data; leave the entry out",
        ),
    ],
)
def test_a_cost_objective_with_something_wrong_is_refused(document: dict[str, Any], field: str, message: str) -> None:
    assert (field, message) in problems(document)


def test_the_same_cost_twice_is_refused() -> None:
    document = paths("objectives.1", DEPTH)
    document = changed("objectives.2", {"name": "deep", "cost": "layers"}, document)
    message = "layers is also the cost of objectives.1; leave out one of the two"
    assert ("objectives.2.cost", message) in problems(document)


def test_the_paper_preset_is_refused_beside_what_contradicts_it() -> None:
    parse_study(changed("search_space.preset", "paper"))
    document = changed("search_space", {"kind": "lfs", "preset": "paper", "layer_groups": 2, "methods": ["ties"]})
    assert [field for field, _ in problems(document)] == ["search_space.layer_groups", "search_space.methods"]


def test_all_problems_are_reported_together_in_file_order() -> None:
    document = changed("name", "a b")
    document = changed("models.experts.base", "x", document)
    document = changed("fidelity.min_samples", 300, document)
    document = changed("objectives.0.metric", 3, document)
    document = changed("objectives.1.name", "math", document)
    document = changed("holdout.1.metric", "acc", document)
    document = changed("limits.max_layer", 3, document)
    assert [field for field, _ in problems(document)] == [
        "name",
        "models.experts.base",
        "fidelity.min_samples",
        "objectives.0.metric",
        "holdout.1.name",
        "limits.max_layer",
    ]


PLACES = [
    *("name", "models", "models.base", "models.experts", "models.experts.math", "search_space", "search_space.methods"),
    *("search", "search.seed", "search.preferences", "search.preferences.vectors"),
    *("fidelity", "fidelity.rungs", "fidelity.max_samples", "objectives", "objectives.0"),
    *("objectives.0.task", "objectives.1.task.until", "objectives.0.range", "objectives.0.rungs", "objectives.0.cost"),
    *("holdout", "holdout.1", "engine", "engine.verify", "engine.chat_template", "limits", "unknown", "constraints"),
]
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(PLACES)
VALUES = st.recursive(SCALARS, lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(max_size=8), v, max_size=3))


@settings(max_examples=50)
@given(st.lists(st.tuples(st.sampled_from(PLACES), VALUES), max_size=4, unique_by=lambda pair: pair[0].split(".")[0]))
def test_whatever_is_written_is_a_study_or_a_list_of_problems(changes: list[tuple[str, Any]]) -> None:
    document = DOCUMENT
    for place, value in changes:
        document = changed(place, value, document)
    found = None
    try:
        study = parse_study(document)
    except InvalidStudy as error:
        found = error.problems
    if found is None:
        assert parse_study(study.canonical()) == study
    else:
        assert [problem.message for problem in found if problem.message]


SECONDS = 4.0  # of processor time; quadratic work on these documents takes 10 to 60 s


def test_of_very_many_problems_the_first_hundred_are_listed() -> None:
    started = time.process_time()
    found = problems(SMALL | {f"k{i}": 0 for i in range(16_000)})
    assert time.process_time() - started < SECONDS
    assert len(found) == 101
    assert found[-1] == ("", "15900 other problems are not listed; fix these first")
    assert [field for field, _ in found[:100]] == [f"k{i}" for i in range(100)]


@pytest.mark.parametrize("data", ["{}.jsonl", "same.jsonl"])
def test_very_many_objectives_are_compared_in_a_moment(data: str) -> None:
    def entries(section: str, number: int) -> list[dict[str, Any]]:
        return [
            {"name": f"{section}{i}", "task": {"file": section + data.format(i)}, "metric": "exact_match"}
            for i in range(number)
        ]

    document = SMALL | {"objectives": entries("o", 6000), "holdout": entries("h", 6000)}
    started = time.process_time()
    found = problems(document)
    assert time.process_time() - started < SECONDS
    assert found[-1] == ("", "other problems are not listed; fix these first")
    assert found[0][1].startswith(
        "h0 is not an objective; a holdout entry has the name of the objective it belongs to: o0"
    )
    assert found[0][1].endswith("o19, ...")


def test_data_that_is_not_json_is_refused() -> None:
    for value in ({1, 2}, b"x"):
        with pytest.raises(InvalidStudy, match="the study is not plain data"):
            parse_study({"name": value})
    with pytest.raises(InvalidStudy, match=r"a study is a mapping \(key: value\), not \[\]"):
        parse_study(cast(Any, []))
    endless: dict[str, object] = {}
    endless["name"] = endless
    with pytest.raises(InvalidStudy, match="the study is not plain data"):
        parse_study(endless)


def with_rungs(fidelity: dict[str, Any], *own: list[int]) -> Any:
    """The documented study with this section `fidelity`, and these rungs of its two objectives."""
    document = changed("fidelity", fidelity)
    for index, rungs in enumerate(own):
        document = changed(f"objectives.{index}.rungs", rungs, document)
    return document


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        (
            with_rungs({"scheduler": "none", "eta": 2, "min_samples": 3, "rungs": [4, 2], "max_samples": 9}, [1, 2]),
            {
                "fidelity.eta": "has no effect with scheduler: none",
                "fidelity.min_samples": "is given as well as rungs",
                "fidelity.rungs": "does not increase",
                "fidelity.max_samples": "is given as well as rungs",
                "objectives.0.rungs": "[1, 2]: scheduler: none has one rung; give [2]",
            },
        ),
        (
            with_rungs({"scheduler": "asha"}, [1, 2], [5]),
            {"objectives.1.rungs": "[5]: asha needs two rungs or more"},
        ),
        (
            with_rungs({}, [1, 2], [1, 2, 3]),
            {"objectives.1.rungs": "[1, 2, 3] differs in length from [1, 2] of objectives.0.rungs"},
        ),
        (
            with_rungs({"max_samples": 9}, [2, 1], [1, 2, 3]),
            {
                "fidelity.max_samples": "9 is given without min_samples",
                "objectives.0.rungs": "[2, 1] shrinks",
                "objectives.1.rungs": "differs in length from [2, 1] of objectives.0.rungs",
            },
        ),
        (
            with_rungs({"scheduler": "asha"}, [1, 3, 3], [2, 4, 4]),
            {"objectives.0.rungs": "no objective has more samples at rung 3 than at rung 2; leave one of them out"},
        ),
        (with_rungs({}, [1, 2]), {"fidelity": "racing needs min_samples and max_samples, or rungs"}),
    ],
)
def test_contradictory_fidelity_is_refused_in_all_its_places(
    document: dict[str, Any], expected: dict[str, str]
) -> None:
    found = dict(reversed(problems(document)))  # the first problem of a place is kept
    assert found.keys() == expected.keys()
    assert {place: text for place, text in expected.items() if text not in found[place]} == {}


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        (with_rungs({"rungs": [10, 50]}, [7, 9]), [(7, 9), (10, 50)]),
        (with_rungs({"min_samples": 30, "max_samples": 270}, [1, 2, 3]), [(1, 2, 3), (30, 90, 270)]),
        (with_rungs({"scheduler": "asha"}, [7, 9], [1, 100]), [(7, 9), (1, 100)]),
        (with_rungs({"rungs": [100, 300, 900]}, [100, 300, 300]), [(100, 300, 300), (100, 300, 900)]),
        (with_rungs({"scheduler": "asha"}, [3, 3, 9], [1, 4, 4]), [(3, 3, 9), (1, 4, 4)]),
        (with_rungs({"scheduler": "none"}, [7]), [(7,), (None,)]),
        (with_rungs({"scheduler": "none", "max_samples": 40}, [7]), [(7,), (40,)]),
    ],
)
def test_objectives_own_rungs_win(document: dict[str, Any], expected: Any) -> None:
    """An objective's own rungs override those of the fidelity section."""
    study = parse_study(document)
    assert [
        study.fidelity.rungs_of(objective) for objective in study.objectives if isinstance(objective, ObjectiveSpec)
    ] == expected
    assert parse_study(study.canonical()) == study


def test_eta_is_3_unless_it_is_given() -> None:
    assert parse_study(changed("fidelity", {"rungs": [1, 2]})).fidelity.reduction_factor == 3
    assert parse_study(changed("fidelity.eta", 2)).fidelity.reduction_factor == 2


@pytest.mark.parametrize(
    ("fidelity", "rungs"),
    [
        ({"min_samples": 30, "max_samples": 270, "eta": 3}, (30, 90, 270)),
        ({"rungs": [10, 50]}, (10, 50)),
        ({"scheduler": "hyperband", "rungs": [170]}, (170,)),
        ({"scheduler": "asha", "min_samples": 30, "max_samples": 270}, (30, 90, 270)),
        ({"scheduler": "none"}, None),
        ({"scheduler": "none", "max_samples": 40}, (40,)),
        ({"scheduler": "none", "rungs": [40]}, (40,)),
    ],
)
def test_rungs_follow_from_the_fidelity_section(fidelity: dict[str, Any], rungs: tuple[int, ...]) -> None:
    assert parse_study(changed("fidelity", fidelity)).fidelity.rung_samples == rungs


def test_relative_paths_start_at_the_file(tmp_path: Path) -> None:
    """Relative paths start at the study file's directory; Hub ids are left alone."""
    (tmp_path / "text").mkdir()
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(changed("objectives.0.task", "tasks/mine.yaml")))
    study = load_study(tmp_path / "study.yaml")
    assert study.models.base == str(tmp_path / "base")
    assert study.models.experts == {
        "math": "owner/math",
        "text": str(tmp_path / "text"),
        "lookup": "/models/lookup",
    }
    objectives, holdout = cast(Any, study.objectives), cast(Any, study.holdout)
    assert objectives[0].task == str(tmp_path / "tasks/mine.yaml")
    assert objectives[1].task.file == str(tmp_path / "text.jsonl")
    assert study.holdout[0].task == "gsm8k"
    assert holdout[1].task.file == str(tmp_path / "text_holdout.jsonl")


def test_a_study_file_may_be_json(tmp_path: Path) -> None:
    (tmp_path / "study.json").write_text(json.dumps(SMALL))
    assert load_study(str(tmp_path / "study.json")) == parse_study(SMALL)


def test_limits_and_trials_may_change() -> None:
    """A study may continue with other limits and more trials."""
    study = parse_study(DOCUMENT)
    for place, value in (("limits.max_gpu_hours", 1), ("limits", ...), ("search.max_trials", 61)):
        assert same_but_limits(study, parse_study(changed(place, value))) == ()


def test_limit_of_layers_identifies_a_study() -> None:
    """Another limit of layers makes another study where the space changes layers."""
    paths = changed("limits.max_layers", 60, changed("search_space", {"kind": "dis"}))
    study = parse_study(changed("search_space", {"kind": "dis"}))
    assert same_but_limits(study, parse_study(paths)) == ("limits.max_layers",)
    assert same_but_limits(parse_study(DOCUMENT), parse_study(changed("limits.max_layers", 60))) == ()


def test_a_study_of_paths_that_was_stored() -> None:
    """The options that were added to `dis` have the values that its studies had before."""
    stored = changed("search_space", {"kind": "dis"})
    now = parse_study(stored)
    before = now.canonical()
    for option in ("scale_of", "scale_range", "sampling", "permutations"):
        del before["search_space"][option]
    assert before["search_space"] == {
        "kind": "dis",
        "depth_granularity": 1,
        "repeats": None,
        "models": None,
        "layer_retention": True,
        "scales": True,
        "preset": None,
    }
    assert same_but_limits(parse_study(before), now) == ()
    others = {"scale_of": "mlp", "scale_range": [0.5, 2], "sampling": "uniform", "permutations": False}
    for option, value in others.items():
        other = parse_study(changed(f"search_space.{option}", value, stored))
        assert same_but_limits(parse_study(before), other)[0].startswith(f"search_space.{option}")


def test_another_study_is_told_by_the_fields_that_differ() -> None:
    study = parse_study(DOCUMENT)
    document = changed("search.seed", 1, changed("search.max_trials", 59))
    document = changed("models.experts.math", "other", changed("holdout", [], document))
    differing = same_but_limits(study, parse_study(document))
    assert {"models.experts.math", "search.max_trials", "search.seed", "holdout.0.name"} <= set(differing)
    assert "search.algorithm" not in differing


def test_json_schema_agrees_with_the_parser() -> None:
    """The JSON Schema is valid and accepts what the parser accepts."""
    schema = study_json_schema()
    Draft202012Validator.check_schema(schema)
    validator = Draft202012Validator(schema)
    for document in (DOCUMENT, SMALL, parse_study(DOCUMENT).canonical(), changed("search_space", ..., SMALL)):
        validator.validate(document)
        validator.validate(parse_study(document).canonical())
    validator.validate(changed("search_space", {}))
    assert not validator.is_valid(changed("search_space", {"kind": "lfs", "granularity": "tensor"}))
    for place, value in (("serch", {}), ("search.algorithm", "hm4"), ("engine.verify", True), ("objectives", [])):
        assert not validator.is_valid(changed(place, value))


@pytest.mark.parametrize("stated", [None, "vllm", "torch"])
def test_the_backend_of_images_is_torch(stated: str | None) -> None:
    """Whatever a study of images states, its document says that torch scores it; engines keep their keys."""
    image = {"name": "pets", "task": {"images": "pets", "head": "e"}, "metric": "acc"}
    engine = {} if stated is None else {"engine": {"backend": stated}}
    study = parse_study({**SMALL, "objectives": [image], **engine})
    assert study.engine.backend == "torch"
    assert parse_study(study.canonical()) == study
    stored = study.canonical() | {"engine": study.canonical()["engine"] | {"backend": "vllm"}}
    assert same_but_limits(Study.model_validate(stored), study) == (), "studies of earlier versions continue"
    text = parse_study(SMALL)
    assert text.canonical()["engine"]["backend"] == "vllm"
    assert study.engine.options.document() == text.engine.options.document()


def test_options_of_prompts_are_refused_for_images() -> None:
    """Options that a study without prompts would ignore are refused: of engines, and of benchmarks."""
    image = {"name": "pets", "task": {"images": "pets", "head": "e"}, "metric": "acc"}
    options = {
        "max_model_len": 64,
        "add_bos_token": True,
        "chat_template": True,
        "system_prompt": "Hello.",
        "model_runner": "v2",
    }
    document = {**SMALL, "objectives": [image], "engine": options}
    message = "is for tasks with prompts, of which the study has none; leave it out"
    assert problems(document) == [(f"engine.{name}", message) for name in options]
    text = {"name": "text", "task": {"file": "a.jsonl"}, "metric": "exact_match"}
    assert parse_study({**document, "objectives": [image, text]}).engine.max_model_len == 64
    judge = {"url": "http://judge/v1", "model": "m"}
    benchmarks = [{**image, "metric": "win_rate", "judge": judge}, {**image, "name": "a", "attack": {"kind": "stress"}}]
    assert problems({**SMALL, "objectives": [image], "benchmarks": benchmarks}) == [
        ("benchmarks.0.judge", "compares generated text, and an image task has none; leave it out"),
        ("benchmarks.1.attack", "changes prompts, and an image task has none; leave it out"),
    ]

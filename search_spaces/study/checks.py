"""Contradictions between the fields of a study, and the planned values and keys that are not accepted yet.

Each check receives only sections that are valid on their own, so that all problems can be reported at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from search_spaces.baselines import ALL, GROUPS, baseline_labels
from search_spaces.constraints import BEST_EXPERT, EXPERT, Constraint, contradictory, parse_constraint
from search_spaces.errors import InvalidPreference, InvalidStudy, Problem
from search_spaces.preferences import preference_vector
from search_spaces.searchers import SEARCHERS
from search_spaces.section import LINE, NAME
from search_spaces.spaces import SPACES
from search_spaces.study.benchmarks import BenchmarkSpec, Contamination
from search_spaces.study.engine import Engine
from search_spaces.study.fidelity import Fidelity
from search_spaces.study.judge import WIN_RATE
from search_spaces.study.models import AnotherStudy, Models
from search_spaces.study.objectives import CostSpec, DescribedTask, InlineTask, ObjectiveSpec, ScoredTask
from search_spaces.study.search import MAX_PREFERENCES, Search, SearchSpaceSpec
from search_spaces.study.validation import MessageHints

__all__ = ["HINTS", "ValidParts", "contradictions", "without_consequences"]

# The largest number of names that a message lists.
MAX_NAMES = 20

# The kind of space whose paths can be refined.
REFINED = "hm3"

HINTS = MessageHints(
    later_values={
        "engine.backend": ("transformers",),
    },
    later_keys={
        "constraints": "constraints are options of the search; write them as search.constraints",
        "holdout.*.cost": "a cost follows from the recipe and needs no held-out data; leave the entry out",
        "benchmarks.*.cost": "a cost follows from the recipe and is no benchmark; leave the entry out",
    },
    patterns={
        NAME: "1 to 63 letters, digits, dots, dashes or underscores, the first a letter or digit",
        LINE: "one line of text",
    },
)

# Options of engines that only tasks with prompts use.
OF_PROMPTS = ("max_model_len", "add_bos_token", "chat_template", "system_prompt", "model_runner")


@dataclass
class ValidParts:
    """The parts of a study file that are valid on their own; contradictions are searched for among these parts.

    A section that is not valid is None. The keys of `objectives`, `costs`, `holdout` and `benchmarks` are the positions
    of the entries in the file's list; an entry that is not valid is missing. `objective_names` are the names of all
    objectives in the file.
    """

    models: Models | None = None
    search_space: SearchSpaceSpec | None = None
    search: Search | None = None
    fidelity: Fidelity | None = None
    objectives: Mapping[int, ObjectiveSpec] = field(default_factory=dict)
    costs: Mapping[int, CostSpec] = field(default_factory=dict)
    holdout: Mapping[int, ObjectiveSpec] = field(default_factory=dict)
    benchmarks: Mapping[int, BenchmarkSpec] = field(default_factory=dict)
    contamination: Contamination | None = None
    engine: Engine | None = None
    objective_names: tuple[str, ...] = ()
    """Names of all objectives, including invalid ones."""


def without_consequences(problems: list[Problem]) -> list[Problem]:
    """Leave out problems that are only consequences of other problems in the list.

    For example, a holdout entry with the key `cost` is a problem, because a cost needs no holdout data. The entry then
    also lacks a task and a metric. These two problems follow from the first problem, and are not reported.
    """
    costs = {problem.field.removesuffix("cost") for problem in problems if problem.field.endswith(".cost")}
    return [
        problem
        for problem in problems
        if not any(problem.field in (f"{place}task", f"{place}metric") for place in costs)
    ]


def contradictions(parts: ValidParts) -> Iterator[Problem]:
    """Yield every contradiction between `parts`, sections of a study file that are each valid on their own."""
    if parts.models is not None:
        yield from _models_contradictions(parts.models)
    if parts.search_space is not None:
        yield from parts.search_space.contradictions()
    if parts.search is not None:
        yield from _search_contradictions(parts.search, parts.objective_names)
        yield from _refinement_contradictions(parts.search, parts.search_space)
        yield from _baseline_contradictions(parts.search, parts.models)
    if parts.fidelity is not None:
        yield from _fidelity_contradictions(parts.fidelity, parts.objectives)
    sections: Mapping[str, Mapping[int, ScoredTask]] = {
        "objectives": parts.objectives,
        "holdout": parts.holdout,
        "benchmarks": parts.benchmarks,
    }
    for section, specs in sections.items():
        yield from _task_contradictions(section, specs)
    if parts.engine is not None:
        yield from _engine_contradictions(
            parts.engine, [spec for specs in sections.values() for spec in specs.values()]
        )
    yield from _judge_contradictions(parts.benchmarks)
    yield from _contamination_contradictions(parts)
    yield from _cost_contradictions(parts)
    costs = frozenset(spec.name for spec in parts.costs.values())
    yield from _holdout_contradictions(parts.objectives, parts.holdout, parts.objective_names, costs)
    if parts.search is not None:
        yield from _constraint_contradictions(parts.search, parts)


def _engine_contradictions(engine: Engine, specs: Sequence[ScoredTask]) -> Iterator[Problem]:
    backends = {spec.task.backend if isinstance(spec.task, DescribedTask) else "vllm" for spec in specs}
    if engine.backend == "torch" and backends == {"vllm"}:
        yield Problem("engine.backend", "torch scores tasks of images, of which the study has none; leave it out")
    if specs and not any(_has_prompts(spec) for spec in specs):
        for name in OF_PROMPTS:
            if getattr(engine, name) != Engine.model_fields[name].default:
                yield Problem(f"engine.{name}", "is for tasks with prompts, of which the study has none; leave it out")


def _has_prompts(spec: ScoredTask) -> bool:
    return not isinstance(spec.task, DescribedTask) or spec.task.has_prompts


def _models_contradictions(models: Models) -> Iterator[Problem]:
    if "base" in models.experts:
        yield Problem("models.experts.base", 'an expert cannot be called "base"; that is the base model; rename it')
    if "union" in models.experts:
        yield Problem("models.experts.union", 'an expert cannot be called "union"; that is a tokenizer; rename it')
    for alias, source in models.chained.items():
        yield from _problems_of_name(source, f"models.experts.{alias}.from_study")
    if models.path_of is not None:
        yield from _problems_of_name(models.path_of, "models.path_of")
        if models.tokenizer != "base":
            yield Problem("models.path_of", f"needs tokenizer: base; the study has {models.tokenizer}")
    if models.tokenizer not in (accepted := ("base", "union", *models.experts)):
        yield Problem("models.tokenizer", f"{models.tokenizer} is not a model of the study; give {', '.join(accepted)}")


def _problems_of_name(study: AnotherStudy, place: str) -> Iterator[Problem]:
    if (study.dir is None) == (study.id is None):
        given = "neither dir nor id" if study.dir is None else "dir and id"
        yield Problem(place, f"has {given}; give one of the two")


def _search_contradictions(search: Search, objectives: Sequence[str]) -> Iterator[Problem]:
    gradient, policy = search.gradient, search.hm3
    if policy.start is not None:
        wrong = list(_problems_of_name(policy.start, "search.hm3.start"))
        yield from wrong
        if not wrong and search.algorithm != "hm3":
            message = f"has no effect with algorithm: {search.algorithm}; write hm3, or leave it out"
            yield Problem("search.hm3.start", message)
    elif not policy.learns:
        message = "false: there is no trained policy that could propose paths; name its study as search.hm3.start"
        yield Problem("search.hm3.learns", message)
    yield from _warm_start_contradictions(search)
    yield from _recipe_contradictions(search)
    if gradient.warm_steps is not None and gradient.warm_steps > gradient.steps:
        message = f"{gradient.warm_steps} is above steps={gradient.steps}; give at most {gradient.steps}"
        yield Problem("search.gradient.warm_steps", message)
    if (preferences := search.preferences) is None:
        return
    place = "search.preferences"
    given = [name for name in ("lattice", "dirichlet", "vectors") if getattr(preferences, name) is not None]
    if len(given) != 1:
        yield Problem(place, f"has {' and '.join(given) or 'none'} of lattice, dirichlet, vectors; give one of them")
        return
    if not preferences.corners and (preferences.lattice is None or preferences.lattice < 2):
        lack = "there is no lattice" if preferences.lattice is None else "lattice 1 has no other vectors"
        yield Problem(f"{place}.corners", f"false: {lack}; leave it out, or give lattice: 2 or more")
        return
    if preferences.interior and (preferences.lattice is None or not preferences.corners):
        lack = "there is no lattice" if preferences.lattice is None else "it leaves the corners out, too"
        remedy = "leave it out" if preferences.lattice is None else "leave corners out"
        yield Problem(f"{place}.interior", f"true: {lack}; {remedy}")
        return
    if len(objectives) < 2:
        if objectives:
            yield Problem(place, "has no effect with one objective; leave it out")
        return
    if preferences.interior and preferences.size(len(objectives)) == 0:
        message = (
            f"true: lattice {preferences.lattice} has no vector of {len(objectives)} objectives without a weight of 0"
        )
        yield Problem(f"{place}.interior", f"{message}; give lattice: {len(objectives)} or more")
        return
    first: dict[tuple[float, ...], int] = {}
    for index, vector in enumerate(preferences.vectors or ()):
        try:
            weights = preference_vector(vector, objectives=objectives)
        except InvalidPreference as error:
            yield Problem(f"{place}.vectors.{index}", str(error))
            continue
        if first.setdefault(weights, index) != index:
            yield Problem(f"{place}.vectors.{index}", f"is also vectors.{first[weights]}; leave out one of the two")
    size = preferences.size(len(objectives))
    if size > MAX_PREFERENCES:
        message = f"{preferences.lattice} makes more than {MAX_PREFERENCES} vectors of {len(objectives)} objectives"
        yield Problem(f"{place}.lattice", f"{message}; give a smaller one, or dirichlet or vectors")
    elif (num_points := max(size, gradient.points)) > search.max_trials:
        message = f"{search.max_trials} is below the {num_points} points of {size} descents that become trials"
        yield Problem("search.max_trials", f"{message}; give at least {num_points}, or fewer preference vectors")


def _refinement_contradictions(search: Search, space: SearchSpaceSpec | None) -> Iterator[Problem]:
    if search.refinement is None or space is None:
        return
    place = "search.refinement"
    if space.kind != REFINED:
        message = f"a space of kind {space.kind} has no paths whose coefficients are fixed; leave it out"
        yield Problem(place, f"{message}, or search a space of kind {REFINED}")
    elif (alignment := getattr(space, "alignment", "none")) != "none":
        message = f"losses along paths with alignment: {alignment} have no gradients; leave it out"
        yield Problem(place, f"{message}, or write alignment: none")


def _recipe_contradictions(search: Search) -> Iterator[Problem]:
    for index, given in enumerate(search.recipes):
        place = f"search.recipes.{index}"
        if (given.file is None) == (given.recipe is None):
            lack = "neither file nor recipe" if given.file is None else "file and recipe"
            yield Problem(place, f"has {lack}; give one of the two")
        elif given.file is None and given.name is None:
            yield Problem(f"{place}.name", "is missing; give a name for the tables")
    if not search.recipes and not search.recipes_only:
        yield Problem("search.recipes_only", "false has no effect without search.recipes; leave it out")
    for name in () if search.proposes else ("warm_start", "preferences", "refinement"):
        if getattr(search, name) is not None:
            message = "has no effect where search.recipes are scored in place of a search; leave it out"
            yield Problem(f"search.{name}", f"{message}, or set search.recipes_only to false")


def _warm_start_contradictions(search: Search) -> Iterator[Problem]:
    if search.warm_start is None:
        return
    place = "search.warm_start"
    yield from _problems_of_name(search.warm_start, place)
    if not SEARCHERS[search.algorithm].uses_earlier_results:
        able = ", ".join(name for name, declared in SEARCHERS.items() if declared.uses_earlier_results)
        hint = "; hm3 begins with the policies of another study: search.hm3.start" if search.algorithm == "hm3" else ""
        message = f"{search.algorithm} cannot use results of another study; searchers that do: {able}{hint}"
        yield Problem(place, message)


def _baseline_contradictions(search: Search, models: Models | None) -> Iterator[Problem]:
    """Yield a problem for each name in `search.baselines` that is repeated, or that is no baseline of the study."""
    if isinstance(search.baselines, str):
        return
    experts = () if models is None else tuple(models.experts)
    known = None if models is None else {*GROUPS, *baseline_labels(GROUPS, experts)}
    first: dict[str, int] = {}
    for index, name in enumerate(search.baselines):
        place = f"search.baselines.{index}"
        if first.setdefault(name, index) != index:
            yield Problem(place, f"{name} is also search.baselines.{first[name]}; give it once")
        elif known is not None and name not in known:
            names = ", ".join((*GROUPS, *baseline_labels(ALL, experts)))
            yield Problem(place, f"{name} is not a baseline of this study; give one of {names}")


def _fidelity_contradictions(fidelity: Fidelity, objectives: Mapping[int, ObjectiveSpec]) -> Iterator[Problem]:
    low, high, steps = fidelity.min_samples, fidelity.max_samples, fidelity.rungs
    for name in ("min_samples", "max_samples") if steps is not None else ():
        if getattr(fidelity, name) is not None:
            yield Problem(f"fidelity.{name}", "is given as well as rungs; leave out one of the two")
    if steps is not None and not _is_increasing(steps):
        yield Problem("fidelity.rungs", _increase(steps))
    if fidelity.scheduler == "none":
        for name in ("min_samples", "eta"):
            if getattr(fidelity, name) is not None:
                yield Problem(
                    f"fidelity.{name}", "has no effect with scheduler: none, which has one rung; leave it out"
                )
    elif steps is None and low is None and high is not None:
        yield Problem("fidelity.max_samples", f"{high} is given without min_samples; give both, or rungs")
    elif steps is None and low is not None and high is None:
        yield Problem("fidelity.min_samples", f"{low} is given without max_samples; give both, or rungs")
    elif steps is None and (low is not None or any(spec.rungs is None for spec in objectives.values())):
        try:
            _ = fidelity.rung_samples
        except ValueError as error:
            yield Problem("fidelity.min_samples" if low is not None else "fidelity", str(error))
    if fidelity.rule == "bound" and fidelity.scheduler != "racing":
        message = f"bound is a rule of scheduler: racing and has no effect with {fidelity.scheduler}; leave it out"
        yield Problem("fidelity.rule", message)
    if fidelity.error_rate is not None and fidelity.rule != "bound":
        message = f"has no effect with rule: {fidelity.rule}; write rule: bound, or leave it out"
        yield Problem("fidelity.error_rate", message)
    yield from _length_contradictions(fidelity, objectives)


def _length_contradictions(fidelity: Fidelity, objectives: Mapping[int, ObjectiveSpec]) -> Iterator[Problem]:
    """Yield a problem for each list of rungs (samples at each rung) that has a wrong length.

    All objectives must have the same number of rungs: one with the scheduler `none`, any with `hyperband`, and two or
    more with the others. If no objective has more samples at some rung than at the rung before it, that is also a
    problem. `fidelity` has the scheduler and a list of rungs; an objective may state its own list. `objectives` are the
    entries of the study file, keyed by position.
    """
    own = {f"objectives.{index}.rungs": spec.rungs for index, spec in objectives.items() if spec.rungs is not None}
    written = own if fidelity.rungs is None else {"fidelity.rungs": fidelity.rungs, **own}
    try:
        reference = fidelity.rung_samples
    except ValueError:
        reference = None
    name = "fidelity"
    if reference is None and own:
        name, reference = next(iter(own.items()))
    for place, counts in written.items():
        if fidelity.scheduler == "none":
            if len(counts) > 1:
                yield Problem(place, f"{list(counts)}: scheduler: none has one rung; give [{counts[-1]}]")
        elif fidelity.scheduler != "hyperband" and len(counts) == 1:
            yield Problem(
                place,
                f"{list(counts)}: {fidelity.scheduler} needs two rungs or more; give smaller ones first, "
                "or `scheduler: none`",
            )
        elif reference is not None and len(counts) != len(reference):
            yield Problem(
                place,
                f"{list(counts)} differs in length from {list(reference)} of {name}; "
                "all objectives need the same number of rungs",
            )
    # Objectives that do not state their rungs have those of fidelity, which increase.
    if own and len(own) == len(objectives) and len({len(counts) for counts in own.values()}) == 1:
        for rung, (before, after) in enumerate(itertools.pairwise(zip(*own.values(), strict=True)), start=1):
            if before == after:
                message = f"no objective has more samples at rung {rung + 1} than at rung {rung}; leave one of them out"
                yield Problem(next(iter(own)), message)


def _is_increasing(counts: Sequence[int], *, may_stay: bool = False) -> bool:
    return all(a < b or (may_stay and a == b) for a, b in itertools.pairwise(counts))


def _increase(counts: Sequence[int]) -> str:
    return f"{list(counts)} does not increase; give each rung more samples than the one before"


def _contamination_contradictions(parts: ValidParts) -> Iterator[Problem]:
    if parts.contamination is None:
        return
    known = [spec.name for specs in (parts.holdout, parts.benchmarks) for spec in specs.values()]
    for index, name in enumerate(parts.contamination.allowed):
        if name not in known:
            names = f"; give {', '.join(dict.fromkeys(known[:MAX_NAMES]))}" if known else ", and the study has none"
            yield Problem(f"contamination.allowed.{index}", f"{name} is no holdout entry or benchmark{names}")


def _judge_contradictions(benchmarks: Mapping[int, BenchmarkSpec]) -> Iterator[Problem]:
    for index, spec in benchmarks.items():
        place = f"benchmarks.{index}"
        if spec.attack is not None and not _has_prompts(spec):
            assert isinstance(spec.task, DescribedTask)
            yield Problem(f"{place}.attack", f"changes prompts, and {spec.task.kind} has none; leave it out")
        if spec.judge is None:
            if spec.metric == WIN_RATE:
                yield Problem(
                    f"{place}.judge", f"is missing; the metric {WIN_RATE} needs one: {{url: URL, model: NAME}}"
                )
            continue
        for option, message in spec.judge.problems():
            yield Problem(f"{place}.judge.{option}", message)
        if spec.metric != WIN_RATE:
            yield Problem(f"{place}.metric", f"{spec.metric} is not what a judge gives; give {WIN_RATE}")
        if spec.attack is not None:
            yield Problem(f"{place}.attack", "prompts of a benchmark with a judge cannot be attacked; leave one out")
        if not _has_prompts(spec):
            assert isinstance(spec.task, DescribedTask)
            yield Problem(f"{place}.judge", f"compares generated text, and {spec.task.kind} has none; leave it out")
        if isinstance(spec.task, InlineTask) and spec.task.program is not None:
            yield Problem(f"{place}.judge", "a task with a program is judged by its execution; leave one of them out")
        if spec.direction == "minimize" or spec.range not in (None, (0.0, 1.0)):
            field = "direction" if spec.direction == "minimize" else "range"
            yield Problem(f"{place}.{field}", f"{WIN_RATE} is from 0 to 1, and more is better; leave it out")


def _task_contradictions(section: str, specs: Mapping[int, ScoredTask]) -> Iterator[Problem]:
    names: dict[str, int] = {}
    for index, spec in specs.items():
        place = f"{section}.{index}"
        if spec.name in names:
            yield Problem(f"{place}.name", f"{spec.name} is also {section}.{names[spec.name]}; give another name")
        names.setdefault(spec.name, index)
        if spec.range is not None and not spec.range[0] < spec.range[1]:
            yield Problem(f"{place}.range", f"{list(spec.range)} is empty; give [lowest, highest]")
        has_range = isinstance(spec.task, DescribedTask) and spec.metric in spec.task.minimised
        if has_range and spec.direction == "maximize":
            yield Problem(f"{place}.direction", f"maximize: {spec.metric} is minimised; leave it out")
        if spec.direction == "minimize" and spec.range is None and not has_range:
            yield Problem(f"{place}.range", f"is missing; {spec.metric} is minimised, so give its [lowest, highest]")
        rungs = spec.rungs if isinstance(spec, ObjectiveSpec) else None
        if rungs is not None and section == "holdout":
            yield Problem(f"{place}.rungs", "held-out data are scored whole, not rung by rung; leave it out")
        elif rungs is not None and not _is_increasing(rungs, may_stay=True):
            message = f"{list(rungs)} shrinks; give each rung at least as many samples as the one before"
            yield Problem(f"{place}.rungs", message)
        if isinstance(spec.task, DescribedTask):
            own = [key for key in ("max_tokens", "until") if key in type(spec.task).model_fields]
            for key in ("filter", "split", "num_fewshot", "max_tokens", "until"):
                if getattr(spec, key) is not None and key not in own:
                    yield Problem(f"{place}.{key}", f"is for lm-eval tasks; {spec.task.kind} has none; leave it out")
            for key in own:
                if getattr(spec, key) is not None:
                    yield Problem(f"{place}.{key}", f"is for lm-eval tasks; of {spec.task.kind} it is task.{key}")


def _cost_contradictions(parts: ValidParts) -> Iterator[Problem]:
    names = [spec.name for spec in parts.objectives.values()]
    is_given = parts.search is not None and bool(parts.search.recipes)  # given recipes may differ in nothing else
    costs: dict[str, int] = {}
    for index, spec in parts.costs.items():
        if spec.name in names:
            yield Problem(f"objectives.{index}.name", f"{spec.name} is the name of two objectives; give another name")
        names.append(spec.name)
        if parts.search_space is not None and not parts.search_space.changes_layers and not is_given:
            able = ", ".join(kind for kind, section in SPACES.items() if section(kind=kind).changes_layers)
            message = (
                f"{spec.cost}: all merges of the space {parts.search_space.kind} have the same number; leave the "
                f"objective out, or search a space that changes them: {able}"
            )
            yield Problem(f"objectives.{index}.cost", message)
        if costs.setdefault(spec.cost, index) != index:
            message = f"{spec.cost} is also the cost of objectives.{costs[spec.cost]}; leave out one of the two"
            yield Problem(f"objectives.{index}.cost", message)
    proposes = parts.search is None or parts.search.proposes
    if parts.costs and len(parts.costs) == len(parts.objective_names) and proposes:
        yield Problem("objectives", "has costs only, which are least for the smallest merge; add one with a task")


def _holdout_contradictions(
    objectives: Mapping[int, ObjectiveSpec],
    holdout: Mapping[int, ObjectiveSpec],
    names: tuple[str, ...],
    costs: frozenset[str],
) -> Iterator[Problem]:
    by_name = {spec.name: spec for spec in reversed(list(objectives.values()))}
    by_data = {_data(spec): spec for spec in reversed(list(objectives.values()))}
    known = frozenset(names)
    for index, spec in holdout.items():
        paired = by_name.get(spec.name)
        if names and spec.name not in known:
            shown = ", ".join(names[:MAX_NAMES]) + ", ..." * (len(names) > MAX_NAMES)
            yield Problem(
                f"holdout.{index}.name",
                f"{spec.name} is not an objective; a holdout entry has the name of the objective it belongs to: "
                f"{shown}",
            )
        elif spec.name in costs:
            yield Problem(f"holdout.{index}.name", f"{spec.name} is a cost, which needs no held-out data; leave it out")
        elif paired is not None and paired.metric != spec.metric:
            yield Problem(
                f"holdout.{index}.metric",
                f"{spec.metric} is not the metric of objective {spec.name}; give {paired.metric}",
            )
        if (other := by_data.get(_data(spec))) is not None:
            yield Problem(
                f"holdout.{index}.task",
                f"is the search data of objective {other.name}; holdout data must be different: use another file or "
                "split",
            )


def _constraint_contradictions(search: Search, parts: ValidParts) -> Iterator[Problem]:
    constraints: dict[int, Constraint] = {}
    for index, text in enumerate(search.constraints):
        try:
            constraints[index] = parse_constraint(text)
        except InvalidStudy as error:
            yield from (Problem(f"search.constraints.{index}", problem.message) for problem in error.problems)
    if search.constraints and parts.fidelity is not None and parts.fidelity.rule == "bound":
        message = "bound cannot compare constraints, which this study has; write behind"
        yield Problem("fidelity.rule", message)
    experts = None if parts.models is None else tuple(parts.models.experts)
    found = tuple(contradictory(constraints, objectives=parts.objective_names, experts=experts))
    refused = {index for index, _ in found}
    for index, message in found:
        yield Problem(f"search.constraints.{index}", message)
    for index, constraint in constraints.items():
        if experts is not None and index not in refused and (lack := _lack_of_baselines(constraint, search, experts)):
            yield Problem(f"search.constraints.{index}", lack)
    by_name = {spec.name: spec for spec in reversed(list(parts.objectives.values()))}
    for index, constraint in constraints.items():
        spec = by_name.get(constraint.objective)
        if spec is not None and (message := _unreachable(constraint, spec)):
            yield Problem(f"search.constraints.{index}", message)


def _lack_of_baselines(constraint: Constraint, search: Search, experts: Sequence[str]) -> str:
    """Error text if the bound of a constraint needs a score that the study does not have, else "".

    A bound such as "base - 0.01" needs the score of a source model, which is a baseline. The text names the source
    models that `search.baselines` leaves out. `experts` are the aliases of the experts.
    """
    if constraint.reference is None:
        return ""
    is_any = constraint.reference == BEST_EXPERT
    needed = [EXPERT + alias for alias in experts] if is_any else [constraint.reference]
    labels = baseline_labels(search.baselines, experts)
    lacking = ", ".join(label for label in needed if label not in labels)
    hint = "write search.baselines: sources, or a list with what is missing"
    return lacking and f"{constraint.text} needs the score of {lacking}, which search.baselines leaves out; {hint}"


def _unreachable(constraint: Constraint, spec: ObjectiveSpec) -> str:
    """Error text if no value of an objective meets the constraint, or "" if some value may meet it.

    `spec` is the objective with the range of its values. If the bound is relative to a model's value, that value may be
    any number in the objective's range.
    """
    if spec.range is not None and not spec.range[0] < spec.range[1]:
        return ""  # the problem is reported for the range
    low, high = spec.range or (0.0, 1.0)
    if constraint.reference is not None:
        low, high = low - high, high - low
    is_beyond = constraint.offset > high if constraint.relation == ">=" else constraint.offset < low
    shown = list(spec.range or (0, 1))
    return f"no value of {spec.name} meets {constraint.text}: its range is {shown}" if is_beyond else ""


def _data(spec: ObjectiveSpec) -> tuple[str, str | None]:
    return (spec.task.place, spec.task.part) if isinstance(spec.task, DescribedTask) else (spec.task, spec.split)

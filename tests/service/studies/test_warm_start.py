"""Studies whose searcher begins with the results of an earlier study."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from search_spaces.constraints import parse_constraint
from search_spaces.errors import InvalidStudy
from search_spaces.fidelity import bracket_cycle
from search_spaces.objectives import Objective
from search_spaces.searchers import SEARCHERS, Feature
from search_spaces.study.file import Study, load_study, parse_study
from service.api.preflight_process import check_request
from service.disk import artifacts_dir
from service.errors import StudyFailed
from service.jobs.base import Accepted, JobKind, RequestContext
from service.jobs.search.local_run import DATABASE, open_run, read_run
from service.jobs.search.request import read_study, studies_of
from service.resolved_study import ResolvedStudy
from service.results.format import search_sentences
from service.results.load import run_record
from service.results.summary import summary
from service.store import Store
from service.store.artifacts import ArtifactStore
from service.store.documents import WARM_START
from service.studies.chains import on_server
from service.studies.preflight.algorithm import Algorithm
from service.studies.preflight.result import PreflightResult, StudyBudget, StudyModels, StudyTasks
from service.studies.warm_start import _digest, check_warm_start, with_warm_start
from service.tune.proposing.searcher_state import SearcherState
from service.tune.searchers import get_searcher
from service.tune.searchers.base import Observation, ProposalContext
from service.types import Account, JobState, Origin, TrialState
from tests.conftest import write_choices
from tests.service.api.harness import ApiServer
from tests.service.site import LocalPreflight
from tests.service.tune.harness import (
    FINGERPRINTS,
    InlineProposer,
    Killed,
    coordinator_of,
    drive,
    killer,
    make_plan,
    space_of,
    trial_list,
)
from workers.evaluation.lm_eval_tasks import content_hash, yaml_content
from workers.serving.fake import FakeScorer
from workers.types import Family, ModelSource, Split, TaskInfo, TaskSpec

NAMES = ("math", "text")
TASKS = {name: TaskSpec(task=name, metric="exact_match") for name in NAMES}
EARLIER_RUNGS = tuple(dict.fromkeys(NAMES, size) for size in (4, 12, 36))
RUNGS = tuple(dict.fromkeys(NAMES, size) for size in (4, 12, 48))
SPACE = space_of("layerwise")
OBJECTIVES = tuple(Objective(name, "exact_match", "maximize", None) for name in NAMES)
ABLE = sorted(name for name, declared in SEARCHERS.items() if declared.uses_earlier_results)
OWN = [name for name in ABLE if SEARCHERS[name].alias_of is None]


def document(**changes: Any) -> dict[str, Any]:
    models = {"base": "/models/base", "experts": {name: f"/models/{name}" for name in NAMES}}
    return {
        "name": "second",
        "models": models,
        "search_space": {"kind": "layerwise"},
        "objectives": [{"name": name, "task": name, "metric": "exact_match"} for name in NAMES],
        "fidelity": {"min_samples": 4, "max_samples": 48, "eta": 3},
        **changes,
    }


def family(fingerprints: Mapping[str, str]) -> Family:
    base, *experts = (ModelSource(alias, f"/models/{alias}", digest) for alias, digest in fingerprints.items())
    return Family(base, tuple(experts))


def checked(warm_start: Mapping[str, Any], **changes: Any) -> PreflightResult:
    """A study of the same family, after every other check of preflight."""
    options = {name: changes.pop(name) for name in ("algorithm", "max_trials") if name in changes}
    study = changes.pop("study", None) or parse_study(document(search={"warm_start": dict(warm_start), **options}))
    num_trials = study.search.max_trials
    parts: dict[str, Any] = {
        "objectives": OBJECTIVES,
        "tasks": TASKS,
        "fingerprints": FINGERPRINTS,
        "rungs": RUNGS,
        "space": SPACE,
        **changes,
    }
    infos = {name: TaskInfo(parts["rungs"][-1][name], True, "generate_until") for name in parts["tasks"]}
    return PreflightResult(
        study=study,
        models=StudyModels(family(parts["fingerprints"]), 4, 1000, 1000, {}, 0, ""),
        tasks=StudyTasks(parts["objectives"], parts["tasks"], infos, {}, {}),
        budget=StudyBudget(parts["rungs"], bracket_cycle("racing", num_rungs=3, eta=3, max_trials=num_trials)),
        space=parts["space"],
        algorithm=Algorithm(study.search.algorithm, "the study names it"),
        memory=cast(Any, None),
    )


@dataclass(frozen=True)
class Earlier:
    """A finished run of 14 trials on rungs of 4, 12 and 36 samples; one trial has failed."""

    directory: Path
    study: str

    @property
    def url(self) -> str:
        return f"sqlite:///{self.directory / DATABASE}"

    def observations(self, *, first: int, full: int, is_full_only: bool = False) -> list[Observation]:
        """The observations of the searched trials that a searcher receives, from the rows of the earlier study."""
        with read_run(self.directory) as (store, record):
            trials = [trial for trial in store.trials(record.id) if trial.origin is Origin.SEARCH]
        found = []
        for index, trial in enumerate(trials):
            assert trial.configuration is not None
            common: dict[str, Any] = {"number": first + index, "is_proposed": False}
            for rung in trial.rungs:
                if rung.rung == 2 or not is_full_only:
                    costs = tuple(1 - rung.values[name] for name in NAMES)
                    errors = tuple(rung.standard_errors[name] for name in NAMES)
                    share = (4, 12, 36)[rung.rung] / full
                    own = Observation(trial.configuration, share, costs, rung=rung.rung, **common)
                    found.append(replace(own, standard_errors=errors))
            if trial.state is TrialState.FAIL:
                found.append(Observation(trial.configuration, 1.0, None, rung=2, **common))
        return found


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Earlier:
    directory = tmp_path_factory.mktemp("earlier")
    store = Store(f"sqlite:///{directory / DATABASE}")
    before = document(name="first")
    accepted = ResolvedStudy(
        fingerprints=FINGERPRINTS,
        num_layers=4,
        tasks={name: task.digest for name, task in TASKS.items()},
        holdout_tasks={},
        rung_samples=EARLIER_RUNGS,
        max_staleness=5,
        objectives=OBJECTIVES,
        version="0",
        algorithm="random",
    )
    study = store.create_job(
        kind="search", name="first", document=parse_study(before).canonical(), accepted=accepted.to_json()
    ).id
    coordinator = coordinator_of(store, study, space=SPACE, proposer=InlineProposer(SPACE, seed=3))
    drive(coordinator, FakeScorer())
    failing = next(trial for trial in store.trials(study) if trial.state is TrialState.PRUNED)
    store.open_attempt(study).set_state(JobState.COMPLETE)
    with store.engine.begin() as connection:
        connection.exec_driver_sql(f"UPDATE trials SET state = 'FAIL' WHERE number = {failing.number}")
    store.close()
    return Earlier(directory, study)


@dataclass(frozen=True)
class Begun:
    """A study that has taken over the results of the earlier one, and the means to do so again."""

    store: Store
    study: str
    preflight: PreflightResult
    artifacts: ArtifactStore

    @classmethod
    def of(cls, directory: Path, preflight: PreflightResult) -> Begun:
        directory.mkdir(exist_ok=True)
        store = Store(f"sqlite:///{directory / DATABASE}")
        accepted = preflight.resolved().to_json()
        study = store.create_job(
            kind="search", name="second", document=preflight.study.canonical(), accepted=accepted
        ).id
        return cls(store, study, preflight, ArtifactStore(store, artifacts_dir(directory)))

    def begin(self) -> PreflightResult:
        writer = self.store.open_attempt(self.study)
        return with_warm_start(self.preflight, self.store, writer, artifacts=self.artifacts, open_study=open_run)


def test_all_results_are_told_by_default(earlier: Earlier, tmp_path: Path) -> None:
    """All results of searched trials are observations, the fidelity being the share of the new full budget."""
    preflight = checked({"dir": str(earlier.directory)})
    check_warm_start(preflight, open_study=open_run)
    found = Begun.of(tmp_path, preflight).begin().search_setting(num_baselines=0).observed
    expected = earlier.observations(first=-14, full=48)
    assert {o.rung for o in expected} == {0, 1, 2}
    assert any(o.costs is None for o in expected)
    assert list(found) == expected


def test_only_results_at_the_full_budget_are_told(earlier: Earlier, tmp_path: Path) -> None:
    """With `rungs: full`, only results of the last rung and failures are observations; an equal budget is all of it."""
    preflight = checked({"dir": str(earlier.directory), "rungs": "full"}, rungs=EARLIER_RUNGS)
    found = Begun.of(tmp_path, preflight).begin().observed
    expected = earlier.observations(first=-14, full=36, is_full_only=True)
    first = -len({o.number for o in expected})
    assert [replace(o, number=0) for o in found] == [replace(o, number=0) for o in expected]
    assert sorted({o.number for o in found}) == list(range(first, 0))
    assert {o.fidelity for o in found} == {1.0}


def test_trials_marked_as_invalid_are_not_told(earlier: Earlier, tmp_path: Path) -> None:
    """A value that a user has marked as wrong does not lead the new search."""
    copy = tmp_path / "copy"
    shutil.copytree(earlier.directory, copy)
    with closing(Store(f"sqlite:///{copy / DATABASE}")) as store, store.engine.begin() as connection:
        number = next(trial.number for trial in store.trials(earlier.study) if trial.origin is Origin.SEARCH)
        connection.exec_driver_sql(f"UPDATE trials SET invalid = 'cut off' WHERE number = {number}")
    found = Begun.of(tmp_path / "new", checked({"dir": str(copy)})).begin().observed
    expected = earlier.observations(first=-14, full=48)
    left_out = [each for each in expected if each.number == -14]
    assert len(found) == len(expected) - len(left_out) < len(expected)
    assert left_out[0].configuration not in [each.configuration for each in found]


def single(observation: Observation) -> Observation:
    """The observation of the first objective alone."""
    return observation if observation.costs is None else replace(observation, costs=observation.costs[:1])


def test_tasks_of_earlier_versions_are_compared(tmp_path: Path) -> None:
    """Earlier versions stored the digest of a YAML task without the data that it reads."""
    file = write_choices(tmp_path)
    bare = TaskSpec(str(file), "acc", content=content_hash(file))
    whole = replace(bare, content=yaml_content(str(file), None))
    assert _digest(whole, whole.digest) == whole.digest
    assert _digest(whole, bare.digest) == bare.digest
    assert _digest(whole, None) == _digest(whole, "0" * 64) == whole.digest


@pytest.mark.parametrize("algorithm", OWN)
def test_proposals_are_those_of_a_searcher_told_the_same(earlier: Earlier, tmp_path: Path, algorithm: str) -> None:
    """A warm-started searcher proposes what a searcher proposes that was told the same observations."""
    told = earlier.observations(first=-14, full=48)
    one_objective = Feature.OBJECTIVES not in SEARCHERS[algorithm].handles
    begun = Begun.of(tmp_path, checked({"dir": str(earlier.directory)}, algorithm=algorithm)).begin()
    setting = begun.search_setting(num_baselines=0)
    if one_objective:
        setting, told = replace(setting, observed=tuple(map(single, setting.observed))), list(map(single, told))
    parameters = begun.space.parameters
    state = SearcherState(algorithm, parameters, setting, (), {})
    own: list[Observation] = []
    for number in range(3):
        call: dict[str, Any] = {"number": number, "seed": 5, "observations": tuple(own), "pending": ()}
        proposed = state.propose(**call)
        expected = get_searcher(algorithm).advance(
            ProposalContext(parameters, **{**call, "observations": (*told, *own)}, setting=setting)
        )
        assert proposed == expected
        assert isinstance(proposed, dict)
        costs = (0.5,) if one_objective else (0.5, 0.25)
        own.append(Observation(proposed, 1.0, costs, number=number, rung=2, standard_errors=(None,) * len(costs)))


def test_told_results_change_what_is_proposed(earlier: Earlier, tmp_path: Path) -> None:
    """The searcher learns from the told results: without them it would draw its first proposal at random."""
    begun = Begun.of(tmp_path, checked({"dir": str(earlier.directory)}, algorithm="tpe")).begin()
    call: dict[str, Any] = {"number": 0, "seed": 5, "observations": (), "pending": ()}
    setting = begun.search_setting(num_baselines=0)
    cold = replace(setting, observed=())
    found = [SearcherState("tpe", begun.space.parameters, each, (), {}).propose(**call) for each in (setting, cold)]
    assert found[0] != found[1]


class WarmProposer(InlineProposer):
    """A proposer in the caller's thread, whose searcher begins with the results of a warm start."""

    def __init__(self, preflight: PreflightResult, *, algorithm: str) -> None:
        super().__init__(preflight.space, seed=5, algorithm=algorithm)
        setting = preflight.search_setting(num_baselines=0)
        self._state = SearcherState(algorithm, preflight.space.parameters, setting, (), {})

    def result(self, *, timeout_s: float) -> dict[str, Any] | None:
        answer = self._state.propose(seed=5, **self._call)
        assert isinstance(answer, dict)
        return answer


def search(begun: Begun, preflight: PreflightResult, **options: Any) -> None:
    proposer = WarmProposer(preflight, algorithm="smac")
    coordinator = coordinator_of(begun.store, begun.study, proposer=proposer, space=SPACE, max_trials=6, **options)
    drive(coordinator, FakeScorer())


@pytest.mark.slow
def test_a_killed_study_goes_on_without_the_earlier_one(earlier: Earlier, tmp_path: Path) -> None:
    """Killed at every tenth step and resumed after the earlier study is gone, it has the undisturbed study's trials."""
    directory = tmp_path / "earlier"
    shutil.copytree(earlier.directory, directory)
    preflight = checked({"dir": str(directory)}, algorithm="smac")
    undisturbed = Begun.of(tmp_path / "undisturbed", preflight)
    search(undisturbed, undisturbed.begin())
    trials = trial_list(undisturbed.store, undisturbed.study)
    assert sum(origin is Origin.SEARCH for _, origin, *_ in trials) == 6

    killed = Begun.of(tmp_path / "killed", preflight)
    began = killed.begin()
    shutil.rmtree(directory)
    num_kills = 0
    while True:
        again = killed.begin()
        assert again.observed == began.observed
        try:
            search(killed, again, observer=killer(10))
        except Killed:
            num_kills += 1
            continue
        break
    assert num_kills >= 3
    assert trial_list(killed.store, killed.study) == trials


def test_lineage_is_kept_and_no_result_is_taken_over(earlier: Earlier, tmp_path: Path) -> None:
    """A document, the summary and the report name the earlier study; its trials are none of the new study."""
    begun = Begun.of(tmp_path, checked({"dir": str(earlier.directory)}))
    num = len(begun.begin().observed)
    stored = begun.store.document(begun.study, WARM_START)
    digest = begun.artifacts.get(begun.study, "warm-start").digest
    assert stored == {
        "study": earlier.study,
        "name": "first",
        "rungs": "all",
        "num_trials": 14,
        "num_observations": num,
        "digest": digest,
    }
    found = summary(run_record(begun.store, begun.study))
    expected = {"study": earlier.study, "name": "first", "rungs": "all", "trials": 14, "observations": num}
    assert found["search"]["warm_start"] == expected
    assert search_sentences(found["search"])[1] == (
        f"it began with {num} results of 14 trials of study 'first' ({earlier.study}), which are not counted here"
    )
    assert found["trials"] == {}
    assert begun.store.trials(begun.study) == ()


def test_changed_results_are_refused(earlier: Earlier, tmp_path: Path) -> None:
    """A study whose stored observations were changed or lost fails instead of going on with others."""
    begun = Begun.of(tmp_path, checked({"dir": str(earlier.directory)}))
    begun.begin()
    other = tmp_path / "other"
    other.mkdir()
    (other / "observations.json.gz").write_bytes(b"others")
    begun.artifacts.put(begun.study, "warm-start", other)
    with pytest.raises(StudyFailed, match=r"search\.warm_start: artifact 'warm-start' has other content"):
        begun.begin()
    assert begun.store.job(begun.study).state is JobState.FAILED


@pytest.mark.parametrize("text", ["math >= base - 0.2", "text >= 0.1"])
def test_constraints_are_those_of_the_new_study(earlier: Earlier, tmp_path: Path, text: str) -> None:
    """Constraint values of earlier trials are computed by the new study's constraints, at every rung."""
    constraint = parse_constraint(text)
    objectives = tuple(
        replace(o, constraints=(constraint,)) if o.name == constraint.objective else o for o in OBJECTIVES
    )
    found = Begun.of(tmp_path, checked({"dir": str(earlier.directory)}, objectives=objectives)).begin().observed
    with read_run(earlier.directory) as (store, record):
        plan = make_plan(record.id, objectives=objectives)
        trials = {trial.number: trial for trial in store.trials(record.id)}
        samples = store.sample_values(record.id, Split.SEARCH)
    base = next(trial for trial in trials.values() if trial.label == "base")
    own = [trial for trial in trials.values() if trial.origin is Origin.SEARCH]
    expected: list[Any] = []
    for trial in own:
        for rung in trial.rungs:
            values = samples[base.recipe.digest][constraint.objective]
            stop = plan.rung_samples[rung.rung][constraint.objective]
            reference = sum(values[p] for p in range(stop)) / stop if constraint.reference else 0.0
            bound = reference + constraint.offset
            expected.append((pytest.approx(bound - rung.values[constraint.objective]),))
        if trial.state is TrialState.FAIL:
            expected.append(())
    assert [o.constraints for o in found] == expected


def problem_of(preflight: PreflightResult) -> str:
    with pytest.raises(InvalidStudy) as refused:
        check_warm_start(preflight, open_study=open_run)
    (problem,) = refused.value.problems
    assert problem.field == "search.warm_start"
    return problem.message


@pytest.mark.parametrize(
    ("changes", "differing"),
    [
        ({"fingerprints": {**FINGERPRINTS, "text": "other"}}, "model text"),
        (
            {"fingerprints": {"base": "b0", "math": "m1", "a": "t2"}},
            "model a (only here), model text (only there)",
        ),
        ({"objectives": OBJECTIVES[:1]}, "objective text (only there)"),
        ({"tasks": {**TASKS, "text": TaskSpec(task="another", metric="exact_match")}}, "objective text"),
        ({"objectives": (OBJECTIVES[0], replace(OBJECTIVES[1], direction="minimize", range=(0, 1)))}, "objective text"),
        ({"objectives": (OBJECTIVES[0], replace(OBJECTIVES[1], range=(0.0, 2.0)))}, "objective text"),
        ({"search_space": {"kind": "layerwise", "granularity": "layer"}}, "search_space.granularity"),
        ({"search_space": {"kind": "lfs"}}, "search_space.kind"),
        ({"models": "text"}, "models.tokenizer"),
    ],
)
def test_another_study_is_refused_with_what_differs(earlier: Earlier, changes: dict[str, Any], differing: str) -> None:
    """A study of other models, of another space or of other objectives is refused, and the message names them all."""
    given = document(search={"warm_start": {"dir": str(earlier.directory)}})
    given |= {key: changes.pop(key) for key in ("search_space",) if key in changes}
    if "models" in changes:
        given["models"]["tokenizer"] = changes.pop("models")
    message = problem_of(checked({}, study=parse_study(given), **changes))
    assert message.startswith("study 'first': its results cannot be used here, because these differ: ")
    assert differing in message
    assert message.endswith("; a warm start needs the same models, search space and objectives")


def test_a_run_without_results_is_refused(tmp_path: Path) -> None:
    """A directory without a run, and a run without a searched trial, are refused."""
    assert "no run here" in problem_of(checked({"dir": str(tmp_path)}))
    begun = Begun.of(tmp_path, checked({"dir": "/nowhere"}))
    begun.store.close()
    assert problem_of(checked({"dir": str(tmp_path)})) == ("study 'second': no trial of its search has a result yet")


def test_a_lost_study_fails_the_one_that_needs_it(earlier: Earlier, tmp_path: Path) -> None:
    """A study whose earlier study is deleted before it first runs fails, and says why."""
    directory = tmp_path / "earlier"
    shutil.copytree(earlier.directory, directory)
    preflight = checked({"dir": str(directory)})
    check_warm_start(preflight, open_study=open_run)
    shutil.rmtree(directory)
    begun = Begun.of(tmp_path / "second", preflight)
    with pytest.raises(StudyFailed, match=r"search\.warm_start: .*no run here"):
        begun.begin()
    assert begun.store.job(begun.study).state is JobState.FAILED


@pytest.mark.parametrize("algorithm", sorted(SEARCHERS.keys() - ABLE))
def test_searchers_that_learn_from_nothing_refuse(algorithm: str) -> None:
    """Searchers that cannot use results of another study refuse a warm start by name."""
    with pytest.raises(InvalidStudy) as refused:
        parse_study(document(search={"algorithm": algorithm, "warm_start": {"dir": "runs/first"}}))
    (problem,) = [each for each in refused.value.problems if each.field == "search.warm_start"]
    able = ", ".join(name for name in SEARCHERS if name in ABLE)
    assert problem.message.startswith(f"{algorithm} cannot use results of another study; searchers that do: {able}")
    assert ("search.hm3.start" in problem.message) == (algorithm == "hm3")


@pytest.mark.parametrize(
    ("warm_start", "message"),
    [
        ({}, "has neither dir nor id; give one of the two"),
        ({"dir": "a", "id": "b"}, "has dir and id; give one of the two"),
        ({"dir": "a", "rungs": "some"}, '"some" is not known; available: all, full'),
        ({"from_study": "a"}, "unknown key; known keys: dir, id, rungs"),
    ],
)
def test_the_option_is_checked(warm_start: dict[str, Any], message: str) -> None:
    """What is wrong with the option itself is said when the file is read."""
    with pytest.raises(InvalidStudy, match=message):
        parse_study(document(search={"warm_start": warm_start}))


def test_the_directory_is_relative_to_the_file(tmp_path: Path) -> None:
    """A relative directory of an earlier run is relative to the study file."""
    file = tmp_path / "study.json"
    file.write_text(json.dumps(document(search={"warm_start": {"dir": "runs/first"}})))
    found = load_study(file).search.warm_start
    assert found is not None
    assert found.dir == str(tmp_path / "runs" / "first")


class WarmPreflight(LocalPreflight):
    """The server's checks of a submitted study, without those of models and tasks."""

    def __init__(self, url: str) -> None:
        self._url = url

    async def accept(
        self, content: bytes, *, is_json: bool, kind: JobKind, client: str = "", reader: Account | None = None
    ) -> Accepted:
        def accept(given: Mapping[str, Any], context: RequestContext) -> Accepted:
            study = read_study(given, context)
            preflight = checked({}, study=study)
            check_warm_start(preflight, open_study=studies_of(context))
            return Accepted(study.name, study.canonical(), preflight.resolved().to_json())

        return check_request(content, kind.noun, accept, RequestContext(store_url=self._url), is_json=is_json)


def test_a_server_knows_its_own_studies(earlier: Earlier, tmp_path: Path) -> None:
    """Over HTTP a study names another one by id; a directory and an unknown id are refused with the field."""
    shutil.copytree(earlier.directory, tmp_path, dirs_exist_ok=True)
    url = f"sqlite:///{tmp_path / DATABASE}"
    with ApiServer(tmp_path, preflight=WarmPreflight(url), database=url) as server:

        def post(warm_start: Mapping[str, Any]) -> httpx.Response:
            return httpx.post(f"{server.url}/v1/studies", json=document(search={"warm_start": warm_start}), timeout=60)

        for wrong, text in (
            ({"dir": "/runs/first"}, "give the id of one of its stud"),
            ({"id": "c0ffee"}, "c0ffee"),
        ):
            answer = post(wrong)
            assert answer.status_code == 422
            (problem,) = answer.json()["problems"]
            assert problem["field"] == "search.warm_start"
            assert text in problem["message"]
        created = post({"id": earlier.study})
        assert created.status_code == 201, created.text
        study = created.json()["id"]
        job = server.store.job(study)
        preflight = checked({}, study=Study.model_validate(job.document))
        artifacts = ArtifactStore(server.store, artifacts_dir(tmp_path))
        writer = server.store.open_attempt(study)
        with_warm_start(
            preflight, server.store, writer, artifacts=artifacts, open_study=on_server(server.store, reader=None)
        )
        found = httpx.get(f"{server.url}/v1/studies/{study}/summary", timeout=60).json()
        assert found["search"]["warm_start"]["study"] == earlier.study
        assert found["trials"] == {}

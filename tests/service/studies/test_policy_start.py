"""Studies that begin with the policies of another study."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from search_spaces.errors import InvalidStudy
from search_spaces.study.file import Study
from search_spaces.study.models import AnotherStudy
from service.disk import artifacts_dir
from service.errors import StudyFailed
from service.jobs.search.local_run import DATABASE, open_run, read_run
from service.results.format import search_sentences
from service.results.load import run_record
from service.results.summary import summary
from service.store import Store
from service.store.artifacts import ArtifactStore
from service.store.documents import POLICY_START
from service.store.steps import UpdateStep
from service.studies.chains import on_server
from service.studies.policies.start import check_start, with_start
from service.studies.preflight.models import searched_models
from service.studies.preflight.result import PreflightResult
from service.tune.searchers.base import ProposalContext, SearchSetting
from service.tune.searchers.hm3 import SEARCHER
from service.types import JobState
from tests.service.resolved import resolved_study
from tests.service.studies.test_policy_paths import Trained
from workers.models.family import resolve_family


@dataclass(frozen=True)
class Checked:
    """The parts of a checked study that the tests use."""

    study: Study
    space: Any
    tasks: Any
    models: Any
    start: tuple[bytes, ...] = ()

    @classmethod
    def of(cls, study: Study, start: Mapping[str, str], **changes: Any) -> PreflightResult:
        options: dict[str, Any] = {
            "start": AnotherStudy(**start),
            **{key: changes.pop(key) for key in ("policy", "learns", "action") if key in changes},
        }
        policy = study.search.hm3.model_copy(update=options)
        search = study.search.model_copy(update={"hm3": policy, **changes.pop("search", {})})
        study = study.model_copy(update={"search": search})
        sources = resolve_family(study.models.base, study.models.named)
        space = study.search_space.build(searched_models(sources, sources.fingerprints))
        tasks = dict.fromkeys(changes.pop("objectives", ("math", "text", "lookup")))
        num_layers = changes.pop("num_layers", sources.layout.num_layers)
        models = SimpleNamespace(family=sources, num_layers=num_layers)
        found = cls(study, space, SimpleNamespace(search=tasks), models)
        return cast(PreflightResult, found)

    def search_setting(self, *, num_baselines: int) -> SearchSetting:
        given = self.study.search.preferences
        return SearchSetting(
            objectives=tuple(self.tasks.search),
            num_samples={},
            num_baselines=num_baselines,
            options=self.study.search,
            preferences=() if given is None else given.weights(tuple(self.tasks.search), seed=0),
            family=self.models.family.family,
            start=self.start,
        )


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return Trained(tmp_path_factory.mktemp("trained") / "run", knows_models=False)


def problem_of(preflight: PreflightResult, place: Path) -> str:
    with pytest.raises(InvalidStudy) as refused:
        check_start(preflight, open_study=open_run, artifacts_in=place)
    (problem,) = refused.value.problems
    assert problem.field == "search.hm3.start"
    return problem.message


def test_policies_of_another_action_are_refused_with_the_option(trained: Trained, tmp_path: Path) -> None:
    """Policies that draw other actions than this study's are refused, also where `auto` chooses the action."""
    for action in ("categorical", "auto"):
        preflight = Checked.of(trained.study, {"dir": str(trained.directory)}, action=action)
        assert problem_of(preflight, tmp_path) == (
            "study 'paths': its policies were trained with action: wolpertinger, this study's have action: "
            "categorical; write search.hm3.action: wolpertinger"
        )


def test_a_study_begins_with_the_newest_policy_and_keeps_it(trained: Trained, tmp_path: Path) -> None:
    copy = tmp_path / "first"
    shutil.copytree(trained.directory, copy)
    preflight = Checked.of(trained.study, {"dir": str(copy)}, learns=False)
    check_start(preflight, open_study=open_run, artifacts_in=tmp_path)
    store = Store(f"sqlite:///{tmp_path / DATABASE}")
    resolved = resolved_study(algorithm="hm3")
    study = store.create_job(
        kind="search", name="second", document=preflight.study.canonical(), accepted=resolved.to_json()
    ).id
    artifacts = ArtifactStore(store, artifacts_dir(tmp_path))
    place: dict[str, Any] = {"artifacts": artifacts, "open_study": open_run}
    began = with_start(preflight, store, store.open_attempt(study), **place)
    (content,) = began.start
    with read_run(copy) as (first, record):
        stated = [step.result.checkpoint for step in first.steps(record.id) if isinstance(step, UpdateStep)]
    digest = hashlib.sha256(content).hexdigest()
    assert digest == stated[-1]
    start = {"study": record.id, "name": "paths", "policies": [{"iteration": len(stated) - 1, "digest": digest}]}
    assert store.document(study, POLICY_START) == start
    # The first episode of a preference is the path that the policy proposes for it.
    setting = began.search_setting(num_baselines=0)
    parameters = began.space.parameters
    found = SEARCHER.advance(ProposalContext(parameters, number=0, seed=0, setting=setting))
    vector = setting.preferences[0]
    (proposed,) = trained.propose(dict(zip(setting.objectives, vector, strict=True)))
    assert isinstance(found, dict)
    assert began.space.to_recipe(found) == proposed.recipe
    # It goes on with the same, whatever becomes of the other study.
    shutil.rmtree(copy)
    assert with_start(preflight, store, store.open_attempt(study), **place).start == began.start
    document = summary(run_record(store, study))["search"]
    assert document["start"] == start
    assert search_sentences(document)[1] == f"it began with the policy {digest[:12]} of study 'paths' ({record.id})"
    for file in (tmp_path / "artifacts" / "blobs").glob("*/*"):
        file.write_bytes(b"another policy")
    with pytest.raises(StudyFailed, match=r"search\.hm3\.start: artifact 'hm3-start-0': its manifest has changed"):
        with_start(preflight, store, store.open_attempt(study), **place)
    assert store.job(study).state is JobState.FAILED
    store.close()


def test_a_study_of_a_server_is_named_by_its_id(trained: Trained) -> None:
    with read_run(trained.directory) as (store, record):
        place: dict[str, Any] = {
            "open_study": on_server(store, reader=None),
            "artifacts_in": artifacts_dir(trained.directory),
        }
        check_start(Checked.of(trained.study, {"id": record.id}), **place)
        with pytest.raises(InvalidStudy, match="on a server, give the id of one of its studies"):
            check_start(Checked.of(trained.study, {"dir": str(trained.directory)}), **place)
        with pytest.raises(InvalidStudy, match="no-such"):
            check_start(Checked.of(trained.study, {"id": "no-such"}), **place)


def test_policies_that_cannot_be_had_are_refused(trained: Trained, tmp_path: Path) -> None:
    study, own = trained.study, {"dir": str(trained.directory)}
    assert "no run here" in problem_of(Checked.of(study, {"dir": str(tmp_path)}), tmp_path)
    assert "give the `dir` of a run" in problem_of(Checked.of(study, {"id": "x"}), tmp_path)
    random = Trained(tmp_path / "random", searcher="random")
    message = "study 'paths': its searcher is random; only hm3 trains policies to begin with"
    assert problem_of(Checked.of(study, {"dir": str(random.directory)}), tmp_path) == message
    untrained = Trained(tmp_path / "warm", warm_up=2, knows_models=False)
    assert "no policy has been learned yet" in problem_of(
        Checked.of(study, {"dir": str(untrained.directory)}), tmp_path
    )
    expected = "its networks have policy: conditioned, this study's have policy: per_preference; write conditioned"
    assert expected in problem_of(Checked.of(study, own, policy="per_preference"), tmp_path)
    assert "are for models of 8 layers; these have 9" in problem_of(Checked.of(study, own, num_layers=9), tmp_path)
    expected = "are for 3 objectives (math, text, lookup); this study has 2 (math, text)"
    assert expected in problem_of(Checked.of(study, own, objectives=("math", "text")), tmp_path)
    expected = "its objectives are in the order math, text, lookup"
    assert expected in problem_of(Checked.of(study, own, objectives=("text", "math", "lookup")), tmp_path)


def test_policies_that_know_their_models_are_for_these_alone(tmp_path: Path) -> None:
    known = Trained(tmp_path / "run", policy="per_preference", episodes=2)
    own = {"dir": str(known.directory)}
    check_start(Checked.of(known.study, own), open_study=open_run, artifacts_in=tmp_path)
    models = known.study.models
    fewer = {alias: place for alias, place in models.experts.items() if alias != "text"}
    study = known.study.model_copy(update={"models": models.model_copy(update={"experts": fewer})})
    expected = "its networks know its own models (math, text, lookup) and no others; this study has math, lookup"
    assert expected in problem_of(Checked.of(study, own), tmp_path)
    given = known.study.search.preferences
    assert given is not None
    search = {"preferences": given.model_copy(update={"lattice": 3})}
    expected = "has no policy for the preference vector 0, 0.333333, 0.666667 (policy: per_preference); it has those"
    assert expected in problem_of(Checked.of(known.study, own, search=search), tmp_path)

"""Paths from a trained policy: for preference vectors that it has not seen, and through other models."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from search_spaces.errors import InvalidPreference
from search_spaces.recipe import Recipe
from search_spaces.spaces.base import AlignmentKind
from search_spaces.study.file import load_study
from search_spaces.study.search import Preferences
from service.cli.main import main
from service.disk import artifacts_dir
from service.errors import Conflict
from service.jobs.search.local_run import DATABASE, read_run
from service.store import Store
from service.store.artifacts import ArtifactStore
from service.store.steps import UpdateRequest, UpdateResult, UpdateStep
from service.studies.policies.paths import PolicyPath, policy_paths
from service.studies.preflight.models import searched_models
from service.tune.proposing.checkpoints import PolicyCheckpoints
from service.tune.searchers.base import SearchSetting
from service.tune.searchers.hm3 import SEARCHER, training_of
from tests.docs.pages import ROOT
from tests.service.resolved import resolved_study
from workers.models.family import resolve_family
from workers.tiny_family import family_dir

SEEN, UNSEEN = {"math": 1.0}, {"math": 0.45, "text": 0.45, "lookup": 0.1}


class Trained:
    """A run of the shipped family whose policy has learned from two iterations of made-up outcomes."""

    def __init__(
        self,
        directory: Path,
        *,
        searcher: str = "hm3",
        alignment: AlignmentKind = "none",
        scales: tuple[float, float] | None = None,
        **options: Any,
    ) -> None:
        directory.mkdir()
        self.directory = directory
        study = load_study(ROOT / "docs" / "examples" / "hm3.yaml")
        policy = study.search.hm3.model_copy(update={"episodes": 4, "mini_batches": 2, "epochs": 1, **options})
        search = study.search.model_copy(update={"hm3": policy, "preferences": Preferences(lattice=4)})
        space = study.search_space.model_copy(update={"alignment": alignment, "merged": None, "scales": scales})
        self.study = study.model_copy(update={"search": search, "search_space": space})
        sources = resolve_family(study.models.base, study.models.named)
        resolved = replace(
            resolved_study(),
            fingerprints=sources.fingerprints,
            num_layers=sources.layout.num_layers,
            algorithm=searcher,
            searcher_version=2,
        )
        store = Store(f"sqlite:///{directory / DATABASE}")
        record = store.create_job(
            kind="search", name="paths", document=self.study.canonical(), accepted=resolved.to_json()
        )
        self._learn(store, record.id, sources)
        store.close()

    def _learn(self, store: Store, study_id: str, sources: Any) -> None:
        objectives = tuple(spec.name for spec in self.study.scored_objectives.values())
        given = self.study.search.preferences
        assert given is not None
        setting = SearchSetting(
            objectives=objectives,
            num_samples={},
            num_baselines=0,
            options=self.study.search,
            preferences=given.weights(objectives, seed=0),
            family=sources.family,
        )
        space = self.study.search_space.build(searched_models(sources, sources.fingerprints))
        training = training_of(space.parameters, 0, setting, {})
        checkpoints = PolicyCheckpoints(
            ArtifactStore(store, artifacts_dir(self.directory)), study_id, SEARCHER, setting
        )
        writer = store.open_attempt(study_id)
        for iteration in range(2 * training.num_policies):
            numbers = training.numbers_in(iteration)
            paths = [training.play(number).path for number in numbers]
            outcomes = [[float(sum(step < 6 for step in path)) / 10, 0.1, 0.2] for path in paths]
            training.learn(iteration, torch.tensor(outcomes))
            content = training.saved.get(iteration)
            if content is not None:
                checkpoints.put(iteration, content)
            digest = "" if content is None else hashlib.sha256(content).hexdigest()
            request = UpdateRequest(label=f"iteration {iteration}", iteration=iteration)
            writer.add_step(UpdateStep(iteration, 0, request, UpdateResult(checkpoint=digest)))

    def propose(self, preference: Mapping[str, float], **options: Any) -> tuple[PolicyPath, ...]:
        with read_run(self.directory) as (store, record):
            artifacts = ArtifactStore(store, artifacts_dir(self.directory))
            return policy_paths(store, record, artifacts, preference=preference, **options)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return Trained(tmp_path_factory.mktemp("trained") / "run", knows_models=False)


def test_policy_proposes_for_new_preferences(trained: Trained) -> None:
    """A conditioned policy proposes paths for a preference that it has not seen."""
    first, *others = trained.propose(UNSEEN, count=3)
    assert len(others) == 2
    assert len({path.recipe.digest for path in (first, *others)}) == 3
    assert 6 <= len(first.steps) <= 10
    assert {model for model, _ in first.steps} <= {"math", "text", "lookup"}
    assert [(layer.mlp.sources[0].model, layer.mlp.sources[0].layer) for layer in first.recipe.layers] == list(
        first.steps
    )
    assert trained.propose(UNSEEN) == (first,)  # the same again


def test_policy_proposes_for_other_models(trained: Trained) -> None:
    """A policy that knows no models proposes paths through other ones."""
    experts = {alias: str(family_dir() / "experts" / alias) for alias in ("lookup", "math")}
    (path,) = trained.propose(UNSEEN, experts=experts)
    assert {model for model, _ in path.steps} <= set(experts)


def test_one_that_knows_its_models_refuses_others(tmp_path: Path) -> None:
    own = Trained(tmp_path / "run")
    assert own.propose(UNSEEN)
    experts = {alias: str(family_dir() / "experts" / alias) for alias in ("lookup", "math")}
    with pytest.raises(Conflict, match=r"knows its own models \(base, math, text, lookup\) and no others; train one"):
        own.propose(UNSEEN, experts=experts)


def test_policies_of_one_vector_each_propose_for_theirs_alone(tmp_path: Path) -> None:
    own = Trained(tmp_path / "run", policy="per_preference", episodes=2)
    assert own.propose(SEEN)
    with pytest.raises(Conflict, match=r"are for one preference vector each \(policy: per_preference\): 1, 0, 0; "):
        own.propose(UNSEEN)


def test_what_cannot_propose_is_refused(trained: Trained, tmp_path: Path) -> None:
    with pytest.raises(InvalidPreference, match="'maths' is not an objective"):
        trained.propose({"maths": 1.0})
    with pytest.raises(Conflict, match="its searcher is random; only hm3 trains a policy"):
        Trained(tmp_path / "random", searcher="random").propose(SEEN)
    with pytest.raises(Conflict, match=r"its paths have alignments \(moments\), which are not learned for proposals"):
        Trained(tmp_path / "aligned", alignment="moments", warm_up=2).propose(SEEN)
    with pytest.raises(Conflict, match="its paths have scales of layers, which proposals do not have"):
        Trained(tmp_path / "scaled", scales=(0.8, 1.25), warm_up=2).propose(SEEN)
    untrained = Trained(tmp_path / "warm", warm_up=2)
    with pytest.raises(Conflict, match="no policy has been learned yet"):
        untrained.propose(SEEN)


def test_the_command_prints_the_path_and_writes_its_recipe(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "recipe.json"
    assert main(["propose", str(trained.directory), "--prefer", "math=0.5,text=0.5", "--out", str(out)]) == 0
    (path,) = trained.propose({"math": 0.5, "text": 0.5})
    assert capsys.readouterr().out.split() == [f"{model}:{layer}" for model, layer in path.steps]
    assert Recipe.from_json(json.loads(out.read_text())).digest == path.recipe.digest
    assert main(["propose", str(trained.directory), "--prefer", "math=1", "--json", "--count", "2"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 2
    assert main(["propose", str(tmp_path), "--prefer", "math=1"]) == 2

"""Whole studies of image classifiers with the real torch engine: searched, killed, continued, verified and exported."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from search_spaces.study.file import parse_study
from service.errors import StudyFailed
from service.jobs.search.attempt import _keep_prompts
from service.jobs.search.verification import verify_trials
from service.results.load import run_record
from service.results.report import render_report
from service.store import Store
from service.store.steps import GradientStep, Step
from service.studies.preflight.examine import examine
from service.studies.preflight.result import PreflightResult
from service.tune.coordinator import Coordinator
from service.tune.proposing.completions import SourceCompletions
from service.tune.proposing.gradient_actor import GradientActor
from service.types import Origin, TrialState
from tests.benchmarks.search_runs import InProcess
from tests.end_to_end.studies import HEADS, image_entries, image_study, write_image_models
from tests.service.tune.harness import InlineProposer, Killed, drive, killer, trial_list
from workers.evaluation.image_pictures import picture_of
from workers.serving.image_worker import ImageWorker
from workers.types import Split

SHORT = {"algorithm": "random", "max_trials": 6, "seed": 3, "baselines": "sources"}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_image_models(tmp_path_factory.mktemp("image_study"))


def preflight_of(root: Path, space: dict[str, Any], **changes: Any) -> PreflightResult:
    return examine(parse_study(image_study(root, space, **changes)))


class Scorer(ImageWorker):
    """The worker of a replica, called directly."""

    def is_starting(self) -> bool:
        return False


@pytest.fixture(scope="module")
def scorers(root: Path) -> dict[int, Scorer]:
    """One scorer for each largest number of layers, made at its first use."""
    return {}


def scorer_of(preflight: PreflightResult, scorers: dict[int, Scorer]) -> Scorer:
    options = preflight.engine_options
    if options.max_layers not in scorers:
        scorers[options.max_layers] = Scorer(preflight.models.family, options, device="cpu")
    return scorers[options.max_layers]


class Run:
    """A study in its own database, which can be driven several times."""

    def __init__(self, preflight: PreflightResult, directory: Path) -> None:
        self.preflight = preflight
        self.resolved = preflight.resolved()
        self.store = Store(f"sqlite:///{directory / 'study.db'}")
        job = self.store.create_job(
            kind="search", name="images", document=preflight.study.canonical(), accepted=self.resolved.to_json()
        )
        self.id = job.id

    def drive(self, scorer: Scorer, **options: Any) -> None:
        proposer: Any = InlineProposer(self.preflight.space, seed=self.preflight.study.search.seed)
        if self.preflight.algorithm.name == "gradient":
            inputs = self.preflight.gradient_inputs()
            assert inputs is not None
            completions = SourceCompletions(self.store, self.id, self.preflight.tasks.objectives)
            proposer = InProcess(self.preflight, GradientActor(inputs), completions, self.store.steps(self.id))
        coordinator = Coordinator(
            self.preflight.plan(self.id, self.resolved),
            space=self.preflight.space,
            store=self.store,
            writer=self.store.open_attempt(self.id),
            proposer=proposer,
            **options,
        )
        drive(coordinator, scorer)

    @property
    def trials(self) -> list[tuple[Any, ...]]:
        return trial_list(self.store, self.id)


SPACES: dict[str, dict[str, Any]] = {
    "lfs": {"kind": "lfs", "layer_groups": 2, "methods": ["task_arithmetic", "linear"]},
    "layerwise": {"kind": "layerwise"},
    "m3": {"kind": "m3", "methods": ["linear", "task_arithmetic"]},
    "dis": {"kind": "dis"},
    "sfs": {"kind": "sfs", "model": "shape"},
    "hm3": {"kind": "hm3", "max_path_length": 3, "min_path_length": 2},
}


@pytest.mark.parametrize("kind", SPACES)
def test_studies_are_searched_and_verified(kind: str, root: Path, scorers: dict[int, Scorer], tmp_path: Path) -> None:
    """In every space all trials are scored, and transformers gives the stored samples on the exports of some."""
    preflight = preflight_of(root, SPACES[kind], search=SHORT)
    scorer, run = scorer_of(preflight, scorers), Run(preflight, tmp_path)
    run.drive(scorer)
    trials = run.store.trials(run.id)
    assert {trial.state for trial in trials} <= {TrialState.COMPLETE, TrialState.PRUNED}
    searched = [trial for trial in trials if trial.origin is Origin.SEARCH]
    assert len(searched) == 6
    if kind in ("dis", "hm3"):
        assert len({len(trial.read_recipe().layers) for trial in searched}) > 1, "paths have several depths"
    stored = run.store.samples(run.id, trials[0].recipe.digest, Split.SEARCH)
    assert len(stored) == 72
    assert all(json.loads(sample.response)["top"] for sample in stored)
    writer = run.store.open_attempt(run.id)
    assert verify_trials(run.store, writer, preflight, scorer, trials, note=lambda _: None) is None
    reports = run.store.document(run.id, "verification")
    assert reports is not None
    assert [(each["num_samples"], each["num_equal"]) for each in reports["reports"]] == [(24, 24)] * 2
    run.store.close()


def test_the_report_shows_samples_with_pictures(root: Path, scorers: dict[int, Scorer], tmp_path: Path) -> None:
    """Pictures in the report are of held-out samples that one trial has right and the other wrong, as they are stored.

    They stay when the images are gone.
    """
    data = tmp_path / "held"
    shutil.copytree(root / "held", data)
    preflight = preflight_of(root, SPACES["lfs"], search=SHORT, holdout=image_entries(data))
    scorer, run = scorer_of(preflight, scorers), Run(preflight, tmp_path)
    run.drive(scorer)
    store, writer = run.store, run.store.open_attempt(run.id)
    assert run_record(store, run.id).contrasts[0].only_chosen[0].picture is None, "none is stored yet"
    _keep_prompts(store, writer, preflight.plan(run.id, run.resolved), scorer, note=pytest.fail)
    shutil.rmtree(data)
    record = run_record(store, run.id)
    assert {(each.objective, each.kind) for each in record.contrasts} == {(head, "single model") for head in HEADS}
    trials = {trial.number: trial.recipe.digest for trial in record.trials}
    shown = 0
    for contrast in record.contrasts:
        values = [
            {s.position: s for s in store.samples(run.id, trials[number], Split.HOLDOUT, objective=contrast.objective)}
            for number in (contrast.trial, contrast.rival)
        ]
        apart = [
            [position for position in values[k] if values[k][position].value > values[1 - k][position].value]
            for k in range(2)
        ]
        assert [contrast.num_chosen, contrast.num_rival] == [len(each) for each in apart]
        for wanted, samples in zip(apart, (contrast.only_chosen, contrast.only_rival), strict=True):
            assert [sample.position for sample in samples] == wanted[:6]
            for sample in samples:
                name, logprob = json.loads(values[0][sample.position].response)["top"][0]
                assert sample.chosen is not None
                assert sample.chosen.name == name
                assert sample.chosen.probability == pytest.approx(math.exp(logprob))
                assert sample.document == values[0][sample.position].document
                assert sample.label == Path(sample.document).parent.name
                with Image.open(root / "held" / f"{contrast.objective}s" / sample.document) as image:
                    assert sample.picture == picture_of(image.convert("RGB"))
                shown += 1
    assert shown > 4
    page = render_report(record)
    assert page.count('<img src="data:image/webp;base64,') == shown
    run.store.close()


def test_killed_studies_continue(root: Path, scorers: dict[int, Scorer], tmp_path: Path) -> None:
    """A study that is killed at every few steps, with its engine, has the trials and scores of an undisturbed one."""
    preflight = preflight_of(root, SPACES["lfs"], search=SHORT)
    (tmp_path / "whole").mkdir()
    (tmp_path / "killed").mkdir()
    whole, killed = Run(preflight, tmp_path / "whole"), Run(preflight, tmp_path / "killed")
    whole.drive(scorer_of(preflight, scorers))
    num_kills = 0
    scorer = scorer_of(preflight, scorers)
    while True:
        if num_kills % 4 == 3:
            scorer = Scorer(preflight.models.family, preflight.engine_options, device="cpu")
        try:
            killed.drive(scorer, observer=killer(2 + num_kills % 5))
            break
        except Killed:
            num_kills += 1
    assert num_kills > 4
    assert killed.trials == whole.trials
    assert len({json.dumps(trial[7][-1].values) for trial in whole.trials}) > 3, "scores tell the trials apart"
    whole.store.close()
    killed.store.close()


@pytest.mark.parametrize("loss", ["cross_entropy", "entropy"])
def test_killed_descents_continue(loss: str, root: Path, scorers: dict[int, Scorer], tmp_path: Path) -> None:
    """A study by gradients that is killed between its steps has the steps and trials of an undisturbed one."""
    search = {**SHORT, "algorithm": "gradient", "max_trials": 4}
    search["gradient"] = {"loss": loss, "steps": 4, "batch": 6, "points": 2, "learning_rate": 0.1}
    fidelity = {"scheduler": "none", "max_samples": 36}
    preflight = preflight_of(root, SPACES["layerwise"], search=search, fidelity=fidelity)
    assert preflight.entropies == (tuple(HEADS) if loss == "entropy" else ())
    scorer = scorer_of(preflight, scorers)
    (tmp_path / "whole").mkdir()
    (tmp_path / "killed").mkdir()
    whole, killed = Run(preflight, tmp_path / "whole"), Run(preflight, tmp_path / "killed")
    whole.drive(scorer)
    num_kills = 0
    while True:
        try:
            killed.drive(scorer, observer=killer(1 + num_kills % 2))
            break
        except Killed:
            num_kills += 1
    assert num_kills > 4
    steps = [
        [step.request for step in run.store.steps(run.id)] + [step_gradient(step) for step in run.store.steps(run.id)]
        for run in (whole, killed)
    ]
    assert steps[0] == steps[1]
    assert [request.kind for request in steps[0][:8]] == ["losses"] * 3 + ["note"] + ["gradient"] * 4
    assert killed.trials == whole.trials
    points = [trial for trial in whole.store.trials(whole.id) if trial.origin is Origin.SEARCH][:2]
    assert points[0].configuration != points[1].configuration
    writer = whole.store.open_attempt(whole.id)
    trials = whole.store.trials(whole.id)
    assert verify_trials(whole.store, writer, preflight, scorer, trials, note=lambda _: None) is None
    whole.store.close()
    killed.store.close()


def step_gradient(step: Step) -> Any:
    return step.result.gradient if isinstance(step, GradientStep) else None


def test_a_wrong_score_fails_the_study(root: Path, scorers: dict[int, Scorer], tmp_path: Path) -> None:
    """Scores of an engine that reads images in another way than the export are found by the verification."""
    preflight = preflight_of(root, SPACES["lfs"], search={**SHORT, "max_trials": 2})
    scorer, run = Scorer(preflight.models.family, preflight.engine_options, device="cpu"), Run(preflight, tmp_path)
    right = scorer.evaluator._features
    scorer.evaluator._features = lambda pixels: right(pixels.flip(-1))
    run.drive(scorer)
    with pytest.raises(StudyFailed, match=r"verification: trial \d+: \d+ of 24 samples differ between the engine and"):
        verify_trials(
            run.store, run.store.open_attempt(run.id), preflight, scorer, run.store.trials(run.id), note=lambda _: None
        )
    run.store.close()

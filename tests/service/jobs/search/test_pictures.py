"""A driver stores small pictures of a study's images beside the prompts, within a limit of bytes."""

from __future__ import annotations

from pathlib import Path

import pytest

from search_spaces.study.file import parse_study
from service.jobs.search.attempt import _keep_prompts
from service.resolved_study import ResolvedStudy
from service.store import Store
from service.studies.preflight.examine import examine
from service.studies.preflight.result import PreflightResult
from service.types import JobRecord
from tests.vision import image_folder, tiny_vit
from workers.errors import InvalidTask
from workers.evaluation.image_pictures import pictures_of
from workers.evaluation.image_tasks import load_image_task
from workers.serving.fake import FakeScorer
from workers.types import SamplePictures, Split, TaskSpec

COUNT = 24


@pytest.fixture
def preflight(tmp_path: Path) -> PreflightResult:
    tiny_vit(tmp_path / "base", 0, classes=None)
    tiny_vit(tmp_path / "shape", 1)
    tasks = {
        split: {"images": str(image_folder(tmp_path / split, per_class=COUNT // 3, seed=seed)), "head": "shape"}
        for seed, split in enumerate(("objectives", "holdout"))
    }
    return examine(
        parse_study(
            {
                "name": "images",
                "models": {"base": str(tmp_path / "base"), "experts": {"shape": str(tmp_path / "shape")}},
                "search": {"max_trials": 2},
                "fidelity": {"scheduler": "none", "max_samples": COUNT},
                **{split: [{"name": "shapes", "task": task, "metric": "acc"}] for split, task in tasks.items()},
            }
        )
    )


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(f"sqlite:///{tmp_path / 'study.db'}")


def created(store: Store, preflight: PreflightResult) -> JobRecord:
    document, accepted = preflight.study.canonical(), preflight.resolved().to_json()
    return store.create_job(kind="search", name="images", document=document, accepted=accepted)


def keep(store: Store, preflight: PreflightResult, scorer: FakeScorer) -> str:
    record = created(store, preflight)
    plan = preflight.plan(record.id, ResolvedStudy.of(record), baselines=())
    _keep_prompts(store, store.open_attempt(record.id), plan, scorer, note=pytest.fail)
    return record.id


def test_pictures_are_those_of_the_samples(store: Store, preflight: PreflightResult, tmp_path: Path) -> None:
    """Pictures of both kinds of data are stored in the order of scoring; an image that is broken has none."""
    record = created(store, preflight)
    plan = preflight.plan(record.id, ResolvedStudy.of(record), baselines=())
    tasks = {Split.SEARCH: plan.tasks["shapes"], Split.HOLDOUT: plan.holdout_tasks["shapes"]}
    expected = {split: pictures_of(load_image_task(task), 0, COUNT) for split, task in tasks.items()}
    assert expected[Split.SEARCH] != expected[Split.HOLDOUT]
    _keep_prompts(store, store.open_attempt(record.id), plan, FakeScorer(), note=pytest.fail)
    for split, pictures in expected.items():
        assert [store.picture(record.id, split, "shapes", position) for position in range(COUNT)] == [*pictures]
        assert store.picture_positions(record.id, split, "shapes", set(range(99))) == set(range(COUNT))


def test_pictures_have_a_limit_of_bytes(
    store: Store, preflight: PreflightResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first pictures are stored that have at most the limit together; texts are stored of all samples."""
    monkeypatch.setattr("service.jobs.search.attempt.TEXTS_PER_CALL", 5)
    whole = keep(store, preflight, FakeScorer())
    sizes = [len(store.picture(whole, Split.SEARCH, "shapes", position) or b"") for position in range(COUNT)]
    monkeypatch.setattr("service.jobs.search.attempt.MAX_PICTURE_BYTES", sum(sizes[:7]))
    study = keep(store, preflight, FakeScorer())
    assert store.picture_positions(study, Split.SEARCH, "shapes", set(range(COUNT))) == set(range(7))
    assert len(store.prompts(study, Split.SEARCH, "shapes", range(COUNT))) == COUNT


class LosesOne(FakeScorer):
    """A scorer for which the second image is gone."""

    def sample_pictures(self, task: TaskSpec, start: int, stop: int) -> SamplePictures:
        found = super().sample_pictures(task, start, stop)
        return (found[0], None, *found[2:])


def test_a_lost_image_has_no_picture(store: Store, preflight: PreflightResult) -> None:
    """Its text is stored, and the pictures of the others."""
    study = keep(store, preflight, LosesOne())
    assert store.picture_positions(study, Split.HOLDOUT, "shapes", set(range(COUNT))) == {*range(COUNT)} - {1}
    assert 1 in store.prompts(study, Split.HOLDOUT, "shapes", [1])


def test_text_has_no_pictures(store: Store, tmp_path: Path) -> None:
    """A task of text is not asked for pictures, and has none to give."""
    with pytest.raises(InvalidTask):
        FakeScorer().sample_pictures(TaskSpec({"file": str(tmp_path / "a.jsonl")}, "exact_match"), 0, 1)

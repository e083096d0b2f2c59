"""The report's section with pictures of samples that one trial gets right and another wrong."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from service.results.load import RunReader, run_record
from service.results.pictures import MAX_SHOWN, PicturedSample
from service.results.report import render_report
from service.results.report.sample_pictures import pictures_section
from service.store import Store
from service.types import JobRecord
from tests.service.api.harness import finished_study
from tests.service.pictured import NUM_PICTURES, NUM_SAMPLES, picture, pictured_study, text_of, write_samples
from workers.types import Split

SOURCE = re.compile(r'<img src="data:image/webp;base64,([^"]+)" alt="Image ([^"]+)">')


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(f"sqlite:///{tmp_path / 'study.db'}")
    yield store
    store.close()


@pytest.fixture
def study(store: Store) -> JobRecord:
    return pictured_study(store)


def section(page: str) -> str:
    found = re.search(r'<section id="pictures">.*?</section>', page, re.DOTALL)
    return "" if found is None else found[0]


def test_samples_are_those_on_which_the_trials_differ(store: Store, study: JobRecord) -> None:
    """Counts, labels, predictions and pictures are those of the stored samples, for each rival and direction."""
    run = run_record(store, study.id)
    assert run.best is not None
    assert {each.kind for each in run.contrasts} == {"single model", "published recipe"}
    digests = {trial.number: trial.recipe.digest for trial in run.trials}
    page = section(render_report(run))
    shown: list[PicturedSample] = []
    for contrast in run.contrasts:
        assert contrast.trial == run.holdout_reference
        a, b = (
            store.samples(study.id, digests[number], Split.HOLDOUT, objective=contrast.objective)
            for number in (contrast.trial, contrast.rival)
        )
        only = [
            [one.position for one, other in zip(*pair, strict=True) if one.value > other.value]
            for pair in ((a, b), (b, a))
        ]
        assert [contrast.num_chosen, contrast.num_rival] == [len(each) for each in only]
        for wanted, samples in zip(only, (contrast.only_chosen, contrast.only_rival), strict=True):
            assert [sample.position for sample in samples] == wanted[:MAX_SHOWN] != []
            shown += samples
            for sample in samples:
                assert sample.chosen is not None
                assert f"{sample.chosen.name} {sample.chosen.probability:.1%}" in page
                assert f"<b>{sample.label}</b>" in page
    pictures = [(base64.b64decode(content), name) for content, name in SOURCE.findall(page)]
    wanted_pictures = [(picture(s.position), s.document) for s in shown if s.position < NUM_PICTURES]
    assert pictures == wanted_pictures
    assert page.count("no picture is stored") == len(shown) - len(pictures) > 0


def test_a_report_has_a_limit_of_bytes(store: Store, study: JobRecord, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures beyond the limit are left out, and the report says how many."""
    whole = len(SOURCE.findall(render_report(run_record(store, study.id))))
    monkeypatch.setattr("service.results.pictures.MAX_BYTES", 3 * len(picture(0)) + 20)
    page = section(render_report(run_record(store, study.id)))
    found = SOURCE.findall(page)
    assert 0 < len(found) < whole
    assert sum(len(base64.b64decode(content)) for content, _ in found) <= 3 * len(picture(0)) + 20
    assert f"{whole - len(found)} are left out" in page
    assert page.count(": left out") == whole - len(found)


def test_reports_without_answers_or_texts_say_so(store: Store, study: JobRecord) -> None:
    """Removed responses leave pictures and classes; a study whose prompts were never stored has neither."""
    store.remove_texts(study.id, num_samples=20, num_bytes=1)
    page = section(render_report(run_record(store, study.id)))
    assert "answer not stored" in page
    assert SOURCE.search(page)
    never = finished_study(
        store, name="never", objectives=study.document["objectives"], holdout=study.document["holdout"]
    )
    page = section(render_report(run_record(store, never.id)))
    assert SOURCE.search(page) is None


def test_samples_of_unlabelled_images_are_not_called_right(store: Store) -> None:
    """The entropy has a best value, but no right answers: only the objective with labels is shown."""
    study = pictured_study(store, metrics={"text": "entropy"})
    assert {each.objective for each in run_record(store, study.id).contrasts} == {"math", "lookup"}


def test_trials_of_equal_names_are_told_apart(store: Store, study: JobRecord, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recipe of the study file may be called like a source; who is right does not follow from names."""
    monkeypatch.setattr("service.results.report.sample_pictures.trial_name", lambda trial: "same")
    found = pictures_section(run_record(store, study.id))
    assert found is not None
    for contrast in found["contrasts"]:
        for direction, is_right in zip(contrast["directions"], ([True, False], [False, True]), strict=True):
            assert direction["samples"]
            for sample in direction["samples"]:
                assert [answer["is_right"] for answer in sample["answers"]] == is_right


def test_pictures_are_read_again_only_if_something_has_changed(
    store: Store, study: JobRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page that follows a study asks for its record often; pictures and answers are most of the work."""
    reader = RunReader(store, study.id)
    first = reader.read()
    assert first.contrasts
    with monkeypatch.context() as patched:
        patched.setattr("service.results.load.contrasts", lambda *args, **options: pytest.fail("was read again"))
        assert reader.read().contrasts == first.contrasts
    store.remove_texts(study.id, num_samples=20, num_bytes=1)
    removed = [s for each in reader.read().contrasts for s in (*each.only_chosen, *each.only_rival)]
    assert {(sample.chosen, sample.rival) for sample in removed} == {(None, None)}


def test_pictures_that_are_stored_later_are_read(store: Store, study: JobRecord) -> None:
    """Prompts and pictures are stored when the search has ended; a record that was read before has none."""
    changes = {key: study.document[key] for key in ("objectives", "holdout")}
    later = finished_study(store, name="later", score=write_samples, **changes)
    reader = RunReader(store, later.id)
    before = [sample for each in reader.read().contrasts for sample in each.only_chosen]
    assert before
    assert {sample.picture for sample in before} == {None}
    writer = store.open_attempt(later.id)
    for name in ("math", "text", "lookup"):
        writer.add_prompts(Split.HOLDOUT, name, [text_of(name, position) for position in range(NUM_SAMPLES)])
    after = [sample for each in reader.read().contrasts for sample in each.only_chosen]
    assert [sample.picture for sample in after if sample.position < NUM_PICTURES] == [
        picture(sample.position) for sample in after if sample.position < NUM_PICTURES
    ]


def test_reports_of_text_have_no_such_section(store: Store) -> None:
    """Neither the section nor its style is in the report of a study of text."""
    page = render_report(run_record(store, finished_study(store).id))
    assert section(page) == ""
    assert ".samples" not in page

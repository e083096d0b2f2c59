"""Quantised exports of a stored study, with made-up scores instead of an engine."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from search_spaces.study.engine import EngineOptions
from service.errors import Conflict, NotFound
from service.store import Store
from service.studies import quantised_export
from service.studies.quantised_export import export_quantised, scores_table
from service.types import JobRecord
from tests.builders import tiny_family
from tests.service.site import Site
from tests.service.sums import score_baselines, sums_study, write_sums
from workers.errors import EngineUnavailable, InvalidModel
from workers.export import quantised
from workers.models.family import ResolvedFamily
from workers.models.modalities import IMAGE
from workers.types import SampleResult, Span

BEST = "7"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    directory = tmp_path_factory.mktemp("site")
    models = directory / "models"
    tiny_family(models, hidden=32)
    write_sums(directory)
    store = Store(f"sqlite:///{directory / 'study.db'}")
    found = Site(directory, models, sums_study(models, data_dir=directory), store)
    found.finish(found.begin("sums"))
    yield found
    store.close()


def the_study(site: Site) -> JobRecord:
    return next(job for job in site.store.jobs() if job.name == "sums")


def all_right(directory: Path, options: Any, spans: Sequence[Span]) -> tuple[SampleResult, ...]:
    return tuple(
        SampleResult(span.objective, position, "", 1.0, "", False)
        for span in spans
        for position in range(span.start, span.stop)
    )


def test_scores_are_of_the_samples_that_the_study_scored(site: Site, tmp_path: Path) -> None:
    asked: list[tuple[Path, EngineOptions, Sequence[Span]]] = []

    def score(directory: Path, options: Any, spans: Sequence[Span]) -> tuple[SampleResult, ...]:
        assert (directory / "model.safetensors").exists()
        asked.append((directory, options, spans))
        return all_right(directory, options, spans)

    notes: list[str] = []
    out = tmp_path / "q"
    record = the_study(site)
    scores = export_quantised(site.store, record, BEST, out, scheme="int8", note=notes.append, score=score)
    ((directory, options, (span,)),) = asked
    assert (directory, options.dtype, span.objective, span.start, span.stop) == (out, "auto", "sums", 0, 20)
    assert span.task.digest == site.preflight.tasks.holdout["sums"].digest
    stored = [float(position % 8 < 7) for position in range(20)]
    assert scores["sums"].merge.value == sum(stored) / 20
    assert scores["sums"].quantised.value == 1.0
    assert scores["sums"].difference.value == pytest.approx(1 - sum(stored) / 20)
    low, high = scores["sums"].difference.ci95
    assert low < scores["sums"].difference.value < high
    document = json.loads((out / "recipe.json").read_text())["quantisation"]
    assert (document["scheme"], document["holdout"]["sums"]["quantised"]["value"]) == ("int8", 1.0)
    card = (out / "README.md").read_text()
    assert card.count("## Quantisation") == 1
    assert f"| {' | '.join(scores_table(scores)[0])} |" in card
    assert notes[0].startswith("quantised 14 linear layers: ")
    assert list(tmp_path.iterdir()) == [out], "the merge in full is removed"


def test_values_outside_their_range_have_intervals(site: Site, tmp_path: Path) -> None:
    """A quantised model may have a sample beyond the range of the metric; intervals then assume no bounds."""

    def score(directory: Path, options: Any, spans: Sequence[Span]) -> tuple[SampleResult, ...]:
        first, *others = all_right(directory, options, spans)
        return (replace(first, value=1.5), *others)

    scores = export_quantised(site.store, the_study(site), BEST, tmp_path / "q", scheme="int8", score=score)
    assert scores["sums"].quantised.value == pytest.approx(1.025)
    assert scores["sums"].quantised.ci95[1] > 1.025


def test_four_bits_are_computed_with_activations_in_sixteen(site: Site, tmp_path: Path) -> None:
    dtypes: list[str] = []

    def score(directory: Path, options: Any, spans: Sequence[Span]) -> tuple[SampleResult, ...]:
        dtypes.append(options.dtype)
        return all_right(directory, options, spans)

    export_quantised(site.store, the_study(site), "best", tmp_path / "q", scheme="int4", score=score)
    assert dtypes == ["bfloat16"]


def test_a_model_that_cannot_be_scored_is_kept_without_scores(site: Site, tmp_path: Path) -> None:
    def score(directory: Path, options: Any, spans: Sequence[Span]) -> tuple[SampleResult, ...]:
        raise EngineUnavailable("vLLM cannot score it")

    with pytest.raises(EngineUnavailable):
        export_quantised(site.store, the_study(site), BEST, tmp_path / "q", scheme="int8", score=score)
    assert json.loads((tmp_path / "q" / "recipe.json").read_text())["quantisation"]["holdout"] == {}


def test_a_trial_without_held_out_scores_and_wrong_places(site: Site, tmp_path: Path) -> None:
    notes: list[str] = []
    writer = site.begin("not-held-out")
    score_baselines(writer, site.preflight.baselines())
    record = site.store.job(writer.job_id)
    found = export_quantised(
        site.store, record, BEST, tmp_path / "q", scheme="int8", note=notes.append, score=all_right
    )
    assert found == {}
    assert notes[-1] == "no held-out scores: the study has none of this trial"
    with pytest.raises(Conflict, match="q: is not empty"):
        export_quantised(site.store, record, BEST, tmp_path / "q", scheme="int8", score=all_right)
    with pytest.raises(NotFound, match="trial '99'"):
        export_quantised(site.store, record, "99", tmp_path / "new", scheme="int8", score=all_right)
    assert not (tmp_path / "new").exists()


def test_what_cannot_be_quantised_is_not_exported(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An export of a large model takes long, so what can be refused is refused before it."""
    monkeypatch.setattr(quantised_export, "export_trial", lambda *_, **__: pytest.fail("the merge is exported"))

    def export(scheme: str) -> None:
        export_quantised(site.store, the_study(site), BEST, tmp_path / "q", scheme=scheme, score=all_right)

    monkeypatch.setattr(quantised, "GROUPS", (48,))
    with pytest.raises(InvalidModel, match=r"linear layers have .*32.* inputs; int4 needs multiples of 48"):
        export("int4")
    monkeypatch.setattr(ResolvedFamily, "modality", IMAGE)
    with pytest.raises(InvalidModel, match="is a model of kind image; expected a model that vLLM runs"):
        export("int8")
    assert not (tmp_path / "q").exists()


def test_a_full_disk_is_a_conflict(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def export() -> None:
        export_quantised(site.store, the_study(site), BEST, tmp_path / "q", scheme="int8", score=all_right)

    with monkeypatch.context() as patched:
        patched.setattr(quantised, "save_file", full)
        with pytest.raises(Conflict, match=r"q: No space left on device: the merge in full and the quantised model"):
            export()
    assert list(tmp_path.iterdir()) == []
    # What an export left behind that was killed is removed by the next one.
    left = tmp_path / "mergesearch-quantise-killed"
    left.mkdir()
    (left / ".lock").touch()
    export()
    assert list(tmp_path.iterdir()) == [tmp_path / "q"]


def test_scores_are_of_positions_without_a_gap(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A range of samples begins at the first one, so those after a sample that was not scored are left out."""
    stored = site.store.samples

    def with_gap(*arguments: Any, **options: Any) -> tuple[SampleResult, ...]:
        return tuple(sample for sample in stored(*arguments, **options) if sample.position != 5)

    monkeypatch.setattr(site.store, "samples", with_gap)
    found = export_quantised(site.store, the_study(site), BEST, tmp_path / "q", scheme="int8", score=all_right)
    assert found["sums"].quantised.samples == found["sums"].merge.samples == 5


def test_changed_data_are_not_compared(site: Site, tmp_path: Path) -> None:
    file = site.directory / "holdout.jsonl"
    text = file.read_text()
    file.write_text(text.replace("41", "14"))
    try:
        with pytest.raises(Conflict, match=r"holdout 'sums': its task has changed since the study"):
            export_quantised(site.store, the_study(site), BEST, tmp_path / "q", scheme="int8", score=all_right)
    finally:
        file.write_text(text)

"""The sentence about the merges found, from held-out samples: correct, and wrong as seldom as it claims."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest

from search_spaces.objectives import Objective
from service.results.finding import RivalTest, criterion, finding_text, rival_tests
from service.results.load import run_record
from service.results.report import render_report
from service.store import Store
from service.tune.coordinator import Coordinator
from service.types import Origin, TrialRecord, TrialState
from tests.service.resolved import resolved_study, study_document
from tests.service.results.test_holdout import Study, binary, both, recipe, store
from tests.service.tune.harness import FINGERPRINTS, InlineProposer, drive, lfs_space, make_plan
from workers.serving.fake import FakeScorer

__all__ = ["store"]

MATH = Objective("math", "exact_match", "maximize")
TEXT = Objective("text", "exact_match", "maximize")
LOSS = Objective("loss", "word_perplexity", "minimize", (0.0, 40.0))


def trial(number: int, origin: Origin = Origin.SEARCH) -> TrialRecord:
    label = f"trial {number}" if origin is Origin.SEARCH else f"{origin.value} {number}"
    return TrialRecord(number, origin, label, TrialState.COMPLETE, recipe(number))


def compared(
    rows: Mapping[int, Mapping[str, np.ndarray]],
    objectives: Sequence[Objective] = (MATH,),
    *,
    finalists: Sequence[int],
    sources: Sequence[int] = (0,),
    published: Sequence[int] = (),
    documents: Mapping[str, str] | None = None,
) -> tuple[RivalTest, ...]:
    trials = [trial(n, Origin.SOURCE) for n in sources] + [trial(n, Origin.PUBLISHED) for n in published]
    proposed = [trial(n) for n in finalists]
    bounds = {objective.name: objective.bounds for objective in objectives}
    return rival_tests(proposed, [*trials, *proposed], objectives, rows, documents=documents or {}, bounds=bounds)


def text_of(tests: Sequence[RivalTest], objectives: Sequence[Objective] = (MATH,), best: int = 1) -> str:
    return finding_text(tests, objectives, best=trial(best), was_scored=True)


def ones(rate: float, size: int = 400) -> np.ndarray:
    """Values of samples with this share of ones. All ones come first, so that two rates differ on few samples."""
    return (np.arange(size) < round(rate * size)).astype(float)


# What is compared.


def test_better_merge_has_intervals() -> None:
    """A merge that is better than both sources is reported with its intervals."""
    rows = {0: {"math": ones(0.5)}, 5: {"math": ones(0.6)}, 1: {"math": ones(0.8)}}
    tests = compared(rows, finalists=[1], published=[5])
    assert [(test.origin, test.rival, test.better) for test in tests] == [("source", 0, (1,)), ("published", 5, (1,))]
    text = text_of(tests)
    assert text.startswith("Trial 1 is better than the best single model, source 0 (difference +0.300, 95 % interval ")
    assert " and than the best published recipe, published 5 (difference +0.200, 95 % interval " in text
    assert text.endswith("in math on held-out data; intervals are paired by document.")


def test_nothing_found_has_an_interval() -> None:
    """A search that found nothing reports the difference and its interval."""
    tests = compared({0: {"math": ones(0.5)}, 1: {"math": ones(0.5025)}}, finalists=[1])
    low, high = tests[0].differences[1].ci95
    assert low < 0 < high
    assert text_of(tests) == (
        f"No merge found is better than the best single model, source 0 (trial 1: difference +0.003, 95 % interval "
        f"{low:.3f} to {high:.3f}), in math on held-out data; intervals are paired by document."
    )


def test_a_merge_may_be_better_than_one_rival_only() -> None:
    rows = {0: {"math": ones(0.5)}, 5: {"math": ones(0.8)}, 1: {"math": ones(0.8)}}
    text = text_of(compared(rows, finalists=[1], published=[5]))
    assert text.startswith("Trial 1 is better than the best single model, source 0 (difference +0.300")
    assert ") but no merge found is better than the best published recipe, published 5 (trial 1: difference +0" in text
    rows = {0: {"math": ones(0.8)}, 5: {"math": ones(0.8)}, 1: {"math": ones(0.8)}}
    text = text_of(compared(rows, finalists=[1], published=[5]))
    assert "nor than the best published recipe" in text


def test_other_finalist_may_be_better() -> None:
    """A finalist that was not the best on search data may be the better one."""
    rows = {0: {"math": ones(0.5)}, 1: {"math": ones(0.5)}, 2: {"math": ones(0.7)}}
    (test,) = compared(rows, finalists=[1, 2])
    assert (list(test.differences), test.better) == ([1, 2], (2,))
    assert text_of((test,)).startswith("Trial 2 is better than")
    assert text_of((test,)).endswith("paired by document and corrected for 2 finalists.")


def test_the_rival_is_the_best_of_its_kind_there() -> None:
    rows = {0: {"math": ones(0.4)}, 7: {"math": ones(0.6)}, 8: {"math": ones(0.5)}, 1: {"math": ones(0.5)}}
    (test,) = compared(rows, finalists=[1], sources=[0, 7, 8])
    assert (test.rival, test.label) == (7, "source 7")
    assert test.differences[1].value == pytest.approx(-0.1)


def test_missing_finalist_or_holdout_is_said() -> None:
    """The sentence says that a proposed finalist or held-out values are missing."""
    assert compared({0: {"math": ones(0.5)}}, finalists=[]) == ()
    text = finding_text((), (MATH,), best=trial(3, Origin.PUBLISHED), was_scored=True)
    assert text == (
        "No merge found is better than published 3: no trial that the search proposed is among the finalists."
    )
    for best, was_scored in ((None, True), (trial(1), False)):
        assert "was not tested on held-out data" in finding_text((), (MATH,), best=best, was_scored=was_scored)


def test_minimised_and_ranged_metrics() -> None:
    """Smaller may be better, and metrics without a mean count by their ranges."""
    draw = np.random.default_rng(0)
    noise = draw.normal(0, 1, 200)
    rows = {0: {"loss": 20 + noise}, 1: {"loss": 16 + noise + draw.normal(0, 0.1, 200)}}
    (test,) = compared(rows, (LOSS,), finalists=[1])
    assert test.differences[1].value == pytest.approx(4, abs=0.1)  # in the metric's own unit
    assert test.better == (1,)
    other = replace(LOSS, name="other", range=(0.0, 400.0))
    both = {n: {"loss": of["loss"], "other": 10 * of["loss"]} for n, of in rows.items()}
    (test,) = compared(both, (LOSS, other), finalists=[1])
    assert test.differences[1].value == pytest.approx(0.1, abs=0.01)  # as shares of the ranges
    assert criterion((LOSS,)) == "loss"
    assert criterion((MATH, LOSS)) == "math"
    assert criterion((MATH, TEXT, LOSS)) == "the mean of math, text"
    assert "shares of their ranges" in criterion((LOSS, other))


def test_an_objective_without_holdout_data_is_left_out(store: Store) -> None:
    study = Study(store, (MATH, TEXT))
    study.add(0, both(binary(0.3, 1)), {"math": binary(0.3, 2)}, origin=Origin.SOURCE)
    study.add(1, both(binary(0.8, 3)), {"math": binary(0.8, 4)})
    finding = study.documents()[0]["finding"]
    assert finding["criterion"] == "math"
    assert finding["text"].startswith("Trial 1 is better than the best single model, t0 (difference +0.500")
    assert ", in math on held-out data" in finding["text"]


def test_metrics_are_paired_by_document() -> None:
    """Two metrics of the same documents are paired by document.

    They agree on every sample, so their mean is known no better than each of them.
    """
    draw = np.random.default_rng(1)
    samples = {number: (draw.random(300) < rate).astype(float) for number, rate in ((0, 0.5), (1, 0.6))}
    rows = {number: {"math": values, "text": values} for number, values in samples.items()}
    width = {}
    for key, documents in (("same", {"math": "d", "text": "d"}), ("other", {"math": "d", "text": "e"})):
        (test,) = compared(rows, (MATH, TEXT), finalists=[1], documents=documents)
        width[key] = np.ptp(test.differences[1].ci95)
    (one,) = compared(rows, (MATH,), finalists=[1])
    assert width["same"] == pytest.approx(np.ptp(one.differences[1].ci95))
    assert width["other"] == pytest.approx(width["same"] / 2**0.5)


# How often it is wrong.


def share_of_claims(num_finalists: int, *, num_studies: int = 400, size: int = 200) -> tuple[float, float]:
    """Share of studies in which a merge is called better, although all candidates are equally good.

    The first share is with the correction, the second with the intervals of single comparisons.
    """
    draw = np.random.default_rng(num_finalists)
    corrected = uncorrected = 0
    for _ in range(num_studies):
        difficulty = draw.random(size)
        rows = {
            n: {"math": ((difficulty + draw.random(size)) / 2 < 0.6).astype(float)} for n in range(num_finalists + 1)
        }
        (test,) = compared(rows, finalists=range(1, num_finalists + 1))
        corrected += bool(test.better)
        alone = [compared(rows, finalists=[n])[0] for n in range(1, num_finalists + 1)]
        uncorrected += any(of_one.better for of_one in alone)
    return corrected / num_studies, uncorrected / num_studies


def test_equal_candidates_rarely_look_better() -> None:
    """Equal candidates are called better in at most one study of twenty."""
    corrected, uncorrected = share_of_claims(8)
    # An interval is two-sided, so 2.5 % are expected at most; 400 studies vary by 0.8 %.
    assert corrected <= 0.05
    assert uncorrected > 0.08, "without the correction, luck would be called a finding too often"


@pytest.mark.slow
def test_a_study_whose_experts_equal_the_base_finds_nothing(store: Store) -> None:
    """Every model has the base's skills: what the search selects is luck."""
    same = dict.fromkeys(FINGERPRINTS, FINGERPRINTS["base"])
    study = store.create_job(
        kind="search", name="equal", document=study_document(), accepted=resolved_study().to_json()
    ).id
    plan = make_plan(study, scheduler="none", max_trials=30, holdout_samples={"math": 200, "text": 200})
    space = lfs_space(fingerprints=same)
    coordinator = Coordinator(
        replace(plan, baselines=tuple((o, label, replace(r, models=same)) for o, label, r in plan.baselines)),
        space=space,
        store=store,
        writer=store.open_attempt(study),
        proposer=InlineProposer(space),
    )
    drive(coordinator, FakeScorer())
    run = run_record(store, study)
    assert [test.origin for test in run.rival_tests] == [Origin.SOURCE, Origin.PUBLISHED]
    assert not any(test.better for test in run.rival_tests)
    text = finding_text(run.rival_tests, run.objectives, best=run.trials[0], was_scored=True)
    assert text.startswith("No merge found is better than the best single model, ")
    assert text in render_report(run)

"""Verification of a study: plain transformers score samples of some trials again, and the results are compared.

A stored report states which trial was verified, and with which samples. Every attempt verifies the chosen trials that
have no report yet, and the trials whose samples differed in an earlier verification.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict

import numpy as np

from search_spaces.study.engine import Verify
from service.errors import StudyFailed
from service.results.selection import best_trial, full_budget_trials
from service.store import JobWriter, Store
from service.store.documents import VERIFICATION, TrialVerification, Verification, read_verification
from service.studies.preflight.result import PreflightResult
from service.types import TrialRecord
from workers.errors import TrialFailed
from workers.types import SampleResult, Scorer, Span, Split, VerificationReport, digest_of

__all__ = ["verify_trials"]


def verify_trials(
    store: Store,
    writer: JobWriter,
    preflight: PreflightResult,
    scorer: Scorer,
    trials: Sequence[TrialRecord],
    *,
    note: Callable[[str], None],
) -> str | None:
    """Verify some trials: compare their stored samples with the results that plain transformers give for them.

    `preflight` is the checked study, and `scorer` runs transformers. The verified trials are the best trial and other
    trials, which are drawn with the study's seed. A trial is skipped if its samples were equal in an earlier
    verification. `writer` stores the reports, and `note` is called with messages for the user.

    Returns the reason why no sample was compared. Returns None if samples were compared, or if the study file switches
    verification off.

    Raises:
        StudyFailed: Samples differ by more than rounding explains, or transformers cannot score samples that the engine
            scored.
    """
    options = preflight.study.engine.verify
    document = store.document(writer.job_id, VERIFICATION)
    if not options:
        if document is None:
            _store(writer, Verification(reason="switched off in the study file"))
        return None
    known = {report.trial: report for report in read_verification(document).reports}
    spans = _spans(preflight, options.samples)
    if not spans:
        return "not verified: no objective has samples"
    chosen = _chosen(preflight, options, trials, known)
    reports = {trial.number: known[trial.number] for trial in chosen if trial.number in known}
    for trial in chosen:
        samples = _samples(store, writer.job_id, trial, spans)
        if not any(sample.response or sample.tokens for sample in samples):  # deleted: `limits.keep_responses`
            continue
        digest = digest_of([asdict(sample) for sample in samples])
        if _is_verified(reports.get(trial.number), trial, digest):
            continue
        note(f"Verifying trial {trial.number} with transformers ...")
        try:
            found = scorer.verify(trial.read_recipe(), samples, spans)
        except TrialFailed as error:
            raise StudyFailed(f"verification: transformers cannot score trial {trial.number}: {error}") from error
        reports[trial.number] = TrialVerification(**vars(found), trial=trial.number, samples=digest)
        _store(writer, Verification(tuple(reports.values())))
        if found.num_beyond:
            raise StudyFailed(_disagreement(trial, found))
    return _why_nothing(reports.values())


def _store(writer: JobWriter, verification: Verification) -> None:
    writer.set_document_named(VERIFICATION, asdict(verification))


def _chosen(
    preflight: PreflightResult, options: Verify, trials: Sequence[TrialRecord], known: Mapping[int, TrialVerification]
) -> list[TrialRecord]:
    """Select the trials whose samples are scored again with transformers, to verify the engine's results.

    The selected trials are the trials that differed in earlier verifications, the best trial, and random trials.
    `options.trials` is the number of the best and the random trials together. The random trials are drawn, with the
    seed of the checked study `preflight`, from the trials that were scored on all samples of the search. `known`
    contains the stored reports of earlier verifications, keyed by trial number.
    """
    candidates = full_budget_trials(trials)
    winner = best_trial(trials, preflight.tasks.objectives)
    assert winner is not None
    others = [trial for trial in candidates if trial is not winner]
    drawn = np.random.default_rng(preflight.study.search.seed).permutation(len(others))
    chosen = [winner, *(others[i] for i in drawn)][: options.trials]
    differed = [trial for trial in trials if trial.number in known and known[trial.number].num_beyond]
    return [*differed, *(trial for trial in chosen if trial not in differed)]


def _spans(preflight: PreflightResult, num_samples: int) -> tuple[Span, ...]:
    full = preflight.budget.rung_samples[-1]
    return tuple(Span(name, task, 0, min(num_samples, full[name])) for name, task in preflight.tasks.search.items())


def _samples(store: Store, study_id: str, trial: TrialRecord, spans: Sequence[Span]) -> tuple[SampleResult, ...]:
    stops = {span.objective: span.stop for span in spans}
    stored = store.samples(study_id, trial.recipe.digest, Split.SEARCH)
    return tuple(sample for sample in stored if sample.position < stops[sample.objective])


def _is_verified(report: TrialVerification | None, trial: TrialRecord, digest: str) -> bool:
    """Whether an earlier verification compared a trial's present samples with transformers, and found them equal.

    `report` is the stored report of that verification, and `digest` is the hash of the trial's present samples.
    Differences that rounding explains count as equal. The result is False if there is no report, or if the report is
    about another recipe or other samples. Reports of earlier versions do not say which samples they compared, so the
    result is False for them too.
    """
    return (
        report is not None
        and report.recipe_digest == trial.recipe.digest
        and report.samples == digest
        and report.is_equal
    )


def _why_nothing(reports: Iterable[VerificationReport]) -> str | None:
    if any(report.num_samples for report in reports):
        return None
    return next((f"not verified: {report.reason}" for report in reports if report.reason), "not verified")


def _disagreement(trial: TrialRecord, report: VerificationReport) -> str:
    first = next(difference for difference in report.differences if difference.is_beyond)
    return (
        f"verification: trial {trial.number}: {report.num_beyond} of {report.num_samples} samples differ between the "
        f"engine and transformers beyond a tolerance of {report.tolerance:g}; the first: {asdict(first)}"
    )

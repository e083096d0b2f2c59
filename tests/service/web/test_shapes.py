"""Views of unusual studies: one or many objectives, long names, a loss, some or no held-out data, constraints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Page

from search_spaces.objectives import Objective
from search_spaces.study.file import Study
from service.results.selection import held_out
from service.store import JobWriter, Store
from service.types import EventKind, JobRecord, JobState, TrialRecord
from tests.service.api.harness import ApiServer, document, resolved, write_trial
from tests.service.synthetic_run import EXPERTS, run_record
from tests.service.web.driving import Visit, expect, navigate, visit, wait_until
from workers.types import Evidence, SampleResult, ScoreResult, Split

HOLDOUT_SAMPLES = 12


def shaped_study(
    store: Store,
    names: Sequence[str],
    *,
    on_holdout: Sequence[str],
    objectives: Mapping[str, Objective] | None = None,
    state: JobState = JobState.COMPLETE,
    name: str | None = None,
) -> JobRecord:
    """A study with the objectives `names`, of which those in `on_holdout` have values on held-out data."""
    given = document(name=name or f"{len(names)}-{len(on_holdout)}")
    source, holdout = given["objectives"][0], given["holdout"][0]
    given["objectives"] = [{**source, "name": name} for name in names]
    given["holdout"] = [{**holdout, "name": name} for name in on_holdout] or None
    study = Study.model_validate({key: value for key, value in given.items() if value is not None})
    accepted = resolved(study)
    if objectives:
        accepted = replace(accepted, objectives=tuple(objectives.get(o.name, o) for o in accepted.objectives))
    job = store.create_job(kind="search", name=study.name, document=study.canonical(), accepted=accepted.to_json())
    writer = store.open_attempt(job.id)
    writer.set_state(JobState.RUNNING)
    made = run_record(num_trials=20)
    trials = [_with(trial, names) for trial in made.whole_trials]
    for trial in trials:
        write_trial(writer, trial)
    if on_holdout:
        for trial in held_out(made.whole_trials, made.objectives):
            _write_holdout(writer, trial, on_holdout)
    if state is not JobState.RUNNING:
        writer.set_state(state)
    return store.job(job.id)


def _with(trial: TrialRecord, names: Sequence[str]) -> TrialRecord:
    """The trial with values of these objectives, copied from the usual objectives in turn."""

    def renamed(values: Mapping[str, Any]) -> dict[str, Any]:
        return {name: values[EXPERTS[k % len(EXPERTS)]] for k, name in enumerate(names)} if values else {}

    rungs = tuple(
        replace(
            rung,
            num_samples=renamed(rung.num_samples),
            values=renamed(rung.values),
            standard_errors=renamed(rung.standard_errors),
        )
        for rung in trial.rungs
    )
    return replace(trial, rungs=rungs, values=renamed(trial.values), standard_errors=renamed(trial.standard_errors))


def _write_holdout(writer: JobWriter, trial: TrialRecord, names: Sequence[str]) -> None:
    samples = tuple(
        SampleResult(name, position, f"d{position}", float((trial.number * 7 + position * (k + 2)) % 5 > 1), "says")
        for k, name in enumerate(names)
        for position in range(HOLDOUT_SAMPLES)
    )
    prompts = {f"holdout {name}": "0" for name in names}
    evidence = Evidence(trial.recipe.digest, "bank", prompts, "sum", "replica-1", trial.number, "fake")
    writer.record_chunk(trial.number, Split.HOLDOUT, ScoreResult(samples, evidence, {"score": 0.5, "swap": 0.02}))
    writer.add_event(EventKind.HOLDOUT_SCORED, {"trial": trial.number})


LOSS = Objective("loss", "nll", "minimize", (0.0, 8.0))
EIGHT = tuple(f"task-{k}" for k in range(8))

SHAPES: Mapping[str, Mapping[str, Any]] = {
    "one objective": {"names": ("math",), "on_holdout": ("math",)},
    "eight objectives": {"names": EIGHT, "on_holdout": EIGHT},
    "a loss alone": {"names": ("loss",), "on_holdout": ("loss",), "objectives": {"loss": LOSS}},
    "two losses": {
        "names": ("loss", "other"),
        "on_holdout": ("loss", "other"),
        "objectives": {"loss": LOSS, "other": replace(LOSS, name="other")},
    },
    "some on held-out data": {"names": ("math", "text"), "on_holdout": ("math",)},
    "no held-out data": {"names": ("math", "text"), "on_holdout": ()},
    "running": {"names": ("math", "text"), "on_holdout": (), "state": JobState.RUNNING},
    "cancelled": {"names": ("math", "text"), "on_holdout": (), "state": JobState.CANCELLED},
}
# The address of each view below that of a study, and its title in the browser's tab; the one without is loaded.
VIEWS = {
    "": None,
    "/trials": "Trials",
    "/parameters": "Parameters",
    "/rungs": "Rungs",
    "/compare": "Compare",
    "/timeline": "Timeline",
    "/benchmarks": "Benchmarks",
    "/exports": "Exports",
    "/events": "Events",
    "/trials/0/samples?split=holdout&against=1": "Samples",
    "/trials/10": "Trial 10",
    "/trials/10/samples": "Samples",
}
# What the overview says of a study without values on held-out data.
NO_HOLDOUT = {
    JobState.COMPLETE: "The study has no held-out data.",
    JobState.CANCELLED: "The study ended before a trial was scored on held-out data.",
    JobState.RUNNING: "Trials are scored on held-out data when the search has ended.",
}


def open_view(opened: Visit, study: JobRecord, view: str) -> Page:
    """Open a view of a study in the window, which the view before may lead to without a load."""
    title, address = VIEWS[view], f"/studies/{study.id}{view}"
    if title is None:
        opened.goto(address)
    else:
        navigate(opened.page, address, title)
    return opened.page


@pytest.mark.parametrize("shape", SHAPES)
def test_every_view_of_a_shape(visitor: Visit, server: ApiServer, http: httpx.Client, shape: str) -> None:
    """No view of the study fails or waits for ever, and the overview has a sentence on held-out data."""
    study = shaped_study(server.store, **SHAPES[shape])
    summary = http.get(f"/v1/studies/{study.id}/summary").json()
    for view in VIEWS:
        page = open_view(visitor, study, view)
        expect(page.get_by_role("heading", level=1)).not_to_have_text("This view has failed")
        expect(page.get_by_text("Loading", exact=True)).to_have_count(0)
        expect(page.get_by_role("heading", level=1)).not_to_have_text("This view has failed")
        if view == "" and not summary["holdout"]:
            expect(page.get_by_text(NO_HOLDOUT[study.state])).to_be_visible()
        if view == "" and summary["holdout"]:
            first = summary["holdout"][0]
            name, estimate = next(iter(first["values"].items()))
            row = page.get_by_role("region", name="Values on held-out data").get_by_role("row")
            expect(row.filter(has_text=first["label"]).first).to_contain_text(f"{estimate['value']:.3f}")
            expect(page.get_by_text(f"{name} minus trial").or_(page.get_by_text("mean minus trial"))).to_be_visible()


# As long as names of tasks of lm-eval are.
LONG = tuple(f"mmlu_pro_high_school_european_history_generative_{k}" for k in range(8))


@pytest.mark.slow
def test_long_names_fit_a_narrow_window(browser: Browser, server: ApiServer) -> None:
    """No view of a study with eight objectives and long names scrolls sideways at 320 px."""
    with visit(browser, server.url, width=320, height=800) as opened:
        study = shaped_study(server.store, LONG, on_holdout=LONG, name="merges_of_all_experts_of_the_second_quarter")
        opened.goto("/studies")
        for view in (None, *VIEWS):
            page = opened.page if view is None else open_view(opened, study, view)
            expect(page.get_by_role("heading", level=1)).to_be_visible()
            expect(page.get_by_text("Loading", exact=True)).to_have_count(0)
            wait_until(page, "document.documentElement.scrollWidth <= window.innerWidth")  # charts follow

"""The choice of the engine that completes prompts: it slows a search only if an administrator allows it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from service.jobs.completers import Place
from service.jobs.heartbeat import ENGINE, WORKERS
from service.jobs.serving.engines import Choice, IdleTimer, Situation, choose, searches
from service.types import JobRecord, JobState

GPUS = Situation(num_gpus=4, free_gpus=2)
FULL = replace(GPUS, free_gpus=0)
BUSY: dict[str, Any] = {"users": 1, "searches": 1}


@pytest.mark.parametrize(
    ("situation", "expected"),
    [
        # No search uses the models: its engines are idle, or one can be started.
        (GPUS, Choice(Place.SCORER, yields=True)),
        (replace(FULL, running=(Place.SCORER,)), Choice(Place.SCORER, yields=True)),
        (Situation(), Choice(Place.SCORER, yields=True)),
        # A search uses them: a replica of the chat's own, on a free GPU.
        (replace(GPUS, running=(Place.SCORER,), **BUSY), Choice(Place.OWN)),
        (replace(FULL, running=(Place.SCORER, Place.OWN), **BUSY), Choice(Place.OWN)),
        (replace(FULL, running=(Place.OWN,)), Choice(Place.OWN)),
        # Or it waits, and says what for.
        (replace(FULL, **BUSY), Choice(None, "a free GPU: 4 are in use, or the studies that use these models to end")),
        (FULL, Choice(None, "a free GPU: 4 are in use")),
        (
            replace(GPUS, free_gpus=1, needed_gpus=2, **BUSY),
            Choice(None, "a free GPU: 4 are in use, or the studies that use these models to end"),
        ),
        # An engine of its own on a CPU would slow a search too.
        (
            Situation(**BUSY),
            Choice(None, "the running studies to end: without a GPU of its own, a chat slows a search"),
        ),
        (
            Situation(searches=1, running=(Place.SCORER,)),
            Choice(None, "the running studies to end: without a GPU of its own, a chat slows a search"),
        ),
        # A job that waits for GPUs gets the GPU of the chat.
        (replace(FULL, starting=1, running=(Place.OWN,)), Choice(None, "another job to get its GPUs")),
        (replace(FULL, starting=1, running=(Place.SCORER,)), Choice(None, "another job to get its GPUs")),
        (replace(GPUS, starting=1, running=(Place.OWN,)), Choice(Place.OWN)),
        # With an administrator's consent.
        (replace(FULL, shares=True, **BUSY), Choice(Place.SCORER)),
        (Situation(shares=True, **BUSY), Choice(Place.SCORER)),
    ],
)
def test_choice_follows_the_situation(situation: Situation, expected: Choice) -> None:
    assert choose(situation) == expected


def job(name: str, *, kind: str = "search", heard_at: float | None = 100.0, **fields: object) -> JobRecord:
    accepted = {"fingerprints": {"base": "a", "math": "b"}}
    return JobRecord(
        name,
        name,
        JobState.RUNNING,
        {},
        accepted,
        1.0,
        kind,
        heartbeat_at=heard_at,
        **fields,  # type: ignore[arg-type]
    )


def test_only_studies_with_drivers_are_searches() -> None:
    """Studies whose driver lives are searches; those with the same models are users. Fine-tunings start, too."""
    jobs = [
        job("ours"),
        replace(job("other", waiting_for=ENGINE), accepted={"fingerprints": {"base": "c"}}),
        replace(job("loading", waiting_for=f"{ENGINE}: it starts vLLM"), accepted={}),  # on GPUs that it has
        job("dead", heard_at=1.0),
        job("queued", heard_at=None),
        job("chat", kind="serving", waiting_for=ENGINE),
        job("tuned", kind="finetune", waiting_for=WORKERS),
        job("trained", kind="finetune"),
    ]
    found = searches(jobs, fingerprints={"base": "a", "math": "b"}, now=101.0)
    assert found == {"searches": 3, "users": 1, "starting": 2}


def test_idle_time_begins_after_the_last_request() -> None:
    """Time counts from the end of the last request, and not while a request is answered."""
    now = [0.0]
    timer = IdleTimer(60.0, clock=lambda: now[0])
    now[0] = 50.0
    assert timer.remaining_s == 10.0
    timer.begin()
    now[0] = 500.0
    assert timer.remaining_s == 60.0, "a request is being answered"
    timer.end()
    assert timer.remaining_s == 60.0
    now[0] = 561.0
    assert timer.remaining_s < 0
    assert timer.num_requests == 1

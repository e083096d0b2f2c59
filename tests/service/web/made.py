"""A study with parameters, texts of samples, several replicas and driver attempts, as a driver would have stored it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import sqlalchemy as sa

from service.results.selection import held_out
from service.store import JobWriter, Store, schema
from service.store.prompts import SampleText
from service.types import EventKind, JobRecord, JobState, Origin, TrialRecord, TrialState
from tests.service.api.harness import stored_study, write_trial
from tests.service.synthetic_run import EXPERTS, RUNGS, draw, random_recipe, run_record, scored_trial, skill
from workers.types import Evidence, SampleResult, ScoreResult, Split

__all__ = ["CONSTANT", "NUM_HOLDOUT", "searched_study", "write_drawn"]

NUM_HOLDOUT = 45
# The first parameter, which is the same in all trials: its name is as long as those of tensors.
CONSTANT = "model.layers.0.self_attn.k_proj.weight.constant"
LONG_PROMPT = "Examples of sums follow. " * 30
TIMINGS = {"materialise": 2.0, "swap": 1.0, "score": 20.0}
METHODS = ("task_arithmetic", "ties")


def searched_study(store: Store, *, num_full: int = 0, name: str = "searched") -> JobRecord:
    """A COMPLETE study: trials of every end, `num_full` more at full budget, and texts of search and held-out samples.

    A sample is right with a probability that follows from the recipe, and the samples of the search have the trials'
    values at each rung.

    Two drivers worked on it. Trials were scored by two replicas over 20 minutes; one of them then failed a check.
    """
    made = run_record(num_trials=40)
    record = stored_study(store, name=name)
    store.record_submission(record.id, 1)
    writer = store.open_attempt(record.id)
    writer.set_state(JobState.RUNNING)
    rng = np.random.default_rng(7)
    trials = [_searched(trial, rng) for trial in made.whole_trials]
    trials = [replace(trial, rival=_rival(trial, trials)) for trial in trials]
    trials += [_full(number, rng) for number in range(len(trials), len(trials) + num_full)]
    for trial in trials:
        write_trial(writer, trial)
        if trial.rungs:
            _write_samples(writer, trial, Split.SEARCH)
    chosen = held_out(trials, made.objectives)
    for trial in chosen:
        _write_samples(writer, trial, Split.HOLDOUT)
    for split, number in ((Split.SEARCH, RUNGS[-1]), (Split.HOLDOUT, NUM_HOLDOUT)):
        for objective in EXPERTS:
            writer.add_prompts(split, objective, [_text(position) for position in range(number)])
    for trial in chosen:
        writer.add_event(EventKind.HOLDOUT_SCORED, {"trial": trial.number})
    writer = store.open_attempt(record.id, because="the driver's node was lost")
    writer.add_event(
        EventKind.ENGINE_FAULT, {"replicas": {"replica-2": "the sum of the weights changed"}, "samples": 3}
    )
    writer.heartbeat(wall_clock_s=1200.0, progress={})
    writer.set_state(JobState.COMPLETE)
    _spread_over_time(store, record.id)
    return store.job(record.id)


def _searched(trial: TrialRecord, rng: np.random.Generator) -> TrialRecord:
    """The trial with a configuration of several parameters if the search has proposed it."""
    return replace(trial, configuration=_configuration(rng)) if trial.origin is Origin.SEARCH else trial


def _rival(trial: TrialRecord, trials: Sequence[TrialRecord]) -> int | None:
    """Number of the trial that stopped a trial: the trial with the least mean of those promoted from its rung."""
    if trial.state is not TrialState.PRUNED:
        return None
    rung = trial.rungs[-1].rung
    promoted = [each for each in trials if each.origin is Origin.SEARCH and len(each.rungs) > rung + 1]
    return min(promoted, key=lambda each: sum(each.rungs[rung].values.values())).number


def _configuration(rng: np.random.Generator) -> dict[str, Any]:
    """A configuration of numbers (one over decades, one constant), a category, an integer and a switch."""
    return {
        CONSTANT: 1.0,
        "g0.method": METHODS[rng.integers(2)],
        **{
            f"{group}.task_arithmetic.lambda.{name}": float(rng.uniform(0, 1))
            for group in ("g0", "g1")
            for name in EXPERTS
        },
        "g1.ties.k": float(10 ** rng.uniform(-4, 0)),
        "g1.steps": int(rng.integers(1, 6)),
        "g1.use.math": bool(rng.integers(2)),
    }


def _full(number: int, rng: np.random.Generator) -> TrialRecord:
    recipe = random_recipe(rng, 8, progress=rng.uniform())
    samples = draw(skill(recipe), EXPERTS, RUNGS[-1], rng)
    trial = scored_trial(number, Origin.SEARCH, f"trial:{number}", recipe, samples, len(RUNGS), 0)
    return _searched(trial, rng)


def _text(position: int) -> SampleText:
    """The prompt and the right answer of a sample; every ninth prompt is long."""
    examples = LONG_PROMPT if position % 9 == 4 else ""
    return SampleText(f"{examples}What is {position} plus 1?", str(position + 1))


def write_drawn(writer: JobWriter, trial: TrialRecord) -> None:
    """Store samples of the search and held-out samples for a trial of the held-out stage."""
    for split in (Split.SEARCH, Split.HOLDOUT):
        _write_samples(writer, trial, split, timings={"score": 0.5, "swap": 0.02})
    writer.add_event(EventKind.HOLDOUT_SCORED, {"trial": trial.number})


def _write_samples(
    writer: JobWriter, trial: TrialRecord, split: Split, *, timings: Mapping[str, float] = TIMINGS
) -> None:
    """Store the answers of a trial to sums; a wrong answer has another number."""

    def result(name: str, position: int, is_right: bool) -> SampleResult:
        answer = position + (1 if is_right else 2)
        text = f"The sum of {position} and 1 is {answer}, so the answer is {answer}."
        return SampleResult(name, position, f"d{position}", float(is_right), text)

    drawn = _searched_values(trial) if split is Split.SEARCH else _held_out_values(trial)
    samples = tuple(
        result(name, position, bool(is_right))
        for name, values in drawn.items()
        for position, is_right in enumerate(values)
    )
    replica = f"replica-{1 + trial.number % 2}"
    prompts = {f"{split} {name}": "0" for name in EXPERTS}
    evidence = Evidence(trial.recipe.digest, "bank", prompts, "sum", replica, trial.number, "fake")
    writer.record_chunk(trial.number, split, ScoreResult(samples, evidence, timings))


def _searched_values(trial: TrialRecord) -> dict[str, list[bool]]:
    """For each objective, whether each sample is right; means over each rung's samples are the trial's values."""
    rng = np.random.default_rng((trial.number, 1))
    found: dict[str, list[bool]] = {name: [] for name in EXPERTS}
    for rung in trial.rungs:
        for name, values in found.items():
            num_right = round(rung.values[name] * rung.num_samples[name]) - sum(values)
            values += rng.permutation(np.arange(rung.num_samples[name] - len(values)) < num_right).tolist()
    return found


def _held_out_values(trial: TrialRecord) -> dict[str, list[bool]]:
    """For each objective, whether each held-out sample is right: more often with more skill; some are hard for all."""
    rng, of_trial = np.random.default_rng(2), np.random.default_rng((trial.number, 2))
    skills = skill(trial.read_recipe())
    return {
        name: (0.4 * rng.random(NUM_HOLDOUT) + 0.6 * of_trial.random(NUM_HOLDOUT) < skills[name]).tolist()
        for name in EXPERTS
    }


def _spread_over_time(store: Store, study_id: str) -> None:
    """Give the study's chunks and its drivers' attempts times over 20 minutes."""
    evidence, events = schema.evidence, schema.events
    with store._engine.begin() as connection:
        rows = connection.execute(sa.select(evidence.c.id).where(evidence.c.study == study_id).order_by(evidence.c.id))
        chunks = [row.id for row in rows]
        start = 1_760_000_000.0
        for place, chunk in enumerate(chunks):
            time = start + 30 + 1170 * (place + 1) / len(chunks)
            connection.execute(sa.update(evidence).where(evidence.c.id == chunk).values(finished_at=time))
        for kind, times in (("attempt", (start, start + 700)), ("engine_fault", (start + 900,))):
            where = (events.c.study == study_id) & (events.c.kind == kind)
            found = connection.execute(sa.select(events.c.id).where(where).order_by(events.c.id)).scalars().all()
            for event, time in zip(found, times, strict=True):
                connection.execute(sa.update(events).where(events.c.id == event).values(time=time))

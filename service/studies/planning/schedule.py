"""The phases of a study, and the hours that they take at given speeds.

The estimate assumes that no proposed merge was scored before, and that the machine does no other work.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from search_spaces.errors import InvalidStudy, Problem
from search_spaces.fidelity import bracket_plan
from service.studies.planning.roofline import SampleTokens, Speeds, Work
from service.studies.preflight.resources import GradientPlace
from workers.engines.canaries import CANARY_EVERY
from workers.engines.transformers.batches import BATCH, TEXTS_READ
from workers.errors import InvalidTask
from workers.evaluation.lengths import Lengths, lengths_of
from workers.evaluation.prompts import Prompts

if TYPE_CHECKING:
    from service.studies.preflight.result import PreflightResult

__all__ = ["Bounds", "Phase", "StudyLengths", "mean_tokens", "phases_of", "study_lengths", "verified_lengths"]


@dataclass(frozen=True)
class Bounds:
    """Lower and upper bound on a number, such as seconds.

    `least` is the number if answers are as long as the reference answers. `most` is the number if all answers have the
    largest length that their tasks allow.
    """

    least: float
    most: float


@dataclass(frozen=True)
class StudyLengths:
    """Mean lengths in tokens of the samples of each objective, each holdout entry and each benchmark of a study."""

    objectives: Mapping[str, Lengths]
    holdout: Mapping[str, Lengths]
    benchmarks: Mapping[str, Lengths]


@dataclass(frozen=True)
class Phase:
    """A phase of a study, such as scoring the baselines, in which the same work is repeated several times.

    `name` names the phase in the plan. `number` is the number of repetitions, for example the number of baselines.
    `seconds` are bounds on the seconds of one repetition. `width` is the largest number of engines that can work on
    different repetitions at the same time.
    """

    name: str
    number: float
    seconds: Bounds
    width: int

    @property
    def elapsed_s(self) -> Bounds:
        """Bounds on the seconds that all repetitions of the phase take if `width` engines share them."""
        turns = self.number / max(1, self.width)
        return Bounds(turns * self.seconds.least, turns * self.seconds.most)


def study_lengths(preflight: PreflightResult, result_dir: str) -> StudyLengths:
    """Measure the mean lengths of the samples of each task of a checked study (`preflight`), on its first samples.

    `result_dir` has the tokenizer and the configuration of merges. Raises InvalidStudy with every task whose prompts
    cannot be built.
    """
    prompts = Prompts(result_dir, preflight.engine_options)
    specs = {
        "objectives": preflight.tasks.search,
        "holdout": preflight.tasks.holdout,
        "benchmarks": {benchmark.name: benchmark.task for benchmark in preflight.tasks.benchmarks},
    }
    found: dict[str, dict[str, Lengths]] = {section: {} for section in specs}
    problems = []
    for place, objective in preflight.study.with_tasks():
        section = place.partition(".")[0]
        try:
            found[section][objective.name] = lengths_of(specs[section][objective.name], prompts)
        except InvalidTask as error:
            problems.append(Problem(f"{place}.{error.field}", str(error)))
    if problems:
        raise InvalidStudy(tuple(problems))
    return StudyLengths(**found)


def verified_lengths(preflight: PreflightResult, lengths: StudyLengths) -> list[tuple[int, int]]:
    """Mean tokens of the prompt, and the largest number of tokens of the answer, of each sample of a verification.

    The list is empty if the checked study (`preflight`) verifies nothing.
    """
    return [
        (math.ceil(lengths.objectives[name].read), math.ceil(lengths.objectives[name].limit))
        for name, number in _verified_samples(preflight, lengths).items()
        for _ in range(number)
    ]


def _verified_samples(preflight: PreflightResult, lengths: StudyLengths) -> dict[str, int]:
    """Number of samples of each objective that are verified, keyed by objective; empty if nothing is verified."""
    verify, full = preflight.study.engine.verify, preflight.budget.rung_samples[-1]
    return {} if verify is False else {name: min(verify.samples, full[name]) for name in lengths.objectives}


def phases_of(
    preflight: PreflightResult,
    lengths: StudyLengths,
    *,
    speeds: Speeds,
    deepest: Speeds,
    gradient_speeds: Speeds | None,
    host_speeds: Speeds,
    steps: tuple[int, int],
    verification_speeds: Speeds | None = None,
    verified_together: int = BATCH,
    download_s: float = 0.0,
    statistics_s: float = 0.0,
    machines: int = 1,
) -> tuple[Phase, ...]:
    """The phases of a study, with their seconds, in the order of running.

    Args:
        preflight: The study, with the results of its checks.
        lengths: Mean lengths of the study's samples.
        speeds: Speeds of the engines.
        deepest: Speeds of the engines for merges with the largest number of layers.
        gradient_speeds: Speeds of the device that computes gradients; None if no gradients are computed.
        host_speeds: Speeds of the CPU's threads of one engine, which build merges for canaries and export them for
            verification.
        steps: Number of gradient steps, and number of samples of each step.
        verification_speeds: Speeds of the device that computes verifications; None for the CPU's threads of one engine.
        verified_together: Number of samples of which a verification generates the answers at once.
        download_s: Seconds in which weights that are not on the machine are downloaded.
        statistics_s: Seconds in which the sources are sorted for statistics that merges use, once on a machine.
        machines: Number of machines that the study's engines run on.
    """
    replicas = preflight.study.engine.replicas
    phases = [Phase("download", 1, Bounds(download_s, download_s), 1)] if download_s else []
    phases.append(Phase("check", 1, Bounds(speeds.check_s, speeds.check_s), 1))
    phases.append(Phase("engine start", replicas, Bounds(speeds.start_s, deepest.start_s), replicas))
    if statistics_s:
        phases.append(Phase("statistics", 1, Bounds(statistics_s, statistics_s), 1))
    swaps = 0.0

    def scored(name: str, number: float, samples: Mapping[str, float], known: Mapping[str, Lengths]) -> None:
        least, most = _work(samples, known)
        nonlocal swaps
        if not number or not least.samples:
            return
        swaps += number
        chunks = max(1, math.ceil(least.samples / 512))
        width = min(replicas, max(1, round(number * chunks)))
        bounds = Bounds(speeds.evaluation_s(least), deepest.evaluation_s(most))
        phases.append(Phase(name, number, bounds, width))
        phases.append(Phase(f"swap for {name}", number, Bounds(speeds.swap_s, deepest.swap_s), width))

    num_baselines = len(preflight.baselines())
    rungs = preflight.budget.rung_samples
    scored("baselines", num_baselines, rungs[-1], lengths.objectives)
    for number, samples, name in _rungs(preflight):
        scored(name, number, samples, lengths.objectives)
    num_steps, batch = steps
    if gradient_speeds is not None and num_steps:
        total = sum(rungs[-1].values()) or 1
        share = {name: batch * count / total for name, count in rungs[-1].items()}
        least, _ = _work(share, lengths.objectives)
        place = preflight.gradients or GradientPlace("cpu")
        tokens = least.samples * (least.tokens.read + least.tokens.answered)
        step_s = gradient_speeds.step_s(
            least, recomputes=place.recomputes, num_passes=max(1, math.ceil(tokens / place.tokens))
        )
        phases.append(Phase("gradient step", num_steps, Bounds(step_s, step_s), 1))
    holdout = {name: float(info.num_samples) for name, info in preflight.tasks.holdout_infos.items()}
    if holdout:
        scored("holdout", num_baselines + preflight.num_finalists, holdout, lengths.holdout)
    for benchmark in preflight.tasks.benchmarks:
        samples = {benchmark.name: float(benchmark.most_samples)}
        scored(f"benchmark {benchmark.name}", preflight.num_scored_on(benchmark), samples, lengths.benchmarks)
    canary = Bounds(host_speeds.canary_s, replace(host_speeds, facts=deepest.facts).canary_s)
    # The first engine of a machine makes one for all when it starts, and every engine one after CANARY_EVERY swaps and
    # one at the end; the engines of a machine make them one after the other.
    number = machines + replicas * (1 + int(swaps / replicas) // CANARY_EVERY)
    phases.append(Phase("canary", number, canary, machines))
    verify = preflight.study.engine.verify
    if verify is not False and lengths.objectives:
        verified = _verified_samples(preflight, lengths)
        compared = sum(min(number, TEXTS_READ) for number in verified.values())
        options: dict[str, Any] = {"compared": compared, "together": verified_together, "on": verification_speeds}
        bounds = Bounds(*(host_speeds.verification_s(work, **options) for work in _work(verified, lengths.objectives)))
        phases.append(Phase("verification", verify.trials, bounds, 1))
    return tuple(phases)


def _rungs(preflight: PreflightResult) -> Iterator[tuple[int, Mapping[str, float], str]]:
    """Yield, for each rung, the number of trials scored at it, the mean new samples of a trial, and the rung's name.

    A rung is a number of samples at which trials are compared. New samples are those on which the trial was not scored
    at an earlier rung; their mean numbers are keyed by objective. `preflight` is the checked study.
    """
    rungs = preflight.budget.rung_samples
    found: dict[tuple[int, int], int] = {}
    for bracket in bracket_plan(preflight.budget.cycle, preflight.study.search.num_proposals):
        for offset, number in enumerate(bracket.sizes):
            rung = bracket.first_rung + offset
            before = rung - 1 if offset else -1
            found[before, rung] = found.get((before, rung), 0) + number
    by_rung: dict[int, int] = {}
    samples: dict[int, dict[str, float]] = {}
    for (before, rung), number in sorted(found.items()):
        by_rung[rung] = by_rung.get(rung, 0) + number
        paid = rungs[before] if before >= 0 else {}
        for name, count in rungs[rung].items():
            new = number * (count - paid.get(name, 0))
            samples.setdefault(rung, {})[name] = samples.get(rung, {}).get(name, 0.0) + new
    for rung, number in sorted(by_rung.items()):
        yield number, {name: total / number for name, total in samples[rung].items()}, f"rung {rung + 1}"


def _work(samples: Mapping[str, float], lengths: Mapping[str, Lengths]) -> tuple[Work, Work]:
    """Work of scoring samples of several tasks, under two assumptions about the answers.

    Returns (work if answers are as long as the references, work if all answers have their largest length). `samples`
    contains the number of samples and `lengths` contains the mean lengths, keyed by task.
    """
    total = sum(samples.get(name, 0.0) for name in lengths)
    if not total:
        nothing = Work(0, SampleTokens(0, 0))
        return nothing, nothing
    shares = {name: samples.get(name, 0.0) / total for name in lengths}
    read = sum(share * lengths[name].read for name, share in shares.items())
    answered = sum(share * lengths[name].answered for name, share in shares.items())
    limit = sum(share * lengths[name].limit for name, share in shares.items())
    return Work(total, SampleTokens(read, answered)), Work(total, SampleTokens(read, limit))


def mean_tokens(parts: Sequence[tuple[float, Mapping[str, float], Mapping[str, Lengths]]]) -> Bounds:
    """Bounds on the mean number of tokens of a sample, prompt and answer together, over several parts of a study.

    Each of `parts` has three values: its number of samples, the weight of each task in its mean, and the mean lengths
    of each task's samples. Weights need not sum to 1.
    """
    least = most = number = 0.0
    for samples, shares, lengths in parts:
        short, long = _work(shares, lengths)
        least += samples * (short.tokens.read + short.tokens.answered)
        most += samples * (long.tokens.read + long.tokens.answered)
        number += samples
    return Bounds(least / (number or 1), most / (number or 1))

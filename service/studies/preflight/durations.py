"""Expected duration of a study, computed before an engine starts from the samples' tokens and this machine's speed.

The estimate ignores three things: proposals of merges that were scored before, the time for merging (which is shorter
than scoring for small models), and other work of the machine.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from search_spaces.errors import InvalidStudy, Problem
from search_spaces.fidelity import bracket_plan
from service.studies.preflight.result import PreflightResult
from workers.engines.vllm.environment import engine_environment
from workers.errors import InvalidTask
from workers.evaluation.lengths import Lengths, lengths_of
from workers.evaluation.prompts import Prompts
from workers.models.family import open_sources

__all__ = ["ExpectedTime", "expected_time"]

# The share of its matrix-product speed that a device reaches while an engine scores (vLLM on CPU, the shipped family).
EFFICIENCY = 0.15

# Seconds to start an engine, and seconds of an evaluation beside scoring: swap, proposal, storing (the shipped family
# on 2 cores, docs/measurements.md).
ENGINE_START_S = 20.0
EVALUATION_S = 0.12

MEASURED_S = 0.5  # seconds in which the speed of products is measured


@dataclass(frozen=True)
class ExpectedTime:
    """Bounds on the hours that a study takes, and on the tokens of a sample (prompt and answer together).

    The lower bounds assume answers as long as the reference answers, and merges as deep as the base. The upper bounds
    assume answers that end at the limits of their tasks, and merges as deep as the space allows.
    """

    least_hours: float
    most_hours: float
    least_tokens: float
    most_tokens: float


def expected_time(preflight: PreflightResult, *, step_samples: int) -> ExpectedTime:
    """Estimate the hours for the search, the stages after it and the start of engines, and the tokens of a sample.

    Gradients are counted as `step_samples` samples in total. The first samples of each task are tokenized to find the
    lengths of prompts and answers. Raises InvalidStudy with every task whose prompts cannot be built.
    """
    samples = preflight.expected_samples()
    lengths = _lengths(preflight)
    searched = _mean(lengths["objectives"], preflight.budget.rung_samples[-1])
    held_out = _mean(
        lengths["holdout"], {name: info.num_samples for name, info in preflight.tasks.holdout_infos.items()}
    )
    benchmarks = preflight.tasks.benchmarks
    scored = _mean(
        lengths["benchmarks"], {b.name: preflight.num_scored_on(b) * b.facts.num_samples for b in benchmarks}
    )
    parts = (
        (preflight.within_limit(samples.search + step_samples), searched),
        (samples.holdout, held_out),
        (samples.benchmarks, scored),
    )
    num_samples = sum(number for number, _ in parts) or 1
    least_tokens = sum(number * (lengths.read + lengths.answered) for number, lengths in parts)
    most_tokens = sum(number * (lengths.read + lengths.limit) for number, lengths in parts)
    deepest = (
        preflight.models.num_parameters if preflight.models.size is None else preflight.models.size.most("parameters")
    )
    threads = int(engine_environment(preflight.engine_options)["OMP_NUM_THREADS"])
    speed = operations_per_s(threads) * EFFICIENCY * preflight.study.engine.replicas
    beside_s = ENGINE_START_S + _num_evaluations(preflight) * EVALUATION_S
    return ExpectedTime(
        (beside_s + 2 * preflight.models.num_parameters * least_tokens / speed) / 3600,
        (beside_s + 2 * deepest * most_tokens / speed) / 3600,
        least_tokens / num_samples,
        most_tokens / num_samples,
    )


def operations_per_s(threads: int) -> float:
    """Measure the speed of matrix products on this machine, in operations per second.

    The GPU is measured in bfloat16 or, without a GPU, `threads` threads of the CPU in float32. The result is the best
    of the measurements that fit into MEASURED_S seconds, because other work slows some of them down.
    """
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    size = 4096 if device == "cuda" else 512
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    matrix = torch.ones(size, size, dtype=dtype, device=device)
    best, until = float("inf"), time.perf_counter() + MEASURED_S
    while (started := time.perf_counter()) < until:
        product = matrix @ matrix
        float(product[0, 0])  # waits for the device
        best = min(best, time.perf_counter() - started)
    torch.set_num_threads(before)
    return 2 * size**3 / best


def _lengths(preflight: PreflightResult) -> dict[str, dict[str, Lengths]]:
    """Mean lengths of samples in tokens, as section of the study file -> name of the entry -> lengths."""
    prompts = Prompts(open_sources(preflight.models.family).result_dir, preflight.engine_options)
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
    return found


def _mean(lengths: Mapping[str, Lengths], num_samples: Mapping[str, int]) -> Lengths:
    """Mean of the lengths of several tasks, each weighted by its number of samples.

    `lengths` and `num_samples` are by the objective's name.
    """
    total = sum(num_samples[name] for name in lengths) or 1
    shares = {name: num_samples[name] / total for name in lengths}
    return Lengths(
        sum(share * lengths[name].read for name, share in shares.items()),
        sum(share * lengths[name].answered for name, share in shares.items()),
        sum(share * lengths[name].limit for name, share in shares.items()),
    )


def _num_evaluations(preflight: PreflightResult) -> int:
    """Expected number of evaluations of a study, at all rungs, on holdout data and on benchmarks.

    An evaluation scores one trial at one rung, on the holdout data, or on one benchmark. It is assumed, as in
    `PreflightResult.expected_samples`, that no trial fails and no two recipes are equal. On holdout data, four
    finalists are assumed besides the baselines.
    """
    num_baselines = len(preflight.baselines())
    brackets = bracket_plan(preflight.budget.cycle, preflight.study.search.num_proposals)
    search = num_baselines + sum(sum(bracket.sizes) for bracket in brackets)
    benchmarks = sum(map(preflight.num_scored_on, preflight.tasks.benchmarks))
    return search + (num_baselines + preflight.num_finalists if preflight.tasks.holdout else 0) + benchmarks

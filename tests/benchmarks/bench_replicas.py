"""Share of time during which 16 and 32 replicas score, by scheduler and searcher; time of schedulers in long studies.

Replicas are fakes whose chunks take one second of a simulated clock (`replica_clock`). Everything else of a study but
Ray is real, and its CPU seconds pass on the same clock. The rungs have 30, 90 and 270 samples.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from search_spaces.fidelity import Scheduler, bracket_cycle, open_brackets
from search_spaces.spaces.base import SearchSpace
from search_spaces.study.search import GradientOptions, PolicyOptions, Search
from service.studies.preflight.result import BATCHES_AHEAD, STALENESS_PER_REPLICA
from service.tune.coordinator import Coordinator
from service.tune.plan import Plan
from service.tune.schedulers import SCHEDULERS
from service.tune.searchers.base import SearchSetting
from tests.benchmarks.calibration import calibration_s
from tests.benchmarks.replica_clock import Clock, SimulatedProposer, simulate
from tests.search_spaces.spaces.families import models, space
from tests.service.tune.harness import FINGERPRINTS, lfs_space, make_plan, new_study, space_of
from workers.serving.fake import FakeScorer

NAMES = ("math", "text")
RUNGS = (30, 90, 270)
NUM_TRIALS = 1000
# In longer searches of HM3 in this small space most proposals are paths that were scored before, and cost nothing.
NUM_PATHS = 200
WARM_TRIALS = 40
HALVING: tuple[Scheduler, ...] = ("racing", "asha", "hyperband")
MUST = {16: 0.95, 32: 0.9}
SMAC_MUST = 0.9
STEPS_MUST = 0.8
TABLE_MUST_MS = 2.0
TABLE_TRIALS = (1_000, 10_000)
SPREAD = 0.5


def run() -> dict[str, Any]:
    torch.set_num_threads(1)  # as in the process that Ray starts for a searcher
    calibration = calibration_s()
    instant = [
        {"replicas": replicas, "scheduler": scheduler, "must": MUST[replicas], **found, "uneven": uneven["busy"]}
        for replicas in MUST
        for scheduler in HALVING
        for found, uneven in [[busy(replicas, scheduler, spread=spread) for spread in (0.0, SPREAD)]]
    ]
    smac = [
        {"replicas": 16, "scheduler": scheduler, "must": SMAC_MUST, **busy(16, scheduler, algorithm="smac")}
        for scheduler in HALVING
    ]
    steps = [
        {"replicas": 16, "searcher": name, "must": STEPS_MUST, **busy(16, "none", algorithm=name, num_trials=number)}
        for name, number in (("hm3", NUM_PATHS), ("gradient", NUM_TRIALS))
    ]
    tables = [
        {
            "scheduler": scheduler,
            "objectives": num_objectives,
            "ms": {number: table_ms(scheduler, num_objectives, number) for number in TABLE_TRIALS},
            "must_ms": TABLE_MUST_MS,
        }
        for scheduler in HALVING
        for num_objectives in (1, 3)
    ]
    return {"calibration_s": calibration, "instant": instant, "smac": smac, "steps": steps, "tables": tables}


def show(result: dict[str, Any]) -> None:
    print(
        f"{NUM_TRIALS} trials ({NUM_PATHS} of hm3), chunks of 1 s; "
        f"calibration {result['calibration_s']:.2f} CPU seconds"
    )
    print("replicas  scheduler  searcher   busy  must  uneven chunks  driver ms a trial  driver  searcher  steps")
    for name in ("instant", "smac", "steps"):
        for row in result[name]:
            uneven = f"{row['uneven']:13.3f}" if "uneven" in row else f"{'':13}"
            print(
                f"{row['replicas']:8}  {row.get('scheduler', 'none'):9}  {row.get('searcher', name):8}  "
                f"{row['busy']:5.3f}  {row['must']:4.2f}  {uneven}  {row['driver_ms_per_trial']:17.1f}  "
                f"{row['driver_share']:6.2f}  {row['searcher_share']:8.2f}  {row['steps_share']:5.2f}"
            )
    print("scheduler  objectives  ms a trial at 1,000  at 10,000   must")
    for row in result["tables"]:
        few, many = row["ms"].values()
        print(f"{row['scheduler']:9}  {row['objectives']:10}  {few:19.2f}  {many:9.2f}  {row['must_ms']:5.1f}")


def busy(
    replicas: int,
    scheduler: Scheduler,
    *,
    algorithm: str = "random",
    num_trials: int = NUM_TRIALS,
    spread: float = 0.0,
) -> dict[str, Any]:
    """Run a search on `replicas` fake replicas, with the defaults of a study with this number of replicas.

    A short search comes first, during which libraries are loaded.
    """
    if algorithm != "random":
        _searched(replicas, scheduler, algorithm=algorithm, num_trials=WARM_TRIALS)
    return _searched(replicas, scheduler, algorithm=algorithm, num_trials=num_trials, spread=spread)


def _searched(
    replicas: int, scheduler: Scheduler, *, algorithm: str, num_trials: int, spread: float = 0.0
) -> dict[str, Any]:
    plan, own, setting = search_of(replicas, scheduler, algorithm, num_trials)
    clock = Clock()
    proposer = SimulatedProposer(clock, algorithm, own.parameters, setting, is_instant=algorithm == "random")
    with tempfile.TemporaryDirectory(prefix="mergesearch-bench-") as directory:
        store, study = new_study(Path(directory))
        coordinator = Coordinator(
            replace(plan, study_id=study),
            space=own,
            store=store,
            writer=store.open_attempt(study),
            proposer=proposer,
        )
        found = asdict(simulate(coordinator, clock, proposer, replicas=replicas, spread=spread))
        store.close()
    return {**found, "max_staleness": plan.max_staleness, "open_brackets": plan.open_brackets, "batch": plan.batch}


def search_of(
    replicas: int, scheduler: Scheduler, algorithm: str, num_trials: int
) -> tuple[Plan, SearchSpace, SearchSetting]:
    """The plan, space and setting of a search: with steps, a vector of preferences for each replica."""
    own: SearchSpace = lfs_space(layer_groups=4)
    options = Search()
    preferences: tuple[tuple[float, ...], ...] = ()
    staleness = STALENESS_PER_REPLICA * replicas - 1
    changes: dict[str, Any] = {}
    if algorithm in ("hm3", "gradient"):
        preferences = tuple((i / (replicas - 1), 1 - i / (replicas - 1)) for i in range(replicas))
    if algorithm == "hm3":
        family = replace(models(NAMES, 4), fingerprints=FINGERPRINTS)
        own = space("hm3", family, max_path_length=8)
        options = Search(hm3=PolicyOptions())
        staleness = min(staleness, options.hm3.episodes * (replicas - 1))
        changes["max_duplicates"] = num_trials
    if algorithm == "gradient":
        own = space_of("layerwise")
        options = Search(gradient=GradientOptions(points=replicas))
        changes["waits_for_baselines"] = True
    last = RUNGS[-1:] if scheduler == "none" else RUNGS
    cycle = bracket_cycle(scheduler, num_rungs=len(last), eta=3, max_trials=num_trials)
    batch = max(1, staleness // BATCHES_AHEAD)
    plan = make_plan(
        "",
        scheduler=scheduler,
        max_trials=num_trials,
        rung_samples=tuple(dict.fromkeys(NAMES, size) for size in last),
        holdout_samples={},
        cycle=cycle,
        chunk_samples=512 if scheduler != "none" else 1024,
        max_staleness=staleness,
        open_brackets=open_brackets(cycle, max_staleness=staleness),
        batch=batch,
        bank_fingerprint=FakeScorer().bank_fingerprint,
        **changes,
    )
    setting = SearchSetting(
        objectives=NAMES,
        num_samples=dict.fromkeys(NAMES, RUNGS[-1]),
        num_baselines=len(plan.baselines),
        options=options,
        preferences=preferences,
        batch=batch,
    )
    return plan, own, setting


def table_ms(scheduler: Scheduler, num_objectives: int, num_trials: int) -> float:
    """CPU milliseconds of the rung table for a trial, if the results of 16 replicas arrive out of order."""
    draw = random.Random(0)
    staleness = STALENESS_PER_REPLICA * 16 - 1
    cycle = bracket_cycle(scheduler, num_rungs=3, eta=3, max_trials=num_trials)
    table = SCHEDULERS[scheduler](
        num_rungs=3,
        eta=3,
        cycle=cycle,
        num_baselines=0,
        max_trials=num_trials,
        max_staleness=staleness,
        open_brackets=open_brackets(cycle, max_staleness=staleness),
        batch=staleness // BATCHES_AHEAD,
    )
    skills = [draw.random() for _ in range(num_trials)]
    spent = 0.0
    while not table.is_finished:
        start = time.process_time()
        while (proposal := table.proposal()) is not None:
            if (opens := proposal.opens) is not None:
                table.open_bracket(proposal.bracket, first_rung=opens.first_rung, size=opens.num_configurations)
            table.add_trial(proposal.number, proposal.bracket)
        ready: Sequence[tuple[int, int]] = list(table.ready())[:48]
        spent += time.process_time() - start
        number, rung = draw.choice(ready)
        costs = tuple(skills[number] + draw.gauss(0, 0.2 / (1 + rung)) for _ in range(num_objectives))
        start = time.process_time()
        table.record(number, rung, costs)
        spent += time.process_time() - start
    return 1e3 * spent / num_trials

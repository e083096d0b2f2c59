"""`python -m tests.benchmarks.scale_driver DATABASE STUDY`: resume a made-up study, and print the time as JSON.

The process does what a driver does between its start and its first evaluation, without Ray and models.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from dataclasses import replace
from pathlib import Path

from search_spaces.fidelity import bracket_cycle
from search_spaces.spaces.layerwise import LayerwiseSection
from service.resolved_study import ResolvedStudy
from service.store import Store
from service.tune.coordinator import Coordinator
from service.tune.plan import Plan, baselines_of
from service.tune.samples.sample_cache import SampleCache
from tests.search_spaces.spaces.families import models
from tests.service.tune.harness import InlineProposer
from workers.types import TaskSpec


def main(database: str, study: str) -> None:
    store = Store(database)
    before = _rss()
    plan = _plan(store, study)
    start, cpu = time.perf_counter(), time.process_time()
    samples = SampleCache(plan, store)
    gc.collect()
    found = {
        "samples": samples.num_scored,
        "samples_s": time.perf_counter() - start,
        "bytes_per_sample": (_rss() - before) / samples.num_scored,
    }
    del samples
    resolved = ResolvedStudy.of(store.job(study))
    family = replace(
        models(tuple(name for name in resolved.fingerprints if name != "base"), resolved.num_layers),
        fingerprints=resolved.fingerprints,
    )
    space = LayerwiseSection(granularity="component").build(family)
    start, cpu = time.perf_counter(), time.process_time()
    coordinator = Coordinator(
        plan,
        space=space,
        store=store,
        writer=store.open_attempt(study),
        proposer=InlineProposer(space),
        observer=lambda _: None,
        is_out_of_budget=lambda: None,
    )
    coordinator.next_evaluation()
    found |= {"resume_s": time.perf_counter() - start, "resume_cpu_s": time.process_time() - cpu}
    found |= {"rss_mb": _rss() / 1e6}
    print(json.dumps(found))


def _plan(store: Store, study: str) -> Plan:
    job = store.job(study)
    resolved = ResolvedStudy.of(job)
    names = [objective.name for objective in resolved.objectives]
    tasks = {name: TaskSpec(task=name, metric="exact_match") for name in names}
    max_trials = job.document["search"]["max_trials"]
    evidence = store.evidence(study, limit=1)
    return Plan(
        study_id=study,
        seed=0,
        objectives=resolved.objectives,
        tasks=tasks,
        holdout_tasks={name: replace(task, split="validation") for name, task in tasks.items()},
        rung_samples=resolved.rung_samples,
        holdout_samples=resolved.rung_samples[-1],
        scheduler="asha",
        cycle=bracket_cycle("asha", num_rungs=len(resolved.rung_samples), eta=3, max_trials=max_trials),
        eta=3,
        max_trials=max_trials,
        max_staleness=resolved.max_staleness,
        chunk_samples=512,
        bank_fingerprint=evidence[0].bank_fingerprint,
        baselines=baselines_of(store.trials(study, stop=100), (), has_begun=True),
    )


def _rss() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


if __name__ == "__main__":
    main(*sys.argv[1:])

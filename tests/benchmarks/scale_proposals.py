"""`python -m tests.benchmarks.scale_proposals`: time one proposal of each searcher from many results, as JSON.

The process should have one thread, as Ray starts the process of a searcher.
"""

from __future__ import annotations

import gc
import json
import time
from dataclasses import replace

import numpy as np

from search_spaces.parameters import Float, Parameters
from search_spaces.searchers import SEARCHERS
from service.tune.searchers import get_searcher
from service.tune.searchers.base import Observation, ProposalContext, SearchSetting

# Searchers that propose from observations alone, and what they are given.
PROPOSING = [
    name
    for name, declared in SEARCHERS.items()
    if declared.learns and declared.proposes_at_once and not declared.alias_of
]
NUM_OBSERVATIONS, NUM_PARAMETERS = 10_000, 800


def main() -> None:
    context = _observed()
    print(json.dumps({name: _proposal(name, context) for name in PROPOSING}))


def _proposal(name: str, context: ProposalContext) -> dict[str, float]:
    searcher = get_searcher(name)
    first = replace(context, number=41, observations=context.observations[:40])
    searcher.advance(first)  # imports what it needs
    gc.collect()
    start, cpu = time.perf_counter(), time.process_time()
    searcher.advance(context)
    return {"s": time.perf_counter() - start, "cpu_s": time.process_time() - cpu}


def _observed() -> ProposalContext:
    rng = np.random.default_rng(0)
    parameters = Parameters([Float(f"p{number}", -0.5, 1.5) for number in range(NUM_PARAMETERS)])
    observations = tuple(
        Observation(
            dict(zip(parameters.names, rng.uniform(-0.5, 1.5, NUM_PARAMETERS).tolist(), strict=True)),
            1.0,
            tuple(rng.random(3).tolist()),
            number=number,
            rung=0,
            standard_errors=(0.01,) * 3,
        )
        for number in range(NUM_OBSERVATIONS)
    )
    setting = SearchSetting(objectives=("a", "b", "c"))
    return ProposalContext(parameters, number=NUM_OBSERVATIONS, seed=4, observations=observations, setting=setting)


if __name__ == "__main__":
    main()

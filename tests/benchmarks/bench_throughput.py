"""Samples per second of the demo study, from its first to its last search chunk, against a bare loop.

The bare loop gives the same recipes and samples, in the same order, to one engine with the same threads and options in
a process of its own: no Ray, no Tune, no store, no searcher. Both run REPEATS times, alternating; ratios are of the
medians. Tune's own share is measured with the fake scorer: the same study with an engine that answers at once.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

REPEATS = 3
MUST, GOAL = 0.6, 0.85


def run() -> dict[str, Any]:
    studies, loops = [], []
    with tempfile.TemporaryDirectory(prefix="mergesearch-bench-") as temporary:
        for repeat in range(REPEATS):
            directory = Path(temporary) / str(repeat)
            subprocess.run(
                [sys.executable, "-m", "service.cli", "demo", "--out", str(directory)],
                check=True,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            studies.append(json.loads(_output("study", directory)))
            loops.append(json.loads(_output("loop", directory)))
        overhead = json.loads(_output("overhead", Path(temporary) / "overhead"))
    rates = {"study": [s["samples_per_s"] for s in studies], "bare_loop": [s["samples_per_s"] for s in loops]}
    medians = {name: statistics.median(values) for name, values in rates.items()}
    return {
        "samples_per_s": rates,
        "median_samples_per_s": medians,
        "ratio": medians["study"] / medians["bare_loop"],
        "must": MUST,
        "goal": GOAL,
        "studies": studies,
        "bare_loops": loops,
        "without_engine": overhead,
    }


def show(result: dict[str, Any]) -> None:
    for name, values in result["samples_per_s"].items():
        spread = ", ".join(f"{value:.0f}" for value in values)
        print(f"{name:<10} {result['median_samples_per_s'][name]:8.0f} samples/s   ({spread})")
    print(f"ratio      {result['ratio']:8.2f}   must {result['must']}, goal {result['goal']}")
    last = result["studies"][-1]
    print(
        f"engine busy for {last['busy_fraction']:.0%} of the search, {last['seconds']:.0f} s, {last['chunks']} chunks"
    )
    free = result["without_engine"]
    print(
        f"the same study with an engine that answers at once: {free['seconds']:.1f} s for {free['evaluations']} "
        f"evaluations, {1000 * free['seconds'] / free['evaluations']:.0f} ms each"
    )


def _output(part: str, directory: Path) -> str:
    return subprocess.run(
        [sys.executable, "-m", "tests.benchmarks.bench_throughput", part, str(directory)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout.splitlines()[-1]


def _search_evidence(store: Any, study: str) -> list[Any]:
    return [row for row in store.evidence(study) if any(key.startswith("search ") for key in row["prompts"])]


def measure_study(directory: Path) -> dict[str, Any]:
    """What the finished run in `directory` reached."""
    from service.run import read_run

    with read_run(directory) as (store, study):
        rows = _search_evidence(store, study.id)
    started = rows[0]["finished_at"] - sum(rows[0]["timings_s"].values())
    seconds = max(row["finished_at"] for row in rows) - started
    samples = sum(row["num_samples"] for row in rows)
    busy = sum(seconds for row in rows for name, seconds in row["timings_s"].items() if name != "wait")
    return {
        "seconds": seconds,
        "samples": samples,
        "samples_per_s": samples / seconds,
        "chunks": len(rows),
        "busy_fraction": busy / seconds,
    }


def measure_loop(directory: Path) -> dict[str, Any]:
    """The chunks of the run in `directory`, in their order, given to one engine."""
    import os

    from workers.engine import engine_environment
    from workers.types import EngineOptions, ScoreRequest, Span

    os.environ.update(engine_environment(EngineOptions()))  # before anything imports torch, as in a replica

    from search_spaces.recipe import Recipe
    from search_spaces.study import Study
    from service.preflight import examine
    from service.run import read_run

    with read_run(directory) as (store, study):
        rows = _search_evidence(store, study.id)
        recipes: dict[str, Recipe] = {trial.recipe.digest: trial.recipe for trial in store.trials(study.id)}
        examination = examine(Study.model_validate(study.document))
    from workers.replica import EngineWorker

    worker = EngineWorker(examination.family, examination.engine_options)
    worker.describe(tuple(examination.tasks.values()))
    requests = []
    for row in rows:
        spans = []
        for key in row["prompts"]:
            objective, _, positions = key.removeprefix("search ").partition("[")
            start, stop = positions.rstrip("]").split(":")
            spans.append(Span(objective, examination.tasks[objective], int(start), int(stop)))
        requests.append(ScoreRequest(study.id, recipes[row["recipe_digest"]], tuple(spans)))
    started = time.perf_counter()
    samples = sum(len(worker.score(request).samples) for request in requests)
    seconds = time.perf_counter() - started
    return {"seconds": seconds, "samples": samples, "samples_per_s": samples / seconds}


def measure_overhead(directory: Path) -> dict[str, Any]:
    """The demo study with the fake scorer: what Tune, the searcher and the store take by themselves."""
    import contextlib
    from collections.abc import Iterator

    from search_spaces.study import load_study
    from service.progress import ProgressStyle, ProgressView
    from service.run import read_run, run_study
    from workers.fake import FakeScorer
    from workers.tiny_family import family_dir

    @contextlib.contextmanager
    def open_fake(examination: Any, _: Any) -> Iterator[FakeScorer]:
        yield FakeScorer(bank_fingerprint=examination.family.fingerprint)

    study = load_study(family_dir() / "study.yaml")
    run_study(study, directory, view=ProgressView(ProgressStyle.LINES), open_scorer=open_fake)
    with read_run(directory) as (store, record):
        evaluations = sum(len(trial.rungs) for trial in store.trials(record.id))
    return {**measure_study(directory), "evaluations": evaluations}


if __name__ == "__main__":
    measure = {"study": measure_study, "loop": measure_loop, "overhead": measure_overhead}[sys.argv[1]]
    print(json.dumps(measure(Path(sys.argv[2]))))

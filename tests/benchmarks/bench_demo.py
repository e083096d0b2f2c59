"""Speed of scoring and quality of merges in the LFS study of docs/examples, with three seeds.

This study is longer than the shipped one, and spends its time only on scores, as the bare loop does.

Speed: samples per second from the first to the last search chunk, against a bare loop that gives the same recipes and
samples, in the same order, to one engine with the same threads and options in a process of its own: no Ray, no Tune, no
store, no searcher. Study and loop alternate; the ratio is the median of the three pairs' ratios. Tune's own share is
measured with the fake scorer: the same study with an engine that answers at once.

Quality: held-out means of the best trial on search data and of the best proposed trial; paired differences (with 95 %
intervals) of the best trial from the best proposed trial, the best expert and the best published recipe.
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

from workers.types import Split

LFS_STUDY = Path(__file__).parents[2] / "docs" / "examples" / "lfs.yaml"
SEEDS = (0, 1, 2)
MUST, GOAL = 0.8, 0.85


def run() -> dict[str, Any]:
    pairs, quality = [], []
    with tempfile.TemporaryDirectory(prefix="mergesearch-bench-") as temporary:
        for seed in SEEDS:
            directory = Path(temporary) / str(seed)
            _output("run", directory, str(seed))
            study, loop = json.loads(_output("study", directory)), json.loads(_output("loop", directory))
            pairs.append({"study": study, "bare_loop": loop, "ratio": study["samples_per_s"] / loop["samples_per_s"]})
            quality.append({"seed": seed, **_quality(directory)})
        overhead = json.loads(_output("overhead", Path(temporary) / "overhead"))
    return {
        "seeds": SEEDS,
        "ratio": statistics.median(pair["ratio"] for pair in pairs),
        "must": MUST,
        "goal": GOAL,
        "pairs": pairs,
        "without_engine": overhead,
        "quality": quality,
    }


def _quality(directory: Path) -> dict[str, Any]:
    """Held-out means of the best trial, the best searched trial, the best expert and the best published recipe."""
    summary = json.loads((directory / "summary.json").read_text())
    trials = [json.loads(line) for line in (directory / "trials.jsonl").read_text().splitlines()]
    rows = {row["trial"]: row for row in summary["holdout"]}
    best = rows[summary["best"]["trial"]]

    proposed = [t for t in trials if t["origin"] == "search" and t["number"] in rows]

    def rival(row: dict[str, Any]) -> dict[str, Any]:
        return {"label": row["label"], "mean": row["mean"]["value"], "minus_best": row["differences"]["mean"]}

    def best_of(origin: str) -> dict[str, Any]:
        return rival(max((r for r in rows.values() if r["origin"] == origin), key=lambda row: row["mean"]["value"]))

    return {
        "best": {"label": best["label"], "mean": best["mean"]["value"], "ci95": best["mean"]["ci95"]},
        "proposed": {
            "samples": sum(t["samples_scored"] for t in trials if t["origin"] == "search"),
            **rival(rows[max(proposed, key=lambda t: statistics.mean(t["values"].values()))["number"]]),
        },
        "source": best_of("source"),
        "published": best_of("published"),
        "search_s": summary["wall_clock_s"],
        "swap_s": summary["engine"]["swap_s"],
        "verification": {k: summary["verification"][k] for k in ("trials", "samples", "equal")},
    }


def show(result: dict[str, Any]) -> None:
    print("seed  samples/s  bare loop  ratio  engine busy")
    for seed, pair in zip(result["seeds"], result["pairs"], strict=True):
        study, loop = pair["study"], pair["bare_loop"]
        print(
            f"{seed:>4}  {study['samples_per_s']:9.0f}  {loop['samples_per_s']:9.0f}  {pair['ratio']:5.2f}  "
            f"{study['busy_fraction']:11.0%}"
        )
    print(f"median ratio {result['ratio']:.2f}   must {result['must']}, goal {result['goal']}")
    free = result["without_engine"]
    print(
        f"with an engine that answers at once: {free['seconds']:.1f} s for {free['evaluations']} evaluations, "
        f"{1000 * free['seconds'] / free['evaluations']:.0f} ms each\n"
    )
    print("seed  best on search data         minus proposed               minus expert                 minus published")
    for row in result["quality"]:
        rivals = (row[name] for name in ("proposed", "source", "published"))
        print(
            f"{row['seed']:>4}  {row['best']['label']:<20} {row['best']['mean']:.3f}  "
            + "  ".join(f"{rival['mean']:.3f} {_gain(rival)}" for rival in rivals)
        )


def _gain(rival: dict[str, Any]) -> str:
    """Text with the difference between the best trial and a rival, and its interval."""
    low, high = rival["minus_best"]["ci95"]
    return f"{-rival['minus_best']['value']:+.3f} [{-high:+.3f}, {-low:+.3f}]"


def _output(part: str, directory: Path, *arguments: str) -> str:
    return subprocess.run(
        [sys.executable, "-m", "tests.benchmarks.bench_demo", part, str(directory), *arguments],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout.splitlines()[-1]


def run_demo(directory: Path, seed: int) -> dict[str, Any]:
    """Run the study with another seed, in the same way as `mergesearch run`."""
    from search_spaces.study.file import load_study
    from service.cli.progress import ProgressStyle, ProgressView
    from service.jobs.resources import OWN
    from service.jobs.search.local_run import run_study

    study = load_study(LFS_STUDY)
    study = study.model_copy(update={"search": study.search.model_copy(update={"seed": seed})})
    with ProgressView(ProgressStyle.LINES) as view:
        run_study(study, directory, view=view, resources=OWN)
    return {"seed": seed}


def _search_evidence(store: Any, study: str) -> list[Any]:
    return [row for row in store.evidence(study) if row.is_of(Split.SEARCH)]


def measure_study(directory: Path) -> dict[str, Any]:
    """Figures of the finished run in the given directory."""
    from service.jobs.search.local_run import read_run

    with read_run(directory) as (store, study):
        rows = _search_evidence(store, study.id)
    started = rows[0].finished_at - sum(rows[0].timings_s.values())
    seconds = max(row.finished_at for row in rows) - started
    samples = sum(row.num_samples for row in rows)
    busy = sum(seconds for row in rows for name, seconds in row.timings_s.items() if name != "wait")
    return {
        "seconds": seconds,
        "samples": samples,
        "samples_per_s": samples / seconds,
        "chunks": len(rows),
        "busy_fraction": busy / seconds,
    }


def measure_loop(directory: Path) -> dict[str, Any]:
    """Time of a bare loop that sends the run's chunks, in their order, to one engine."""
    import os

    from search_spaces.study.engine import EngineOptions
    from workers.engines.vllm.environment import engine_environment
    from workers.types import ScoreRequest, Span

    os.environ.update(engine_environment(EngineOptions()))  # before anything imports torch, as in a replica

    from search_spaces.recipe import Recipe
    from search_spaces.study.file import Study
    from service.jobs.search.local_run import read_run
    from service.studies.preflight.examine import examine

    with read_run(directory) as (store, study):
        rows = _search_evidence(store, study.id)
        recipes: dict[str, Recipe] = {trial.recipe.digest: trial.read_recipe() for trial in store.trials(study.id)}
        preflight = examine(Study.model_validate(study.document))
    from workers.serving.engine_worker import EngineWorker

    worker = EngineWorker(preflight.models.family, preflight.engine_options)
    worker.describe(tuple(preflight.tasks.search.values()))
    requests = []
    for row in rows:
        spans = []
        for key in row.prompts:
            objective, _, positions = key.removeprefix("search ").partition("[")
            start, stop = positions.rstrip("]").split(":")
            spans.append(Span(objective, preflight.tasks.search[objective], int(start), int(stop)))
        requests.append(ScoreRequest(study.id, recipes[row.recipe_digest], tuple(spans)))
    started = time.perf_counter()
    samples = sum(len(worker.score(request).samples) for request in requests)
    seconds = time.perf_counter() - started
    return {"seconds": seconds, "samples": samples, "samples_per_s": samples / seconds}


def measure_overhead(directory: Path) -> dict[str, Any]:
    """Time of Tune, the searcher and the store alone: that of the study with the fake scorer."""
    import contextlib
    from collections.abc import Iterator
    from dataclasses import replace

    from search_spaces.study.file import load_study
    from service.cli.progress import ProgressStyle, ProgressView
    from service.jobs.resources import OWN
    from service.jobs.search.local_run import read_run, run_study
    from workers.serving.fake import FakeScorer
    from workers.types import Family, Scorer

    @contextlib.contextmanager
    def fake(family: Family, *_: Any) -> Iterator[Scorer]:
        yield FakeScorer(bank_fingerprint=family.fingerprint)

    study = load_study(LFS_STUDY)
    run_study(study, directory, view=ProgressView(ProgressStyle.LINES), resources=replace(OWN, scorer=fake))
    with read_run(directory) as (store, record):
        evaluations = sum(len(trial.rungs) for trial in store.trials(record.id))
    return {**measure_study(directory), "evaluations": evaluations}


if __name__ == "__main__":
    part, directory = sys.argv[1], Path(sys.argv[2])
    measures = {"study": measure_study, "loop": measure_loop, "overhead": measure_overhead}
    print(json.dumps(run_demo(directory, int(sys.argv[3])) if part == "run" else measures[part](directory)))

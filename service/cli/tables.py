"""Results as tables for the terminal, made from the same documents as the files and the HTTP API."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime

from rich import box
from rich.table import Table
from rich.text import Text

from search_spaces.objectives import COSTS
from service.cli.progress import STATE_STYLES
from service.client.requests import path_of_link
from service.disk import gib
from service.results.format import (
    ATTACK_NAMES,
    comparison_text,
    duration,
    preferred_text,
    sample_count,
    search_sentences,
    sort_holdout,
    violation_text,
)
from service.schemas.api import BytesUsedDocument, GpuDocument, JobDocument, NodeDocument, QueueDocument, StudyDocument
from service.schemas.files import (
    BenchmarksDocument,
    EstimateDocument,
    FindingDocument,
    ObjectiveDocument,
    ParetoDocument,
    SearchDocument,
    SummaryDocument,
    TrialDocument,
    VerificationDocument,
)
from service.types import JobState, Origin, TrialState

__all__ = [
    "attacks_table",
    "benchmarks_table",
    "cluster_table",
    "finding_line",
    "holdout_table",
    "id_digits",
    "job_table",
    "jobs_table",
    "judged_table",
    "local_time",
    "pareto_table",
    "queue_table",
    "search_line",
    "state_text",
    "studies_table",
    "study_table",
    "titled",
    "trials_table",
    "used_text",
    "verification_line",
]

JOB_STYLES: Mapping[str, str] = {JobState.RUNNING: "cyan", JobState.COMPLETE: "green", JobState.FAILED: "red"}

VERIFICATION_STYLES: Mapping[str, str] = {"not verified": "yellow", "disagreement": "red"}

# Digits of an id that are shown; more where shown prefixes would collide.
ID_DIGITS = 8


def pareto_table(document: ParetoDocument) -> Table:
    """Terminal table of a study's Pareto front: each trial's value and standard error of each objective.

    The trial with the best mean over the objectives comes first.
    """
    table = titled("Pareto front")
    table.add_column("trial", justify="right")
    table.add_column("label", overflow="fold")
    for objective in document["objectives"]:
        arrow = "↑" if objective["direction"] == "maximize" else "↓"
        table.add_column(f"{objective['name']} {arrow}", justify="right")
    names = [objective["name"] for objective in document["objectives"]]
    for row in sorted(document["front"], key=lambda row: -_signed_mean(row["values"], document["objectives"])):
        errors = row["standard_errors"]
        table.add_row(
            str(row["trial"]),
            _label(row["label"], row["origin"]),
            *(f"{row['values'][name]:.4g} {_error_text(errors.get(name, 0.0))}" for name in names),
        )
    caption = f"hypervolume {document['hypervolume']:.4g}; ± is one standard error, on search data"
    if held_out := document.get("holdout_hypervolume"):  # servers of earlier versions send none
        low, high = held_out["ci95"]
        caption += (
            f"\nthe {len(held_out['trials'])} finalists on held-out data: hypervolume {held_out['value']:.4g} "
            f"[{low:.4g}, {high:.4g}], on search data {held_out['search']:.4g}"
        )
    for row in document["front"]:
        if text := violation_text(row.get("violations", {})):
            caption += f"\ntrial {row['trial']} {text} on search data; no trial keeps to all constraints"
    if chosen := document.get("preferred"):
        caption += f"\n{preferred_text(chosen)}"
    table.caption = Text(caption, style="table.caption")
    return table


def holdout_table(document: SummaryDocument) -> Table:
    """Terminal table of a study's results on held-out data, highest mean first.

    The rows are the trials that are best on the search data, and the baselines, such as the source models. Each row has
    the trial's values, and its difference from the best trial, with 95 % confidence intervals.
    """
    table = titled("Held-out data")
    table.add_column("trial", justify="right")
    table.add_column("label", overflow="fold")
    rows = sort_holdout(document["holdout"])
    names = list(dict.fromkeys(name for row in rows for name in row["values"]))
    for name in names:
        table.add_column(name, justify="right")
    has_mean = len(names) > 1 and any(row["mean"] for row in rows)
    if has_mean:
        table.add_column("mean", justify="right")
    best = document["best"]["trial"] if document["best"] else None
    reference = document["holdout_reference"]
    table.add_column("minus best" if reference in (None, best) else f"minus trial {reference}", justify="right")
    for row in rows:
        values = [row["values"].get(name) for name in names]
        if has_mean:  # one interval per row; the report has all
            cells = ["" if value is None else _exact_text(value) or f"{value['value']:.3f}" for value in values]
            cells.append(_interval_text(row["mean"]))
        else:
            cells = [_interval_text(value) for value in values]
        difference = row["differences"].get("mean" if has_mean else names[0])
        cells.append("" if row["trial"] == reference else _interval_text(difference, signed=True))
        table.add_row(
            str(row["trial"]),
            _label(row["label"], row["origin"]),
            *cells,
            style="bold" if row["trial"] == best else None,
        )
    caption = "95 % intervals; differences are paired, sample by sample"
    for failure in document["holdout_failures"]:
        caption += f"\ntrial {failure['trial']} failed on held-out data: {failure['reason']}"
    for row in rows:
        if text := violation_text(row.get("violations", {})):
            caption += f"\ntrial {row['trial']} {text}"
    # As Text: a reason may contain characters that rich would parse as markup.
    table.caption = Text(caption, style="table.caption")
    return table


def benchmarks_table(document: BenchmarksDocument) -> Table:
    """Terminal table of the results of a study's trials on its benchmarks, with 95 % confidence intervals.

    The table also has averages over groups of benchmarks. Its caption compares the trials with baselines, such as the
    source models.
    """
    table = titled("Benchmarks")
    table.add_column("trial", justify="right")
    table.add_column("label", overflow="fold")
    averages = [group for group, names in document["groups"].items() if len(names) > 1]
    names = [column["name"] for column in document["benchmarks"]]
    for name in (*(f"average of {group}" for group in averages), *names):
        table.add_column(name, justify="right")
    for row in document["rows"]:
        estimates = [*(row["averages"].get(group) for group in averages), *(row["values"].get(name) for name in names)]
        table.add_row(
            str(row["trial"]),
            _label(row["label"], row["origin"]),
            *map(_interval_text, estimates),
            style="bold" if row["trial"] == document["reference"] else None,
        )
    lines = ["95 % intervals; those of all comparisons with one kind of baseline hold together"]
    lines += map(comparison_text, document["tests"])
    lines += [f"trial {f['trial']} failed on {f['benchmark']}: {f['reason']}" for f in document["failures"]]
    table.caption = Text("\n".join(lines), style="table.caption")
    return table


def attacks_table(document: BenchmarksDocument) -> Table:
    """Terminal table of results with adversarially changed prompts: values before and after, and the drop rate.

    The drop rate is the share of the value that is lost.
    """
    table = titled("Attacked prompts")
    table.add_column("trial", justify="right")
    table.add_column("label", overflow="fold")
    table.add_column("benchmark")
    for name in ("original", "attacked", "drop rate", "queries"):
        table.add_column(name, justify="right")
    kinds = {c["name"]: ATTACK_NAMES[c["attack"]["kind"]] for c in document["benchmarks"] if c["attack"]}
    for name, kind in kinds.items():
        for row in document["rows"]:
            if (found := row["attacks"].get(name)) is not None:
                table.add_row(
                    str(row["trial"]),
                    _label(row["label"], row["origin"]),
                    f"{name} ({kind})",
                    *map(_interval_text, (row["values"][name], found["value"], found["drop"])),
                    f"{found['queries']:,}",
                    style="bold" if row["trial"] == document["reference"] else None,
                )
    text = "drop rate: share of the value that is lost, with its 95 % bootstrap interval; less is more robust"
    table.caption = Text(text, style="table.caption")
    return table


def judged_table(document: BenchmarksDocument) -> Table:
    """Terminal table of benchmarks on which a judge, a model, compares completions with reference answers.

    The table contains the win rates, how consistent the judge is, and the lengths of the completions.
    """
    table = titled("Judged completions")
    table.add_column("trial", justify="right")
    table.add_column("label", overflow="fold")
    table.add_column("benchmark")
    for name in ("win rate", "both orders agree", "first preferred", "mean length", "no verdict"):
        table.add_column(name, justify="right")
    judges = {column["name"]: column["judge"] for column in document["benchmarks"] if column.get("judge")}
    for name in judges:
        for row in document["rows"]:
            if (found := row["judged"].get(name)) is not None:
                table.add_row(
                    str(row["trial"]),
                    _label(row["label"], row["origin"]),
                    f"{name} ({', '.join(found['models'])})",
                    _interval_text(row["values"][name]),
                    f"{found['agreement']:.0%}",
                    f"{found['first']:.0%}",
                    f"{found['length']:,.0f}",
                    f"{found['without_verdict']:,}",
                    style="bold" if row["trial"] == document["reference"] else None,
                )
    lengths = "; ".join(f"{name} {judge['reference_length']:,.0f}" for name, judge in judges.items() if judge)
    text = f"plain win rate against the reference answers, whose mean length in characters is: {lengths}"
    table.caption = Text(text, style="table.caption")
    return table


def finding_line(document: FindingDocument) -> Text:
    """Line of text that states a study's main result.

    The line says whether a merge is better than the best source model and than the best recipe from the literature.
    """
    return Text(f"finding:       {document['text']}")


def search_line(document: SearchDocument) -> Text:
    """Text about a study's search: the searcher, the reason why it was chosen, and the cost of the search."""
    return Text("search:        " + f"\n{'':<15}".join(search_sentences(document)))


def verification_line(document: VerificationDocument) -> Text:
    """Line of text that says whether Hugging Face transformers reproduced the scores that vLLM gave to samples.

    If no trials were verified in this way, the line has the reason.
    """
    status = document["status"]
    parts = []
    if status != "not verified":
        trials, left_out = document["trials"], document["trials_not_verified"]
        parts.append(f"{document['equal']} of {document['samples']} samples of {trials} of {trials + left_out} trials")
        parts.append(f"{document['tokens']:,} tokens and {document['logprobs']:,} log-probabilities compared")
    if unstable := document["unstable_logprobs"]:
        parts.append(f"{unstable:,} of them beyond the tolerance by rounding errors of float32")
    if document["samples_without_tokens"]:
        parts.append(f"tokens of {document['samples_without_tokens']} samples not stored, texts compared")
    if document["reason"]:
        parts.append(document["reason"])
    line = Text("verification:  ").append(status, style=VERIFICATION_STYLES.get(status, "green"))
    return line.append(f": {'; '.join(parts)}")


def trials_table(documents: Iterable[TrialDocument], objectives: Sequence[str]) -> Table:
    """Terminal table of trials, with each trial's values on the largest number of samples that it was scored on.

    `objectives` has the names of the objectives.
    """
    table = titled("Trials")
    for name, justify in (("trial", "right"), ("label", "left"), ("state", "left"), ("samples", "right")):
        table.add_column(name, justify="right" if justify == "right" else "left", overflow="fold")
    for name in objectives:
        table.add_column(name, justify="right")
    for trial in documents:
        rung = trial["rungs"][-1] if trial["rungs"] else None
        cells = [f"{rung['values'][name]:.4g}" if rung else "" for name in objectives]
        # As Text: a reason may contain characters that rich would parse as markup.
        invalid = trial.get("invalid")  # servers of earlier versions send none
        reasons = [
            trial["reason"] or "",
            f"invalid: {invalid}" if invalid else "",
            violation_text(trial.get("violations", {})),
        ]
        state = Text(": ".join(filter(None, [trial["state"].lower(), *reasons])))
        samples = sample_count(rung["samples"]) if rung else "0"
        table.add_row(str(trial["number"]), _label(trial["label"], trial["origin"]), state, samples, *cells)
    table.caption = "values at the highest rung finished; samples are per objective"
    return table


def studies_table(studies: Sequence[StudyDocument]) -> Table:
    """Terminal table of studies, one row for each in the given order.

    Ids are shortened to the first digits that tell all of them apart, at least 8.
    """
    table = titled("Studies")
    for name in ("study", "name", "state"):
        table.add_column(name, overflow="fold")
    table.add_column("trials", justify="right")
    table.add_column("worked", justify="right")
    table.add_column("created", no_wrap=True)
    table.add_column("best so far", overflow="fold")
    digits = id_digits([study["id"] for study in studies])
    for study in studies:
        progress = study["progress"]
        of = f"/{progress['max_trials']}" if progress else ""
        table.add_row(
            study["id"][:digits],
            Text(study["name"]),
            state_text(study["state"]),
            f"{_num_finished(study)}{of}",
            duration(study["wall_clock_s"]),
            local_time(study["created_at"]),
            _values_text(progress["best"]) if progress else "",
        )
    table.caption = "trials: finished / total; best: among trials at the full budget"
    return table


def study_table(study: StudyDocument, *, server: str) -> Table:
    """Terminal table of one study's fields.

    `server` is the server's address, which is put before links.
    """
    progress = study["progress"]
    rows: list[tuple[str, str | Text]] = []
    if algorithm := study.get("algorithm"):  # servers of earlier versions send none
        rows.append(("search", f"{algorithm}: {study['algorithm_reason']}"))
    rows.append(("trials", _trials_text(study)))
    if progress:
        rows.append(("stage", progress["stage"]))
        if planned := progress.get("steps_planned"):  # 0 for a searcher without steps; earlier versions send none
            rows.append(("steps", f"{progress.get('steps', 0):,} of {planned:,}"))
        rows.append(("samples", f"{progress['samples_scored']:,} of {progress['samples_planned']:,}"))
        if (limit := progress.get("max_samples")) is not None:
            used = progress.get("samples_used", 0)
            rows.append(("sample limit", f"{used:,} of {limit:,} used by the search ({used / limit:.0%})"))
        if progress["best"]:
            rows.append(("best so far", f"trial {progress['best_trial']}: {_values_text(progress['best'])}"))
    return job_table(study, noun="study", server=server, rows=rows)


def job_table(job: JobDocument, *, noun: str, server: str, rows: Iterable[tuple[str, str | Text]] = ()) -> Table:
    """Terminal table of one job's fields; `noun` is the word for the job, such as "study".

    `rows` are further rows for jobs of this kind, each a name and a text. `server` is the server's address, which is
    put before links.
    """
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    state = state_text(job["state"]).append(f": {job['reason']}" if job["reason"] else "", style="default")
    drivers = f"{job['attempt']} driver{'s' if job['attempt'] != 1 else ''}"
    table.add_row(noun, Text(job["name"], style="bold"))
    table.add_row("id", job["id"])
    table.add_row("state", state)
    if job["waiting_for"]:
        table.add_row("waits for", job["waiting_for"])
    if place := job.get("queue"):  # servers of earlier versions have no queue
        start = f", expected to start {local_time(place['estimated_start'])}" if place["estimated_start"] else ""
        table.add_row("queue", f"{place['position']} of {place['length']}{start}")
    table.add_row("created", local_time(job["created_at"]))
    table.add_row("worked", f"{duration(job['wall_clock_s'])}, by {drivers}")
    for name, text in rows:
        table.add_row(name, Text(text) if isinstance(text, str) else text)
    if ray_job := job["job"]:
        table.add_row("Ray job", ray_job["submission_id"])
        if ray_job["dashboard_url"]:
            table.add_row("dashboard", server + path_of_link(ray_job["dashboard_url"]))
    for name in ("report", "log"):
        if name in job["links"]:
            table.add_row(name, server + path_of_link(job["links"][name]))
    return table


def jobs_table(jobs: Sequence[JobDocument], *, noun: str, title: str) -> Table:
    """Terminal table of jobs of one kind, one row for each in the given order.

    `noun` is the word for such a job, such as "study", and `title` is the title of the table. Ids are shortened to the
    first digits that tell all of them apart, at least 8.
    """
    table = titled(title)
    for name in (noun, "name", "state"):
        table.add_column(name, overflow="fold")
    table.add_column("worked", justify="right")
    table.add_column("created", no_wrap=True)
    digits = id_digits([job["id"] for job in jobs])
    for job in jobs:
        times = duration(job["wall_clock_s"]), local_time(job["created_at"])
        table.add_row(job["id"][:digits], Text(job["name"]), state_text(job["state"]), *times)
    return table


def queue_table(document: QueueDocument) -> Table:
    """Build a table of the queue: the running jobs, then the waiting jobs in the order in which they start."""
    table = titled(f"Queue: {len(document['running'])} of {document['places']} places are taken")
    table.add_column("position", justify="right")
    for name in ("job", "name", "team", "priority", "waits for"):
        table.add_column(name, overflow="fold", justify="right" if name == "priority" else "left")
    table.add_column("expected start", no_wrap=True)
    entries = [*document["running"], *document["waiting"]]
    digits = id_digits([entry["job"]["id"] for entry in entries if entry["job"] is not None])
    for entry in entries:
        position = "runs" if entry["position"] is None else str(entry["position"])
        if (job := entry["job"]) is None:
            table.add_row(position, Text("a job that you may not read", style="dim"), "", "", "", "", "")
            continue
        start = local_time(entry["estimated_start"]) if entry["estimated_start"] else ""
        team, waits = Text(job["team"] or ""), Text(entry["waiting_for"] or "")
        table.add_row(position, job["id"][:digits], Text(job["name"]), team, str(job["priority"]), waits, start)
    table.caption = document["not_ready"] and f"no job continues: {document['not_ready']}"
    return table


def cluster_table(nodes: Sequence[NodeDocument]) -> Table:
    """Build a table of the nodes of a Ray cluster, with the use of their processors, memory, disk and GPUs."""
    table = titled("Nodes of the Ray cluster")
    for name in ("host", "address", "state"):
        table.add_column(name, overflow="fold")
    for name in ("processors", "memory", "disk"):
        table.add_column(name, justify="right")
    table.add_column("GPUs", overflow="fold")
    for node in nodes:
        state = ("head" if node["is_head"] else "alive") if node["is_alive"] else "dead"
        busy = "" if node["cpu_percent"] is None else f", {node['cpu_percent']:.0f} %"
        processors = "" if node["num_cpus"] is None else f"{node['num_cpus']}{busy}"
        gpus = "\n".join(_gpu_text(gpu) for gpu in node["gpus"])
        memory, disk = used_text(node["memory"]), used_text(node["disk"])
        style = "" if node["is_alive"] else "red"
        table.add_row(node["host"], node["address"], Text(state, style=style), processors, memory, disk, Text(gpus))
    return table


def _gpu_text(gpu: GpuDocument) -> str:
    busy = "" if gpu["percent"] is None else f"{gpu['percent']:.0f} %, "
    return f"{gpu['name']}: {busy}{used_text(gpu['memory'])}"


def used_text(used: BytesUsedDocument) -> str:
    """Text of the used and the total bytes, such as "24.0 of 64.0 GiB"; empty if the total is unknown."""
    return f"{gib(used['used']).removesuffix(' GiB')} of {gib(used['total'])}" if used["total"] else ""


def titled(title: str) -> Table:
    return Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, caption_justify="left")


def _label(label: str, origin: str) -> Text:
    return Text(label, style="" if Origin(origin).is_searched else "dim")


def state_text(state: str) -> Text:
    """Text of a job's state, such as "complete", in a colour for this state."""
    return Text(state.lower(), style=JOB_STYLES.get(state, ""))


def id_digits(ids: Sequence[str]) -> int:
    """Smallest number of leading digits that tells all given ids apart, but at least 8."""
    digits = ID_DIGITS
    while len({name[:digits] for name in ids}) < len(ids):
        digits += 1
    return digits


def _num_finished(study: StudyDocument) -> int:
    return sum(count for state, count in study["trials"].items() if TrialState(state).is_finished)


def _trials_text(study: StudyDocument) -> Text:
    of = f" of {study['progress']['max_trials']}" if study["progress"] else ""
    text = Text(f"{_num_finished(study)}{of}")
    for state, style in STATE_STYLES.items():
        if count := study["trials"].get(state, 0):
            text.append(f"  {count} {state.lower()}", style=style)
    return text


def _values_text(values: Mapping[str, float]) -> str:
    return "  ".join(f"{name} {value:.4g}" for name, value in values.items())


def local_time(time: str) -> str:
    return f"{datetime.fromisoformat(time).astimezone():%Y-%m-%d %H:%M}"


def _signed_mean(values: Mapping[str, float], objectives: Sequence[ObjectiveDocument]) -> float:
    ranked = [o for o in objectives if o["metric"] not in COSTS] or objectives
    return statistics.fmean(values[o["name"]] * (1 if o["direction"] == "maximize" else -1) for o in ranked)


def _error_text(error: float | None) -> str:
    return "±n/a" if error is None else f"±{error:.2g}"


def _exact_text(estimate: EstimateDocument, *, signed: bool = False) -> str:
    """Text of the value of `estimate` if the value follows from the recipe (merge) alone, such as the model's size.

    Such a value has no confidence interval. Returns "" if the value is a mean over samples, which has a confidence
    interval. If `signed` is True, a positive value has a plus sign.
    """
    return "" if estimate["samples"] else f"{estimate['value']:{'+' if signed else ''},.10g}"


def _interval_text(estimate: EstimateDocument | None, *, signed: bool = False) -> str:
    if estimate is None:
        return ""
    if exact := _exact_text(estimate, signed=signed):
        return exact
    low, high = estimate["ci95"]
    sign = "+" if signed else ""
    return f"{estimate['value']:{sign}.3f} [{low:{sign}.3f}, {high:{sign}.3f}]"

"""`mergesearch finetune`: trains one or several experts, runs the study that merges them, and shows progress."""

from __future__ import annotations

import argparse
import errno
import json
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from search_spaces.errors import InvalidStudy
from service.cli.finetune_texts import loss_text, value_texts
from service.cli.terminal import console, print_json, print_json_line
from service.results.losses import is_at_offset
from service.types import JobState
from workers.errors import InvalidTask, TrainingFailed
from workers.training.finetuning.history import METRICS, VALUES, read_history

__all__ = ["finetune", "training_text"]

INTERVAL_S = 5.0

REPORT = "report.html"


def finetune(options: argparse.Namespace, *, run_study: Callable[[Any, Path], int]) -> int:
    """Run `mergesearch finetune` with the parsed command line `options`, and return the exit code.

    The command trains experts (fine-tuned models) as a specification file says. The command analyses the experts if the
    specification requests an analysis, or if `options.analyse` is not None; `options.analyse` is a list of directories
    of earlier fine-tunings to compare with. If the specification has a study that merges the trained experts,
    `run_study` is called with the study and its directory. `run_study` must run the study, export the best merge, print
    the results and return the exit code.
    """
    from service.jobs.finetune.directory import EXPERT_DIR, trained_fleet
    from service.jobs.finetune.request import template_problems
    from service.jobs.finetune.training import run_fleet
    from service.jobs.resources import OWN
    from service.results.training import (
        ANALYSIS_FILE,
        analyse,
        directory_curves,
        lack_of_losses,
        read_analysis,
        render_training,
    )
    from workers.training.finetuning.fleet import STUDY, Analysis, load_pipeline

    out: Path = options.out
    if out.exists() and not out.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "not a directory; give another one", str(out))
    pipeline = load_pipeline(options.spec)
    places = pipeline.places(out)
    analysed = options.analyse is not None or pipeline.analysis is not None
    if analysed and (problems := lack_of_losses(pipeline)):
        raise InvalidStudy(problems)
    if not (out / STUDY).exists():
        with suppress(InvalidTask):  # data that cannot be read are reported before their expert is trained
            if problems := template_problems(pipeline):
                raise InvalidStudy(problems)

    def report(state: JobState, reason: str | None = None) -> Path:
        file = out / REPORT
        curves = directory_curves(places)
        file.write_text(
            render_training(pipeline, curves, state=state.value, reason=reason, analysis=read_analysis(out))
        )
        return file

    try:
        with _progress(places, as_json=options.json):
            summaries = run_fleet(
                pipeline.experts,
                places,
                resources=OWN,
                parallel=pipeline.parallel_experts,
                note=_quiet if options.json else _note,
            )
    except KeyboardInterrupt:
        print(f"interrupted; the same command resumes the fine-tuning in {out}", file=sys.stderr)
        return 130
    except TrainingFailed as error:
        report(JobState.FAILED, str(error))
        raise
    if analysed:
        fleets = [(pipeline.experts, places), *map(trained_fleet, options.analyse or ())]
        wanted = pipeline.analysis or Analysis()
        samples = options.samples or wanted.samples
        found = analyse(fleets, samples=samples, wudi=wanted.wudi, note=_quiet if options.json else _note)
        (out / ANALYSIS_FILE).write_text(json.dumps(found, indent=1) + "\n")
    written = report(JobState.COMPLETE)
    study = pipeline.study_of({alias: place / EXPERT_DIR for alias, place in places.items()})
    if study is None and options.json:
        print_json(summaries if pipeline.is_fleet else next(iter(summaries.values())))
    elif not options.json:
        for alias, summary in summaries.items():
            print(_line(alias, summary, places[alias] / EXPERT_DIR))
        if analysed:
            from service.cli.finetune_tables import analysis_tables

            console().print(*analysis_tables(found), sep="\n")
        print(f"report: {written}")
    return 0 if study is None else run_study(study, out / STUDY)


def _line(alias: str, summary: dict[str, Any], expert: Path) -> str:
    values = "".join(f", {text}" for text in value_texts(summary))
    # Only the summaries of the method mergopt have a loss at the weights.
    loss = loss_text(summary, is_moved="weights_loss" in summary)
    return f"{alias}: {summary['steps']} steps, last {loss}{values}; expert: {expert}"


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _quiet(text: str) -> None:
    pass


@contextmanager
def _progress(places: dict[str, Path], *, as_json: bool) -> Iterator[None]:
    """Context that prints new losses and evaluations of running trainings every 5 s.

    `places` contains the directory of each training, keyed by the alias of the expert, the model that is trained. The
    output is text on standard error or, if `as_json` is True, JSON lines on standard output.
    """
    done = threading.Event()
    shown = {alias: len(read_history(place / METRICS)) for alias, place in places.items()}

    def show() -> None:
        while not done.wait(INTERVAL_S):
            for alias, place in places.items():
                lines = read_history(place / METRICS)
                if len(lines) != shown[alias]:  # fewer, after a resumption from a checkpoint
                    shown[alias] = len(lines)
                    _note(_text(alias, lines)) if not as_json else print_json_line({"expert": alias, **lines[-1]})

    thread = threading.Thread(target=show, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _text(alias: str, lines: list[dict[str, Any]]) -> str:
    update = next((line for line in reversed(lines) if "loss" in line), None)
    evaluation: dict[str, Any] = next((line for line in reversed(lines) if line.get(VALUES)), {})
    if update is None:
        return f"{alias}: no update yet"
    return training_text({**evaluation, "expert": alias, **update})


def training_text(line: Mapping[str, Any]) -> str:
    """Text that describes an update, or an evaluation, in the training of an expert (a fine-tuned model).

    The text contains the loss, the values of an evaluation, or both. `line` has the numbers of the update or
    evaluation, as JSON.
    """
    of = f" of {line['steps']}" if line.get("steps") else ""
    loss = ""
    if "loss" in line:
        loss = f"  {loss_text(line, is_moved=is_at_offset(line))}  {line['seconds']:.2f} s a step"
    scores = "".join(f"  {text}" for text in value_texts(line))
    return f"{line['expert']}: step {line['step']}{of}{loss}{scores}"

"""The `mergesearch` command. Parses, calls, prints; decides nothing.

What is heavy (torch, Ray, vLLM, even pydantic) is imported by the verb that needs it, so that help is instant.
Exit codes: 0 done, 1 the study failed or could not go on, 2 the input is at fault, 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from service.results import RunRecord

__all__ = ["main"]

SCHEMAS = ("study", "trial", "summary", "pareto", "recipe")

# A path that was given is not what it should be.
WRONG_PLACE = (FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    options = _parser().parse_args(arguments)
    try:
        return int(options.call(options) or 0)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output has left, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        code = _exit_code(error)
        if code is None:
            raise
        print(_told(error, as_json=getattr(options, "json", False)), file=sys.stderr)
        return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mergesearch",
        description="Finds the best merges of language models: a Pareto front with held-out scores, as checkpoints.",
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    verbs = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def verb(name: str, call: Any, text: str) -> argparse.ArgumentParser:
        command = verbs.add_parser(name, help=text, description=text)
        command.set_defaults(call=call)
        command.add_argument("--json", action="store_true", help="machine-readable output on standard output")
        return command

    command = verb("run", _run, "Run a study file in a directory, or resume it there.")
    command.add_argument("study", type=Path, metavar="STUDY", help="study file (YAML or JSON)")
    command.add_argument("--out", type=Path, required=True, metavar="DIR", help="where results and state are kept")
    command.add_argument("--check", action="store_true", help="check everything, print the plan, start nothing")
    command.add_argument("--export", choices=["best"], help="write the best merge to DIR/export")

    command = verb("demo", _demo, "Search the shipped tiny model family and export its best merge.")
    command.add_argument("--out", type=Path, default=Path("mergesearch-demo"), metavar="DIR")

    command = verb("export", _export, "Write a trial's merged model as safetensors.")
    command.add_argument("run", type=Path, metavar="DIR", help="directory of a run")
    command.add_argument("trial", metavar="TRIAL", help='trial number, or "best"')
    command.add_argument("--out", type=Path, required=True, metavar="DIR")
    command.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="default: the engine's")

    command = verb("merge", _merge, "Merge models by a recipe file, without a search.")
    command.add_argument("recipe", type=Path, metavar="RECIPE", help="recipe.json of a run or export")
    command.add_argument("--out", type=Path, required=True, metavar="DIR")
    command.add_argument(
        "--model", action="append", default=[], metavar="ALIAS=DIR", help="where a model of the recipe is; repeat"
    )
    command.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="bfloat16")

    command = verb("trials", _trials, "List a run's trials.")
    command.add_argument("run", type=Path, metavar="DIR")

    command = verb("pareto", _pareto, "Show a run's Pareto front.")
    command.add_argument("run", type=Path, metavar="DIR")

    command = verb("schema", _schema, "Print the JSON Schema of a file that people write or read.")
    command.add_argument("name", choices=SCHEMAS)
    return parser


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any, **__: Any) -> None:
        from importlib.metadata import version

        print(version("mergesearch"))
        parser.exit()


# -- verbs -----------------------------------------------------------------------------------------------------------


def _run(options: argparse.Namespace) -> int:
    from search_spaces.study import load_study

    study = load_study(options.study)
    if options.check:
        return _check(study, as_json=options.json)
    return _run_in(study, options.out, export_best=options.export == "best", as_json=options.json)


def _demo(options: argparse.Namespace) -> int:
    from search_spaces.study import load_study
    from workers.tiny_family import family_dir

    study = load_study(family_dir() / "study.yaml")
    return _run_in(study, options.out, export_best=True, as_json=options.json)


def _run_in(study: Any, directory: Path, *, export_best: bool, as_json: bool) -> int:
    from service.progress import ProgressStyle, ProgressView
    from service.results import summary
    from service.run import run_study

    view = ProgressView(ProgressStyle.JSON if as_json else ProgressStyle.AUTO)
    try:
        with view:
            result = run_study(study, directory, view=view)
            exported = _export_from(directory, "best", directory / "export") if export_best else None
    except KeyboardInterrupt:
        print(f"interrupted; the same command resumes the study in {directory}", file=sys.stderr)
        return 130
    if as_json:
        _print_json(summary(result))
    else:
        _print_results(_console(), result, directory, exported)
    return 0


def _check(study: Any, *, as_json: bool) -> int:
    from service.check import check

    plan = check(study)
    if as_json:
        _print_json(plan.to_json())
    else:
        print(plan.to_text())
    return 0


def _export(options: argparse.Namespace) -> int:
    out = _export_from(options.run, options.trial, options.out, dtype=options.dtype)
    _print_json({"directory": str(out)}) if options.json else print(f"merged model: {out}")
    return 0


def _merge(options: argparse.Namespace) -> int:
    from service.export import merge_recipe

    out = merge_recipe(options.recipe, _directories(options.model), options.out, dtype=options.dtype)
    _print_json({"directory": str(out)}) if options.json else print(f"merged model: {out}")
    return 0


def _trials(options: argparse.Namespace) -> int:
    from service.results import trial_document
    from service.tables import trials_table

    result = _read(options.run)
    documents = [trial_document(trial) for trial in result.trials]
    if options.json:
        _print_json(documents)
    else:
        _console().print(trials_table(documents, [objective.name for objective in result.objectives]))
    return 0


def _pareto(options: argparse.Namespace) -> int:
    from service.results import pareto
    from service.tables import pareto_table

    document = pareto(_read(options.run))
    _print_json(document) if options.json else _console().print(pareto_table(document))
    return 0


def _schema(options: argparse.Namespace) -> int:
    from service.documents import schemas

    _print_json(schemas()[options.name])
    return 0


# -- helpers -----------------------------------------------------------------------------------------------------------


def _console() -> Any:
    from rich.console import Console

    return Console() if sys.stdout.isatty() else Console(width=110)


def _read(directory: Path) -> RunRecord:
    from service.run import read_run
    from service.run_record import run_record

    with read_run(directory) as (store, study):
        return run_record(store, study.id)


def _export_from(directory: Path, trial: str, out: Path, *, dtype: str | None = None) -> Path:
    from service.export import export_trial
    from service.run import read_run

    with read_run(directory) as (store, study):
        return export_trial(store, study, trial, out, dtype=dtype)


def _print_results(console: Any, result: RunRecord, directory: Path, exported: Path | None) -> None:
    from service.results import pareto, summary
    from service.tables import holdout_table, pareto_table

    document = summary(result)
    console.print(pareto_table(pareto(result)))
    if document["holdout"]:
        console.print(holdout_table(document))
    console.print(f"report:       {directory / 'report.html'}", highlight=False, soft_wrap=True)
    if exported is not None:
        console.print(f"merged model: {exported}", highlight=False, soft_wrap=True)


def _directories(models: Sequence[str]) -> dict[str, Path]:
    """What the options `--model ALIAS=DIR` say, by alias."""
    from search_spaces.errors import InvalidRecipe

    directories: dict[str, Path] = {}
    for text in models:
        alias, equals, directory = text.partition("=")
        if not (alias and equals and directory):
            raise InvalidRecipe(f"--model {text!r}: write ALIAS=DIR, e.g. --model math=/models/math")
        if alias in directories:
            raise InvalidRecipe(f"--model {text!r}: {alias} is given twice, first as {directories[alias]}")
        directories[alias] = Path(directory)
    return directories


def _print_json(document: Any) -> None:
    print(json.dumps(document, indent=2))


def _exit_code(error: Exception) -> int | None:
    """None: a fault of ours, to be shown with its traceback."""
    from search_spaces.errors import SearchSpaceError
    from service.errors import Conflict, NotFound, ServiceError
    from workers.errors import EngineUnavailable, InvalidModel, InvalidTask

    if isinstance(error, SearchSpaceError | InvalidModel | InvalidTask | Conflict | NotFound):
        return 2
    if isinstance(error, WRONG_PLACE) and error.filename is not None:
        return 2
    if isinstance(error, ServiceError | EngineUnavailable | ConnectionError):
        return 1
    return None


def _told(error: Exception, *, as_json: bool) -> str:
    from search_spaces.errors import InvalidStudy
    from workers.errors import InvalidModel

    text = f"{error.filename}: {error.strerror}" if isinstance(error, WRONG_PLACE) else str(error)
    if not as_json:
        return "\n".join(f"mergesearch: {line}" for line in text.splitlines())
    if isinstance(error, InvalidStudy):
        problems = [{"field": problem.field, "message": problem.message} for problem in error.problems]
    else:
        messages = error.problems if isinstance(error, InvalidModel) else (text,)
        problems = [{"field": "", "message": message} for message in messages]
    return json.dumps({"error": type(error).__name__, "problems": problems})


if __name__ == "__main__":
    sys.exit(main())

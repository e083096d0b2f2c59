"""The `mergesearch` command. Parses, calls, prints; decides nothing.

What is heavy (torch, Ray, vLLM, even pydantic) is imported by the verb that needs it, so that help is instant.
Exit codes: 0 done, 1 the study failed or could not go on or no server answers, 2 the input is at fault,
130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from service.cli.terminal import console, print_json, print_results

if TYPE_CHECKING:
    from service.cli.remote import ServerVerbs
    from service.results.files import RunRecord

__all__ = ["main"]

RUN_OR_STUDY = "directory of a run, or a study on a server: its id, the beginning of that, or its name"

DTYPES = ("float32", "bfloat16", "float16")

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

    def server_verb(name: str, call: Any, text: str) -> argparse.ArgumentParser:
        command = verb(name, call, text)
        command.add_argument(
            "--server", metavar="URL", help="default: $MERGESEARCH_SERVER, else a server on this machine"
        )
        return command

    command = verb("run", _run, "Run a study file in a directory, or resume it there.")
    command.add_argument("study", type=Path, metavar="STUDY", help="study file (YAML or JSON)")
    command.add_argument("--out", type=Path, required=True, metavar="DIR", help="where results and state are kept")
    command.add_argument("--check", action="store_true", help="check everything, print the plan, start nothing")
    command.add_argument("--export", choices=["best"], help="write the best merge to DIR/export")

    command = verb("demo", _demo, "Search the shipped tiny model family and export its best merge.")
    command.add_argument("--out", type=Path, default=Path("mergesearch-demo"), metavar="DIR")

    command = verb("serve", _serve, "Serve studies over HTTP, on a Ray of this machine or of RAY_ADDRESS.")
    command.add_argument("--data", type=Path, required=True, metavar="DIR", help="where studies and exports are kept")
    command.add_argument("--host", default="127.0.0.1", help="address to listen on (default %(default)s)")
    command.add_argument("--port", type=int, default=8080, help="default %(default)s; 0: any free one")
    command.add_argument("--dashboard-host", default="127.0.0.1", help="address of the Ray dashboard it starts")
    command.add_argument("--dashboard-port", type=int, help="default: 8265, or the next free one")

    command = server_verb("submit", _submit, "Submit a study file to a server.")
    command.add_argument("study", type=Path, metavar="STUDY", help="study file (YAML or JSON)")
    command.add_argument("--watch", action="store_true", help="then watch it until it has ended")
    command.add_argument(
        "--name-key", metavar="KEY", help="name this request: the same again gives the study that it made before"
    )

    server_verb("studies", _studies, "List a server's studies.")

    for name, call, text in (
        ("show", _show, "Show where a study on a server stands."),
        ("watch", _watch, "Watch a study on a server until it has ended."),
        ("log", _log, "Print what the drivers of a study on a server have printed."),
        ("cancel", _cancel, "End a study on a server for good; what it has found is kept."),
    ):
        command = server_verb(name, call, text)
        command.add_argument("study", metavar="STUDY", help="id of the study, its beginning, or its name")

    command = server_verb("export", _export, "Write a trial's merged model as safetensors.")
    command.add_argument("run", metavar="DIR|STUDY", help=RUN_OR_STUDY)
    command.add_argument("trial", metavar="TRIAL", help='trial number, or "best"')
    command.add_argument("--out", type=Path, required=True, metavar="DIR")
    command.add_argument("--dtype", choices=DTYPES, help="default: the engine's")

    command = verb("merge", _merge, "Merge models by a recipe or a mergekit configuration, without a search.")
    command.add_argument("file", type=Path, metavar="FILE", help="recipe.json of an export, or mergekit's YAML")
    command.add_argument("--out", type=Path, required=True, metavar="DIR")
    command.add_argument(
        "--model",
        action="append",
        default=[],
        metavar="ALIAS=DIR",
        help="where a model of the recipe is, or one that mergekit's file names; repeat",
    )
    command.add_argument("--check", action="store_true", help="check everything, print the plan, write nothing")
    command.add_argument("--dtype", choices=DTYPES, help="default: the file's, else the models' (a recipe: bfloat16)")
    command.add_argument(
        "--max-shard-size", type=_num_bytes, metavar="SIZE", help="of the largest file of weights; default: 5GB"
    )

    command = server_verb("trials", _trials, "List a run's trials.")
    command.add_argument("run", metavar="DIR|STUDY", help=RUN_OR_STUDY)

    command = server_verb("pareto", _pareto, "Show a run's Pareto front.")
    command.add_argument("run", metavar="DIR|STUDY", help=RUN_OR_STUDY)

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
    from search_spaces.study.file import load_study

    study = load_study(options.study)
    if options.check:
        return _check(study, options.out, exports=options.export == "best", as_json=options.json)
    return _run_in(study, options.out, export_best=options.export == "best", as_json=options.json)


def _demo(options: argparse.Namespace) -> int:
    from search_spaces.study.file import load_study
    from workers.tiny_family import family_dir

    study = load_study(family_dir() / "study.yaml")
    return _run_in(study, options.out, export_best=True, as_json=options.json)


def _run_in(study: Any, directory: Path, *, export_best: bool, as_json: bool) -> int:
    from service.cli.progress import ProgressStyle, ProgressView
    from service.results.files import pareto, summary
    from service.studies.local_run import run_study
    from service.studies.preflight.examine import EXPORT

    view = ProgressView(ProgressStyle.JSON if as_json else ProgressStyle.AUTO)
    try:
        with view:
            result = run_study(study, directory, view=view, exports=export_best)
            if export_best:
                _export_from(directory, "best", directory / EXPORT)
    except KeyboardInterrupt:
        print(f"interrupted; the same command resumes the study in {directory}", file=sys.stderr)
        return 130
    if as_json:
        print_json(summary(result))
    else:
        places = {"report": directory / "report.html"} | ({"merged_model": directory / EXPORT} if export_best else {})
        print_results(pareto(result), summary(result), **{name: str(place) for name, place in places.items()})
    return 0


def _check(study: Any, directory: Path, *, exports: bool, as_json: bool) -> int:
    from service.studies.dry_run import check

    plan = check(study, directory, exports=exports)
    if as_json:
        print_json(plan.to_json())
    else:
        print(plan.to_text())
    return 0


def _serve(options: argparse.Namespace) -> int:
    from service.server import serve

    serve(
        options.data,
        host=options.host,
        port=options.port,
        dashboard_host=options.dashboard_host,
        dashboard_port=options.dashboard_port,
    )
    return 0


def _submit(options: argparse.Namespace) -> int:
    with _on_server(options) as server:
        return server.submit(options.study, key=options.name_key, watch=options.watch)


def _studies(options: argparse.Namespace) -> int:
    with _on_server(options) as server:
        return server.studies()


def _show(options: argparse.Namespace) -> int:
    with _on_server(options) as server:
        return server.show(options.study)


def _watch(options: argparse.Namespace) -> int:
    with _on_server(options) as server:
        return server.watch(options.study)


def _log(options: argparse.Namespace) -> int:
    with _on_server(options) as server:
        return server.log(options.study)


def _cancel(options: argparse.Namespace) -> int:
    with _on_server(options) as server:
        return server.cancel(options.study)


def _export(options: argparse.Namespace) -> int:
    if not _is_directory(options):
        with _on_server(options) as server:
            return server.export(options.run, options.trial, options.out, dtype=options.dtype)
    out = _export_from(Path(options.run), options.trial, options.out, dtype=options.dtype)
    print_json({"directory": str(out)}) if options.json else print(f"merged model: {out}")
    return 0


def _merge(options: argparse.Namespace) -> int:
    from service.cli.export_progress import ExportView
    from service.studies.merge import check_merge, merge_file

    directories = _directories(options.model)
    if options.check:
        note = partial(print, file=sys.stderr)
        plan = check_merge(options.file, directories, options.out, dtype=options.dtype, note=note)
        print_json(plan.to_json()) if options.json else print(plan.to_text())
        return 0
    shards = {} if options.max_shard_size is None else {"max_shard_bytes": options.max_shard_size}
    try:
        with ExportView() as view:
            out = merge_file(
                options.file,
                directories,
                options.out,
                dtype=options.dtype,
                note=partial(print, file=sys.stderr),
                progress=view.update,
                **shards,
            )
    except KeyboardInterrupt:
        print("interrupted; the same command keeps the files that are whole", file=sys.stderr)
        return 130
    print_json({"directory": str(out)}) if options.json else print(f"merged model: {out}")
    return 0


def _trials(options: argparse.Namespace) -> int:
    if not _is_directory(options):
        with _on_server(options) as server:
            return server.trials(options.run)
    from service.cli.tables import trials_table
    from service.results.files import trial_document

    result = _read(Path(options.run))
    documents = [trial_document(trial) for trial in result.trials]
    if options.json:
        print_json(documents)
    else:
        console().print(trials_table(documents, [objective.name for objective in result.objectives]))
    return 0


def _pareto(options: argparse.Namespace) -> int:
    if not _is_directory(options):
        with _on_server(options) as server:
            return server.pareto(options.run)
    from service.cli.tables import pareto_table
    from service.results.files import pareto

    document = pareto(_read(Path(options.run)))
    print_json(document) if options.json else console().print(pareto_table(document))
    return 0


def _schema(options: argparse.Namespace) -> int:
    from service.schemas.files import schemas

    print_json(schemas()[options.name])
    return 0


# -- helpers -----------------------------------------------------------------------------------------------------------


def _on_server(options: argparse.Namespace) -> AbstractContextManager[ServerVerbs]:
    from service.cli.remote import server_verbs

    no_directory = getattr(options, "run", None) if options.server is None else None
    return server_verbs(options.server, as_json=options.json, no_directory=no_directory)


def _is_directory(options: argparse.Namespace) -> bool:
    """Whether DIR|STUDY names a run's directory rather than a study on a server."""
    return options.server is None and (os.sep in options.run or Path(options.run).exists())


def _read(directory: Path) -> RunRecord:
    from service.results.load import run_record
    from service.studies.local_run import read_run

    with read_run(directory) as (store, study):
        return run_record(store, study.id)


def _export_from(directory: Path, trial: str, out: Path, *, dtype: str | None = None) -> Path:
    from service.cli.export_progress import ExportView
    from service.studies.export import export_trial
    from service.studies.local_run import read_run

    with read_run(directory) as (store, study), ExportView() as view:
        return export_trial(store, study, trial, out, dtype=dtype, progress=view.update)


def _num_bytes(text: str) -> int:
    """The bytes in "500MB" or "5GB". Raises argparse's error."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?(KB|MB|GB)", text.upper())
    if match is None or float(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write it as 500MB or 5GB")
    return int(float(match[1]) * {"KB": 10**3, "MB": 10**6, "GB": 10**9}[match[2]])


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


def _exit_code(error: Exception) -> int | None:
    """None: a fault of ours, to be shown with its traceback."""
    from search_spaces.errors import SearchSpaceError
    from service.errors import Conflict, NotFound, RequestRefused, ServiceError
    from workers.errors import EngineUnavailable, InvalidModel, InvalidTask

    if isinstance(error, RequestRefused):
        return 2 if error.status < 500 else 1
    if isinstance(error, SearchSpaceError | InvalidModel | InvalidTask | Conflict | NotFound):
        return 2
    if isinstance(error, WRONG_PLACE) and error.filename is not None:
        return 2
    if isinstance(error, ServiceError | EngineUnavailable | ConnectionError):
        return 1
    return None


def _told(error: Exception, *, as_json: bool) -> str:
    from search_spaces.errors import InvalidStudy
    from service.errors import RequestRefused
    from workers.errors import InvalidModel

    text = f"{error.filename}: {error.strerror}" if isinstance(error, WRONG_PLACE) else str(error)
    if not as_json:
        return "\n".join(f"mergesearch: {line}" for line in text.splitlines())
    if isinstance(error, InvalidStudy):
        problems = [{"field": problem.field, "message": problem.message} for problem in error.problems]
    elif isinstance(error, RequestRefused):
        problems = [{"field": problem["field"], "message": problem["message"]} for problem in error.problems]
    else:
        messages = error.problems if isinstance(error, InvalidModel) else (text,)
        problems = [{"field": "", "message": message} for message in messages]
    return json.dumps({"error": type(error).__name__, "problems": problems})


if __name__ == "__main__":
    sys.exit(main())

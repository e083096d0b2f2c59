"""The `mergesearch` command: its options, and the exit code and message of every error.

The module `verbs` does the work. Exit codes are 0 (done), 1 (the job failed or cannot continue, or no server responds),
2 (the input is wrong) and 130 (interrupted).
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from search_spaces.errors import InvalidStudy, SearchSpaceError
from service.auth.settings import GroupRole
from service.cli import accounts, notifications, verbs
from service.cli.plan import plan
from service.disk import parse_bytes
from service.errors import Conflict, NotFound, RequestRefused, ServiceError
from service.jobs.registry import KINDS
from service.retention.limits import Limit, parse_keep
from workers.errors import EngineUnavailable, EvidenceMismatch, InvalidModel, InvalidTask, TrainingFailed
from workers.telemetry.logs import FORMATS

__all__ = ["main"]

RUN_OR_STUDY = "directory of a run, or a study on a server: its id, a prefix of its id, or its name"
RUN_OR_JOB = "directory of a run, or a job on a server: its id, a prefix of its id, or its name"

# The largest count that the database stores (32 bits).
MAX_COUNT = 2**31 - 1

DTYPES = ("float32", "bfloat16", "float16")

SHARING = ("private", "team", "all")

SCOPES = ("read", "submit", "admin")

LOGIN_RULES = ("first", "known", "never")

NOTICES = ("complete", "failed", "waiting", "paused", "cancelled")

SCHEMAS = ("study", "finetune", "trial", "summary", "pareto", "recipe", "plan")

# New objects before the garbage collector runs (Python's default: 700). Imports make hundreds of thousands of objects,
# none of which is garbage: with the default, collections take a tenth of the time of a small merge.
MANY_OBJECTS = 50_000

# Errors of a given path that cannot be used for its purpose.
WRONG_PLACE = (FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `mergesearch` with the given command-line arguments, and return the exit code.

    If `arguments` is None, the arguments of this process are used.
    """
    gc.set_threshold(MANY_OBJECTS)
    options = _parser().parse_args(arguments)
    try:
        return int(options.call(options) or 0)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of standard output has exited, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        code = _exit_code(error)
        if code is None:
            raise
        print(_message(error, as_json=getattr(options, "json", False)), file=sys.stderr)
        return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mergesearch",
        description="Finds the best merges of language models: a Pareto front with held-out scores, as checkpoints.",
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def verb(name: str, call: Any, text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(call=call)
        command.add_argument("--json", action="store_true", help="machine-readable output on standard output")
        return command

    def server_verb(name: str, call: Any, text: str) -> argparse.ArgumentParser:
        command = verb(name, call, text)
        command.add_argument(
            "--server", metavar="URL", help="default: $MERGESEARCH_SERVER, else a server on this machine"
        )
        return command

    def add_keep(command: argparse.ArgumentParser) -> None:
        command.add_argument(
            "--keep",
            action="append",
            default=[],
            type=_keep,
            metavar="KIND=LIMIT",
            help="how long and how much is kept of ended jobs: KIND is responses, files or jobs; LIMIT an age (12h, "
            "30d, 8w), a size (5GB) or both (30d,5GB); repeatable (default: everything is kept)",
        )

    command = verb("run", verbs.run, "Run a study file in a directory, or resume it there.")
    command.add_argument("study", type=Path, metavar="STUDY", help="study file (YAML or JSON)")
    command.add_argument("--out", type=Path, required=True, metavar="DIR", help="where results and state are kept")
    command.add_argument(
        "--check", action="store_true", help="check everything and print the expected cost; start nothing"
    )
    command.add_argument(
        "--metadata-only",
        action="store_true",
        help="with --check: take sizes from the models' configurations; weights need not be on this machine",
    )
    command.add_argument("--export", choices=["best"], help="write the best merge to DIR/export")

    command = verb("plan", plan, "Plan a study for machines of a profile: placement, memory, seconds, hours and cost.")
    command.add_argument("study", type=Path, metavar="STUDY", help="study file (YAML or JSON)")
    command.add_argument(
        "--profile",
        default="here",
        metavar="NAME|FILE",
        help="machines: h100x8, h200x8, a100x1, a100-40gbx8, l40sx4, rtx4090x2, cpux32 and so on, a YAML file, or here "
        "(the default), which measures this machine",
    )
    command.add_argument(
        "--nodes", type=_count, metavar="N", help="number of such machines (default 1, or that of FILE)"
    )
    command.add_argument(
        "--price", type=_price, metavar="P", help="price of a GPU for an hour, or of a machine without"
    )

    command = verb("demo", verbs.demo, "Search the shipped tiny model family and export its best merge.")
    command.add_argument("--out", type=Path, default=Path("mergesearch-demo"), metavar="DIR")
    command.add_argument(
        "--retrain",
        action="store_true",
        help="first train the family's experts into DIR/experts; then run their study in DIR/study",
    )

    command = verb(
        "serve", verbs.serve, "Run the HTTP server; its jobs run on the Ray of this machine or of RAY_ADDRESS."
    )
    command.epilog = (
        "environment: MERGESEARCH_ENGINE_NODES states the machines for engines if the server and Ray's head have no "
        "GPU, such as 'gpus=8,memory=900GiB,gpu_memory=80GB,nodes=4 gpus=4,memory=350GiB,nodes=8': groups of machines, "
        "at most NODES each; set it for Ray's head too"
    )
    command.add_argument("--data", type=Path, required=True, metavar="DIR", help="where jobs and exports are kept")
    command.add_argument(
        "--database",
        metavar="URL",
        help="sqlite:///FILE or postgresql://USER@HOST:PORT/NAME (default: $MERGESEARCH_DATABASE, else that of the "
        "last server in DIR, else a file there)",
    )
    command.add_argument("--host", default="127.0.0.1", help="address to listen on (default %(default)s)")
    command.add_argument("--port", type=int, default=8080, help="default %(default)s; 0: any free port")
    command.add_argument("--dashboard-host", default="127.0.0.1", help="address the Ray dashboard listens on")
    command.add_argument("--dashboard-port", type=int, help="default: 8265, or the next free one")
    command.add_argument(
        "--allow-dir",
        action="append",
        default=[],
        type=Path,
        metavar="DIR",
        help="jobs may read files below DIR; repeatable (default: --data, the working directory, the hub's cache)",
    )
    command.add_argument(
        "--trust-dir",
        action="append",
        default=[],
        type=Path,
        metavar="DIR",
        help="as --allow-dir, and lm-eval task files below DIR may run Python functions; repeatable",
    )
    command.add_argument(
        "--allow-url",
        action="append",
        default=[],
        metavar="URL",
        help="jobs may read models, task files and data below s3://BUCKET/FOLDER or gs://BUCKET/FOLDER; repeatable",
    )
    command.add_argument(
        "--allow-judge",
        action="append",
        default=[],
        metavar="URL",
        help="benchmarks of jobs may name the endpoint URL as a judge; repeatable (default: no judge)",
    )
    command.add_argument(
        "--no-accounts",
        action="store_true",
        help="let everybody who reaches the server do everything (default: requests need a token once the database has "
        "a user; without a user, only a loopback --host is accepted)",
    )
    command.add_argument(
        "--rate-limit",
        type=_rate,
        metavar="N",
        help="requests a second of each token, or of each address without accounts; ten times as many at once "
        "(default: 100 of a token)",
    )
    command.add_argument(
        "--max-running",
        type=_count,
        metavar="N",
        help="jobs that run at the same time (default: 4); the driver of each takes some hundred MB on Ray's head",
    )
    command.add_argument(
        "--open-metrics", action="store_true", help="let everybody read /metrics, which names the jobs of all teams"
    )
    command.add_argument(
        "--open-dashboard",
        action="store_true",
        help="let every user read Ray's dashboard (/ray/), which shows the jobs of all teams (default: administrators)",
    )
    command.add_argument(
        "--allow-host",
        action="append",
        default=[],
        metavar="HOST",
        help="another name of this server in requests; repeatable (always known: loopback names, --host, its address)",
    )
    command.add_argument(
        "--prefix",
        type=_prefix,
        metavar="PATH",
        help="answer below PATH, such as /mergesearch, too: for a proxy that passes whole paths on",
    )
    _add_oidc(command)
    _add_notifications(command)
    command.add_argument(
        "--export-days", type=_days, default=7.0, metavar="DAYS", help="how long exports are kept (default %(default)s)"
    )
    command.add_argument(
        "--export-quota", type=_num_bytes, metavar="SIZE", help="bytes for all exports; default: a tenth of the disk"
    )
    command.add_argument(
        "--artifact-quota",
        type=_num_bytes,
        metavar="SIZE",
        help="bytes for experts and policies; default: a tenth of the disk",
    )
    command.add_argument(
        "--files",
        default=os.environ.get("MERGESEARCH_FILES"),
        metavar="LOCATION",
        help="where experts and policies are stored: a directory, or s3://BUCKET/FOLDER or gs://BUCKET/FOLDER "
        "(default: $MERGESEARCH_FILES, else in --data)",
    )

    add_keep(command)
    command.add_argument(
        "--log-format",
        choices=FORMATS,
        help="text, or JSON lines with the job, trial and attempt that they are about; also of drivers and replicas "
        "(default: $MERGESEARCH_LOG_FORMAT, else text)",
    )
    command.add_argument(
        "--access-log", action="store_true", help="log a line for each request, without the query of its URL"
    )

    command = verb(
        "clean", verbs.clean, "Remove what exceeds limits from the ended jobs of a server that is stopped, or show it."
    )
    command.add_argument("--data", type=Path, required=True, metavar="DIR", help="data directory of the server")
    command.add_argument("--database", metavar="URL", help="database of the server, as for serve")
    command.add_argument(
        "--files", default=os.environ.get("MERGESEARCH_FILES"), metavar="LOCATION", help="as for serve"
    )
    add_keep(command)
    command.add_argument(
        "--dry-run", action="store_true", help="show what would be removed and remove nothing; the server may run"
    )

    command = verb(
        "drain",
        verbs.drain,
        "Let the jobs of a server wait, before an upgrade: it accepts no jobs, and drivers end between chunks.",
    )
    command.add_argument("--data", type=Path, required=True, metavar="DIR", help="data directory of the server")
    command.add_argument("--database", metavar="URL", help="database of the server, as for serve")
    command.add_argument(
        "--wait",
        type=_seconds,
        default=300.0,
        metavar="SECONDS",
        help="how long to wait until no job has a driver (default %(default)g)",
    )
    command.add_argument("--end", action="store_true", help="accept jobs again, and continue those that wait")

    command = verb("backup", verbs.back_up, "Back up a server's jobs and artifacts to a directory, also while it runs.")
    command.add_argument("--data", type=Path, required=True, metavar="DIR", help="data directory of the server")
    command.add_argument("--database", metavar="URL", help="database of the server, as for serve")
    command.add_argument(
        "--files", default=os.environ.get("MERGESEARCH_FILES"), metavar="LOCATION", help="as for serve"
    )
    command.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="directory of the backup, new or of an earlier backup"
    )

    command = verb("restore", verbs.restore, "Restore a backup to a new data directory and an empty database.")
    command.add_argument("backup", type=Path, metavar="BACKUP", help="directory that `mergesearch backup` wrote")
    command.add_argument("--data", type=Path, required=True, metavar="DIR", help="data directory of the new server")
    command.add_argument("--database", metavar="URL", help="empty database of the new server, as for serve")
    command.add_argument(
        "--files", default=os.environ.get("MERGESEARCH_FILES"), metavar="LOCATION", help="as for serve"
    )

    databases = commands.add_parser("database", help="Manage the database of a server.")
    actions = databases.add_subparsers(title="commands", metavar="COMMAND", required=True)
    text = "Copy all jobs from one database to another, which must be empty; the server must be stopped."
    command = actions.add_parser("move", help=text, description=text)
    command.set_defaults(call=verbs.move_database)
    command.add_argument("--json", action="store_true", help="machine-readable output on standard output")
    command.add_argument("source", metavar="FROM", help="URL of a database, or the data directory of its server")
    command.add_argument("target", metavar="TO", help="URL of a database, or the data directory of its server")

    text = "Create a database's tables, or migrate them to this version; servers and drivers do so when they open it."
    command = actions.add_parser("migrate", help=text, description=text)
    command.set_defaults(call=verbs.migrate_database)
    command.add_argument("--json", action="store_true", help="machine-readable output on standard output")
    command.add_argument(
        "database",
        nargs="?",
        metavar="DATABASE",
        help="URL of a database, or the data directory of its server (default: $MERGESEARCH_DATABASE)",
    )
    command.add_argument(
        "--wait",
        type=_seconds,
        default=0.0,
        metavar="SECONDS",
        help="how long to wait for a database that does not answer (default %(default)g)",
    )

    _add_accounts(commands)
    _add_subscriptions(commands)

    command = server_verb("submit", verbs.submit, "Submit a job to a server: a study, a fine-tuning or a served study.")
    command.add_argument(
        "file",
        type=Path,
        metavar="FILE",
        help="study file, specification of a fine-tuning or serving request",
    )
    command.add_argument("--watch", action="store_true", help="then watch the job until it ends")
    command.add_argument(
        "--name-key",
        metavar="KEY",
        help="idempotency key: a repeated submission with the same key returns the job that the first one created",
    )

    command.add_argument("--team", metavar="TEAM", help="team of the job; needed by members of several teams")
    command.add_argument("--sharing", choices=SHARING, help="who else may read the job (default: its team)")

    command = server_verb("share", verbs.share, "Change who may read a job on a server, and its team.")
    command.add_argument("job", metavar="JOB", help="id of the job, a prefix of its id, or its name")
    command.add_argument("sharing", choices=SHARING, metavar="SHARING", help="%(choices)s")
    command.add_argument("--team", metavar="TEAM", help="team of the job from now on")

    command = server_verb("edit", verbs.edit, "Edit a job on a server: its labels, and options of a study that runs.")
    command.add_argument("job", metavar="JOB", help="id of the job, a prefix of its id, or its name")
    command.add_argument("--name", metavar="NAME")
    command.add_argument("--description", metavar="TEXT", help="what the job is for")
    command.add_argument("--tag", dest="tags", action="append", metavar="TAG", help="repeatable; replaces all tags")
    command.add_argument("--notes", metavar="TEXT", help="what was learned from it")
    command.add_argument("--priority", type=int, metavar="N", help="waiting jobs with a larger one start first")
    command.add_argument("--max-trials", type=int, metavar="N", help="search.max_trials of a study")
    command.add_argument("--replicas", type=int, metavar="N", help="engine.replicas of a study")
    command.add_argument("--reason", metavar="TEXT", help="reason, which the events of the job show")
    for limit, number in (("max-samples", int), ("max-gpu-hours", float), ("max-wall-clock-s", float)):
        name = limit.replace("-", "_")
        command.add_argument(
            f"--{limit}", type=partial(_limit, number), metavar="N", help=f"limits.{name} of a study, or none"
        )

    command = server_verb("invalidate", verbs.invalidate, "Mark a trial of a study as invalid: nothing selects it.")
    command.add_argument("study", metavar="STUDY", help="id of the study, a prefix of its id, or its name")
    command.add_argument("trial", type=int, metavar="TRIAL", help="trial number")
    command.add_argument("--reason", metavar="TEXT", help="why the trial is invalid")
    command.add_argument("--undo", action="store_true", help="mark the trial as valid again")

    text = "Evaluate the recipe of a pruned or failed trial at the full budget, as a new trial of the study."
    command = server_verb("reevaluate", verbs.reevaluate, text)
    command.add_argument("study", metavar="STUDY", help="id of the study, a prefix of its id, or its name")
    command.add_argument("trial", type=int, metavar="TRIAL", help="trial number")
    command.add_argument("--reason", metavar="TEXT", help="reason, which the events of the study show")

    text = "Evaluate a given merge at the full budget, as a new trial of the study."
    command = server_verb("enqueue", verbs.enqueue, text)
    command.add_argument("study", metavar="STUDY", help="id of the study, a prefix of its id, or its name")
    command.add_argument("label", metavar="LABEL", help="label of the new trial")
    merge = command.add_mutually_exclusive_group(required=True)
    merge.add_argument("--recipe", metavar="FILE", help="a recipe.json, or a mergekit configuration")
    merge.add_argument("--configuration", metavar="FILE", help="YAML or JSON with a value for each parameter")
    command.add_argument("--reason", metavar="TEXT", help="reason, which the events of the study show")

    command = server_verb("clone", verbs.clone, "Submit a copy of a job, with changes; the copy starts anew.")
    command.add_argument("job", metavar="JOB", help="id of the job, a prefix of its id, or its name")
    command.add_argument("--name", metavar="NAME", help="name of the copy (default: that of the job)")
    command.add_argument(
        "--set",
        action="append",
        default=[],
        type=_setting,
        metavar="OPTION=VALUE",
        help="change an option, such as search.seed=2; VALUE is JSON or text; null is the default; repeatable",
    )
    command.add_argument("--team", metavar="TEAM", help="team of the copy; needed by members of several teams")
    command.add_argument("--sharing", choices=SHARING, help="who else may read the copy (default: its team)")

    server_verb("queue", verbs.queue, "Show the jobs of a server that run and that wait, and what they wait for.")

    text = "Show the nodes of a server's Ray cluster, its disk, its database and versions; for administrators."
    server_verb("cluster", verbs.cluster, text)

    text = "Move a waiting job to the front of the jobs of its priority, or before another one; for administrators."
    command = server_verb("move", verbs.move, text)
    command.add_argument("job", metavar="JOB", help="id of the job, a prefix of its id, or its name")
    command.add_argument("--before", metavar="JOB", help="the other job (default: the front)")
    command.add_argument("--reason", metavar="TEXT", help="reason, which the events of the job show")

    command = server_verb("login", accounts.login, "Store your token for a server, in a file that only you may read.")
    command.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        help="file with the token, or - (default: $MERGESEARCH_TOKEN)",
    )
    server_verb("logout", accounts.logout, "Remove your token for a server from this machine.")

    for kind in KINDS.values():
        server_verb(kind.collection, partial(verbs.list_jobs, kind.name), f"List a server's {kind.plural}.")

    for name, call, text in (
        ("show", verbs.show, "Show the state and progress of a job on a server."),
        ("watch", verbs.watch, "Watch a job on a server until it ends."),
        ("log", verbs.log, "Print the output of the drivers of a job on a server."),
        ("pause", verbs.pause, "Pause a job on a server until it is resumed."),
        (
            "resume",
            verbs.resume,
            "Let a failed or paused job on a server continue from where it is.",
        ),
        ("stop", verbs.stop, "Stop the search of a study early; its held-out data and benchmarks are scored."),
        ("cancel", verbs.cancel, "Cancel a job on a server permanently and now; its results are kept."),
        ("delete", verbs.delete, "Delete a job that has ended from a server, with its results and exports."),
    ):
        command = server_verb(name, call, text)
        command.add_argument("job", metavar="JOB", help="id of the job, a prefix of its id, or its name")
        if name in ("pause", "resume", "stop", "cancel"):
            command.add_argument("--reason", metavar="TEXT", help="reason, which the events of the job show")

    command = server_verb("export", verbs.export, "Write a trial's merged model, or an expert that a server trained.")
    command.add_argument("run", metavar="DIR|JOB", help=RUN_OR_JOB)
    command.add_argument("trial", metavar="TRIAL", help='trial number or "best"; for a fine-tuning, an expert\'s alias')
    _add_prefer(command)
    command.add_argument("--out", type=Path, required=True, metavar="DIR")
    command.add_argument("--dtype", choices=DTYPES, help="default: the dtype of the study's engine")
    command.add_argument(
        "--quantize",
        choices=["int4", "int8"],
        help="round weights to 4 or 8 bits, and score the holdout data again; for the directory of a run",
    )
    command.add_argument(
        "--push", type=_repository, metavar="OWNER/NAME", help="upload the model to this repository of the hub"
    )
    command.add_argument("--private", action="store_true", help="a repository that --push creates is private")

    command = server_verb("chat", verbs.chat, "Complete prompts with trials of a study, one or several side by side.")
    command.add_argument("study", metavar="STUDY", help="id of the study, a prefix of its id, or its name")
    command.add_argument(
        "trials", nargs="+", metavar="TRIAL", help='trial number, label of a baseline such as base, or "best"'
    )
    command.add_argument("--prompt", metavar="TEXT", help="prompt (default: standard input; a terminal is asked)")
    command.add_argument("--text", action="store_true", help="complete the prompt as a text, without a chat template")
    command.add_argument("--system", metavar="TEXT", help="system message (default: that of the study, if any)")
    command.add_argument("--max-tokens", type=int, metavar="N", help="most tokens of an answer")
    command.add_argument("--temperature", type=float, metavar="T", help="0 is greedy (default 1)")
    command.add_argument("--seed", type=int, metavar="N", help="seed of the sampling")
    command.add_argument("--idle", type=float, metavar="MINUTES", help="serving ends after these without a request")
    command.add_argument(
        "--share-engines",
        action="store_true",
        help="use the engines of a search that runs, which slows it; for administrators of the server",
    )
    command.add_argument(
        "--wait",
        type=_seconds,
        default=600.0,
        metavar="SECONDS",
        help="how long to wait for an engine (default %(default)g)",
    )

    command = verb("merge", verbs.merge, "Merge models by a recipe or a mergekit configuration, without a search.")
    command.add_argument("file", type=Path, metavar="FILE", help="recipe.json of an export, or mergekit's YAML")
    command.add_argument("--out", type=Path, required=True, metavar="DIR")
    command.add_argument(
        "--model",
        action="append",
        default=[],
        metavar="ALIAS=DIR",
        help="directory of a model that the recipe or the mergekit configuration names; repeatable",
    )
    command.add_argument("--check", action="store_true", help="check everything, print the plan, write nothing")
    command.add_argument(
        "--strict", action="store_true", help="refuse settings without effect instead of warning about them"
    )
    command.add_argument(
        "--dtype", choices=DTYPES, help="default: that of the file, else of the models (recipes: bfloat16)"
    )
    command.add_argument(
        "--max-shard-size", type=_num_bytes, metavar="SIZE", help="largest size of one weight file; default: 5GB"
    )

    text = (
        "Expand models of different widths, depths and kinds to one form, for layer paths; what they compute stays the "
        "same."
    )
    command = verb("expand", verbs.expand, text)
    command.add_argument(
        "models",
        nargs="+",
        metavar="ALIAS=MODEL",
        help="model of the hub or directory; ALIAS is the name of its folder",
    )
    command.add_argument("--out", type=Path, metavar="DIR", required=True, help="directory of the models' folders")
    command.add_argument("--check", action="store_true", help="check the models, print the common form, write nothing")
    command.add_argument(
        "--tokens-of",
        metavar="ALIAS",
        help="give all models the tokens of this one, for models with different tokenizers; it changes what the others "
        "compute",
    )

    text = "Begin a study file that searches for better merges than that of a mergekit configuration."
    command = verb("begin", verbs.begin, text)
    command.add_argument("file", type=Path, metavar="FILE", help="mergekit's YAML")
    command.add_argument("--name", default="mergekit", help="name of the study and of the merge (default: %(default)s)")
    command.add_argument("--out", type=Path, metavar="STUDY_FILE", help="new file (default: standard output)")

    command = verb(
        "finetune",
        verbs.finetune,
        "Fine-tune an expert or a fleet, or resume that; then search for merges, if SPEC has a study.",
    )
    command.add_argument("spec", type=Path, metavar="SPEC", help="specification (YAML or JSON)")
    command.add_argument("--out", type=Path, required=True, metavar="DIR", help="where results and state are kept")
    command.add_argument(
        "--analyse",
        type=Path,
        nargs="*",
        metavar="DIR",
        help="also analyse task vectors and losses of merges, beside those of the same experts trained in DIR ...",
    )
    command.add_argument(
        "--samples",
        type=_count,
        metavar="N",
        help="samples of each evaluation task that coefficients are chosen by; as many are reported (default 100)",
    )

    command = server_verb(
        "evaluate",
        verbs.evaluate,
        "Score benchmarks on a model, or on trials of a study that has ended; stored samples are not scored again.",
    )
    command.add_argument("run", metavar="DIR|STUDY|MODEL", help=f"{RUN_OR_STUDY}; with --out a model")
    command.add_argument(
        "trial",
        type=_trial,
        nargs="?",
        metavar="TRIAL",
        help='trial number or "best"; default: the trials that the benchmarks name',
    )
    command.add_argument(
        "--benchmarks",
        type=Path,
        required=True,
        metavar="FILE",
        help="file with the key benchmarks, as in a study file (YAML or JSON)",
    )
    command.add_argument(
        "--out", type=Path, metavar="DIR", help="score a model, a directory or hub id; results and state are kept here"
    )
    command.add_argument("--watch", action="store_true", help="on a server: then watch the study until it ends")

    command = server_verb("trials", verbs.trials, "List a run's trials, or write them to a file.")
    command.add_argument("run", metavar="DIR|STUDY", help=RUN_OR_STUDY)
    written = command.add_mutually_exclusive_group()
    written.add_argument("--out", type=Path, metavar="FILE", help="write a row for each trial, as .csv or .parquet")
    written.add_argument("--optuna", metavar="URL", help="add the trials to an Optuna storage, such as sqlite:///t.db")

    command = server_verb(
        "recipe", verbs.recipe, "Print the recipe of a trial, or a mergekit configuration of its merge."
    )
    command.add_argument("run", metavar="DIR|STUDY", help=RUN_OR_STUDY)
    command.add_argument("trial", type=int, metavar="TRIAL", help="trial number")
    command.add_argument(
        "--mergekit", action="store_true", help="print mergekit's YAML, or every reason why mergekit cannot express it"
    )

    command = server_verb("pareto", verbs.pareto, "Show a run's Pareto front.")
    command.add_argument("run", metavar="DIR|STUDY", help=RUN_OR_STUDY)
    _add_prefer(command)

    command = verb(
        "propose",
        verbs.propose,
        "Propose layer paths with the policy that a run of hm3 has learned, without training it.",
    )
    command.add_argument("run", type=Path, metavar="DIR", help="directory of a run")
    _add_prefer(command, required=True, help="how much each objective matters; the weights sum to 1")
    command.add_argument(
        "--count",
        type=_count,
        default=1,
        metavar="N",
        help="number of different paths, best first (default %(default)s)",
    )
    command.add_argument(
        "--model",
        action="append",
        default=[],
        metavar="ALIAS=DIR",
        help="replaces an expert by another of as many layers, if the policy knows layers by statistics; repeatable",
    )
    command.add_argument("--out", type=Path, metavar="FILE", help="write the recipe of the first path, for `merge`")

    command = verb(
        "tasks", verbs.list_tasks, "List the shipped tasks: paper, licence, samples, metric, and their data."
    )
    actions = command.add_subparsers(title="commands", metavar="COMMAND")
    text = "Download the data of a task, so that studies with it run without a network."
    fetch = actions.add_parser("fetch", help=text, description=text)
    fetch.set_defaults(call=verbs.fetch_task)
    fetch.add_argument("--json", action="store_true", help="machine-readable output on standard output")
    fetch.add_argument("task", metavar="NAME|FILE", help="name of a task of lm-eval or a shipped one, or a YAML file")

    text = "List the classes of images in a folder or JSONL file, and check that every image can be read."
    images = actions.add_parser("images", help=text, description=text)
    images.set_defaults(call=verbs.list_images)
    images.add_argument("--json", action="store_true", help="machine-readable output on standard output")
    images.add_argument("place", metavar="FOLDER|FILE", help="folder with a directory for each class, or JSONL file")

    command = verb("schema", verbs.schema, "Print the JSON Schema of a study file or a result file.")
    command.add_argument("name", choices=SCHEMAS)
    return parser


def _add_accounts(commands: Any) -> None:
    """Declare the commands `users`, `teams` and `tokens`, each with its actions, among the program's `commands`."""

    def group(name: str, text: str) -> Callable[..., argparse.ArgumentParser]:
        actions = commands.add_parser(name, help=text, description=text).add_subparsers(
            title="commands", metavar="COMMAND", required=True
        )

        def action(name: str, call: Any, text: str, **defaults: Any) -> argparse.ArgumentParser:
            command: argparse.ArgumentParser = actions.add_parser(name, help=text, description=text)
            command.set_defaults(call=call, **defaults)
            command.add_argument("--json", action="store_true", help="machine-readable output on standard output")
            command.add_argument("--data", type=Path, metavar="DIR", help="data directory of the server")
            command.add_argument(
                "--database", metavar="URL", help="database of the server, as for serve (default: that in --data)"
            )
            return command

        return action

    action = group("users", "Manage the users of a server, in its database.")
    action("list", accounts.list_users, "List the users and their teams.")
    command = action("add", accounts.add_user, "Add a user; the first one must be an administrator.")
    command.add_argument("name", type=_name, metavar="NAME")
    command.add_argument("--admin", action="store_true", help="the user administers the server")
    command.add_argument(
        "--if-absent", action="store_true", help="a user who exists is no error; only token and --login are changed"
    )
    command.add_argument(
        "--login",
        choices=LOGIN_RULES,
        help="who may log in as the user with the identity provider: the first identity that does, only one that has "
        "done so already, or nobody, for users of programs (default: first for a new user, else unchanged)",
    )
    command.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        help="file with a token that the user gets, for deployments; it replaces the one of the last call",
    )
    command.add_argument(
        "--token-scope", choices=SCOPES, default="admin", help="what this token may be used for (default %(default)s)"
    )
    for name, text, defaults in (
        ("disable", "Disable a user: the tokens of the user are refused.", {"is_disabled": True, "is_admin": None}),
        ("enable", "Enable a user again.", {"is_disabled": False, "is_admin": None}),
        ("promote", "Let a user administer the server.", {"is_disabled": None, "is_admin": True}),
        ("demote", "End that a user administers the server.", {"is_disabled": None, "is_admin": False}),
    ):
        command = action(name, accounts.change_user, text, **defaults)
        command.add_argument("name", type=_name, metavar="NAME")

    command = action("unbind", accounts.unbind_user, "Let another identity of the identity provider log in as a user.")
    command.add_argument("name", type=_name, metavar="NAME")

    action = group("teams", "Manage the teams of a server, in its database.")
    action("list", accounts.list_teams, "List the teams and their members.")
    command = action("add", accounts.add_team, "Add a team without members.")
    command.add_argument("team", type=_name, metavar="TEAM")
    command = action("remove", accounts.remove_team, "Remove a team that has no jobs.")
    command.add_argument("team", type=_name, metavar="TEAM")
    command = action("set", accounts.set_role, "Give a user a role in a team, or end the membership.")
    command.add_argument("team", type=_name, metavar="TEAM")
    command.add_argument("user", type=_name, metavar="USER")
    command.add_argument("role", choices=("viewer", "member", "admin", "none"), metavar="ROLE", help="%(choices)s")

    command = action("limit", accounts.limit_team, "Change the weight and the quotas of a team; none lifts a quota.")
    command.add_argument("team", type=_name, metavar="TEAM")
    command.add_argument("--weight", type=_above_0, metavar="W", help="share of the places, relative to other teams")
    for name, number, metavar, text in (
        ("max-running", _count, "N", "jobs that run at the same time"),
        ("max-replicas", _count, "N", "replicas and workers of running jobs together"),
        ("max-served", _count, "N", "studies that are served at the same time"),
        ("gpu-hours", _above_0, "HOURS", "GPU-hours in a calendar month (UTC)"),
        ("artifact-bytes", _num_bytes, "SIZE", "experts and policies, such as 500GB"),
        ("export-bytes", _num_bytes, "SIZE", "exported models, such as 500GB"),
        ("requests-per-minute", _count, "N", "requests of the members in a minute"),
    ):
        command.add_argument(f"--{name}", type=partial(_limit, number), metavar=metavar, help=f"{text}, or none")

    action = group("tokens", "Manage the API tokens of a server, in its database.")
    command = action("list", accounts.list_tokens, "List tokens: prefix, user, scope, expiry and last use.")
    command.add_argument("--user", type=_name, metavar="NAME", help="only those of one user")
    command = action("create", accounts.create_token, "Create a token and print it, once.")
    command.add_argument("--user", type=_name, required=True, metavar="NAME", help="whose token it is")
    command.add_argument("--name", type=_name, default="token", metavar="NAME", help="name of the token, for lists")
    command.add_argument("--scope", choices=SCOPES, default="submit", help="what it may do (default %(default)s)")
    command.add_argument("--expires", type=_days, metavar="DAYS", help="days until it expires (default: never)")
    command = action("revoke", accounts.revoke_token, "Revoke a token; every server refuses it within a second.")
    command.add_argument("token", metavar="TOKEN", help="id or prefix of the token")


def _name(text: str) -> str:
    """Parse the name of a user, a team or a token. Raises ArgumentTypeError for an invalid name."""
    from service.store.accounts import name_problem

    if problem := name_problem(text):
        raise argparse.ArgumentTypeError(problem)
    return text


def _add_prefer(
    command: argparse.ArgumentParser,
    *,
    required: bool = False,
    help: str = "pick a trial of the front by weights of the objectives, which sum to 1",
) -> None:
    command.add_argument("--prefer", type=_preference, required=required, metavar="OBJECTIVE=WEIGHT,...", help=help)


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any, **__: Any) -> None:
        from importlib.metadata import version

        print(version("mergesearch"))
        parser.exit()


def _limit(number: Callable[[str], Any], text: str) -> Any:
    """Parse the value of an option that limits something: a number, or "none" for no limit.

    `number` converts the text of a number; the text "none" is returned unchanged. Raises ArgumentTypeError for any
    other text.
    """
    if text == accounts.NO_LIMIT:
        return text
    try:
        return number(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: give a number or {accounts.NO_LIMIT}") from error


def _setting(text: str) -> tuple[str, Any]:
    """Parse an option of the study file with a new value, such as "search.seed=2", into its name and the value.

    Raises ArgumentTypeError for an invalid text.
    """
    path, equals, value = text.partition("=")
    if not equals or not all(path.split(".")):
        raise argparse.ArgumentTypeError(f"{text!r}: give OPTION=VALUE, such as search.seed=2")
    try:
        return path, json.loads(value)
    except ValueError:
        return path, value


def _repository(text: str) -> str:
    """Check the name of a repository of the hub, owner/name. Raises ArgumentTypeError for another text."""
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a repository; write it as owner/name")
    return text


def _num_bytes(text: str) -> int:
    """Parse a size such as "500MB" or "5GB" as a number of bytes. Raises ArgumentTypeError for an invalid text."""
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _keep(text: str) -> tuple[str, Limit]:
    """Parse a limit on the data that a server keeps of ended jobs, such as "responses=30d", into kind and limit.

    Raises ArgumentTypeError for an invalid text.
    """
    try:
        return parse_keep(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _preference(text: str) -> dict[str, float]:
    """Parse weights of a study's objectives, such as "math=0.6,code=0.4", into a dict, keyed by objective.

    Raises ArgumentTypeError for an invalid text.
    """
    from search_spaces.preferences import parse_preference

    try:
        return parse_preference(text)
    except SearchSpaceError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _trial(text: str) -> int | str:
    """Parse which trial a command is about: a trial's number, or "best". Raises ArgumentTypeError for other text."""
    if text == "best":
        return text
    if not (text.isascii() and text.isdecimal()):
        raise argparse.ArgumentTypeError(f'{text!r} is not a trial; give its number or "best"')
    return int(text)


def _count(text: str) -> int:
    """Parse the value of an option that is a whole number of at least 1, such as a number of nodes.

    Raises ArgumentTypeError for an invalid text, or for a number that no column of the database can store.
    """
    if not (text.isascii() and text.isdecimal()) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a count; give a whole number of at least 1")
    if int(text) > MAX_COUNT:
        raise argparse.ArgumentTypeError(f"{text} is too large; give at most {MAX_COUNT}")
    return int(text)


def _price(text: str) -> float:
    with suppress(ValueError):
        price = float(text)
        if 0 <= price < math.inf:
            return price
    raise argparse.ArgumentTypeError(f"{text!r} is not a price; give 0 or more, such as 2.5")


def _above_0(text: str) -> float:
    """Parse a number above 0. Raises ArgumentTypeError for an invalid text."""
    with suppress(ValueError):
        number = float(text)
        if 0 < number < math.inf:
            return number
    raise argparse.ArgumentTypeError(f"{text!r} is not accepted; give a number above 0, such as 2.5")


def _days(text: str) -> float:
    """Parse the value of an option that is a number of days above 0, such as "0.5".

    Raises ArgumentTypeError for an invalid text.
    """
    try:
        days = float(text)
    except ValueError:
        days = 0.0
    if not 0 < days < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of days; give one above 0, such as 7 or 0.5")
    return days


def _seconds(text: str) -> float:
    """Parse the value of an option that is a number of seconds of at least 0, such as how long to wait.

    Raises ArgumentTypeError for an invalid text.
    """
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds; give 0 or more, such as 60")
    return seconds


def _rate(text: str) -> float:
    """Parse the value of an option that is a number of requests a second above 0.

    Raises ArgumentTypeError for an invalid text.
    """
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not 0 < rate < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of requests a second; give one above 0, such as 50")
    return rate


def _add_oidc(command: argparse.ArgumentParser) -> None:
    """Declare the options of the command `serve` about the identity provider with which users log in in browsers."""
    command.add_argument(
        "--oidc-issuer",
        metavar="URL",
        help="identity provider (OpenID Connect) with which browsers log in (default: they cannot)",
    )
    command.add_argument("--oidc-client-id", metavar="ID", help="id of this server at the identity provider")
    command.add_argument(
        "--oidc-client-secret-file",
        type=Path,
        metavar="FILE",
        help="file with the client secret (default: $MERGESEARCH_OIDC_CLIENT_SECRET)",
    )
    command.add_argument(
        "--oidc-scopes",
        metavar="SCOPES",
        help="what the server asks the provider for (default: 'openid profile email')",
    )
    command.add_argument(
        "--oidc-user-claim",
        metavar="CLAIM",
        help="claim that names the user (default: preferred_username, else an email that the provider has verified)",
    )
    command.add_argument("--oidc-groups-claim", metavar="CLAIM", help="claim with the user's groups, for --oidc-team")
    command.add_argument(
        "--oidc-team",
        action="append",
        default=[],
        type=_group_role,
        metavar="GROUP=TEAM:ROLE",
        help="role in a team that the members of a group get at each login, and others lose; repeatable",
    )
    command.add_argument(
        "--oidc-create-users",
        action="store_true",
        help="add unknown users, without a team, at their first login (default: they are refused)",
    )
    command.add_argument(
        "--public-url",
        metavar="URL",
        help="URL under which users reach the server, with its path prefix, for logins and notifications (default: as "
        "in the request; notifications have paths)",
    )


def _add_notifications(command: argparse.ArgumentParser) -> None:
    """Declare the options of the command `serve` for the webhooks and mails that are sent to users."""
    command.add_argument(
        "--webhook-allow",
        action="append",
        default=[],
        metavar="HOST",
        help="webhooks may name HOST though its address is private, and over http; repeatable (default: https and "
        "public addresses only)",
    )
    command.add_argument(
        "--smtp-url",
        metavar="URL",
        help="mail server for mails to users: smtp[s]://[USER@]HOST[:PORT], with the password in "
        "$MERGESEARCH_SMTP_PASSWORD (default: no mails)",
    )
    command.add_argument("--mail-from", metavar="ADDRESS", help="sender of the mails")
    command.add_argument(
        "--smtp-password-file",
        type=Path,
        metavar="FILE",
        help="file with the password at the mail server (default: $MERGESEARCH_SMTP_PASSWORD)",
    )
    command.add_argument(
        "--smtp-plaintext",
        action="store_true",
        help="send mails, and the password, without TLS (default: only to a mail server on this machine)",
    )
    command.add_argument(
        "--notify-waiting",
        type=_minutes,
        metavar="MINUTES",
        help="notify users of a job that has waited so long for the same reason (default: 30)",
    )


def _add_subscriptions(commands: Any) -> None:
    """Declare the commands `webhooks` and `mail`, each with its actions."""

    def group(name: str, text: str) -> Callable[..., argparse.ArgumentParser]:
        actions = commands.add_parser(name, help=text, description=text).add_subparsers(
            title="commands", metavar="COMMAND", required=True
        )

        def action(name: str, call: Any, text: str) -> argparse.ArgumentParser:
            command: argparse.ArgumentParser = actions.add_parser(name, help=text, description=text)
            command.set_defaults(call=call)
            command.add_argument("--json", action="store_true", help="machine-readable output on standard output")
            command.add_argument(
                "--server", metavar="URL", help="default: $MERGESEARCH_SERVER, else a server on this machine"
            )
            return command

        return action

    def add_events(command: argparse.ArgumentParser) -> None:
        command.add_argument(
            "--event",
            dest="events",
            action="append",
            choices=NOTICES,
            metavar="EVENT",
            help="%(choices)s; repeatable (default: complete, failed and waiting)",
        )

    action = group("webhooks", "Manage URLs that a server requests when jobs end, fail or wait too long.")
    action("list", notifications.list_webhooks, "List your webhooks, or all for administrators.")
    command = action("add", notifications.add_webhook, "Add a webhook and print its secret, once.")
    command.add_argument("url", metavar="URL", help="https URL")
    add_events(command)
    command.add_argument("--covers", choices=("own", "team", "all"), help="whose jobs (default: your own)")
    command.add_argument("--team", type=_name, metavar="TEAM", help="the jobs of a team that you administer")
    for name, call, text in (
        ("remove", notifications.remove_webhook, "Remove a webhook; what waits is not sent."),
        ("test", notifications.send_test, "Send a test to a webhook, and wait for its outcome."),
        ("deliveries", notifications.list_deliveries, "List the last deliveries to a webhook."),
    ):
        command = action(name, call, text)
        command.add_argument("webhook", metavar="WEBHOOK", help="id of the webhook, or a prefix of it")

    action = group("mail", "Manage the e-mail address to which a server sends changes of your jobs.")
    show = action("show", notifications.show_mail, "Show your address.")
    command = action("set", notifications.set_mail, "Set your address.")
    command.add_argument("address", metavar="ADDRESS")
    add_events(command)
    for each in (show, command, action("remove", notifications.remove_mail, "Remove your address.")):
        each.add_argument("--user", type=_name, metavar="NAME", help="another user's (administrators)")


def _minutes(text: str) -> float:
    """Parse a number of minutes above 0. Raises ArgumentTypeError for an invalid text."""
    try:
        minutes = float(text)
    except ValueError:
        minutes = 0.0
    if not 0 < minutes < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of minutes; give one above 0, such as 30")
    return minutes


def _group_role(text: str) -> GroupRole:
    """Parse a rule GROUP=TEAM:ROLE, which gives the members of a group of the identity provider a role in a team.

    Raises ArgumentTypeError for an invalid text.
    """
    try:
        return GroupRole.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _prefix(text: str) -> str:
    """Parse the path prefix below which a server is reached, such as "/mergesearch".

    Raises ArgumentTypeError for an invalid text.
    """
    from service.api.prefix import prefix_problem

    if problem := prefix_problem(text):
        raise argparse.ArgumentTypeError(problem)
    return text


def _exit_code(error: Exception) -> int | None:
    """Exit code of the program for an error that a command has raised.

    Returns None if the error can only be a bug in this program, which needs a traceback.
    """
    if isinstance(error, RequestRefused):
        return 2 if error.status < 500 else 1
    if isinstance(error, SearchSpaceError | InvalidModel | InvalidTask | Conflict | NotFound):
        return 2
    if isinstance(error, WRONG_PLACE) and error.filename is not None:
        return 2
    if isinstance(error, ServiceError | EngineUnavailable | EvidenceMismatch | TrainingFailed | ConnectionError):
        return 1
    return None


def _message(error: Exception, *, as_json: bool) -> str:
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

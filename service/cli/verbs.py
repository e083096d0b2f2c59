"""Subcommands of `mergesearch`: each does its work, prints the result, and returns the exit code.

Modules that load torch, Ray, vLLM or pydantic are imported by the verb that needs them, so that `--help` is instant.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from search_spaces.errors import InvalidPreference, InvalidRecipe, InvalidStudy, Problem
from service.auth.settings import oidc_settings, public_address
from service.cli.accounts import NO_LIMIT
from service.cli.chat import ChatOptions, read_prompt
from service.cli.export_progress import ExportView
from service.cli.finetune import finetune as finetune_experts
from service.cli.tasks import fetch_task, list_images, list_tasks
from service.cli.terminal import (
    console,
    print_benchmarks,
    print_export,
    print_json,
    print_removals,
    print_results,
    print_scores,
)
from service.cli.trial_files import write_trials
from service.disk import alignments_dir, artifacts_dir, gib
from service.errors import Conflict, DatabaseUnavailable, NotFound
from service.notifications.settings import notification_settings
from service.results.columns import trial_columns
from service.retention.limits import limits_of
from service.server import alone
from service.server import serve as run_server
from service.studies.preflight.dtype import engine_dtype
from workers.export.push import push
from workers.models.remote.errors import HubUnusable
from workers.tiny_family import RETRAIN_FILE, STUDY_FILE, family_dir

if TYPE_CHECKING:
    from search_spaces.study.benchmarks import AddedBenchmarks
    from service.cli.remote import ServerVerbs
    from service.results.record import RunRecord
    from service.schemas.files import PreferredDocument
    from workers.export.expansion.form import Form

__all__ = [
    "back_up",
    "begin",
    "cancel",
    "chat",
    "clean",
    "clone",
    "cluster",
    "delete",
    "demo",
    "drain",
    "edit",
    "enqueue",
    "evaluate",
    "expand",
    "export",
    "fetch_task",
    "finetune",
    "invalidate",
    "list_images",
    "list_jobs",
    "list_tasks",
    "log",
    "merge",
    "migrate_database",
    "move",
    "move_database",
    "pareto",
    "pause",
    "propose",
    "queue",
    "recipe",
    "reevaluate",
    "restore",
    "resume",
    "run",
    "schema",
    "serve",
    "share",
    "show",
    "stop",
    "submit",
    "trials",
    "watch",
]

# Aliases of models that `mergesearch expand` writes to folders of these names.
FOLDER = "[A-Za-z0-9][A-Za-z0-9._-]*"

# Options of `mergesearch edit`, of which some are limits of a study.
LIMITS = ("max_samples", "max_gpu_hours", "max_wall_clock_s")
EDITED = ("name", "description", "tags", "notes", "priority", "max_trials", "replicas", *LIMITS)


def run(options: argparse.Namespace) -> int:
    from search_spaces.study.file import load_study

    study = load_study(options.study)
    if options.metadata_only and not options.check:
        raise InvalidStudy((Problem("", "--metadata-only is for --check: a run needs the weights"),))
    if options.check:
        exports = options.export == "best"
        return _check(study, options.out, exports=exports, metadata_only=options.metadata_only, as_json=options.json)
    return _run_in(study, options.out, export_best=options.export == "best", as_json=options.json)


def demo(options: argparse.Namespace) -> int:
    from search_spaces.study.file import load_study

    if options.retrain:
        options.spec, options.analyse, options.samples = family_dir() / RETRAIN_FILE, None, None
        return finetune(options)
    study = load_study(family_dir() / STUDY_FILE)
    return _run_in(study, options.out, export_best=True, as_json=options.json)


def finetune(options: argparse.Namespace) -> int:
    run_study = partial(_run_in, export_best=True, as_json=options.json)
    return finetune_experts(options, run_study=run_study)


def _run_in(study: Any, directory: Path, *, export_best: bool, as_json: bool) -> int:
    from service.cli.progress import ProgressStyle, ProgressView
    from service.jobs.resources import OWN
    from service.jobs.search.local_run import run_study
    from service.results.documents import pareto as pareto_document
    from service.results.summary import summary
    from service.studies.preflight.examine import EXPORT

    view = ProgressView(ProgressStyle.JSON if as_json else ProgressStyle.AUTO)
    try:
        with view:
            result = run_study(study, directory, view=view, exports=export_best, resources=OWN)
            if export_best:
                _export_from(directory, "best", directory / EXPORT)
    except KeyboardInterrupt:
        print(f"interrupted; the same command resumes the study in {directory}", file=sys.stderr)
        return 130
    if as_json:
        print_json(summary(result))
    else:
        places = {"report": directory / "report.html"} | ({"merged_model": directory / EXPORT} if export_best else {})
        print_results(pareto_document(result), summary(result), **{name: str(place) for name, place in places.items()})
    return 0


def _check(study: Any, directory: Path, *, exports: bool, metadata_only: bool, as_json: bool) -> int:
    from service.jobs.search.dry_run import check

    plan = check(study, directory, exports=exports, metadata_only=metadata_only)
    if as_json:
        print_json(plan.to_json())
    else:
        print(plan.to_text())
    return 0


def serve(options: argparse.Namespace) -> int:
    public_url = public_address(options.public_url)
    oidc = oidc_settings(
        issuer=options.oidc_issuer,
        client_id=options.oidc_client_id,
        secret_file=options.oidc_client_secret_file,
        scopes=options.oidc_scopes,
        user_claim=options.oidc_user_claim,
        groups_claim=options.oidc_groups_claim,
        teams=options.oidc_team,
        creates_users=options.oidc_create_users,
        public_url=public_url,
        environment=os.environ,
    )
    notifications = notification_settings(
        allowed_hosts=options.webhook_allow,
        public_url=public_url,
        smtp_url=options.smtp_url,
        mail_from=options.mail_from,
        password_file=options.smtp_password_file,
        allows_plain=options.smtp_plaintext,
        waiting_minutes=options.notify_waiting,
        environment=os.environ,
    )
    run_server(
        options.data,
        database=options.database,
        host=options.host,
        port=options.port,
        dashboard_host=options.dashboard_host,
        dashboard_port=options.dashboard_port,
        allow_dirs=options.allow_dir,
        trust_dirs=options.trust_dir,
        allow_urls=options.allow_url,
        allow_judges=options.allow_judge,
        allow_hosts=options.allow_host,
        prefix=options.prefix or "",
        export_days=options.export_days,
        keep=limits_of(options.keep),
        export_quota_bytes=options.export_quota,
        files=options.files,
        artifact_quota_bytes=options.artifact_quota,
        has_accounts=not options.no_accounts,
        requests_per_s=options.rate_limit,
        has_open_metrics=options.open_metrics,
        has_open_dashboard=options.open_dashboard,
        oidc=oidc,
        max_running=options.max_running,
        notifications=notifications,
        log_format=options.log_format,
        has_access_log=options.access_log,
    )
    return 0


def move_database(options: argparse.Namespace) -> int:
    from service.store import Store
    from service.store.database_url import named_url
    from service.store.move import move

    source = Store(named_url(options.source))
    try:
        target = Store(named_url(options.target))
        try:
            tables = move(source, target, note=partial(print, file=sys.stderr))
        finally:
            target.close()
    finally:
        source.close()
    if options.json:
        print_json([asdict(table) for table in tables])
    else:
        print(f"copied {sum(table.rows for table in tables)} rows from {source.place} to {target.place}")
        print("start the server with --database, or MERGESEARCH_DATABASE, and the same --data")
    return 0


def back_up(options: argparse.Namespace) -> int:
    from service.store import Store
    from service.store.backup import back_up
    from service.store.database_url import known_url

    data_dir = options.data.resolve()
    if not data_dir.is_dir():
        raise NotFound(f"--data {data_dir}: is not a directory; give the data directory of a server")
    store = Store(known_url(data_dir, options.database))
    try:
        backup = back_up(
            store,
            options.files or artifacts_dir(data_dir),
            options.out.resolve(),
            data_dir=data_dir,
            note=partial(print, file=sys.stderr, flush=True),
        )
    finally:
        store.close()
    if options.json:
        print_json(asdict(backup))
    else:
        print(
            f"{options.out}: {backup.jobs} jobs ({backup.unfinished_jobs} unfinished), "
            f"{sum(table.rows for table in backup.tables)} rows, {backup.files} files ({gib(backup.bytes)})"
        )
    return 0


def restore(options: argparse.Namespace) -> int:
    from service.store import Store
    from service.store.backup import read_backup, restore
    from service.store.database_url import database_url

    read_backup(options.backup)  # before an empty database is created
    data_dir = options.data.resolve()
    address = database_url(data_dir, options.database)
    with alone(data_dir, address, is_shared=False):
        store = Store(address)
        try:
            restored = restore(
                options.backup,
                store,
                options.files or artifacts_dir(data_dir),
                data_dir=data_dir,
                note=partial(print, file=sys.stderr, flush=True),
            )
        finally:
            store.close()
    if options.json:
        print_json(asdict(restored))
    else:
        backup = restored.backup
        print(f"{data_dir}: {backup.jobs} jobs restored; {backup.unfinished_jobs} continue when a server is started")
        if restored.removed_exports:
            print(f"{restored.removed_exports} exports are not part of a backup; request them again")
        if any(table.name == "users" and table.rows for table in backup.tables):
            print("users, teams and tokens are those of the backup: a token that was revoked since is valid again")
        print("start the server with this --data, and with the same --database and --files, if any were given")
    return 0


def migrate_database(options: argparse.Namespace) -> int:
    import logging
    import time

    from service.store import Store
    from service.store.database_url import VARIABLE, named_url
    from service.store.schema import REVISION

    name = options.database or os.environ.get(VARIABLE)
    if not name:
        raise Conflict(f"database: none is named; give its URL or its server's data directory, or set {VARIABLE}")
    logging.basicConfig(level=logging.INFO, format="%(message)s")  # Alembic names each migration
    deadline = time.monotonic() + options.wait
    while True:
        try:
            store = Store(named_url(name))
            break
        except DatabaseUnavailable as error:
            if time.monotonic() >= deadline:
                raise
            print(f"waiting: {error}", file=sys.stderr, flush=True)
            time.sleep(1.0)
    store.close()
    if options.json:
        print_json({"database": store.place, "revision": REVISION})
    else:
        print(f"database {store.place}: is at revision {REVISION}, that of this version")
    return 0


def clean(options: argparse.Namespace) -> int:
    from service.api.export_queue import Exports
    from service.retention.cleaning import Cleaner
    from service.store import Store
    from service.store.artifacts import ArtifactStore
    from service.store.database_url import known_url

    data_dir = options.data.resolve()
    if not data_dir.is_dir():
        raise NotFound(f"--data {data_dir}: is not a directory; give the data directory of a server")
    limits = limits_of(options.keep)
    address = known_url(data_dir, options.database)
    with nullcontext() if options.dry_run else alone(data_dir, address, is_shared=False):
        store = Store(address)
        try:
            artifacts = ArtifactStore(store, options.files or artifacts_dir(data_dir))
            exports = Exports(store, data_dir, artifacts=artifacts)
            cleaner = Cleaner(store, data_dir, artifacts, limits, delete_job=exports.delete_job_now)
            removals = cleaner.plan()
            if not options.dry_run:
                removals = cleaner.carry_out(removals)
        finally:
            store.close()
    if options.json:
        print_json([asdict(removal) for removal in removals])
    else:
        print_removals(removals, is_dry_run=options.dry_run)
    return 0


def drain(options: argparse.Namespace) -> int:
    import time

    from service.store import Store
    from service.store.database_url import known_url

    data_dir = options.data.resolve()
    if not data_dir.is_dir():
        raise NotFound(f"--data {data_dir}: is not a directory; give the data directory of a server")
    working: list[str] = []
    store = Store(known_url(data_dir, options.database))
    try:
        store.set_drained(drained=not options.end)
        deadline = time.monotonic() + options.wait
        while not options.end and (
            working := [job.name for job in store.unfinished_jobs() if job.has_driver(now=store.now())]
        ):
            if time.monotonic() >= deadline:
                break
            time.sleep(0.5)
    finally:
        store.close()
    if options.json:
        print_json({"drained": not options.end, "working": working})
    elif options.end:
        print(f"{data_dir}: jobs are accepted and continue")
    elif working:
        print(f"{data_dir}: drained, but drivers still work on {', '.join(working)}; wait, or end them with their Ray")
    else:
        print(f"{data_dir}: drained; no job has a driver, and jobs wait until `mergesearch drain --end`")
    return int(bool(working))


def submit(options: argparse.Namespace) -> int:
    with _on_server(options) as server:
        return server.submit(
            options.file, key=options.name_key, team=options.team, sharing=options.sharing, watch=options.watch
        )


def share(options: argparse.Namespace) -> int:
    with _on_server(options) as server:
        return server.share(options.job, options.sharing, team=options.team)


def list_jobs(kind: str, options: argparse.Namespace) -> int:
    with _on_server(options) as server:
        return server.list_jobs(kind)


def show(options: argparse.Namespace) -> int:
    with _on_server(options) as server:
        return server.show(options.job)


def watch(options: argparse.Namespace) -> int:
    with _on_server(options) as server:
        return server.watch(options.job)


def log(options: argparse.Namespace) -> int:
    with _on_server(options) as server:
        return server.log(options.job)


def chat(options: argparse.Namespace) -> int:
    if options.text and options.system is not None:
        raise Conflict("--system: --text completes the prompt alone, without a system message; leave one of them out")
    prompt = read_prompt(options.prompt)  # before a trial is served
    if prompt is None and options.json:
        raise Conflict("--json: needs a prompt; give --prompt TEXT, or send a text to standard input")
    request = {name: getattr(options, name) for name in ("max_tokens", "temperature", "seed")}
    chat_options = ChatOptions(
        is_text=options.text,
        system=options.system,
        request={name: value for name, value in request.items() if value is not None},
        idle_minutes=options.idle,
        shares_engines=options.share_engines,
        wait_s=options.wait,
    )
    with _on_server(options) as server:
        return server.chat(options.study, options.trials, prompt, chat_options)


def cancel(options: argparse.Namespace) -> int:
    with _on_server(options) as server:
        return server.cancel(options.job, reason=options.reason)


def edit(options: argparse.Namespace) -> int:
    given = {name: value for name in EDITED if (value := getattr(options, name)) is not None}
    limits = {name: given.pop(name) for name in LIMITS if name in given}
    limits = {name: None if value == NO_LIMIT else value for name, value in limits.items()}
    changes = {**given, **({"limits": limits} if limits else {})}
    if not changes:
        raise Conflict("nothing to edit: give at least one of the options that `mergesearch edit --help` lists")
    with _on_server(options) as server:
        return server.edit(options.job, changes, reason=options.reason)


def invalidate(options: argparse.Namespace) -> int:
    if options.reason is None and not options.undo:
        raise Conflict("--reason is missing: say why the trial is invalid")
    with _on_server(options) as server:
        return server.set_validity(options.study, options.trial, is_valid=options.undo, reason=options.reason)


def reevaluate(options: argparse.Namespace) -> int:
    with _on_server(options) as server:
        return server.evaluate_trial(options.study, options.trial, reason=options.reason)


def enqueue(options: argparse.Namespace) -> int:
    file, is_recipe = Path(options.recipe or options.configuration), options.recipe is not None
    with _on_server(options) as server:
        return server.enqueue(options.study, options.label, file, is_recipe=is_recipe, reason=options.reason)


def clone(options: argparse.Namespace) -> int:
    changes: list[dict[str, Any]] = [] if options.name is None else [{"name": options.name}]
    for index, (path, value) in enumerate(options.set):
        for earlier, scalar in options.set[:index]:
            if path.startswith(f"{earlier}.") and scalar is not None and not isinstance(scalar, dict):
                raise Conflict(
                    f"--set {path}={json.dumps(value)}: {earlier} has no keys after --set {earlier}="
                    f"{json.dumps(scalar)}; leave one of them out"
                )
        for key in reversed(path.split(".")):
            value = {key: value}
        changes.append(value)
    with _on_server(options) as server:
        return server.clone(options.job, changes, team=options.team, sharing=options.sharing)


def pause(options: argparse.Namespace) -> int:
    with _on_server(options) as server:
        return server.pause(options.job, reason=options.reason)


def queue(options: argparse.Namespace) -> int:
    with _on_server(options) as server:
        return server.queue()


def cluster(options: argparse.Namespace) -> int:
    with _on_server(options) as server:
        return server.cluster()


def move(options: argparse.Namespace) -> int:
    with _on_server(options) as server:
        return server.move(options.job, before=options.before, reason=options.reason)


def resume(options: argparse.Namespace) -> int:
    with _on_server(options) as server:
        return server.resume(options.job, reason=options.reason)


def stop(options: argparse.Namespace) -> int:
    with _on_server(options) as server:
        return server.stop(options.job, reason=options.reason)


def delete(options: argparse.Namespace) -> int:
    with _on_server(options) as server:
        return server.delete(options.job)


def export(options: argparse.Namespace) -> int:
    if not _is_directory(options):
        if options.quantize is not None:
            raise Conflict(
                "--quantize is for the directory of a run, because held-out scores need its data; "
                f"{options.run!r} is a job on a server"
            )
        with _on_server(options) as server:
            status = server.export(options.run, options.trial, options.out, dtype=options.dtype, prefer=options.prefer)
        _push(options)
        return status
    if options.prefer is not None and options.trial != "best":
        raise InvalidPreference(f'preference: weights choose the trial; give "best", not {options.trial!r}')
    trial, chosen = options.trial, None
    if options.prefer is not None:
        chosen = _preferred(_read(Path(options.run)), options.prefer)
        trial = str(chosen["trial"])
    if options.quantize is None:
        out = _export_from(Path(options.run), trial, options.out, dtype=options.dtype)
        print_export(out, chosen, as_json=options.json)
    else:
        _export_quantised(options, trial, chosen)
    _push(options)
    return 0


def _export_quantised(options: argparse.Namespace, trial: str, chosen: Any) -> None:
    """Write a trial's quantised model, and print its directory and its held-out scores beside the scores of the merge.

    `trial` is "best" or a number. `chosen` describes the trial if the user's weights of the objectives chose it; None
    if the user gave no weights.
    """
    from service.jobs.search.local_run import read_run
    from service.studies.quantised_export import export_quantised, scores_table

    directory = Path(options.run)
    with read_run(directory) as (store, study), ExportView() as view:
        scores = export_quantised(
            store,
            study,
            trial,
            options.out,
            scheme=options.quantize,
            dtype=options.dtype,
            note=partial(print, file=sys.stderr),
            alignments_in=alignments_dir(directory),
            progress=view.update,
        )
    if options.json:
        document = {"directory": str(options.out), "holdout": {name: asdict(each) for name, each in scores.items()}}
        print_json(document | ({} if chosen is None else {"preferred": chosen}))
        return
    print_export(options.out, chosen, as_json=False)
    if scores:
        print_scores(scores_table(scores))


def _push(options: argparse.Namespace) -> None:
    """Upload the exported model to the hub if the option `--push` is given, and print the URL."""
    if options.push is None:
        return
    try:
        pushed = push(options.out, options.push, private=options.private)
    except HubUnusable as error:
        raise Conflict(f"{options.out} is written, but not pushed: {error}") from error
    print(f"pushed: {pushed.url}", file=sys.stderr if options.json else sys.stdout)


def merge(options: argparse.Namespace) -> int:
    from service.merges.merge import MergePlan
    from service.merges.series import check_merges, merge_all

    directories = _directories(options.model)
    if options.check:
        note = partial(print, file=sys.stderr)
        plans = check_merges(
            options.file, directories, options.out, dtype=options.dtype, strict=options.strict, note=note
        )
        for name, plan in plans.items():
            if isinstance(plan, MergePlan):
                print_json(plan.to_json()) if options.json else print(plan.to_text())
            elif not options.json:
                print(
                    f"{name or 'the final merge'} is made from {', '.join(plan)}; it is checked once these are written"
                )
        return 0
    shards = {} if options.max_shard_size is None else {"max_shard_bytes": options.max_shard_size}
    try:
        with ExportView() as view:
            out = merge_all(
                options.file,
                directories,
                options.out,
                dtype=options.dtype,
                strict=options.strict,
                note=partial(print, file=sys.stderr),
                progress=view.update,
                **shards,
            )
    except KeyboardInterrupt:
        print("interrupted; the same command continues and keeps the complete files", file=sys.stderr)
        return 130
    print_json({"directory": str(out)}) if options.json else print(f"merged model: {out}")
    return 0


def expand(options: argparse.Namespace) -> int:
    from workers.export.expansion.files import expand as expand_models
    from workers.export.expansion.form import common_form
    from workers.models.checkpoints import open_checkpoint

    models = _by_alias(options.models, option="MODEL")
    for alias in models:
        if re.fullmatch(FOLDER, alias) is None:
            raise InvalidRecipe(f"MODEL {alias!r}: an alias is the name of a folder, and matches {FOLDER}")
    if options.check:
        opened = {alias: open_checkpoint(directory) for alias, directory in models.items()}
        form = common_form(opened, tokens_of=options.tokens_of)
        print_json(_form_document(form)) if options.json else print(_described_form(form))
        return 0
    try:
        with ExportView() as view:
            found = expand_models(
                models,
                options.out,
                tokens_of=options.tokens_of,
                progress=view.update,
                note=partial(print, file=sys.stderr),
            )
    except FileExistsError as error:
        raise Conflict(str(error)) from error
    if options.json:
        print_json(_form_document(found.form) | {"directories": {a: str(d) for a, d in found.directories.items()}})
        return 0
    print(_described_form(found.form))
    for alias, directory in found.directories.items():
        print(f"{alias}: {directory}")
    return 0


def _described_form(form: Form) -> str:
    return f"common form: {form}"


def _form_document(form: Form) -> dict[str, Any]:
    return {"model_type": form.kind, "rotary_type": form.rotary.kind, "shape": asdict(form.shape)}


def begin(options: argparse.Namespace) -> int:
    import yaml

    from search_spaces.section import NAME
    from service.merges.study_file import study_of_file

    def warn(line: str) -> None:
        print(f"{options.file}: {line}", file=sys.stderr)

    if re.fullmatch(NAME, options.name) is None:
        raise InvalidStudy((Problem("name", f"{options.name!r} does not match {NAME}"),))
    try:
        document = study_of_file(options.file, name=options.name, warn=warn)
    except InvalidRecipe as error:
        raise InvalidRecipe(f"{options.file}: {error}") from error
    text = yaml.safe_dump(document, sort_keys=False, allow_unicode=True)
    if options.out is not None:
        with options.out.open("x", encoding="utf-8") as file:
            file.write(text)
    if options.json:
        print_json(document)
    elif options.out is None:
        print(text, end="")
    else:
        print(f"study file: {options.out}; fill in its objectives")
    return 0


def trials(options: argparse.Namespace) -> int:
    if not _is_directory(options):
        with _on_server(options) as server:
            return server.trials(options.run, out=options.out, optuna=options.optuna)
    from service.cli.tables import trials_table
    from service.results.documents import trial_documents

    result = _read(Path(options.run))
    if options.out is not None or options.optuna is not None:
        configurations = {t.number: t.configuration for t in result.whole_trials if t.configuration is not None}
        columns = trial_columns(result.trials, configurations)
        directions = {objective.name: objective.direction for objective in result.objectives}
        documents = [] if options.optuna is None else trial_documents(result)
        return write_trials(columns, result.study.name, directions, documents, out=options.out, optuna=options.optuna)
    documents = trial_documents(result)
    if options.json:
        print_json(documents)
    else:
        console().print(trials_table(documents, [objective.name for objective in result.objectives]))
    return 0


def recipe(options: argparse.Namespace) -> int:
    if not _is_directory(options):
        with _on_server(options) as server:
            return server.recipe(options.run, options.trial, is_mergekit=options.mergekit)
    from service.jobs.search.local_run import read_run

    with read_run(Path(options.run)) as (store, study):
        document = store.trial(study.id, options.trial).read_recipe().to_json()
        if not options.mergekit:
            from search_spaces.study.file import Study
            from service.resolved_study import ResolvedStudy

            dtype = engine_dtype(Study.model_validate(study.document), ResolvedStudy.of(study))
            print_json({**document, "dtype": dtype})
            return 0
        from service.studies.mergekit import mergekit_file

        content = mergekit_file(study, document)
        print_json({"mergekit": content}) if options.json else print(content, end="")
    return 0


def pareto(options: argparse.Namespace) -> int:
    if not _is_directory(options):
        with _on_server(options) as server:
            return server.pareto(options.run, prefer=options.prefer)
    from service.cli.tables import pareto_table
    from service.results.documents import pareto as pareto_document

    result = _read(Path(options.run))
    document = pareto_document(result)
    if options.prefer is not None:
        document["preferred"] = _preferred(result, options.prefer)
    print_json(document) if options.json else console().print(pareto_table(document))
    return 0


def evaluate(options: argparse.Namespace) -> int:
    from search_spaces.study.file import load_benchmarks

    added = load_benchmarks(options.benchmarks).on_trial(options.trial)
    if options.out is not None:
        return _evaluate_model(options, added)
    if not _is_directory(options):
        with _on_server(options) as server:
            return server.evaluate(options.run, added, watch=options.watch)
    from service.jobs.resources import OWN
    from service.jobs.search.local_run import DATABASE, evaluate_run

    directory = Path(options.run)
    if not (directory / DATABASE).exists() and (directory / "config.json").exists():
        raise NotFound(f"{directory}: is a model, not a run; say where its results are kept: --out DIR")
    return _print_benchmarks(options, lambda view: evaluate_run(directory, added, view=view, resources=OWN))


def _evaluate_model(options: argparse.Namespace, added: AddedBenchmarks) -> int:
    from service.jobs.resources import OWN
    from service.jobs.search.local_run import run_study
    from service.studies.benchmarks import model_study

    if options.trial is not None or options.server is not None:
        given = "a trial" if options.trial is not None else "--server"
        raise Conflict(f"--out is for a single model on this machine; leave out {given}, or --out for a study")
    study = model_study(options.run, added)
    return _print_benchmarks(
        options, lambda view: run_study(study, options.out, view=view, resources=OWN, continues=True)
    )


def _print_benchmarks(options: argparse.Namespace, evaluated: Callable[[Any], RunRecord]) -> int:
    from service.cli.progress import ProgressStyle, ProgressView
    from service.results.documents import benchmarks_document

    view = ProgressView(ProgressStyle.JSON if options.json else ProgressStyle.AUTO)
    try:
        with view:
            result = evaluated(view)
    except KeyboardInterrupt:
        print("interrupted; the same command continues and keeps what is scored", file=sys.stderr)
        return 130
    document = benchmarks_document(result.benchmarks)
    print_json(document) if options.json else print_benchmarks(document)
    return 0


def propose(options: argparse.Namespace) -> int:
    from service.jobs.search.local_run import read_run
    from service.store.artifacts import ArtifactStore
    from service.studies.policies.paths import policy_paths

    directory = Path(options.run)
    experts = {alias: str(place) for alias, place in _directories(options.model).items()} or None
    with read_run(directory) as (store, study):
        artifacts = ArtifactStore(store, artifacts_dir(directory))
        found = policy_paths(store, study, artifacts, preference=options.prefer, count=options.count, experts=experts)
    if options.out is not None:
        options.out.write_text(json.dumps(found[0].recipe.to_json(), indent=2) + "\n")
    if options.json:
        print_json([{"path": path.steps, "recipe": path.recipe.to_json()} for path in found])
    else:
        for path in found:
            print(" ".join(f"{model}:{layer}" for model, layer in path.steps))
    return 0


def schema(options: argparse.Namespace) -> int:
    from service.schemas.json_schemas import schemas

    print_json(schemas()[options.name])
    return 0


# -- helpers -----------------------------------------------------------------------------------------------------------


def _on_server(options: argparse.Namespace) -> AbstractContextManager[ServerVerbs]:
    from service.cli.remote import server_verbs

    no_directory = getattr(options, "run", None) if options.server is None else None
    return server_verbs(options.server, as_json=options.json, no_directory=no_directory)


def _is_directory(options: argparse.Namespace) -> bool:
    """Whether a command's argument `options.run` names the directory of a `mergesearch run`, and not a job of a server.

    The argument names a directory if the option --server is absent, and the argument is an existing path or contains a
    path separator.
    """
    return options.server is None and (os.sep in options.run or Path(options.run).exists())


def _read(directory: Path) -> RunRecord:
    from service.jobs.search.local_run import read_run
    from service.results.load import run_record

    with read_run(directory) as (store, study):
        return run_record(store, study.id)


def _preferred(result: RunRecord, weights: Mapping[str, float]) -> PreferredDocument:
    from service.results.preference import choices

    return choices(result).preferred(weights)


def _export_from(directory: Path, trial: str, out: Path, *, dtype: str | None = None) -> Path:
    from service.jobs.search.local_run import read_run
    from service.studies.export import export_trial

    with read_run(directory) as (store, study), ExportView() as view:
        own = alignments_dir(directory)
        return export_trial(store, study, trial, out, dtype=dtype, alignments_in=own, progress=view.update)


def _directories(models: Sequence[str]) -> dict[str, Path]:
    """Parse the values of the option `--model`, each ALIAS=DIR, into a dict from aliases to directories.

    Raises InvalidRecipe if a value does not have this form, or if an alias is given twice.
    """
    return {alias: Path(directory) for alias, directory in _by_alias(models, option="--model").items()}


def _by_alias(models: Sequence[str], *, option: str) -> dict[str, str]:
    """Parse the values of an option or argument, each ALIAS=MODEL, into a dict from aliases to models.

    Raises InvalidRecipe if a value does not have this form, or if an alias is given twice.
    """
    directories: dict[str, str] = {}
    for text in models:
        alias, equals, directory = text.partition("=")
        if not (alias and equals and directory):
            raise InvalidRecipe(f"{option} {text!r}: write ALIAS=DIR, e.g. math=/models/math")
        if alias in directories:
            raise InvalidRecipe(f"{option} {text!r}: {alias} is given twice, first as {directories[alias]}")
        directories[alias] = directory
    return directories

"""Training of one expert or of several experts, each in its directory and from its last checkpoint."""

from __future__ import annotations

import json
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from service.disk import locked
from service.errors import Conflict
from service.jobs.base import Resources
from service.jobs.finetune.directory import (
    EXPERT_DIR,
    FAILURE_FILE,
    SPEC_FILE,
    SUMMARY_FILE,
    read_document,
    write_document,
)
from service.jobs.finetune.earlier_versions import read_spec, with_stored_defaults, written_as
from service.jobs.finetune.gpu_memory import check_gpu_memory, largest_gpu_bytes
from service.jobs.finetune.ray_train import num_side_by_side, trains_on_gpus
from service.jobs.finetune.request import foreign_tasks
from workers.errors import InvalidModel, InvalidTask, TrainingFailed
from workers.file_access import FileAccess
from workers.models.checkpoints import open_checkpoint
from workers.models.remote import locate
from workers.training.finetuning.fleet import fleet_noise
from workers.training.finetuning.history import CHECKPOINTS
from workers.training.finetuning.memory_plan import training_memory
from workers.training.finetuning.modality import training_of
from workers.training.finetuning.spec import FinetuneSpec

__all__ = ["run_finetune", "run_fleet"]

# Options that change rounding at most, with which a training may continue on other machines.
CHANGEABLE = ("workers", "device", "training.micro_batch", "training.gradient_checkpointing")

# The section that does not influence the training, and may change until the values are final.
EVALUATION = "evaluation"

# Characters of an option's value in a message.
MAX_SHOWN = 60

# Errors that another attempt would repeat: workers store them instead of raising them.
FINAL: dict[str, Callable[[str], Exception]] = {
    "InvalidModel": lambda text: InvalidModel((text,)),
    "InvalidTask": InvalidTask,
    "TrainingFailed": TrainingFailed,
}


def run_finetune(
    spec: FinetuneSpec,
    directory: Path,
    *,
    resources: Resources,
    note: Callable[[str], None] = lambda _: None,
    access: FileAccess | None = None,
    side_by_side: int = 1,
    fleet: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Train the expert that `spec` describes in `directory`, or continue its training; return the summary.

    Args:
        spec: Specification of the expert.
        directory: Directory of the training, new or from an earlier call with the same `spec`. Only the options in
            CHANGEABLE and, until the training has ended, the section EVALUATION may differ. Options that `spec` does
            not state keep the defaults of the version that began the training.
        resources: Functions that connect to Ray and train on Ray Train.
        note: Called with messages about the progress.
        access: Files that evaluation tasks may read; None is no limit.
        side_by_side: Number of experts, including this expert, that are trained at the same time and share the CPU
            cores.
        fleet: Options of `method` that the fleet of the expert sets if its file does not state them.

    Raises:
        InvalidModel: The base model cannot be trained.
        InvalidTask: The data or a task cannot be used.
        Conflict: The directory is used by another run or specification, the data have changed since its last
            checkpoint, the cluster is too small, or the training does not fit into the memory of its GPUs.
        ConnectionError: Ray cannot be reached.
        TrainingFailed: The training failed, and would fail again.
    """
    with locked(directory):
        before = read_document(directory / SPEC_FILE)
        if before is not None:
            spec, kept = with_stored_defaults(spec, before, fleet=fleet)
            stored = read_spec(before)
            has_ended = (directory / SUMMARY_FILE).exists()
            if differences := _differences(stored, spec, CHANGEABLE if has_ended else (*CHANGEABLE, EVALUATION)):
                raise Conflict(
                    f"{directory}: holds another fine-tuning ({stored.name!r}), which differs in "
                    f"{', '.join(differences)}; give these options the values of that fine-tuning to continue it, or "
                    "give another directory"
                )
            for message in kept:
                note(message)
        if before is None and (directory / EXPERT_DIR).exists():
            raise Conflict(f"{directory}: holds a model that this fine-tuning did not make; give another directory")
        if (summary := read_document(directory / SUMMARY_FILE)) is not None:
            return summary
        note(f"Checking base model and data of {spec.name} ...")
        for message in _check(spec, access):
            note(message)
        _check_data_unchanged(spec, directory)
        with _ray(resources, note):
            cluster = resources.cluster()
            _check_memory(spec, directory, cluster)
            for line in _plan(spec, cluster):
                note(line)
            # Only now, so that a specification that was refused may change.
            write_document(directory / SPEC_FILE, written_as(spec, before))
            (directory / FAILURE_FILE).unlink(missing_ok=True)
            resources.fit(spec, directory, access, side_by_side)
        if (failure := read_document(directory / FAILURE_FILE)) is not None:
            raise FINAL[failure["error"]](failure["message"])
        summary = read_document(directory / SUMMARY_FILE)
        assert summary is not None
        return summary


def run_fleet(
    specs: Mapping[str, FinetuneSpec],
    directories: Mapping[str, Path],
    *,
    resources: Resources,
    parallel: int | None = None,
    note: Callable[[str], None] = lambda _: None,
    begins: Callable[[int], None] = lambda _: None,
    finished: Callable[[str, dict[str, Any]], None] = lambda *_: None,
    access: FileAccess | None = None,
) -> dict[str, dict[str, Any]]:
    """Train several experts, each in its directory, and return their summaries, keyed by alias.

    All trainings use one connection to Ray. All experts are checked before the first training starts. If a training
    fails, the trainings that already run are finished, and no other training is started.

    Args:
        specs: Specifications of the experts, keyed by alias.
        directories: Directories of the trainings, keyed by alias.
        resources: Functions that connect to Ray and train on Ray Train.
        parallel: Number of experts that train at the same time. None means the number of experts for which the cluster
            has GPUs, or one if workers train on CPU cores.
        note: Called with messages about the progress.
        begins: Called with the number of experts that train at the same time, before the first training.
        finished: Called in the caller's thread with the alias and the summary of an expert, as soon as it is trained.
        access: Files that evaluation tasks may read; None is no limit.

    Raises InvalidModel, InvalidTask, Conflict, ConnectionError and TrainingFailed in the same cases as `run_finetune`.
    Also raises Conflict if the cluster is too small for `parallel` experts.
    """
    unfinished = [alias for alias in specs if read_document(directories[alias] / SUMMARY_FILE) is None]
    of_fleet = fleet_noise(specs)
    if len(unfinished) > 1:
        for alias in unfinished:
            note(f"Checking base model and data of {alias} ...")
            _check(_continued(specs[alias], directories[alias], of_fleet), access)
    summaries: dict[str, dict[str, Any]] = {}
    with _ray(resources, note) if len(unfinished) > 1 else nullcontext():
        count = 1
        if len(unfinished) > 1:
            cluster = resources.cluster()
            for alias in unfinished:
                _check_memory(specs[alias], directories[alias], cluster)
            count = num_side_by_side([specs[alias] for alias in unfinished], cluster, parallel)
            if count > 1:
                note(f"{count} of {len(unfinished)} experts train at the same time")
        begins(count)

        def train(alias: str) -> dict[str, Any]:
            return run_finetune(
                specs[alias],
                directories[alias],
                resources=resources,
                note=note,
                access=access,
                side_by_side=count,
                fleet=of_fleet,
            )

        for alias, summary in _results(train, specs, count):
            summaries[alias] = summary
            finished(alias, summary)
    return {alias: summaries[alias] for alias in specs}


def _results(
    train: Callable[[str], dict[str, Any]], aliases: Iterable[str], count: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Call `train` for each of `aliases`, and yield (alias, result) as soon as a call ends.

    At most `count` calls run at a time. With `count` 1, the calls run in the caller's thread; otherwise, they run in
    separate threads. After an error no other call is started, and the error is raised when the running calls have
    ended.
    """
    if count == 1:
        for alias in aliases:
            yield alias, train(alias)
        return
    waiting, errors = deque(aliases), list[BaseException]()
    ended: queue.Queue[tuple[str, dict[str, Any] | BaseException]] = queue.Queue()

    def run(alias: str) -> None:
        try:
            ended.put((alias, train(alias)))
        except BaseException as error:  # raised in the caller's thread
            ended.put((alias, error))

    running = 0
    while running or (waiting and not errors):
        while waiting and running < count and not errors:
            # Daemons: an interrupted command ends without them, and they end with the connection to Ray.
            threading.Thread(target=run, args=(waiting.popleft(),), daemon=True).start()
            running += 1
        alias, result = ended.get()
        running -= 1
        if isinstance(result, BaseException):
            errors.append(result)
        else:
            yield alias, result
    if errors:
        raise errors[0]


@contextmanager
def _ray(resources: Resources, note: Callable[[str], None]) -> Iterator[None]:
    with resources.ray() as session:
        if session.dashboard_url:
            note(f"Ray dashboard: {session.dashboard_url}/#/actors")
        yield


def _continued(spec: FinetuneSpec, directory: Path, fleet: Mapping[str, Any]) -> FinetuneSpec:
    """The specification with which the training in `directory` continues, if an earlier version began it.

    The result has the defaults of that version. `fleet` has the options of `method` that the fleet of the expert sets.
    If no training began in `directory`, the result is `spec`.
    """
    before = read_document(directory / SPEC_FILE)
    return spec if before is None else with_stored_defaults(spec, before, fleet=fleet)[0]


def _check(spec: FinetuneSpec, access: FileAccess | None) -> tuple[str, ...]:
    """Check everything in an expert's specification that does not need the weights of the base model.

    `access` limits the files that data and tasks may name; None is no limit. Returns messages for the user. Raises
    InvalidModel if the base model cannot be trained, and InvalidTask if the data or an evaluation task cannot be used.
    """
    from workers.training.finetuning.trainer import check

    if problems := [*foreign_tasks(spec)]:
        raise InvalidTask("\n".join(f"{spec.name}: {problem.field}: {problem.message}" for problem in problems))
    return check(spec, access=access)


def _check_data_unchanged(spec: FinetuneSpec, directory: Path) -> None:
    """Check that the training in `directory` continues on the data of its last checkpoint, if it has one.

    Raises Conflict if the data have changed. The base model, whose hash takes longer, is checked by the training.
    """
    from workers.training.finetuning import checkpoints
    from workers.training.finetuning.result import DATA, changed_source

    newest = checkpoints.latest(directory / CHECKPOINTS)
    if newest is None or (digest := training_of(locate(spec.base)).data_digest(spec)) is None:
        return
    if change := changed_source(spec, before=checkpoints.sources(newest), now={DATA: digest}):
        raise Conflict(f"{directory}: {change}")


def _check_memory(spec: FinetuneSpec, directory: Path, resources: Mapping[str, float]) -> None:
    """Check that a training on GPUs fits into their memory, if this memory is known.

    A training with a checkpoint in `directory` is not checked: it has run before. Raises Conflict if the training does
    not fit, or if the cluster is too small for its workers.
    """
    if not trains_on_gpus(spec.workers, resources, spec.device) or any((directory / CHECKPOINTS).glob("*")):
        return
    if (capacity := largest_gpu_bytes(int(resources["GPU"]))) is not None:
        check_gpu_memory(spec, capacity)


def _plan(spec: FinetuneSpec, resources: Mapping[str, float]) -> Iterator[str]:
    """Yield messages for users about the devices of an expert's training, and about the memory that it takes.

    `spec` is the specification of the expert. `resources` has the cluster's numbers of CPU cores ("CPU") and GPUs
    ("GPU").
    """
    has_gpus = trains_on_gpus(spec.workers, resources, spec.device)
    if not has_gpus and spec.device == "auto":
        yield f"{spec.name} trains on CPU cores: the cluster has no GPU"
    is_bfloat16 = spec.training.precision == "bfloat16" or (spec.training.precision == "auto" and has_gpus)
    base, wanted = open_checkpoint(locate(spec.base)), spec.training.gradient_checkpointing
    plan = training_memory(spec, base, is_bfloat16=is_bfloat16, recomputes=wanted is True)
    text = f"{spec.name} takes about {plan.text()} on each of {spec.workers} {'GPUs' if has_gpus else 'workers'}"
    if wanted == "auto" and spec.method.kind != "tangent":
        least = training_memory(spec, base, is_bfloat16=is_bfloat16, recomputes=True)
        text += f"; {least.total / (1 << 30):.1f} GiB with activations computed twice, where that does not fit"
    yield text


def _differences(before: FinetuneSpec, spec: FinetuneSpec, changeable: Sequence[str]) -> list[str]:
    """Options in which two specifications of an expert differ although they must be equal, with both values.

    `before` is the specification with which the training of the expert began, and `spec` is the present specification.
    Differences in the options and sections that are `changeable` are left out.
    """
    return list(_different(_settled(before, changeable), _settled(spec, changeable)))


def _different(before: Mapping[str, Any], now: Mapping[str, Any], section: str = "") -> Iterator[str]:
    for name, value in now.items():
        if isinstance(value, Mapping) and isinstance(before[name], Mapping):
            yield from _different(before[name], value, f"{section}{name}.")
        elif value != before[name]:
            yield f"{section}{name} ({_shown(before[name])} there, {_shown(value)} here)"


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def _settled(spec: FinetuneSpec, changeable: Sequence[str]) -> dict[str, Any]:
    document = spec.canonical()
    for option in changeable:
        *sections, name = option.split(".")
        place = document
        for section in sections:
            place = place[section]
        del place[name]
    return document

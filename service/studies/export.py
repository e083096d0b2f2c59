"""Export of merged models to checkpoint directories.

Modules that only the export of a study's trial needs are imported in `export_trial`; `mergesearch merge`, which uses
this module too, starts in half the time without them.
"""

from __future__ import annotations

import errno
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from search_spaces.recipe import Recipe
from service.disk import lack_of_space
from service.errors import Conflict, NotFound
from service.resolved_study import ResolvedStudy
from service.studies.preflight.dtype import DTYPE_BYTES, engine_dtype
from workers.alignments.recipes import unaligned
from workers.models.family import resolve_family

if TYPE_CHECKING:
    from service.store import Store
    from service.types import JobRecord, TrialRecord
    from workers.merging.bank import Bank

__all__ = ["chosen_trial", "export_trial", "model_bytes", "write_model"]


def export_trial(
    store: Store,
    record: JobRecord,
    trial: str,
    out: Path,
    *,
    dtype: str | None = None,
    alignments_in: str | Path | None = None,
    **details: Any,
) -> Path:
    """Write the merged model of a trial to the directory `out`, and return `out`.

    `record` is the study's job in `store`, and `trial` is "best" or the trial's number. With `dtype` None the model has
    the dtype of the study's engines. `alignments_in` is the directory of the study's alignments (maps from one layer's
    output to the next layer's input), or the URL of the object store that has them. `details` are passed on to the
    function that writes the checkpoint, such as `max_shard_bytes` or `progress` (`workers.export.checkpoint.export`).

    Raises:
        NotFound: There is no such trial.
        Conflict: The sources have changed since the study was created, `out` contains anything but this model, or its
            disk has too little space.
        InvalidStudy: The study is not permitted to read its models any more.
    """
    from search_spaces.study.file import Study
    from service.results.load import held_out_estimates
    from service.studies.preflight.files import check_files
    from service.studies.preflight.models import with_revisions
    from workers.merging.bank import Bank

    resolved = ResolvedStudy.of(record)
    study = with_revisions(Study.model_validate(record.document), resolved)
    check_files(study, resolved.access)
    trials, objectives = store.trials(record.id), resolved.objectives
    chosen = chosen_trial(store, record, trial)
    sources = resolve_family(study.models.base, study.models.named, tokenizer=study.models.tokenizer).fetched()
    fingerprints = resolved.fingerprints
    if sources.fingerprints != fingerprints:
        changed = sorted(a for a, f in sources.fingerprints.items() if fingerprints.get(a) != f)
        raise Conflict(f"models {', '.join(changed)} have changed since the study; the scored merge cannot be written")
    bank = Bank(sources, keeps_statistics=False)
    if alignments_in is not None:
        bank.alignments_dir = str(alignments_in)
    return write_model(
        chosen.read_recipe(),
        bank,
        out,
        dtype=dtype or engine_dtype(study, resolved),
        scores=held_out_estimates(store, record.id, chosen.number, trials=trials, objectives=objectives),
        study=study.name,
        **details,
    )


def write_model(
    recipe: Recipe, bank: Bank, out: Path, *, dtype: str, chat_template: str | None = None, **details: Any
) -> Path:
    """Write the merged model of a recipe to the directory `out`, and return `out`.

    `bank` has the weights of the source models. `dtype` is the dtype of the merged model, such as "bfloat16".
    `chat_template` replaces the tokenizer's chat template; None keeps it. `details` are passed on to the function that
    writes the checkpoint, such as `max_shard_bytes` or `progress` (`workers.export.checkpoint.export`). Raises Conflict
    if `out` contains anything but this model, and if the disk has too little space. If the disk is full before the
    model is complete, the incomplete model is removed.
    """
    import torch

    from workers.export.checkpoint import export

    model_bytes(recipe, bank, out, dtype=dtype, chat_template=chat_template)
    try:
        return export(recipe, bank, out, dtype=getattr(torch, dtype), chat_template=chat_template, **details)
    except FileExistsError as error:
        raise Conflict(str(error)) from error
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise Conflict(
            f"{out}: {os.strerror(error.errno)}: the incomplete model was removed; make room or give a "
            "directory on another disk"
        ) from error


def model_bytes(recipe: Recipe, bank: Bank, out: Path, *, dtype: str, chat_template: str | None = None) -> int:
    """Compute the size of the merged model of a recipe, in bytes, and check that it can be written to `out`.

    Nothing is written. `bank` has the source models, and `dtype` is the dtype of the merged model. `chat_template`
    replaces the tokenizer's chat template; None keeps it. Raises Conflict if `out` contains anything but this model, or
    if its disk has too little space.
    """
    import torch

    from workers.export.checkpoint import is_written, left_behind_bytes
    from workers.merging.plan import merged_names

    num_bytes = sum(map(math.prod, merged_names(unaligned(recipe), bank).values())) * DTYPE_BYTES[dtype]
    try:
        is_written(recipe, out, getattr(torch, dtype), chat_template=chat_template)
    except FileExistsError as error:
        raise Conflict(str(error)) from error
    if lack := lack_of_space(out, num_bytes - left_behind_bytes(out)):
        raise Conflict(lack)
    return num_bytes


def chosen_trial(store: Store, record: JobRecord, trial: str) -> TrialRecord:
    """The trial of a study that `trial` names: "best" or a number. Raises NotFound if there is no such trial.

    `record` is the study's job in `store`.
    """
    from service.results.selection import best_trial

    trials = store.trials(record.id)
    if not trials:
        raise NotFound("the run has no trials yet; there is nothing to export")
    if trial == "best":
        if (winner := best_trial(trials, ResolvedStudy.of(record).objectives)) is None:
            raise NotFound("no trial has reached the full budget yet, so there is no best one")
        return winner
    if not trial.isdecimal() or int(trial) >= len(trials):
        raise NotFound(f'trial {trial!r}: give "best" or a number from 0 to {len(trials) - 1}')
    return trials[int(trial)]

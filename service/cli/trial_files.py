"""Files and Optuna storages to which `mergesearch trials` writes the trials of a study."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from service.results.columns import Columns, add_to_optuna, write_columns

if TYPE_CHECKING:
    from service.schemas.files import TrialDocument

__all__ = ["write_trials"]


def write_trials(
    columns: Columns,
    name: str,
    directions: Mapping[str, str],
    trials: Sequence[TrialDocument],
    *,
    out: Path | None,
    optuna: str | None,
) -> int:
    """Write the trials of the study `name` to the file `out`, or to the Optuna storage with the URL `optuna`.

    `columns` has the trials as columns, for the file. `trials` has the trials' documents with all rungs, for the
    storage. `directions` has "minimize" or "maximize" for each objective. Returns the exit code. Raises Conflict if the
    file's name does not end with .csv or .parquet, or the storage has a study of this name.
    """
    if out is not None:
        write_columns(columns, out)
    if optuna is not None:
        rungs = {trial["number"]: trial["rungs"] for trial in trials}
        add_to_optuna(columns, name=name, directions=directions, storage=optuna, rungs=rungs)
    print(f"{len(columns['number'])} trials: {out or f'study {name} in {optuna}'}")
    return 0

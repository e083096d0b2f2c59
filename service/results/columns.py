"""The trials of a study as columns: for charts of many trials, CSV and Parquet files, and studies of Optuna."""

from __future__ import annotations

import csv
import itertools
import json
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import filter as matching
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from service.errors import Conflict, InvalidQuery
from service.types import TrialResult

__all__ = [
    "MAX_PATTERNS",
    "PARAMETER",
    "ColumnChoice",
    "Columns",
    "add_to_optuna",
    "optuna_trials",
    "trial_columns",
    "write_columns",
]

# Columns by name, all of the same length.
Columns = Mapping[str, Sequence[Any]]

VALUE, PARAMETER = "value.", "parameter."

# Characters that make a name a pattern, and the number of patterns that one choice may have: each of them is compared
# with the name of every column.
WILDCARDS = frozenset("*?[")
MAX_PATTERNS = 50

# Digits of values and standard errors; noise of samples is larger.
DIGITS = 6

# First characters of texts that spreadsheets run as formulas (OWASP, "CSV Injection"), full-width ones among them. The
# web page (`service/web/app/src/parts/csv.ts`) guards the same.
FORMULA = tuple("=+-@\t\r\n\uff1d\uff0b\uff0d\uff20")

# Optuna stores parameters as floats, which hold all integers up to this size; and the number of trials that are written
# to its storage together.
LARGEST_INTEGER = 2**53
INSERTED_TOGETHER = 500


def trial_columns(
    trials: Sequence[TrialResult], configurations: Mapping[int, Mapping[str, Any]]
) -> dict[str, list[Any]]:
    """Return the trials of a study as columns: for each column's name, a list with a value or None for each trial.

    A trial's values are its values at the highest rung that it has finished, so values of trials with different numbers
    in the column `samples` are not comparable. The columns are:

    - `number`, `state`, `label`, `recipe_digest`: number, state and label of the trial, and the digest of its recipe
    - `origin`: where its recipe comes from, such as "search" or "source"
    - `bracket`: index of its bracket of successive halving; None for a baseline
    - `reason`: why it failed or was pruned; None otherwise
    - `invalid`: why a user marked it as invalid; None if it is valid
    - `rung`: index of the highest finished rung, from 0
    - `samples`: number of samples of that rung, over all objectives
    - `samples_scored`, `samples_reused`: numbers of its samples that were scored for it, and that were stored before
    - `value.NAME`, `standard_error.NAME`: value of each objective at that rung, and its standard error
    - `parameter.NAME`: each parameter of the search space; None in trials whose configuration lacks it

    Args:
        trials: The trials, in the order of the rows.
        configurations: Configurations, keyed by trial number; trials without a configuration are baselines.
    """
    last = [trial.rungs[-1] if trial.rungs else None for trial in trials]
    columns: dict[str, list[Any]] = {
        "number": [trial.number for trial in trials],
        "state": [trial.state.value for trial in trials],
        "origin": [trial.origin.value for trial in trials],
        "label": [trial.label for trial in trials],
        "bracket": [trial.bracket for trial in trials],
        "reason": [trial.reason for trial in trials],
        "invalid": [trial.invalid for trial in trials],
        "recipe_digest": [trial.recipe.digest for trial in trials],
        "rung": [rung and rung.rung for rung in last],
        "samples": [rung and sum(rung.num_samples.values()) for rung in last],
        "samples_scored": [trial.samples_scored for trial in trials],
        "samples_reused": [trial.samples_reused for trial in trials],
    }
    for name in dict.fromkeys(name for rung in last if rung for name in rung.values):
        columns[f"value.{name}"] = [rung and _rounded(rung.values.get(name)) for rung in last]
        columns[f"standard_error.{name}"] = [rung and _rounded(rung.standard_errors.get(name)) for rung in last]
    of_trials = [configurations.get(trial.number, {}) for trial in trials]
    for name in dict.fromkeys(name for configuration in of_trials for name in configuration):
        columns[f"parameter.{name}"] = [configuration.get(name) for configuration in of_trials]
    return columns


class ColumnChoice:
    """Choice of columns by name and by pattern, such as "number,value.*".

    Args:
        fields: Names and patterns, separated by commas. In a pattern, "*" stands for any text.

    Raises:
        InvalidQuery: There are more than MAX_PATTERNS patterns.
    """

    def __init__(self, fields: str) -> None:
        names = {name.strip() for name in fields.split(",")}
        self._patterns = {name for name in names if WILDCARDS & set(name)}
        self._names = names - self._patterns
        if len(self._patterns) > MAX_PATTERNS:
            raise InvalidQuery("fields", f"has {len(self._patterns)} patterns; give at most {MAX_PATTERNS}")

    def of(self, columns: Iterable[str]) -> frozenset[str]:
        """Names of `columns` that the user has chosen, by name or by pattern."""
        every = frozenset(columns)
        return (every & self._names).union(*(matching(every, pattern) for pattern in self._patterns))


def write_columns(columns: Columns, file: Path) -> None:
    """Write columns to a file with a row for each trial: CSV or Parquet, by the end of the file's name.

    In CSV, a text that a spreadsheet would run as a formula begins with an apostrophe, since labels are texts of other
    users; Parquet has all texts as they are. Raises Conflict if the name ends otherwise.
    """
    if file.suffix == ".csv":
        with file.open("w", newline="", encoding="utf-8") as stream:
            rows = csv.writer(stream)
            rows.writerow(map(_guarded, columns))
            rows.writerows(map(_guarded, row) for row in zip(*columns.values(), strict=True))
    elif file.suffix == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.table({name: _one_type(values) for name, values in columns.items()}), file)
    else:
        raise Conflict(f"{file}: trials are written as .csv or .parquet; give a name that ends so")


def _guarded(value: Any) -> Any:
    """Put an apostrophe before a text that a spreadsheet would run as a formula; other values are not changed."""
    return f"'{value}" if isinstance(value, str) and value.startswith(FORMULA) else value


def _one_type(values: Sequence[Any]) -> list[Any]:
    """Convert the values of a column to text if they have several types; otherwise the values are not changed.

    Integers and floats count as one type. None stays None.
    """
    kinds = {type(value) for value in values if value is not None}
    if len(kinds) < 2 or kinds == {int, float}:
        return list(values)
    return [None if value is None else str(value) for value in values]


def add_to_optuna(
    columns: Columns,
    *,
    name: str,
    directions: Mapping[str, str],
    storage: str,
    rungs: Mapping[int, Sequence[Mapping[str, Any]]] = MappingProxyType({}),
) -> None:
    """Add the trials of a study to an Optuna storage as a new study, for optuna-dashboard and Optuna's charts.

    Objectives become Optuna's objectives, and the values in Optuna are the values at the full budget. Trials that users
    marked as invalid are FAIL in the storage, so that they are not among the best. With a single objective, the values
    at rungs are intermediate values, whose steps are numbers of samples; with several objectives, Optuna has no
    intermediate values. Optuna needs a range for each parameter. The range is computed from the values that the
    parameter has in the trials, not taken from the search space.

    Args:
        columns: Columns of the trials.
        name: Name of the new study in the storage.
        directions: "minimize" or "maximize", keyed by objective.
        storage: URL of an Optuna storage in a database, such as `sqlite:///trials.db`.
        rungs: Rungs as in the documents of trials, keyed by trial number.

    Raises:
        Conflict: The storage has a study with this name, or cannot be opened or written.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)  # it tells of each new study on stderr
    of_optuna = [optuna.study.StudyDirection[direction.upper()] for direction in directions.values()]
    try:
        database = optuna.storages.RDBStorage(storage)
        study = optuna.create_study(study_name=name, storage=database, directions=of_optuna)
    except optuna.exceptions.DuplicatedStudyError as error:
        raise Conflict(f"{storage}: has a study {name!r} already; give another storage") from error
    except Exception as error:  # of the storage's database driver
        raise Conflict(f"{storage}: cannot be opened: {error}") from error
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)  # names are displays alone
        study.set_metric_names(list(directions))
    try:
        _insert(database, name, optuna_trials(columns, list(directions), rungs))
    except Exception as error:
        optuna.delete_study(study_name=name, storage=database)
        raise Conflict(f"{storage}: the trials cannot be written: {error}") from error
    finally:
        database.engine.dispose()


def _insert(database: Any, name: str, trials: Iterable[Any]) -> None:
    """Insert the trials of the new study `name` into the tables of an Optuna storage, in one transaction.

    `Study.add_trials` needs several queries for each parameter and a transaction for each trial. For 10,000 trials, it
    takes half an hour, and this function takes seconds.
    """
    from optuna.storages._rdb import models
    from sqlalchemy import insert
    from sqlalchemy.orm import Session

    study_id = database.get_study_id_from_name(name)
    numbers = itertools.count()
    remaining = iter(trials)
    with Session(database.engine) as session, session.begin():
        while chunk := list(itertools.islice(remaining, INSERTED_TOGETHER)):
            stored = [
                models.TrialModel(
                    study_id=study_id,
                    number=next(numbers),
                    state=trial.state,
                    datetime_start=trial.datetime_start,
                    datetime_complete=trial.datetime_complete,
                )
                for trial in chunk
            ]
            session.add_all(stored)
            session.flush()
            rows: dict[Any, list[dict[str, Any]]] = {
                models.TrialValueModel: [],
                models.TrialParamModel: [],
                models.TrialIntermediateValueModel: [],
                models.TrialUserAttributeModel: [],
            }
            for trial, row in zip(chunk, stored, strict=True):
                trial._validate()
                of_trial = {"trial_id": row.trial_id}
                for objective, value in enumerate(trial.values or ()):
                    number, kind = models.TrialValueModel.value_to_stored_repr(value)
                    known: dict[str, Any] = {"objective": objective, "value": number, "value_type": kind}
                    rows[models.TrialValueModel].append(of_trial | known)
                for parameter, value in trial.params.items():
                    distribution = trial.distributions[parameter]
                    known = {
                        "param_name": parameter,
                        "param_value": distribution.to_internal_repr(value),
                        "distribution_json": _as_json(distribution),
                    }
                    rows[models.TrialParamModel].append(of_trial | known)
                for step, value in trial.intermediate_values.items():
                    at_step, sort = models.TrialIntermediateValueModel.intermediate_value_to_stored_repr(value)
                    known = {"step": step, "intermediate_value": at_step, "intermediate_value_type": sort}
                    rows[models.TrialIntermediateValueModel].append(of_trial | known)
                for key, value in trial.user_attrs.items():
                    rows[models.TrialUserAttributeModel].append(
                        of_trial | {"key": key, "value_json": json.dumps(value)}
                    )
            for model, found in rows.items():
                if found:
                    session.execute(insert(model), found)


@cache
def _as_json(distribution: Any) -> str:
    from optuna.distributions import distribution_to_json

    return str(distribution_to_json(distribution))


def optuna_trials(
    columns: Columns,
    objectives: Sequence[str],
    rungs: Mapping[int, Sequence[Mapping[str, Any]]] = MappingProxyType({}),
) -> Iterator[Any]:
    """Convert columns to trials of Optuna with the values of `objectives`, in this order.

    The columns are `state`, `value.NAME` of each objective, parameters, and any others, such as `invalid`. The range of
    a parameter is computed from its values in the trials. `rungs` contains the rungs of trials, keyed by trial number;
    with a single objective, the values at rungs become intermediate values.
    """
    shown = {column: _for_optuna(v) if column.startswith(PARAMETER) else v for column, v in columns.items()}
    ranges = {column: _range(values) for column, values in shown.items() if column.startswith(PARAMETER)}
    for values in zip(*shown.values(), strict=True):
        row = dict(zip(shown, values, strict=True))
        yield _optuna_trial(row, ranges, objectives, rungs.get(row.get("number", -1), ()))


def _optuna_trial(
    row: Mapping[str, Any],
    ranges: Mapping[str, Any],
    objectives: Sequence[str],
    rungs: Sequence[Mapping[str, Any]],
) -> Any:
    import optuna

    state = optuna.trial.TrialState[row["state"]]
    values: list[Any] = [row.get(VALUE + name) for name in objectives]
    if state is optuna.trial.TrialState.COMPLETE and (
        row.get("invalid") is not None or any(value is None or math.isnan(value) for value in values)
    ):
        state = optuna.trial.TrialState.FAIL
    given = [column for column in ranges if row[column] is not None]
    steps: dict[int, float] = {}
    if len(objectives) == 1:
        (name,) = objectives
        steps = {rung["samples"][name]: rung["values"][name] for rung in rungs if name in rung["values"]}
    return optuna.trial.create_trial(
        state=state,
        values=values if state is optuna.trial.TrialState.COMPLETE else None,
        params={column.removeprefix(PARAMETER): row[column] for column in given},
        distributions={column.removeprefix(PARAMETER): ranges[column] for column in given},
        intermediate_values=steps,
        user_attrs={key: _finite(value) for key, value in row.items() if key not in ranges and value is not None},
    )


def _for_optuna(values: Sequence[Any]) -> list[Any]:
    """Convert the values of a parameter to types that Optuna stores without a change.

    Lists, NaN, infinities, and integers too large for a float become text. If a parameter then has values of several
    types, all of them become text.
    """
    return _one_type([_finite(value) for value in values])


def _finite(value: Any) -> Any:
    if isinstance(value, list | tuple | dict):
        return json.dumps(value)
    is_lost = isinstance(value, float) and not math.isfinite(value)
    return str(value) if is_lost or (isinstance(value, int) and abs(value) > LARGEST_INTEGER) else value


def _range(values: Sequence[Any]) -> Any:
    """Choose Optuna's distribution for a parameter (integer, float or categorical) so that it contains all `values`."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    given = [value for value in values if value is not None]
    kinds = {type(value) for value in given}
    if kinds == {int}:
        return IntDistribution(min(given), max(given))
    if kinds <= {int, float}:
        return FloatDistribution(min(given, default=0.0), max(given, default=0.0))
    return CategoricalDistribution(tuple(dict.fromkeys(given)))


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.{DIGITS}g}")

"""Trials as columns, in files, and in storages of Optuna."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

import optuna
import pandas as pd
import pyarrow.parquet as pq
import pytest
import sqlalchemy as sa

from service.errors import Conflict, InvalidQuery
from service.results.columns import MAX_PATTERNS, ColumnChoice, add_to_optuna, trial_columns, write_columns
from service.results.documents import trial_documents
from service.types import TrialState
from tests.service.synthetic_run import run_record

RUN = run_record()
CONFIGURATIONS = {trial.number: trial.configuration for trial in RUN.whole_trials if trial.configuration is not None}
DIRECTIONS = {objective.name: objective.direction for objective in RUN.objectives}


@pytest.fixture(scope="module")
def columns() -> dict[str, list[Any]]:
    return trial_columns(RUN.trials, CONFIGURATIONS)


def test_columns_have_what_trials_have(columns: dict[str, list[Any]]) -> None:
    """Values are those of the highest finished rung, also of trials that were pruned."""
    assert {len(values) for values in columns.values()} == {len(RUN.trials)}
    assert columns["number"] == [trial.number for trial in RUN.trials]
    seen = set()
    for index, trial in enumerate(RUN.trials):
        seen.add(trial.state)
        last = trial.rungs[-1] if trial.rungs else None
        for name in DIRECTIONS:
            expected = None if last is None else pytest.approx(last.values[name], rel=1e-5)
            assert columns[f"value.{name}"][index] == expected
        assert columns["samples"][index] == (None if last is None else sum(last.num_samples.values()))
        given = CONFIGURATIONS.get(trial.number, {})
        assert {k.removeprefix("parameter."): v[index] for k, v in columns.items() if k.startswith("parameter.")} == {
            name.removeprefix("parameter."): given.get(name.removeprefix("parameter."))
            for name in columns
            if name.startswith("parameter.")
        }
    assert {TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL} <= seen


def test_files_have_a_row_for_each_trial(columns: dict[str, list[Any]], tmp_path: Path) -> None:
    """Parquet keeps types; CSV has the same texts. Another name is refused, with the accepted ones."""
    write_columns(columns, tmp_path / "trials.csv")
    with (tmp_path / "trials.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert [int(row["number"]) for row in rows] == columns["number"]
    assert [row["label"] for row in rows] == columns["label"]
    write_columns(columns, tmp_path / "trials.parquet")
    frame = pd.read_parquet(tmp_path / "trials.parquet")
    assert list(frame.columns) == list(columns)
    name = next(iter(DIRECTIONS))
    assert frame[f"value.{name}"].dropna().tolist() == [v for v in columns[f"value.{name}"] if v is not None]
    with pytest.raises(Conflict, match=r"trials are written as \.csv or \.parquet"):
        write_columns(columns, tmp_path / "trials.xlsx")


@pytest.mark.parametrize("text", ["=1+1", "+1", "-1+2", "@SUM(A1)", "\t=1", "\r=1", "\n=1", "\uff1d1", "\uff20a"])
def test_texts_of_a_csv_file_are_no_formulas(text: str, tmp_path: Path) -> None:
    """A text that a spreadsheet would run gets an apostrophe in CSV, not in Parquet; numbers stay numbers."""
    columns: dict[str, list[Any]] = {
        "label": [text, "it's a=-1", None],
        "parameter.x": [-0.5, -1, None],
        text: [text, 1e-7, "+"],
    }
    write_columns(columns, tmp_path / "t.csv")
    with (tmp_path / "t.csv").open(newline="", encoding="utf-8") as stream:
        rows = list(csv.reader(stream))
    assert rows == [
        ["label", "parameter.x", f"'{text}"],
        [f"'{text}", "-0.5", f"'{text}"],
        ["it's a=-1", "-1", "1e-07"],
        ["", "", "'+"],
    ]
    write_columns({"label": [text]}, tmp_path / "t.parquet")
    assert pq.read_table(tmp_path / "t.parquet")["label"].to_pylist() == [text]


def test_values_of_several_types_are_text(tmp_path: Path) -> None:
    """A parameter may be a number in one layer group and a word in another."""
    write_columns({"parameter.x": [1, "all", None, 0.5]}, tmp_path / "t.parquet")
    assert pq.read_table(tmp_path / "t.parquet")["parameter.x"].to_pylist() == ["1", "all", None, "0.5"]


def test_optuna_reads_the_trials(columns: dict[str, list[Any]], tmp_path: Path) -> None:
    """A storage has every trial with its state, its values at the full budget and its parameters."""
    url = f"sqlite:///{tmp_path / 'trials.db'}"
    add_to_optuna(columns, name="s", directions=DIRECTIONS, storage=url)
    study = optuna.load_study(study_name="s", storage=url)
    assert [direction.name.lower() for direction in study.directions] == list(DIRECTIONS.values())
    assert study.metric_names == list(DIRECTIONS)
    assert [trial.state.name for trial in study.trials] == columns["state"]
    for trial, ours in zip(study.trials, RUN.trials, strict=True):
        assert trial.params == CONFIGURATIONS.get(ours.number, {})
        assert json.loads(json.dumps(trial.user_attrs))["number"] == ours.number
        if ours.state is TrialState.COMPLETE:
            assert trial.values == pytest.approx([ours.values[name] for name in DIRECTIONS], rel=1e-5)
    assert study.best_trials, "there is a Pareto front"
    with pytest.raises(Conflict, match="has a study 's' already"):
        add_to_optuna(columns, name="s", directions=DIRECTIONS, storage=url)
    with pytest.raises(Conflict, match="cannot be opened"):
        add_to_optuna(columns, name="s", directions=DIRECTIONS, storage=f"sqlite:///{tmp_path}/missing/trials.db")


def test_optuna_has_the_values_at_rungs(tmp_path: Path) -> None:
    """With one objective, rungs are intermediate values, also of pruned trials; Optuna agrees on the best trial."""
    run = run_record(num_objectives=1)
    configurations = {t.number: t.configuration for t in run.whole_trials if t.configuration is not None}
    columns = trial_columns(run.trials, configurations)
    rungs = {document["number"]: document["rungs"] for document in trial_documents(run)}
    url = f"sqlite:///{tmp_path / 'trials.db'}"
    add_to_optuna(columns, name="s", directions={"math": "maximize"}, storage=url, rungs=rungs)
    study = optuna.load_study(study_name="s", storage=url)
    for trial, ours in zip(study.trials, run.trials, strict=True):
        assert trial.intermediate_values == {rung.num_samples["math"]: rung.values["math"] for rung in ours.rungs}
    assert {len(trial.intermediate_values) for trial in study.trials if trial.state.name == "PRUNED"} == {1, 2}
    assert study.best_trial.number == columns["value.math"].index(max(filter(None, columns["value.math"])))
    assert set(optuna.importance.get_param_importances(study)) <= {name for c in configurations.values() for name in c}


def columns_of(**columns: list[Any]) -> dict[str, list[Any]]:
    """Columns of complete trials, some of them replaced by `columns`."""
    (number,) = {len(values) for values in columns.values()}
    plain: dict[str, list[Any]] = {
        "number": list(range(number)),
        "state": ["COMPLETE"] * number,
        "invalid": [None] * number,
        "value.math": [0.5] * number,
    }
    return plain | {name.replace("__", "."): v for name, v in columns.items()}


def test_optuna_takes_every_value(tmp_path: Path) -> None:
    """Infinite values are kept; a trial without a number as its value is FAIL; odd parameters become text."""
    columns = columns_of(
        value__math=[math.inf, math.nan, None, 0.5],
        standard_error__math=[math.inf, None, math.nan, 0.1],
        parameter__list=[[0, 2, 1], [1, 0, 2], None, [2]],
        parameter__mixed=[1, "all", None, 0.5],
        parameter__switch=[True, False, None, True],
        parameter__huge=[2**60, 3, None, 4],
        parameter__number=[1, 0.5, None, -math.inf],
        parameter__empty=[None] * 4,
    )
    url = f"sqlite:///{tmp_path / 'trials.db'}"
    add_to_optuna(columns, name="s", directions={"math": "maximize"}, storage=url)
    trials = optuna.load_study(study_name="s", storage=url).trials
    assert [trial.state.name for trial in trials] == ["COMPLETE", "FAIL", "FAIL", "COMPLETE"]
    assert [trial.values for trial in trials] == [[math.inf], None, None, [0.5]]
    assert trials[0].params == {"list": "[0, 2, 1]", "mixed": "1", "switch": True, "huge": str(2**60), "number": "1"}
    assert trials[3].params == {"list": "[2]", "mixed": "0.5", "switch": True, "huge": "4", "number": "-inf"}
    assert trials[2].params == {}
    assert (trials[0].user_attrs["standard_error.math"], trials[2].user_attrs["standard_error.math"]) == ("inf", "nan")


def test_invalid_trials_are_not_the_best_in_optuna(tmp_path: Path) -> None:
    """A trial that a user marked as invalid is FAIL in Optuna, with the reason."""
    url = f"sqlite:///{tmp_path / 'trials.db'}"
    columns = columns_of(value__math=[0.9, 0.5], invalid=["its answers were cut off", None])
    add_to_optuna(columns, name="s", directions={"math": "maximize"}, storage=url)
    study = optuna.load_study(study_name="s", storage=url)
    assert study.best_trial.number == 1
    assert study.trials[0].state.name == "FAIL"
    assert study.trials[0].user_attrs["invalid"] == "its answers were cut off"


def test_failed_writes_leave_no_study(tmp_path: Path) -> None:
    """If the trials cannot be written, the storage has no part of the study, and the same command may be repeated."""
    url = f"sqlite:///{tmp_path / 'trials.db'}"
    with pytest.raises(Conflict, match="the trials cannot be written: Object of type object is not JSON serializable"):
        add_to_optuna(columns_of(label=["a", object()]), name="s", directions={"math": "maximize"}, storage=url)
    assert optuna.get_all_study_names(url) == []
    add_to_optuna(columns_of(label=["a", "b"]), name="s", directions={"math": "maximize"}, storage=url)
    assert len(optuna.load_study(study_name="s", storage=url).trials) == 2


@pytest.mark.slow
def test_optuna_gets_many_trials_at_once(tmp_path: Path) -> None:
    """The number of transactions does not grow with that of the trials: a commit for each would take half an hour."""
    number, commits = 300, 0

    def count(_: sa.Connection) -> None:
        nonlocal commits
        commits += 1

    columns = columns_of(value__math=[i / number for i in range(number)])
    columns |= {f"parameter.p{i}": [(i + j) / number for j in range(number)] for i in range(20)}
    url = f"sqlite:///{tmp_path / 'trials.db'}"
    sa.event.listen(sa.Engine, "commit", count)
    try:
        add_to_optuna(columns, name="s", directions={"math": "maximize"}, storage=url)
    finally:
        sa.event.remove(sa.Engine, "commit", count)
    assert 0 < commits < 30
    study = optuna.load_study(study_name="s", storage=url)
    assert [trial.number for trial in study.trials] == list(range(number))
    assert study.best_trial.params["p0"] == columns["parameter.p0"][-1]


def test_columns_are_chosen_by_name_and_by_pattern() -> None:
    """Names choose themselves, also names of no column; patterns choose all columns that match."""
    columns = ["number", "value.math", "value.text", "parameter.g0.weight"]
    assert ColumnChoice("number, value.*,speed").of(columns) == {"number", "value.math", "value.text"}
    assert ColumnChoice("*").of(columns) == set(columns)
    assert ColumnChoice("value.?ath,*.g0.*").of(columns) == {"value.math", "parameter.g0.weight"}
    assert ColumnChoice("").of(columns) == set()
    most = [f"value.{number}*" for number in range(MAX_PATTERNS)]
    assert ColumnChoice(",".join([*most, *columns])).of(columns) == set(columns)
    with pytest.raises(InvalidQuery, match=f"has {MAX_PATTERNS + 1} patterns; give at most {MAX_PATTERNS}"):
        ColumnChoice(",".join([*most, "number*"]))

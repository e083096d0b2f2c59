"""Directories of runs: those that a run may use, and reading and exporting their content."""

from __future__ import annotations

import json
import os

import pytest
import torch
from safetensors.torch import load_file

from service.disk import locked
from service.jobs.search.local_run import DATABASE
from service.store import Store
from tests.service.cli.terminals import Workplace

# Directories of runs.


def test_other_study_names_differing_fields(place: Workplace) -> None:
    """The refusal of another study's directory names the fields that differ."""
    place.begin()
    message = place.refused("run", place.write(search__seed=7, search__max_trials=5), "--out", place.run_dir)
    assert message == (
        f"{place.run_dir}: holds another study ('small'); these fields differ: search.max_trials, search.seed; "
        "only limits, a larger search.max_trials and more benchmarks may change; give another directory"
    )


def test_models_or_data_that_changed_since_the_run_began(place: Workplace) -> None:
    place.begin()
    with (place.directory / "search.jsonl").open("a") as file:
        file.write('{"prompt": "0+0=", "answer": "0"}\n')
    message = place.refused("run", place.write(), "--out", place.run_dir)
    assert message.startswith("study 'small': tasks of sums have changed since it was started; ")
    assert message.endswith(f"or restore the files: {place.directory / 'search.jsonl'}")


def test_second_run_is_refused(place: Workplace) -> None:
    """A second run on one directory is refused, and the message names the process."""
    with locked(place.run_dir):
        message = place.refused("run", place.write(), "--out", place.run_dir)
    assert message == (
        f"{place.run_dir}: process {os.getpid()} is using this directory; "
        "wait for it, stop it, or give another directory"
    )


def test_a_run_directory_that_is_a_file(place: Workplace) -> None:
    place.run_dir.write_text("mine")
    assert place.refused("run", place.write(), "--out", place.run_dir) == f"{place.run_dir}: File exists"
    assert "Not a directory" in place.refused("run", place.write(), "--out", place.run_dir / "inside")
    assert place.run_dir.read_text() == "mine"


@pytest.mark.parametrize(
    "verb", [("trials",), ("pareto",), ("export", "best", "--out", "x"), ("export", "0", "--out", "x")]
)
def test_reading_a_directory_without_a_run(place: Workplace, verb: tuple[str, ...]) -> None:
    name, *rest = verb
    for directory in (place.directory / "nowhere", place.directory, place.directory / "search.jsonl"):
        assert place.refused(name, directory, *rest) == (
            f"{directory}: no run here (no study.db); give the directory that `mergesearch run` was given"
        )
    assert not (place.directory / "nowhere").exists()


def test_a_database_that_is_none(place: Workplace) -> None:
    place.run_dir.mkdir()
    (place.run_dir / DATABASE).write_bytes(b"not a database at all" * 100)
    for arguments in (("trials", place.run_dir), ("run", place.write(), "--out", place.run_dir)):
        message = place.refused(*arguments)
        assert message == f"database sqlite:///{place.run_dir}/study.db: cannot be used: file is not a database"


# Trials, fronts, exports.


def test_a_run_that_has_only_begun_has_no_trials_and_no_front(place: Workplace) -> None:
    place.begin()
    assert place.run("trials", place.run_dir, "--json")[:2] == (0, "[]\n")
    code, out, _ = place.run("pareto", place.run_dir, "--json")
    assert (code, json.loads(out)["front"]) == (0, [])
    for trial in ("best", "0"):
        message = place.refused("export", place.run_dir, trial, "--out", place.directory / "merged")
        assert message == "the run has no trials yet; there is nothing to export"


def test_trials_and_front_are_listed_for_people_and_programs(place: Workplace) -> None:
    place.begin(scored=True)
    code, out, err = place.run("trials", place.run_dir)
    assert (code, err) == (0, "")
    assert "expert:math" in out
    code, out, _ = place.run("trials", place.run_dir, "--json")
    trials = json.loads(out)
    assert [trial["number"] for trial in trials] == list(range(9))
    assert (trials[8]["state"], trials[8]["reason"]) == ("FAIL", "NaN logits")
    code, out, _ = place.run("pareto", place.run_dir, "--json")
    assert [point["trial"] for point in json.loads(out)["front"]] == [7]
    assert place.run("pareto", place.run_dir)[0] == 0
    file = place.directory / "trials.csv"
    assert place.run("trials", place.run_dir, "--out", file)[1] == f"9 trials: {file}\n"
    assert len(file.read_text().splitlines()) == 1 + 9


def test_a_recipe_of_a_run_is_printed(place: Workplace) -> None:
    """The recipe of a run's trial is JSON, mergekit's file YAML."""
    place.begin(scored=True)
    code, out, _ = place.run("recipe", place.run_dir, "1")
    assert (code, json.loads(out)["format"].split("/")[0]) == (0, "mergesearch-recipe")
    assert json.loads(out)["dtype"] == "float32"
    code, out, _ = place.run("recipe", place.run_dir, "1", "--mergekit")
    assert (code, out.startswith("merge_method: linear\n")) == (0, True)
    assert str(place.models / "math") in out
    assert "trial 99" in place.refused("recipe", place.run_dir, "99")


def test_export_writes_the_named_trial(place: Workplace) -> None:
    """Export writes the named trial and refuses others."""
    place.begin(scored=True)
    out = place.directory / "merged"
    for trial in ("9", "-1", "1.5", "bset", "٣٣"):
        message = place.refused("export", place.run_dir, "--out", out, "--", trial)
        assert message == f'trial {trial!r}: give "best" or a number from 0 to 8'
    assert not out.exists()
    code, stdout, _ = place.run("export", place.run_dir, "1", "--out", out, "--dtype", "float32")
    assert (code, stdout) == (0, f"merged model: {out}\n")
    merged, expert = load_file(out / "model.safetensors"), load_file(place.models / "math" / "model.safetensors")
    assert all(torch.equal(merged[name], expert[name]) for name in merged)
    assert f"{out}: exists and is not an export of recipe" in place.refused("export", place.run_dir, "2", "--out", out)


def test_weights_pick_the_trial_that_is_shown_and_exported(place: Workplace) -> None:
    place.begin(scored=True)
    out, told = (
        place.directory / "merged",
        "preferred by sums=1: trial 7, task arithmetic 0.7, sums 0.700 on search data",
    )
    code, stdout, _ = place.run("pareto", place.run_dir, "--prefer", "sums=1")
    assert (code, told in " ".join(stdout.split())) == (0, True)
    code, stdout, _ = place.run("export", place.run_dir, "best", "--prefer", "sums=1", "--out", out)
    assert (code, stdout) == (0, f"{told}\nmerged model: {out}\n")
    code, stdout, _ = place.run("export", place.run_dir, "best", "--prefer", "sums=1", "--out", out, "--json")
    document = json.loads(stdout)
    assert (document["directory"], document["preferred"]["trial"]) == (str(out), 7)
    assert document["preferred"]["values"] == {"sums": 0.7}


def test_what_are_no_weights_is_refused(place: Workplace) -> None:
    place.begin(scored=True)
    command = ("export", place.run_dir, "best", "--out", place.directory / "merged", "--prefer")
    assert place.refused(*command, "sums=0.6") == (
        "preference: sums=0.6 sum to 0.6, not to 1; for the same proportions: sums=1"
    )
    assert "'math' is not an objective; give weights of sums" in place.refused(*command, "math=1")
    other = ("export", place.run_dir, "3", "--out", place.directory / "merged", "--prefer", "sums=1")
    assert place.refused(*other) == "preference: weights choose the trial; give \"best\", not '3'"
    assert not (place.directory / "merged").exists()


def test_export_refuses_sources_that_have_changed(place: Workplace) -> None:
    expert = place.copied("math")
    place.begin(scored=True)
    store = Store(f"sqlite:///{place.run_dir / DATABASE}")
    (record,) = store.jobs()
    store.open_attempt(record.id).set_document(
        {
            **record.document,
            "models": {
                **record.document["models"],
                "experts": {"math": str(expert), "text": str(place.models / "text")},
            },
        }
    )
    store.close()
    (expert / "generation_config.json").write_text('{"eos_token_id": 5}')
    message = place.refused("export", place.run_dir, "best", "--out", place.directory / "merged")
    assert message == "models math have changed since the study; the scored merge cannot be written"

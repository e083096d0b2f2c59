"""The family of a real model: its data and documents, the cost of commands, and what is kept of a study."""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from search_spaces.study.file import load_study
from service.errors import InUse
from tests.benchmarks import arms, bench_real, real_family
from tests.benchmarks.bench_real import ARMS, begin, command_cost, costs_table, holdout_table, study_figures
from tests.benchmarks.real_family import KINDS, SEARCHES, SPLITS, TASKS, make_base, questions, write_family
from tests.builders import tiny_family
from workers.training.finetuning.fleet import load_pipeline


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The family with a tiny base in place of the real model."""
    root = tmp_path_factory.mktemp("real")
    tiny_family(root / "tiny", experts=("math",), layers=2)
    make_base(root, str(root / "tiny" / "base"))
    write_family(root)
    return root


def test_the_base_is_the_given_model_in_float32(family: Path) -> None:
    given, base = (load_file(family / name / "model.safetensors") for name in ("tiny/base", "base"))
    assert base.keys() == given.keys()
    assert all(each.dtype == torch.float32 for each in base.values())
    assert all(torch.equal(base[name], given[name].float()) for name in given)
    assert "quantization_config" not in json.loads((family / "base" / "config.json").read_text())


def test_no_package_is_an_error_that_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(real_family, "smollm2", lambda: None)
    with pytest.raises(FileNotFoundError, match="run `make real-family`"):
        make_base(tmp_path)


def test_answers_are_right() -> None:
    for question, answer in questions("sums"):
        terms = [int(word.strip(".")) for word in question.split() if word.strip(".").isdigit()]
        assert answer == f"{terms[0]} + {terms[1]} = {sum(terms)}"
    for question, answer in questions("dates"):
        text = question.removeprefix("Which date is one day after ").removesuffix("?")
        later = datetime.datetime.strptime(answer, "<%Y/%m/%d>") - datetime.datetime.strptime(text, "%B %d, %Y")
        assert later == datetime.timedelta(days=1)
    for question, answer in questions("sorting"):
        words = question.removeprefix("Put these words in order: ").removesuffix(".").split(", ")
        assert answer.split(" < ") == sorted(words)


def test_no_question_is_in_two_splits(family: Path) -> None:
    for task in TASKS:
        asked = []
        for split, size in SPLITS.items():
            rows = [json.loads(line) for line in (family / "data" / f"{task}_{split}.jsonl").read_text().splitlines()]
            assert len(rows) == size
            asked += [row["messages"][0]["content"] if split == "train" else row["prompt"] for row in rows]
        assert len(set(asked)) == len(asked)


def test_specifications_and_studies_can_be_read(family: Path) -> None:
    for kind in KINDS:
        for task in TASKS:
            (spec,) = load_pipeline(family / f"{kind}-{task}.yaml").experts.values()
            assert (spec.adapter is not None) == (kind == "lora")
            assert Path(str(spec.data.file)).is_file()
        for name in SEARCHES:
            study = load_study(family / f"study-{kind}-{name}.yaml")
            assert study.engine.dtype == "float32"
            assert [spec.name for spec in study.holdout] == list(TASKS)
            assert list(study.models.experts.values()) == [str(family / "experts" / kind / t / "model") for t in TASKS]


# -- arms --------------------------------------------------------------------------------------------------------------


def test_the_cost_of_a_command_has_its_interrupted_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_real, "SAMPLED_S", 0.05)
    holds = "import os, time; held = bytearray(os.urandom(60_000_000)); time.sleep(0.6); "
    with pytest.raises(subprocess.CalledProcessError):
        command_cost(["-c", holds + "raise SystemExit(3)"], tmp_path / "arm")
    first = json.loads((tmp_path / "arm" / "cost.json").read_text())
    assert first["seconds"] >= 0.6
    cost = command_cost(["-c", "import time; time.sleep(0.3); print('said')"], tmp_path / "arm")
    assert cost["parts"] == 2
    assert cost["seconds"] >= first["seconds"] + 0.3 - 0.1
    assert 60_000_000 <= cost["peak_bytes"] == first["peak_bytes"]
    assert (tmp_path / "arm" / "log").read_text() == "said\n"
    assert command_cost(["-c", "raise SystemExit(1)"], tmp_path / "arm") == cost, "a finished command is not repeated"


def test_a_command_ends_with_the_benchmark(tmp_path: Path) -> None:
    """A benchmark that is killed leaves no training behind, beside which the next run would start another."""
    begun = tmp_path / "begun"
    command = f"import os, time; open({str(begun)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    call = "from pathlib import Path; from tests.benchmarks.bench_real import command_cost; "
    outer = subprocess.Popen(
        [sys.executable, "-c", f"{call}command_cost(['-c', {command!r}], Path({str(tmp_path)!r}))"]
    )
    try:
        deadline = time.monotonic() + 60.0
        while not begun.exists() or not begun.read_text():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        inner = psutil.Process(int(begun.read_text()))
        with pytest.raises(InUse):
            command_cost(["-c", ""], tmp_path)
    finally:
        outer.kill()
        outer.wait()
    inner.wait(timeout=10.0)


def test_other_settings_begin_anew(tmp_path: Path) -> None:
    place, result = tmp_path / "arm", tmp_path / "model"
    for key, is_left in (({"steps": 1}, False), ({"steps": 1}, True), ({"steps": 2}, False)):
        begin(place, key, results=[result])
        assert result.exists() == is_left
        assert (place / "cost.json").exists() == is_left
        result.mkdir(exist_ok=True)
        (place / "cost.json").touch()


def test_studies_wait_for_their_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_real, "CACHE", tmp_path)
    advice = "run the arms lora/sums, lora/dates, lora/sorting first, with FRESH=1 if their figures are on file"
    with pytest.raises(FileNotFoundError, match=advice):
        bench_real.searched(tmp_path / "family", "lora", "auto")
    monkeypatch.setenv("REAL_ARMS", "lora/songs")
    with pytest.raises(ValueError, match="no arm lora/songs; there are base, lora/sums"):
        bench_real.run()


def test_figures_are_those_of_one_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_real, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(arms, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(arms, "commit", lambda: "0123456")
    monkeypatch.setattr(bench_real, "made", lambda family: {"given": os.environ.get("BENCH_SMOLLM2", "")})
    for given in ("", "models/other.gguf", ""):
        monkeypatch.setenv("BENCH_SMOLLM2", given)
        assert bench_real.measured("base") == {"given": given}


def test_the_tables_have_what_arms_keep() -> None:
    def estimate(value: float) -> dict[str, Any]:
        return {"value": value, "ci95": [value - 0.1, value + 0.1], "standard_error": 0.05, "samples": 9}

    def row(trial: int, value: float) -> dict[str, Any]:
        values = {task: estimate(value) for task in TASKS}
        differences = {"mean": estimate(value - 0.5)}
        return {
            "trial": trial,
            "label": f"trial {trial}",
            "origin": "search",
            "values": values,
            "mean": estimate(value),
            "differences": differences,
            "violations": {},
            "tokens_per_second": None,
        }

    summary = {
        "state": "COMPLETE",
        "search": {"algorithm": "gradient", "notes": []},
        "trials": {"COMPLETE": 2},
        "samples": {"used": 9, "scored": 9, "per_second": 3.0, "reused": 0},
        "phases": {"scoring": 60.0, "gradients": 30.0},
        "wall_clock_s": 100.0,
        "engine": {"swap_s": {"median": 0.1}, "starts": 1},
        "verification": {"status": "equal", "trials": 3, "samples": 48, "equal": 48, "tokens": 100},
        "finding": {"text": "Trial 4 is better.", "tests": [], "criterion": "mean"},
        "holdout_reference": 4,
        "holdout": [row(1, 0.4), row(4, 0.5)],
    }
    figures = {**study_figures(summary), "seconds": 120.0, "peak_bytes": 3e9, "parts": 1, "export": {"seconds": 5.0}}
    assert json.loads(json.dumps(figures)) == figures
    expert = {
        "seconds": 40.0,
        "peak_bytes": 2e9,
        "steps": 3,
        "update_s": 1.5,
        "values": {"2": {"sums": 0.1}, "10": {"sums": 0.4}},
    }
    lines = costs_table({"base": {"seconds": 9.0, "peak_bytes": 1e9}, "lora/sums": expert, "lora/auto": figures})
    assert lines.splitlines()[2:] == [
        "| `base` | 9 | 1.0 |  |",
        "| `lora/sums` | 40 | 2.0 | 3 updates of 1.5 s, sums 0.40 |",
        "| `lora/auto` | 120 | 3.0 | scoring 60 s, gradients 30 s, export 5 s |",
    ]
    assert holdout_table(figures).splitlines()[2:] == [
        "| 4 | trial 4 | 0.500 | 0.500 | 0.500 | 0.500 [0.400, 0.600] |  |",
        "| 1 | trial 1 | 0.400 | 0.400 | 0.400 | 0.400 [0.300, 0.500] | -0.100 [-0.200, +0.000] |",
    ]
    assert len(set(ARMS)) == 1 + len(KINDS) * (len(TASKS) + len(SEARCHES))

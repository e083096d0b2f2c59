"""`mergesearch finetune` without Ray: its output, its study, and its exit codes."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from service.cli import finetune as finetune_view
from service.cli import verbs
from service.cli.main import main
from service.jobs import resources
from service.jobs.finetune import training
from service.jobs.finetune.request import template_problems
from tests.builders import tiny_llama
from tests.service.jobs.finetune.test_training import HERE
from workers.tiny_family import family_dir
from workers.training.finetuning.fleet import load_pipeline


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(resources, "OWN", HERE)
    tiny_llama(tmp_path / "base", layers=1)
    for name in ("math", "text"):
        rows = [json.dumps({"prompt": f"{name}{i}=", "completion": str(i)}) for i in range(12)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows) + "\n")
    document = {
        "name": "family",
        "base": "base",
        "data": {"max_length": 64},
        "training": {"steps": 2, "batch": 2},
        "experts": {name: {"data": {"file": f"{name}.jsonl"}} for name in ("math", "text")},
    }
    return write(tmp_path / "fleet.yaml", document)


def write(file: Path, document: dict[str, Any]) -> Path:
    file.write_text(yaml.safe_dump(document))
    return file


def changed(file: Path, **changes: Any) -> Path:
    return write(file, {**yaml.safe_load(file.read_text()), **changes})


def test_a_fleet_is_trained_and_again_is_done(fleet: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["finetune", str(fleet), "--out", str(tmp_path / "out")]) == 0
    out = capsys.readouterr().out
    for name in ("math", "text"):
        expert = tmp_path / "out" / "experts" / name / "model"
        assert re.search(rf"{name}: 2 steps, last loss \S+ at the offset, \S+ at the weights; expert", out)
        assert str(expert) in out
        assert (expert / "model.safetensors").exists()
    assert main(["finetune", str(fleet), "--out", str(tmp_path / "out"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["math"]["steps"] == 2


@pytest.mark.slow
def test_an_analysis_is_printed_kept_and_in_the_report(
    fleet: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = {"file": "math.jsonl", "answer": "{{completion}}", "max_tokens": 4}
    objective = {"name": "n", "task": task, "metric": "exact_match"}
    out = ["--out", str(tmp_path / "out")]
    assert main(["finetune", str(fleet), "--analyse", *out]) == 2
    assert "experts.math.evaluation: has no evaluation; losses of merges" in capsys.readouterr().err
    assert not (tmp_path / "out").exists(), "told before anything is trained"
    fleet = changed(fleet, evaluation={"objectives": [objective], "samples": 1}, analysis={"samples": 2})
    tangent = {**yaml.safe_load(fleet.read_text()), "method": {"kind": "tangent"}, "analysis": None}
    write(tmp_path / "tangent.yaml", tangent)
    assert main(["finetune", str(tmp_path / "tangent.yaml"), "--out", str(tmp_path / "tangent")]) == 0
    call = ["finetune", str(fleet), *out, "--analyse"]
    capsys.readouterr()
    assert main([*call, str(tmp_path / "tangent")]) == 0
    printed = capsys.readouterr().out
    for word in ("Task vectors", "laplace", "gaussian", "Merges", "sum of all", "weight averaging", "TIES", "loss"):
        assert word in printed
    found = json.loads((tmp_path / "out" / "analysis.json").read_text())
    assert ([each["name"] for each in found["fleets"]], found["samples"]) == (
        ["mergopt", "tangent", "tangent, linearized"],
        2,
    )
    assert [len(each["landscape"]["losses"]) for each in found["fleets"][:2]] == [11, 11]
    assert [each.get("accumulated", {}).get("expert") for each in found["fleets"]] == ["sum of all"] * 2 + [None]
    for each in found["fleets"]:
        assert each["landscapes"] == ([each["landscape"]] if each["landscape"] else [])
        row = each["merges"][1]
        assert row["values"].keys() == {"math", "text"}
        assert 0 <= row["value"] <= 1
        assert len(row["tried"]) == 13
    (mixed,) = found["mixed"]
    assert mixed["fleets"] == ["mergopt", "tangent"]
    assert [row["method"] for row in mixed["merges"]] == ["weight averaging", "task arithmetic", "TIES", "DARE"]
    assert mixed["merges"][0]["losses"].keys() == {"math", "text"}
    page = (tmp_path / "out" / "report.html").read_text()
    assert "mergopt with tangent" in page
    for heading in ("Task vectors", "Joint loss", "Merges"):
        assert f"<h2>{heading}</h2>" in page
    assert "chosen by the loss on other samples" in page
    assert "Mean loss of merges by task arithmetic, by the coefficient" in page
    changed(fleet, analysis=None)
    assert main(call[:-1]) == 0, "a report that is written again keeps it"
    assert "<h2>Joint loss</h2>" in (tmp_path / "out" / "report.html").read_text()
    capsys.readouterr()
    assert main([*call, str(tmp_path)]) == 2
    assert "holds no fine-tuning" in capsys.readouterr().err


def test_a_file_in_place_of_a_directory_is_named(
    fleet: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").write_text("")
    assert main(["finetune", str(fleet), "--out", str(tmp_path / "out")]) == 2
    assert f"{tmp_path / 'out'}: not a directory; give another one" in capsys.readouterr().err


def test_the_demo_retrains_the_shipped_family_by_its_pipeline(
    fleet: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(verbs, "finetune_experts", lambda options, **_: seen.append(options.spec) or 0)
    assert main(["demo", "--retrain", "--out", str(tmp_path / "out")]) == 0
    assert seen == [family_dir() / "retrain.yaml"]


def test_a_pipeline_hands_the_experts_to_its_study(
    fleet: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(verbs, "_run_in", lambda study, out, **options: seen.append((study, out, options)) or 0)
    task = {"name": "math", "task": {"file": "math.jsonl", "answer": "{{completion}}"}, "metric": "exact_match"}
    study = {"name": "merge", "fidelity": {"scheduler": "none"}, "objectives": [task]}
    assert main(["finetune", str(changed(fleet, study=study)), "--out", str(tmp_path / "out")]) == 0
    ((study, out, options),) = seen
    assert study.models.experts == {
        name: str(tmp_path / "out" / "experts" / name / "model") for name in ("math", "text")
    }
    assert study.models.base == str(tmp_path / "base")
    assert (out, options) == (tmp_path / "out" / "study", {"export_best": True, "as_json": False})


def test_a_study_of_chats_says_whether_it_writes_them(
    fleet: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Experts of chats are evaluated with the chat template, and a study is not unless it says so."""
    chat = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    (tmp_path / "text.jsonl").write_text(json.dumps({"messages": chat}) + "\n")
    task = {"name": "math", "task": {"file": "math.jsonl", "answer": "{{completion}}"}, "metric": "exact_match"}
    study: dict[str, Any] = {"name": "merge", "fidelity": {"scheduler": "none"}, "objectives": [task]}
    out = ["--out", str(tmp_path / "out"), "--json"]
    assert main(["finetune", str(changed(fleet, study=study)), *out]) == 2
    (problem,) = json.loads(capsys.readouterr().err)["problems"]
    assert problem["field"] == "study.engine.chat_template"
    assert "the data of text are conversations" in problem["message"]
    for stated in (True, False):
        told = load_pipeline(changed(fleet, study={**study, "engine": {"chat_template": stated}}))
        assert template_problems(told) == ()
    plain = load_pipeline(
        changed(fleet, study=study, evaluation={"chat_template": False, "objectives": [copy.deepcopy(task)]})
    )
    assert template_problems(plain) == ()
    (tmp_path / "out" / "study").mkdir(parents=True)  # one that has begun goes on
    trained: list[Any] = []
    monkeypatch.setattr(training, "run_fleet", lambda specs, *_, **__: trained.append(specs) or {})
    monkeypatch.setattr(verbs, "_run_in", lambda *_, **__: 0)
    assert main(["finetune", str(changed(fleet, study=study)), *out]) == 0
    assert len(trained) == 1


def test_nothing_of_a_fleet_is_trained_if_one_expert_cannot_be(
    fleet: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.jsonl").write_text("{\n")
    assert main(["finetune", str(fleet), "--out", str(tmp_path / "out")]) == 2
    assert "text.jsonl, line 1: not JSON" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_mistakes_and_failures_have_their_exit_codes(
    fleet: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ["--out", str(tmp_path / "out"), "--json"]
    wrong = changed(fleet, training={"steps": 2, "batch": 0})
    assert main(["finetune", str(wrong), *out]) == 2
    problems = json.loads(capsys.readouterr().err)["problems"]
    assert {problem["field"] for problem in problems} == {"experts.math.training.batch", "experts.text.training.batch"}
    training = {"steps": 3, "batch": 2, "learning_rate": 1e38, "max_gradient_norm": None}
    failing = changed(fleet, training=training, method={"kind": "sgd"})
    assert main(["finetune", str(failing), *out]) == 1
    assert "the loss is" in json.loads(capsys.readouterr().err)["problems"][0]["message"]


def test_progress_is_the_latest_line() -> None:
    lines: list[dict[str, Any]] = [
        {"step": 1, "loss": 2.0, "seconds": 0.5},
        {"step": 1, "values": {"math": 0.25}},
        {"step": 2, "loss": 1.5, "seconds": 0.5},
    ]
    assert finetune_view._text("math", lines) == "math: step 2  loss 1.5000  0.50 s a step  math 0.250"
    assert finetune_view._text("math", []) == "math: no update yet"
    tangent = [*lines[:1], {**lines[1], "linearized_values": {"math": 0.5}}]
    assert finetune_view._text("math", tangent).endswith("0.50 s a step  math 0.250 (0.500 linearized)")
    moved = {"step": 11, "loss": 2.0, "alpha": 0.5, "weights_loss": 1.5, "seconds": 0.5}
    assert "loss 2.0000 at the offset, 1.5000 at the weights  0.50 s" in finetune_view._text("math", [moved])
    assert "loss 2.0000, 2.5000 at the offset  0.50 s" in finetune_view._text(
        "math", [{"step": 1, "loss": 2.0, "offset_loss": 2.5, "seconds": 0.5}]
    )

"""Messages of `run` before anything starts: the study's plan, or all its problems with value and place."""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from search_spaces.searchers import SEARCHERS
from search_spaces.spaces import SPACES
from search_spaces.study.file import load_study
from service.jobs.search.local_run import DATABASE
from service.store import Store
from service.store.steps import LossesRequest, LossesResult, step_of
from service.studies.preflight.examine import examine
from service.types import TrialRecord, TrialState
from tests.conftest import write_choices
from tests.service.cli.terminals import Workplace, spoilt
from workers.models.checkpoints import BY_CONFIG

AVAILABLE = ", ".join(SEARCHERS)
KINDS = ", ".join(SPACES)

# A good study.


def test_check_prints_the_plan_and_starts_and_leaves_nothing(place: Workplace) -> None:
    code, out, err = place.run("run", place.write(), "--out", place.run_dir, "--check")
    assert (code, err) == (0, "")
    assert "study     small: nothing is wrong with it" in out
    assert "models    base + 2 experts of" in out
    assert "rungs     4 -> 12 -> 36 samples of each objective, 1 objective; scheduler: hyperband\n" in out
    assert re.search(r"^disk      0\.0 GiB for an exported model, \d+\.\d GiB free$", out, re.MULTILINE)
    assert re.search(r"^trials    10 baselines for 360 samples( and \d+ held out)?, 6 searched$", out, re.MULTILINE)
    assert "search    random: the study names it\n" in out
    assert not place.run_dir.exists()


def test_check_as_json_holds_the_same_plan(place: Workplace) -> None:
    code, out, _ = place.run("run", place.write(), "--out", place.run_dir, "--check", "--json")
    plan = json.loads(out)
    assert code == 0
    assert plan["rungs"] == [{"sums": 4}, {"sums": 12}, {"sums": 36}]
    assert plan["trials"] == {"extras": 10, "search": 6}
    assert plan["memory_bytes"]["needed"] == plan["memory_bytes"]["bank"] + plan["memory_bytes"]["engines"]
    assert plan["hours"] > 0
    assert (plan["algorithm"], plan["step_samples"]) == ("random", 0)


def test_check_compares_the_plan_with_the_limit(place: Workplace) -> None:
    """The plan of a study is compared with the limit of its samples; JSON has both."""
    study = place.write(search__max_trials=12, limits={"max_samples": 450})
    _, out, _ = place.run("run", study, "--out", place.run_dir, "--check")
    line = next(line for line in out.splitlines() if line.startswith("limit "))
    _, document, _ = place.run("run", study, "--out", place.run_dir, "--check", "--json")
    plan = json.loads(document)
    assert (plan["max_samples"], plan["samples_used"]) == (450, 0)
    planned = plan["samples"]["search"]
    assert planned > 450
    ends = "the search may end before its last trial"
    assert line == f"limit     450 samples of the search; its plan takes up to {planned}: {ends}"
    study = place.write(search__max_trials=12, limits={"max_samples": planned})
    _, out, _ = place.run("run", study, "--out", place.run_dir, "--check")
    assert f"limit     {planned} samples of the search; its plan takes up to {planned}: all trials fit\n" in out


def test_check_counts_what_earlier_runs_used(place: Workplace) -> None:
    """Samples and steps of the run in the directory are those used."""
    study = load_study(place.write(search__max_trials=12, limits={"max_samples": 450}))
    preflight = examine(study)
    place.run_dir.mkdir()
    store = Store(f"sqlite:///{place.run_dir / DATABASE}")
    resolved = preflight.resolved().to_json()
    job = store.create_job(kind="search", name=study.name, document=study.canonical(), accepted=resolved)
    writer = store.open_attempt(job.id)
    (origin, label, recipe), *_ = preflight.baselines()
    writer.add_trial(TrialRecord(0, origin, label, TrialState.RUNNING, recipe, samples_scored=36))
    losses = LossesRequest(label="trial 0", point=(0.5,), positions={"sums": (0, 1, 2)})
    writer.add_step(step_of(0, 10, losses, LossesResult()))
    store.close()
    _, out, _ = place.run("run", place.directory / "study.yaml", "--out", place.run_dir, "--check")
    assert "limit     450 samples of the search, 39 of them used; its plan takes up to " in out


def test_limit_that_leaves_nothing_to_search(place: Workplace) -> None:
    """A limit of samples below the baselines and the first bracket is refused."""
    # Ten baselines of 36 samples; six trials of 4 samples, two of which are scored on 12 and one on 36.
    least = 10 * 36 + 6 * 4 + 2 * 8 + 24
    assert place.refused_study(limits={"max_samples": least - 1}) == (
        f"limits.max_samples: {least - 1} is below the {least} samples of 10 baselines and the first bracket of 6 "
        f"trials; give at least {least}"
    )
    assert place.run("run", place.write(limits={"max_samples": least}), "--out", place.run_dir, "--check")[0] == 0


# Models.


def test_a_missing_model_directory(place: Workplace) -> None:
    message = place.refused_study(models__experts={"math": str(place.models / "maths"), "text": "owner/name"})
    maths, name = message.splitlines()
    assert maths == (
        f"models: expert 'math': {place.models}/maths: does not exist; expected a directory with config.json, "
        "tokenizer files and *.safetensors"
    )
    assert name == (
        "models: expert 'text': owner/name: neither a directory nor a hub model that can be loaded here: it is not "
        "completely in the hub's cache, and the hub cannot be reached: HF_HUB_OFFLINE is set; expected a directory "
        "with config.json, tokenizer files and *.safetensors, or the id of a hub model that is in the hub's cache or "
        "can be downloaded"
    )


def test_a_model_that_is_a_file(place: Workplace) -> None:
    message = place.refused_study(models__base=str(place.models / "base" / "config.json"))
    assert "base model: " in message
    assert "config.json: is a file; expected a directory" in message


def test_no_experts(place: Workplace) -> None:
    assert place.refused_study(models__experts={}) == "models.experts: is empty; give at least 1"


def test_other_shape_is_described(place: Workplace) -> None:
    """The message about a tensor of another shape names tensor, model and both shapes."""
    name, expert = "model.layers.1.mlp.up_proj.weight", place.copied("math")
    tensors = load_file(expert / "model.safetensors")
    rows, columns = tensors[name].shape
    save_file(tensors | {name: torch.zeros(rows + 1, columns)}, expert / "model.safetensors", {"format": "pt"})
    assert place.refused_study(models__experts__math=str(expert)) == (
        f"models: expert 'math': {expert}: tensor '{name}' has shape [{rows + 1}, {columns}]; "
        f"the base has [{rows}, {columns}]"
    )


def test_truncated_safetensors_name_file_and_both_sizes(place: Workplace) -> None:
    file = place.copied("math") / "model.safetensors"
    size = file.stat().st_size
    os.truncate(file, size - 1000)
    assert place.refused_study(models__experts__math=str(file.parent)) == (
        f"models: expert 'math': {file}: is truncated: its header declares {size} bytes, the file has {size - 1000}"
    )


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe", b'{"model_type": "llama"}'])
def test_a_damaged_configuration_is_told(place: Workplace, content: bytes) -> None:
    expert = place.copied("math")
    (expert / "config.json").write_bytes(content)
    code, _, err = place.run("run", place.write(models__experts__math=str(expert)), "--out", place.run_dir, "--check")
    assert code == 2
    assert str(expert) in err


@pytest.mark.slow
def test_uncounted_layers_are_described(place: Workplace) -> None:
    """A configuration without a layer count is reported with the count that transformers assumes."""
    base = place.copied("base")
    config = json.loads((base / "config.json").read_text())
    del config["num_hidden_layers"]
    (base / "config.json").write_text(json.dumps(config))
    problem = place.refused_study(models__base=str(base))
    assert f"num_hidden_layers is 32 {BY_CONFIG}, its tensors are of 2 layers" in problem


def test_a_base_without_tokenizer(place: Workplace) -> None:
    base = place.copied("base")
    for file in base.glob("token*"):
        file.unlink()
    assert place.refused_study(models__base=str(base)).startswith(
        f"models: {base}: no tokenizer; expected one of tokenizer.json, "
    )


def test_infinite_weights_are_located(place: Workplace) -> None:
    """Weights that are not finite are reported with tensor and model."""
    base, expert = place.copied("base"), place.copied("math")
    name = "model.layers.1.mlp.up_proj.weight"
    for directory, value in ((base, float("nan")), (expert, float("inf"))):
        tensors = load_file(directory / "model.safetensors")
        tensors[name][0, :3] = value
        save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    message = place.refused_study(models__base=str(base), models__experts__math=str(expert))
    assert message.splitlines() == [
        f"{field}: {directory}: tensor '{name}' holds 3 values that are NaN or infinite; expected finite weights"
        for field, directory in (("models.base", base), ("models.experts.math", expert))
    ]


def test_problems_of_headers_tokenizer_and_tasks_come_together(place: Workplace) -> None:
    base, expert = place.copied("base"), place.copied("math")
    (base / "tokenizer.json").write_text('{"version": "1.0"}')
    (expert / "model.safetensors").rename(expert / "pytorch_model.bin")
    message = place.refused_study(
        models__base=str(base), models__experts__math=str(expert), objectives__0__task__file="no.jsonl"
    )
    first, second, third = message.splitlines()
    assert first.startswith(f"models: expert 'math': {expert}: only pickles (pytorch_model.bin), which are never")
    assert second.startswith(f"models: {base}: its tokenizer cannot be loaded: ")
    assert third.startswith("objectives.0.task: ")


# Names.


@pytest.mark.parametrize(
    ("where", "value", "message"),
    [
        ("serch", {}, 'serch: unknown key; did you mean "search"? known keys: name, models, search_space, search'),
        ("search.max_trial", 3, 'search.max_trial: unknown key; did you mean "max_trials"?'),
        ("objectives.0.task.max_token", 3, 'objectives.0.task.max_token: unknown key; did you mean "max_tokens"?'),
        (
            "search_space.kind",
            "llfs",
            f'search_space.kind: "llfs" is not known; did you mean "lfs"? available: {KINDS}',
        ),
        ("search_space.kind", "hm4", 'search_space.kind: "hm4" is not known; did you mean "hm3"? available: '),
        ("search_space.methods", ["tie"], '"tie" is not known; did you mean "ties"? available: task_arithmetic, ties'),
        ("search.algorithm", "smak", f'"smak" is not known; did you mean "smac"? available: {AVAILABLE}'),
        ("search.algorithm", "hm4", f'"hm4" is not known; did you mean "hm3"? available: {AVAILABLE}'),
        ("fidelity.scheduler", "asa", '"asa" is not known; did you mean "asha"?'),
        ("fidelity.eta", 1, "fidelity.eta: 1 is not accepted; give at least 2"),
        ("fidelity.min_samples", 37, "fidelity.min_samples: min_samples=37 is above max_samples=36"),
        ("search_space.layer_groups", 3, "search_space.layer_groups: 3 for a model of 2 layers; use 1 to 2"),
        ("limits.max_layers", 1, "limits.max_layers: 1 is below the 2 layers that every merge of this study has"),
    ],
)
def test_names_and_numbers_in_the_study_file(place: Workplace, where: str, value: Any, message: str) -> None:
    found = place.refused_study(**{where.replace(".", "__"): value})
    assert message in found
    assert len(found.splitlines()) == 1


def test_a_policy_needs_layer_paths_one_rung_and_some_iterations(place: Workplace) -> None:
    message = place.refused_study(search={"algorithm": "hm3", "max_trials": 47})
    assert message.splitlines() == [
        "search_space.kind: hm3 learns layer paths; a space of kind lfs has none; write kind: hm3",
        "fidelity.scheduler: hyperband: hm3 needs the reward of every path at one budget; write scheduler: none, or "
        "successive_halving, which scores the best paths on more samples after the search",
        "search.max_trials: 47 is too few for 1 policies with 1 iterations of 16 episodes to warm up, one to learn "
        "from and one to play; give at least 48, or fewer episodes",
    ]
    message = place.refused_study(
        search_space={"kind": "hm3", "models": ["base", "math"]},
        search={"algorithm": "hm3", "max_trials": 30, "hm3": {"episodes": 10, "mini_batches": 11}},
        fidelity={"scheduler": "none", "max_samples": 36},
    )
    assert message == "search.hm3.mini_batches: 11 is above episodes=10; give at most 10"


def test_an_unknown_metric_of_an_inline_task(place: Workplace) -> None:
    message = place.refused_study(objectives__0__metric="exact_mach", holdout=[])
    assert message == (
        f"objectives.0.metric: task {place.directory}/search.jsonl: unknown metric 'exact_mach'; "
        "an inline task has exact_match and length"
    )


def test_an_unknown_metric_and_split_of_an_lm_eval_file(place: Workplace) -> None:
    task = str(write_choices(place.directory))
    objective = {"name": "sums", "task": task, "metric": "accuracy"}
    message = place.refused_study(objectives=[objective], holdout=[{**objective, "split": "dev"}])
    assert message.splitlines() == [
        f"objectives.0.metric: task {task}: unknown metric 'accuracy'; it has acc",
        f"holdout.0.metric: task {task}: unknown metric 'accuracy'; it has acc",
    ]
    objective["metric"] = "acc"
    message = place.refused_study(objectives=[objective], holdout=[{**objective, "split": "dev"}])
    assert f"holdout.0.split: task {task}: no split 'dev'; its data has test, train" in message


@pytest.mark.slow
def test_an_unknown_task_names_the_nearest(place: Workplace) -> None:
    message = place.refused_study(objectives=[{"name": "sums", "task": "gsm8", "metric": "exact_match"}], holdout=[])
    assert "objectives.0.task: task 'gsm8': lm-eval knows no such task; nearest are " in message
    assert "gsm8k" in message


def test_a_program_has_its_own_metric_and_limit(place: Workplace) -> None:
    file = place.directory / "code.jsonl"
    file.write_text('{"prompt": "f", "answer": "f", "test": "f()"}\n')
    objective = {
        "name": "code",
        "task": {"file": str(file), "program": "{{completion}}{{test}}", "max_tokens": 8},
        "metric": "exact_match",
    }
    assert place.refused_study(objectives=[objective], holdout=[]) == (
        f"objectives.0.metric: task {file}: unknown metric 'exact_match'; an inline task with a program has "
        "pass@1, pass@10 ..."
    )
    assert (
        "objectives.0.max_tokens: is for lm-eval tasks; of a JSONL task it is task.max_tokens"
        in place.refused_study(objectives=[{**objective, "metric": "pass@1", "max_tokens": 400}], holdout=[])
    )


# Data.


def test_a_malformed_line_is_named_by_number(place: Workplace) -> None:
    file = place.directory / "bad.jsonl"
    file.write_text('{"prompt": "1+1=", "answer": "2"}\n\n{"prompt": "1+2=", "answer"\n')
    message = place.refused_study(objectives__0__task__file="bad.jsonl")
    assert message.startswith(f"objectives.0.task: {file}, line 3: not JSON (")


def test_an_empty_file_and_a_missing_one(place: Workplace) -> None:
    (place.directory / "empty.jsonl").touch()
    message = place.refused_study(objectives__0__task__file="empty.jsonl", holdout__0__task__file="no.jsonl")
    assert message.splitlines() == [
        f"objectives.0.task: {place.directory}/empty.jsonl: holds no samples; expected one JSON object per line",
        f"holdout.0.task: {place.directory}/no.jsonl: cannot be read (No such file or directory)",
    ]


def test_more_samples_than_there_are(place: Workplace) -> None:
    assert place.refused_study(fidelity__max_samples=100) == (
        "fidelity.max_samples: 100 samples requested, objective 'sums' has 40; use at most 40"
    )
    assert place.refused_study(fidelity={"rungs": [10, 41]}) == (
        "fidelity.rungs: 41 samples requested, objective 'sums' has 40; use at most 40"
    )


def test_answers_that_leave_no_room_for_a_prompt(place: Workplace) -> None:
    assert place.refused_study(holdout__0__task__max_tokens=64) == (
        "holdout.0.task.max_tokens: 64 leaves no room for a prompt in the 64 tokens that the model reads; give at most "
        "63, or raise engine.max_model_len where that is the limit"
    )


def test_a_chat_template_that_the_tokenizer_does_not_have(place: Workplace) -> None:
    base = place.copied("base")
    assert place.refused_study(models__base=str(base), engine__chat_template=True) == (
        f"engine.chat_template: true: the tokenizer of {base} has no template; write false"
    )
    (base / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert place.refused_study(models__base=str(base), engine__chat_template="tools") == (
        f'engine.chat_template: "tools": the tokenizer of {base} has the templates default; give one of them'
    )
    file = place.write(models__base=str(base), engine__chat_template=True)
    assert place.run("run", file, "--out", place.run_dir, "--check")[0] == 0


def test_all_problems_are_told_together(place: Workplace) -> None:
    message = place.refused_study(
        models__experts__math=str(place.models / "nowhere"),
        objectives__0__task__file="nothing.jsonl",
        holdout__0__metric="exact_match",
        engine__tensor_parallel_size=512,
    )
    assert [line.split(":")[0] for line in message.splitlines()] == [
        "models",
        "objectives.0.task",
        "engine" if torch.cuda.is_available() else "engine.tensor_parallel_size",
    ]


# Study files.


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda file: None, "study.yaml: cannot be read: No such file or directory"),
        (lambda file: file.mkdir(), "study.yaml: cannot be read: Is a directory"),
        (lambda file: file.write_bytes(bytes(range(128, 256))), "study.yaml: is not UTF-8 text"),
        (lambda file: file.write_bytes(b"\x00\x01\x02"), "is not allowed in YAML"),
        (
            lambda file: file.write_bytes(b"name: x\n" * 200_000),
            "study.yaml: has 1600000 bytes; a study file has at most 1000000",
        ),
        (lambda file: file.write_text("a: [1,\nb: 2"), "study.yaml: line 2"),
        (lambda file: file.write_text(""), "study.yaml: is empty, not a mapping"),
        (lambda file: file.write_text("[" * 100_000), "study.yaml: is nested too deeply"),
        (lambda file: file.write_text("name: a\nname: b\n"), "line 2, column 1: key 'name' is given twice"),
    ],
    ids=["missing", "directory", "not UTF-8", "binary", "huge", "malformed", "empty", "deep", "twice"],
)
def test_study_files_that_cannot_be_read(place: Workplace, make: Callable[[Path], Any], message: str) -> None:
    file = place.directory / "study.yaml"
    make(file)
    assert message in place.refused("run", file, "--out", place.run_dir)
    assert not place.run_dir.exists()


@pytest.mark.slow
def test_study_file_gives_plan_or_message(place: Workplace) -> None:
    """Every study file, whatever its text, gives a plan or a message."""
    draw = random.Random(0)
    codes = []
    for _ in range(60):
        document = spoilt(place.study, draw)
        file = place.directory / "mutant.yaml"
        file.write_text(yaml.safe_dump(document))
        code, out, err = place.run("run", file, "--out", place.run_dir, "--check")
        codes.append(code)
        assert code in (0, 2), (document, err)
        assert (out and not err) if code == 0 else (err and not out), document
    assert set(codes) == {0, 2}

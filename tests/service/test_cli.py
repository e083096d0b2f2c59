"""The command as people meet it: what is wrong is told with its value and place, at once, before anything starts."""

from __future__ import annotations

import copy
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from jsonschema import Draft202012Validator
from safetensors.torch import load_file, save_file

from search_spaces.published import sources_and_published
from search_spaces.study import load_study
from service.cli import SCHEMAS, main
from service.preflight import examine
from service.run import DATABASE, locked
from service.store import Store
from service.types import Origin, RungRecord, TrialRecord, TrialState
from tests.builders import tiny_family
from tests.conftest import write_choices
from tests.workers.recipes import arithmetic
from workers.checkpoints import BY_CONFIG, open_family
from workers.findings import CACHE_VARIABLE
from workers.types import Family


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No command here may come to start Ray, or load vLLM (other tests of the session may have)."""

    def started() -> None:
        raise AssertionError("Ray would have been started")

    monkeypatch.setattr("service.run.ray_session", started)
    before = "vllm" in sys.modules, ray_is_up()
    yield
    assert ("vllm" in sys.modules, ray_is_up()) == before


def ray_is_up() -> bool:
    return "ray" in sys.modules and sys.modules["ray"].is_initialized()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("family")
    tiny_family(directory, experts=("math", "text"))
    return directory


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path_factory.getbasetemp() / "findings"))


@dataclass
class Workplace:
    """A directory with a good study of a tiny family, and the command to run there."""

    directory: Path
    models: Path
    capsys: pytest.CaptureFixture[str]

    def __post_init__(self) -> None:
        for name, size in (("search", 40), ("holdout", 20)):
            lines = [json.dumps({"prompt": f"{i}+1=", "answer": str(i + 1)}) for i in range(size)]
            (self.directory / f"{name}.jsonl").write_text("\n".join(lines) + "\n")

    @property
    def study(self) -> dict[str, Any]:
        return {
            "name": "small",
            "models": {
                "base": str(self.models / "base"),
                "experts": {alias: str(self.models / alias) for alias in ("math", "text")},
            },
            "search_space": {"kind": "lfs", "layer_groups": 2, "component_groups": 3, "methods": ["ties", "linear"]},
            "search": {"algorithm": "random", "max_trials": 6, "seed": 0},
            "fidelity": {"scheduler": "hyperband", "min_samples": 4, "max_samples": 36, "eta": 3},
            "objectives": [
                {"name": "sums", "task": {"file": "search.jsonl", "max_tokens": 6}, "metric": "exact_match"}
            ],
            "holdout": [{"name": "sums", "task": {"file": "holdout.jsonl", "max_tokens": 6}, "metric": "exact_match"}],
            "engine": {"max_model_len": 64, "replicas": 1},
            "limits": {"max_layers": 50},
        }

    @property
    def run_dir(self) -> Path:
        return self.directory / "run"

    def write(self, **changes: Any) -> Path:
        """The study with values at dotted places (written with double underscores) changed, as a file."""
        document = self.study
        for place, value in changes.items():
            put(document, place.replace("__", "."), value)
        file = self.directory / "study.yaml"
        file.write_text(yaml.safe_dump(document, sort_keys=False))
        return file

    def run(self, *arguments: Any) -> tuple[int, str, str]:
        """Exit code, standard output and standard error of one command."""
        self.capsys.readouterr()
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as error:  # argparse
            code = int(error.code or 0)
        captured = self.capsys.readouterr()
        return code, captured.out, captured.err

    def refused(self, *arguments: Any) -> str:
        """What a refused command says, every line of it with the command's name."""
        code, out, err = self.run(*arguments)
        assert (code, out) == (2, ""), err
        assert "Traceback" not in err
        lines = err.splitlines()
        assert lines
        assert all(line.startswith("mergesearch: ") for line in lines), err
        return "\n".join(line.removeprefix("mergesearch: ") for line in lines)

    def refused_study(self, **changes: Any) -> str:
        """What `run` says of the changed study; it leaves no database behind that holds a study."""
        message = self.refused("run", self.write(**changes), "--out", self.run_dir)
        assert not (self.run_dir / DATABASE).exists() or not studies_in(self.run_dir)
        return message


@pytest.fixture
def place(tmp_path: Path, models: Path, capsys: pytest.CaptureFixture[str]) -> Workplace:
    return Workplace(tmp_path, models, capsys)


def put(document: dict[str, Any], place: str, value: Any) -> None:
    *parents, last = [int(part) if part.isdigit() else part for part in place.split(".")]
    node: Any = document
    for part in parents:
        node = node[part]
    node[last] = value


def studies_in(directory: Path) -> tuple[Any, ...]:
    store = Store(f"sqlite:///{directory / DATABASE}")
    try:
        return store.studies()
    finally:
        store.close()


def copied(place: Workplace, alias: str) -> Path:
    """A model of the family that a test may damage."""
    return Path(shutil.copytree(place.models / alias, place.directory / f"{alias}-copy"))


# A good study.


def test_check_prints_the_plan_and_starts_and_leaves_nothing(place: Workplace) -> None:
    code, out, err = place.run("run", place.write(), "--out", place.run_dir, "--check")
    assert (code, err) == (0, "")
    assert "study     small: nothing is wrong with it" in out
    assert "models    base + 2 experts of" in out
    assert "rungs     4 -> 12 -> 36 samples of each objective, 1 objective; scheduler: hyperband\n" in out
    assert re.search(r"^disk      0\.0 GiB for an exported model, \d+\.\d GiB free$", out, re.MULTILINE)
    assert "trials    8 sources and published recipes, 6 searched" in out
    assert not place.run_dir.exists()


def test_check_as_json_holds_the_same_plan(place: Workplace) -> None:
    code, out, _ = place.run("run", place.write(), "--out", place.run_dir, "--check", "--json")
    plan = json.loads(out)
    assert code == 0
    assert plan["rungs"] == [{"sums": 4}, {"sums": 12}, {"sums": 36}]
    assert plan["trials"] == {"extras": 8, "search": 6}
    assert plan["memory_bytes"]["needed"] == plan["memory_bytes"]["bank"] + plan["memory_bytes"]["engines"]
    assert plan["hours"] > 0


# Models.


def test_a_missing_model_directory(place: Workplace) -> None:
    message = place.refused_study(models__experts={"math": str(place.models / "maths"), "text": "owner/name"})
    maths, name = message.splitlines()
    assert maths == (
        f"models: expert 'math': {place.models}/maths: does not exist; expected a directory with config.json, "
        "tokenizer files and *.safetensors"
    )
    assert name == (
        "models: expert 'text': owner/name: neither a directory nor a hub model that can be had here: it is not wholly "
        "in the hub's cache, and the hub cannot be reached: HF_HUB_OFFLINE is set; expected a directory with "
        "config.json, tokenizer files and *.safetensors, or the id of a hub model that is in the hub's cache or can be "
        "fetched"
    )


def test_a_model_that_is_a_file(place: Workplace) -> None:
    message = place.refused_study(models__base=str(place.models / "base" / "config.json"))
    assert "base model: " in message
    assert "config.json: is a file; expected a directory" in message


def test_no_experts(place: Workplace) -> None:
    assert place.refused_study(models__experts={}) == "models.experts: is empty; give at least 1"


def test_a_tensor_of_another_shape_names_tensor_model_and_both_shapes(place: Workplace) -> None:
    name, expert = "model.layers.1.mlp.up_proj.weight", copied(place, "math")
    tensors = load_file(expert / "model.safetensors")
    rows, columns = tensors[name].shape
    save_file(tensors | {name: torch.zeros(rows + 1, columns)}, expert / "model.safetensors", {"format": "pt"})
    assert place.refused_study(models__experts__math=str(expert)) == (
        f"models: expert 'math': {expert}: tensor '{name}' has shape [{rows + 1}, {columns}]; "
        f"the base has [{rows}, {columns}]"
    )


def test_truncated_safetensors_name_file_and_both_sizes(place: Workplace) -> None:
    file = copied(place, "math") / "model.safetensors"
    size = file.stat().st_size
    os.truncate(file, size - 1000)
    assert place.refused_study(models__experts__math=str(file.parent)) == (
        f"models: expert 'math': {file}: is truncated: its header declares {size} bytes, the file has {size - 1000}"
    )


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe", b'{"model_type": "llama"}'])
def test_a_damaged_configuration_is_told(place: Workplace, content: bytes) -> None:
    expert = copied(place, "math")
    (expert / "config.json").write_bytes(content)
    code, _, err = place.run("run", place.write(models__experts__math=str(expert)), "--out", place.run_dir, "--check")
    assert code == 2
    assert str(expert) in err


def test_a_configuration_that_does_not_count_layers_says_what_transformers_takes_it_to_say(place: Workplace) -> None:
    base = copied(place, "base")
    config = json.loads((base / "config.json").read_text())
    del config["num_hidden_layers"]
    (base / "config.json").write_text(json.dumps(config))
    problem = place.refused_study(models__base=str(base))
    assert f"num_hidden_layers is 32 {BY_CONFIG}, its tensors are of 2 layers" in problem


def test_a_base_without_tokenizer(place: Workplace) -> None:
    base = copied(place, "base")
    for file in base.glob("token*"):
        file.unlink()
    assert place.refused_study(models__base=str(base)).startswith(
        f"models: {base}: no tokenizer; expected one of tokenizer.json, "
    )


def test_weights_that_are_not_finite_are_told_by_tensor_and_model(place: Workplace) -> None:
    base, expert = copied(place, "base"), copied(place, "math")
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
    base, expert = copied(place, "base"), copied(place, "math")
    (base / "tokenizer.json").write_text('{"version": "1.0"}')
    (expert / "model.safetensors").rename(expert / "pytorch_model.bin")
    message = place.refused_study(
        models__base=str(base), models__experts__math=str(expert), objectives__0__task__file="no.jsonl"
    )
    first, second, third = message.splitlines()
    assert first.startswith(f"models: expert 'math': {expert}: only pickles (pytorch_model.bin), which are never")
    assert second.startswith(f"models: {base}: its tokenizer cannot be loaded: ")
    assert third.startswith("objectives.0.task: ")


# The disk.


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.disk.shutil.disk_usage", lambda _: type("Usage", (), {"free": 2**25})())


NO_ROOM = "the disk has 0.0 GiB free, the merged model needs 0.1 GiB; make room or give a directory on another disk"


@pytest.mark.usefixtures("full_disk")
def test_a_disk_too_small_for_the_export(place: Workplace) -> None:
    for check in ((), ("--check",)):
        message = place.refused("run", place.write(), "--out", place.run_dir, "--export", "best", *check)
        assert message == f"--export: {place.run_dir}/export: {NO_ROOM}"
        assert not place.run_dir.exists()
    assert place.run("run", place.write(), "--out", place.run_dir, "--check")[0] == 0
    begin(place, scored=True)
    out = place.directory / "merged"
    assert place.refused("export", place.run_dir, "1", "--out", out) == f"{out}: {NO_ROOM}"
    assert not out.exists()


@pytest.mark.usefixtures("full_disk")
def test_a_disk_too_small_for_a_merge(place: Workplace, family: Family) -> None:
    file, out = recipe_file(place, arithmetic(family, 0.5, 0.5).to_json()), place.directory / "merged"
    assert place.refused("merge", file, "--out", out, *given(family, "base", "math", "text")) == f"{out}: {NO_ROOM}"
    assert not out.exists()


# Names.


@pytest.mark.parametrize(
    ("where", "value", "message"),
    [
        ("serch", {}, 'serch: unknown key; did you mean "search"? known keys: name, models, search_space, search'),
        ("search.max_trial", 3, 'search.max_trial: unknown key; did you mean "max_trials"?'),
        ("objectives.0.task.max_token", 3, 'objectives.0.task.max_token: unknown key; did you mean "max_tokens"?'),
        ("search_space.kind", "lsf", 'search_space.kind: "lsf" is not known; did you mean "lfs"? available: lfs'),
        ("search_space.kind", "dis", 'search_space.kind: "dis" is not available yet; available: lfs'),
        ("search_space.methods", ["tie"], '"tie" is not known; did you mean "ties"? available: task_arithmetic, ties'),
        ("search.algorithm", "smak", '"smak" is not known; did you mean "smac"? available: auto, smac, random'),
        ("search.algorithm", "cmaes", '"cmaes" is not available yet; available: auto, smac, random'),
        ("fidelity.scheduler", "racing", '"racing" is not available yet; available: hyperband, asha, none'),
        ("fidelity.eta", 1, "fidelity.eta: 1 is not accepted; give at least 2"),
        ("fidelity.min_samples", 37, "fidelity.min_samples: min_samples=37 is above max_samples=36"),
        ("search_space.layer_groups", 3, "search_space.layer_groups: 3 for a model of 2 layers; use 1 to 2"),
        ("limits.max_layers", 1, "limits.max_layers: 1 is below the 2 layers that every merge here has"),
    ],
)
def test_names_and_numbers_in_the_study_file(place: Workplace, where: str, value: Any, message: str) -> None:
    found = place.refused_study(**{where.replace(".", "__"): value})
    assert message in found
    assert len(found.splitlines()) == 1


def test_an_unknown_metric_of_an_inline_task(place: Workplace) -> None:
    message = place.refused_study(objectives__0__metric="exact_mach", holdout=[])
    assert message == (
        f"objectives.0.metric: task {place.directory}/search.jsonl: unknown metric 'exact_mach'; "
        "an inline task has exact_match"
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


def test_an_unknown_task_names_the_nearest(place: Workplace) -> None:
    message = place.refused_study(objectives=[{"name": "sums", "task": "gsm8", "metric": "exact_match"}], holdout=[])
    assert "objectives.0.task: task 'gsm8': lm-eval knows no such task; nearest are " in message
    assert "gsm8k" in message


@pytest.mark.parametrize("task", ["humaneval", "mbpp", "humaneval_plus"])
def test_tasks_that_execute_code(place: Workplace, task: str) -> None:
    objective = {"name": "sums", "task": task, "metric": "pass@1"}
    assert place.refused_study(objectives=[objective], holdout=[]) == (
        f"objectives.0.task: task '{task}': executes code that the model writes; such tasks are refused, there is no "
        "sandbox for them"
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
        "fidelity.max_samples: 100 samples asked for, objective 'sums' has 40; use at most 40"
    )
    assert place.refused_study(fidelity={"rungs": [10, 41]}) == (
        "fidelity.rungs: 41 samples asked for, objective 'sums' has 40; use at most 40"
    )


def test_answers_that_leave_no_room_for_a_prompt(place: Workplace) -> None:
    assert place.refused_study(holdout__0__task__max_tokens=64) == (
        "holdout.0.task.max_tokens: 64 leaves no room for a prompt in the 64 tokens that the model reads; give at most "
        "63, or raise engine.max_model_len where that is the limit"
    )


def test_a_chat_template_that_the_tokenizer_does_not_have(place: Workplace) -> None:
    base = copied(place, "base")
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


def test_errors_as_json_hold_every_problem_with_its_field(place: Workplace) -> None:
    code, out, err = place.run(
        "run", place.write(serch={}, fidelity__eta=1), "--out", place.run_dir, "--check", "--json"
    )
    assert (code, out) == (2, "")
    told = json.loads(err)
    assert told["error"] == "InvalidStudy"
    assert {problem["field"] for problem in told["problems"]} == {"serch", "fidelity.eta"}
    assert all(problem["message"] for problem in told["problems"])
    code, _, err = place.run("trials", place.run_dir, "--json")
    assert code == 2
    assert json.loads(err)["error"] == "NotFound"


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


MUTANTS = (None, True, -1, 0, 10**30, 1e400, "", "x", "\0", "../..", [], {}, [[]], {"a": {"b": []}}, "/proc/self/mem")


def places_in(node: Any, prefix: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    for key, value in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
        yield (*prefix, key)
        yield from places_in(value, (*prefix, key))


def test_whatever_is_written_in_a_study_file_is_a_plan_or_a_message(place: Workplace) -> None:
    draw = random.Random(0)
    codes = []
    for _ in range(60):
        document = copy.deepcopy(place.study)
        for _ in range(draw.randint(1, 2)):
            *parents, last = draw.choice(list(places_in(document)))
            node = document
            for part in parents:
                node = node[part]
            if draw.random() < 0.2:
                del node[last]
            else:
                node[last] = draw.choice(MUTANTS)
        file = place.directory / "mutant.yaml"
        file.write_text(yaml.safe_dump(document))
        code, out, err = place.run("run", file, "--out", place.run_dir, "--check")
        codes.append(code)
        assert code in (0, 2), (document, err)
        assert (out and not err) if code == 0 else (err and not out), document
    assert set(codes) == {0, 2}


# Directories of runs.


def test_another_study_in_the_directory_is_told_by_the_fields_that_differ(place: Workplace) -> None:
    begin(place)
    message = place.refused("run", place.write(search__seed=7, search__max_trials=5), "--out", place.run_dir)
    assert message == (
        f"{place.run_dir}: holds another study ('small'); these fields differ: search.max_trials, search.seed; "
        "only limits and a larger search.max_trials may change; give another directory"
    )


def test_models_or_data_that_changed_since_the_run_began(place: Workplace) -> None:
    begin(place)
    with (place.directory / "search.jsonl").open("a") as file:
        file.write('{"prompt": "0+0=", "answer": "0"}\n')
    message = place.refused("run", place.write(), "--out", place.run_dir)
    assert message.startswith("study 'small': tasks of sums have changed since it was started; ")


def test_a_second_run_on_one_directory_is_refused_naming_the_process(place: Workplace) -> None:
    with locked(place.run_dir):
        message = place.refused("run", place.write(), "--out", place.run_dir)
    assert message == (
        f"{place.run_dir}: process {os.getpid()} is at work here; wait for it, stop it, or give another directory"
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


def begin(place: Workplace, *, scored: bool = False) -> str:
    """A run as the store has it after its start; `scored`: with the source and published recipes at full budget and
    one searched trial that failed."""
    place.run_dir.mkdir(exist_ok=True)
    study = load_study(place.write())
    examination = examine(study)
    store = Store(f"sqlite:///{place.run_dir / DATABASE}")
    record = store.create_study(
        name=study.name, document=study.canonical(), facts={**examination.facts(), "version": "0"}
    )
    if scored:
        writer = store.open_attempt(record.id)
        for number, (origin, label, recipe) in enumerate(examination.extras()):
            writer.add_trial(TrialRecord(number, origin, label, TrialState.RUNNING, recipe))
            rung = RungRecord(2, {"sums": 36}, {"sums": number / 10}, {"sums": 0.01})
            writer.finish_rung(number, rung, samples_reused=0, state=TrialState.COMPLETE)
        writer.add_trial(TrialRecord(number + 1, Origin.SEARCH, "trial", TrialState.WAITING, recipe, bracket=0))
        writer.finish_trials([number + 1], TrialState.FAIL, "NaN logits")
    store.close()
    return record.id


def test_a_run_that_has_only_begun_has_no_trials_and_no_front(place: Workplace) -> None:
    begin(place)
    assert place.run("trials", place.run_dir, "--json")[:2] == (0, "[]\n")
    code, out, _ = place.run("pareto", place.run_dir, "--json")
    assert (code, json.loads(out)["front"]) == (0, [])
    for trial in ("best", "0"):
        message = place.refused("export", place.run_dir, trial, "--out", place.directory / "merged")
        assert message == "the run has no trials yet; there is nothing to export"


def test_trials_and_front_are_listed_for_people_and_programs(place: Workplace) -> None:
    begin(place, scored=True)
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


def test_export_writes_the_trial_that_is_named_and_refuses_others(place: Workplace) -> None:
    begin(place, scored=True)
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


def test_export_refuses_sources_that_have_changed(place: Workplace) -> None:
    expert = copied(place, "math")
    begin(place, scored=True)
    store = Store(f"sqlite:///{place.run_dir / DATABASE}")
    (record,) = store.studies()
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
    assert message == "models math have changed since the study; what was scored cannot be written"


# Merging by a recipe file.


@pytest.fixture
def family(models: Path) -> Family:
    return open_family(models / "base", {alias: models / alias for alias in ("math", "text")})


def recipe_file(place: Workplace, document: Any) -> Path:
    file = place.directory / "recipe.json"
    file.write_text(document if isinstance(document, str) else json.dumps(document))
    return file


def given(family: Family, *aliases: str) -> list[str]:
    return [part for m in family.models if m.alias in aliases for part in ("--model", f"{m.alias}={m.directory}")]


def test_merge_needs_to_know_where_every_model_is(place: Workplace, family: Family) -> None:
    file, out = recipe_file(place, arithmetic(family, 0.5, 0.5).to_json()), place.directory / "merged"
    assert place.refused("merge", file, "--out", out, *given(family, "base")) == (
        f"{file}: where are math, text? Add --model math=DIR --model text=DIR"
    )
    everything = given(family, "base", "math", "text")
    assert place.refused("merge", file, "--out", out, *everything, "--model", "code=x") == (
        f"{file}: has no model code; it names base, math, text"
    )
    assert place.refused("merge", file, "--out", out, "--model", "math") == (
        "--model 'math': write ALIAS=DIR, e.g. --model math=/models/math"
    )
    assert place.refused("merge", file, "--out", out, "--model", "a=b", "--model", "a=c") == (
        "--model 'a=c': a is given twice, first as b"
    )
    assert "expert 'text': " in place.refused(
        "merge", file, "--out", out, *given(family, "base", "math"), "--model", "text=/nowhere"
    )
    assert not out.exists()
    assert place.run("merge", file, "--out", out, *everything)[0] == 0
    assert (out / "model.safetensors").is_file()


def test_merge_refuses_another_model_than_the_recipe_means(place: Workplace, family: Family) -> None:
    recipe = arithmetic(family, 0.5, 0.5).to_json()
    recipe["models"]["math"] = "f" * 64
    file = recipe_file(place, recipe)
    message = place.refused("merge", file, "--out", place.directory / "m", *given(family, "base", "math", "text"))
    assert message == (
        f"{file}: {place.models}/math is not the recipe's 'math': its content has fingerprint "
        f"{family.fingerprints['math'][:12]}, the recipe's ffffffffffff"
    )


def test_a_recipe_that_names_only_the_base_is_the_base(place: Workplace, family: Family) -> None:
    known = sources_and_published(base="base", experts=("math",), fingerprints=family.fingerprints, num_layers=2)
    (recipe,) = (known.recipe for known in known if known.label == "base")
    assert list(recipe.models) == ["base"]
    out = place.directory / "merged"
    file = recipe_file(place, recipe.to_json())
    code, _, err = place.run("merge", file, "--out", out, *given(family, "base"), "--dtype", "float32")
    assert (code, err) == (0, "")
    merged, base = load_file(out / "model.safetensors"), load_file(place.models / "base" / "model.safetensors")
    assert all(torch.equal(merged[name], base[name]) for name in merged)
    assert "does not exist" in place.refused("merge", file, "--out", place.directory / "m", "--model", "base=/nowhere")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "line 1: not JSON: "),
        ("[1]", "recipe: format is [1]; this version reads "),
        ('{"format": "other"}', "recipe: format is 'other'; this version reads "),
        ("9" * 10_000, "Exceeds the limit"),
        ("[" * 100_000, "is nested too deeply"),
        ("\udcff", "is not UTF-8 text (byte 0); give a recipe.json"),
    ],
    ids=["malformed", "list", "format", "number", "deep", "not UTF-8"],
)
def test_recipes_that_cannot_be_read(place: Workplace, text: str, message: str) -> None:
    file = place.directory / "recipe.json"
    file.write_bytes(text.encode(errors="surrogateescape"))
    found = place.refused("merge", file, "--out", place.directory / "merged")
    assert found.startswith(f"{file}: {message}")


def test_a_recipe_file_that_is_missing_or_a_directory(place: Workplace) -> None:
    for file, reason in ((place.directory / "no.json", "No such file"), (place.directory, "Is a directory")):
        message = place.refused("merge", file, "--out", place.directory / "merged")
        assert message.startswith(f"{file}: cannot be read: {reason}")


def test_whatever_a_recipe_says_is_a_merge_or_a_message(place: Workplace, family: Family) -> None:
    draw = random.Random(0)
    good = arithmetic(family, 0.5, 0.5).to_json()
    everything = given(family, "base", "math", "text")
    codes = []
    for number in range(60):
        document = copy.deepcopy(good)
        *parents, last = draw.choice(list(places_in(document)))
        node = document
        for part in parents:
            node = node[part]
        if isinstance(node, dict) and draw.random() < 0.2:
            del node[last]
        else:
            node[last] = draw.choice(MUTANTS)
        out = place.directory / f"merged-{number}"
        code, _, err = place.run("merge", recipe_file(place, document), "--out", out, *everything)
        codes.append(code)
        assert code in (0, 2), (document, err)
        assert code == 0 or err.strip(), document
    assert 2 in codes


# Help and schemas.


@pytest.mark.parametrize("name", SCHEMAS)
def test_schema_prints_a_valid_json_schema(place: Workplace, name: str) -> None:
    code, out, err = place.run("schema", name)
    assert (code, err) == (0, "")
    schema = json.loads(out)
    Draft202012Validator.check_schema(schema)
    assert not Draft202012Validator(schema).is_valid([])


def test_the_schema_of_the_study_file_accepts_the_study(place: Workplace) -> None:
    validator = Draft202012Validator(json.loads(place.run("schema", "study")[1]))
    assert validator.is_valid(place.study)
    assert not validator.is_valid({**place.study, "serch": {}})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["schema", "studdy"], "invalid choice: 'studdy'"),
        (["rnu"], "invalid choice: 'rnu'"),
        (["run"], "the following arguments are required: STUDY, --out"),
        ([], "the following arguments are required: COMMAND"),
        (["run", "x", "--out", "y", "--export", "worst"], "invalid choice: 'worst'"),
        (["export", "x", "best", "--out", "y", "--dtype", "int8"], "invalid choice: 'int8'"),
    ],
)
def test_a_wrong_command_line_exits_with_2_and_the_usage(place: Workplace, arguments: list[str], message: str) -> None:
    code, out, err = place.run(*arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert err.startswith("usage: mergesearch")


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["--version"]])
def test_help_is_instant_and_imports_nothing_heavy(arguments: list[str]) -> None:
    program = (
        "import sys, service.cli\n"
        f"try: service.cli.main({arguments})\n"
        "except SystemExit as end: assert not end.code\n"
        "heavy = {'torch', 'vllm', 'ray', 'pydantic', 'numpy', 'yaml', 'sqlalchemy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    seconds = []
    for _ in range(3):
        started = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        seconds.append(time.perf_counter() - started)
        assert done.returncode == 0, done.stderr
        assert done.stdout
    assert min(seconds) < 1

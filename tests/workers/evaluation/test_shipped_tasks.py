"""The sources of task data, and the files that `tasks fetch` stores for runs without a network."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import datasets
import pytest
from lm_eval.tasks._index import TaskIndex

from service.cli.main import main
from tests.hub_server import Hub, only_hub
from tests.workers.task_pack.rows import ROWS, write_data
from workers.errors import InvalidTask
from workers.evaluation import task_index
from workers.evaluation.data_sets import DATA_VARIABLE, place_of
from workers.evaluation.shipped_tasks import shipped_tasks
from workers.evaluation.tasks import build_task, check_task
from workers.models.remote import reachability
from workers.task_pack import pack_dir
from workers.types import TaskSpec

GSM8K = "openai/gsm8k"
SPEC = TaskSpec("lfs_gsm8k", "exact_match")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = [{"question": f"{i} + 1?", "answer": f"#### {i + 1}"} for i in range(5)]
    parts = {"main": {"train": rows[:2], "test": rows}, "socratic": {"train": rows, "test": rows[:1]}}
    return write_data(tmp_path_factory.mktemp("data"), parts)


@pytest.fixture(autouse=True)
def _named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Register the shipped tasks' names, and give the package `datasets` an empty cache."""
    monkeypatch.setattr(task_index, "_given", TaskIndex.build([pack_dir()], resolve_includes=False))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "prepared")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.delenv(DATA_VARIABLE, raising=False)


@pytest.fixture
def hub(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub that has the data of GSM8K."""
    hub = Hub()
    hub.push(f"datasets/{GSM8K}", data)
    with only_hub(hub, monkeypatch, tmp_path):
        monkeypatch.setattr(datasets.config, "HF_ENDPOINT", hub.url)
        monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(
            datasets.config, "HUB_DATASETS_URL", hub.url + "/datasets/{repo_id}/resolve/{revision}/{path}"
        )
        monkeypatch.setattr(reachability, "_silent_at", {})
        yield hub


def go_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


def test_fetched_data_serve_without_the_hub(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """After `tasks fetch` a task builds without a request, and `tasks` says that its data are here."""
    assert not next(task for task in shipped_tasks() if task.name == "lfs_gsm8k").is_here
    assert main(["tasks", "fetch", "lfs_gsm8k", "--json"]) == 0
    (fetched,) = json.loads(capsys.readouterr().out)
    assert fetched == {"data": GSM8K, "part": "main", "sizes": {"train": 2, "test": 5}}
    assert {file for file in hub.sent if file.endswith("test.parquet")} == {f"datasets/{GSM8K}/main/test.parquet"}
    go_offline(monkeypatch)
    hub.requests.clear()
    assert check_task(SPEC).num_samples == 5
    assert hub.requests == []
    assert main(["tasks", "--json"]) == 0
    listed = {task["name"]: task for task in json.loads(capsys.readouterr().out)}
    assert listed["lfs_gsm8k"]["is_here"]
    assert not listed["lfs_math"]["is_here"]


@pytest.mark.parametrize("names_main", [True, False])
def test_a_snapshot_of_hf_download_serves(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names_main: bool
) -> None:
    """What `hf download --repo-type dataset` leaves in the hub client's cache is found, links included."""
    go_offline(monkeypatch)
    folder = tmp_path / "hub" / "datasets--openai--gsm8k"
    snapshot, blobs = folder / "snapshots" / ("0" * 40), folder / "blobs"
    blobs.mkdir(parents=True)
    for number, file in enumerate(sorted(file for file in data.rglob("*") if file.is_file())):
        shutil.copyfile(file, blobs / str(number))
        link = snapshot / file.relative_to(data)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(blobs / str(number))
    (folder / "snapshots" / ("1" * 40)).mkdir()
    (folder / "snapshots" / ("1" * 40) / "README.md").touch()  # a later one, of which only the card was read
    if names_main:
        (folder / "refs").mkdir()
        (folder / "refs" / "main").write_text("0" * 40)
    assert place_of(GSM8K) == snapshot
    with build_task(SPEC) as task:
        assert task.info.num_samples == 5
        assert task.subtasks[0].task.eval_docs[4]["question"] == "4 + 1?"


def test_files_that_the_hub_made_of_a_script_serve(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """LogiQA is read from the revision with the hub's Parquet files, and afterwards without the hub."""
    path = "lucasmccabe/logiqa"
    for split in ("train", "validation", "test"):
        file = tmp_path / "made" / "default" / split / "0000.parquet"
        file.parent.mkdir(parents=True)
        datasets.Dataset.from_list([dict(ROWS[path](i)) for i in range(len(split))]).to_parquet(file)
    hub.push(f"datasets/{path}", tmp_path / "made")
    assert main(["tasks", "fetch", "lfs_logiqa", "--json"]) == 0
    (fetched,) = json.loads(capsys.readouterr().out)
    assert fetched == {"data": path, "part": None, "sizes": {"train": 5, "validation": 10, "test": 4}}
    assert any("refs%2Fconvert%2Fparquet" in request for _, request in hub.requests)
    go_offline(monkeypatch)
    hub.requests.clear()
    with build_task(TaskSpec("lfs_logiqa", "acc", split="validation")) as task:
        documents = task.subtasks[0].task.eval_docs
        assert [task.subtasks[0].task.doc_to_target(documents[i]) for i in range(5)] == [0, 1, 2, 3, 0]
        assert task.info.num_samples == 10
    assert hub.requests == []


def test_own_copy_comes_first(hub: Hub, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Data in $MERGESEARCH_DATA are used without a request, in the layout of the hub."""
    monkeypatch.setenv(DATA_VARIABLE, str(tmp_path / "own"))
    write_data(tmp_path / "own" / GSM8K, {"main": {"test": [{"question": "mine", "answer": "#### 1"}]}})
    with build_task(SPEC) as task:
        assert [row["question"] for row in task.subtasks[0].task.eval_docs] == ["mine"]
    assert hub.requests == []


def test_own_copy_without_a_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message has the missing file, not the 60 file name extensions that the package `datasets` knows."""
    monkeypatch.setenv(DATA_VARIABLE, str(tmp_path))
    place = tmp_path / "TRACE" / "LLM-CL-Benchmark" / "FOMC"
    place.mkdir(parents=True)
    (place / "test.json").write_text('{"prompt": "p", "answer": "A"}\n')
    with pytest.raises(InvalidTask, match=r"its data in .*FOMC are not complete: .*'.*/FOMC/train.json'$"):
        check_task(TaskSpec("trace_fomc", "exact_match"))


def test_absent_data_are_named_with_where_they_may_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message says where was looked, and how to get the data."""
    go_offline(monkeypatch)
    monkeypatch.setenv(DATA_VARIABLE, str(tmp_path / "own"))
    with pytest.raises(InvalidTask) as error:
        check_task(SPEC)
    for part in (
        "task 'lfs_gsm8k': its data cannot be fetched",
        f"{tmp_path / 'own' / GSM8K} does not exist",
        f"no snapshot of {GSM8K} in {tmp_path / 'hub'}",
        "`mergesearch tasks fetch`",
        f"`hf download --repo-type dataset {GSM8K}`",
    ):
        assert part in str(error.value)
    with pytest.raises(
        InvalidTask, match=r"not on the hub: unpack the archive .*BeyonderXX/TRACE .*TRACE/LLM-CL-Bench"
    ):
        check_task(TaskSpec("trace_fomc", "exact_match"))


def test_commands_report_what_cannot_be_fetched(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tasks", "fetch", "lfs_mgsm_ja"]) == 2
    assert "task 'lfs_mgsm_ja': " in capsys.readouterr().err
    assert main(["tasks", "fetch", "lfs_gsm9k"]) == 2
    assert "nearest are lfs_gsm8k" in capsys.readouterr().err


def test_tasks_are_listed_with_their_facts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tasks"]) == 0
    shown = capsys.readouterr().out
    for word in ("lfs_gsm8k", "CC BY-SA 4.0", "testmini 2,400", "rouge_l", "not here"):
        assert word in shown

"""The content of a task from a YAML file: a digest of all files that the task is made from, and of no others."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import write_choices
from workers.cache import CACHE_VARIABLE
from workers.errors import InvalidTask
from workers.evaluation import task_files
from workers.evaluation.lm_eval_tasks import content_hash, yaml_content
from workers.evaluation.task_files import files_digest
from workers.evaluation.tasks import check_task
from workers.file_access import FileAccess
from workers.types import TaskSpec

CHANGED = r"one of the files that it reads has changed since the study was planned; restore the files"
FUNCTION = "def process_docs(dataset):\n    return dataset\n"


def spec_of(file: Path, access: FileAccess | None = None) -> TaskSpec:
    return TaskSpec(str(file), "acc", content=yaml_content(str(file), access), access=access)


def replaced(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


def including(place: Path) -> Path:
    """A task that includes a file of another folder, which includes a file beside it."""
    (place / "shared").mkdir()
    write_choices(place, name="whole").rename(place / "shared" / "inner.yaml")
    (place / "shared" / "outer.yaml").write_text("include: inner.yaml\n")
    (place / "mine.yaml").write_text("include: [shared/outer.yaml]\ntask: mine\n")
    return place / "mine.yaml"


def group(place: Path) -> Path:
    """A group of a task and a tag, whose second member has data of its own."""
    (place / "second").mkdir()
    write_choices(place, name="first")
    data = {"data_files": {"test": "second/test.jsonl", "train": "second/train.jsonl"}}
    write_choices(place / "second", name="second", tag="tagged", dataset_kwargs=data)
    (place / "both.yaml").write_text("group: both\ntask: [first, {group: inner, task: [tagged]}]\n")
    return place / "both.yaml"


def with_data(**kwargs: Any) -> Callable[[Path], Path]:
    def written(place: Path) -> Path:
        (place / "data").mkdir()
        write_choices(place / "data")
        return write_choices(place, dataset_kwargs=kwargs["options"], **kwargs.get("settings", {}))

    return written


EVEN, ODD = '"gold": 1', '"gold": 2'


@pytest.mark.parametrize(
    ("written", "changed", "old", "new"),
    [
        pytest.param(write_choices, "test.jsonl", EVEN, ODD, id="answer"),
        pytest.param(write_choices, "choices.yaml", "{{question}}", "{{question}}?", id="YAML file"),
        pytest.param(including, "shared/outer.yaml", "include", "repeats: 1\ninclude", id="include"),
        pytest.param(including, "shared/inner.yaml", "{{question}}", "{{question}}?", id="include of an include"),
        pytest.param(including, "test.jsonl", EVEN, ODD, id="data of an include"),
        pytest.param(group, "first.yaml", "{{question}}", "{{question}}?", id="task of a group"),
        pytest.param(group, "second/second.yaml", "{{question}}", "{{question}}?", id="task of a tag"),
        pytest.param(group, "second/test.jsonl", EVEN, ODD, id="data of a task of a tag"),
        pytest.param(
            with_data(options={"data_files": {"test": ["data/te*.jsonl"], "train": "train.jsonl"}}),
            "data/test.jsonl",
            EVEN,
            ODD,
            id="pattern",
        ),
        pytest.param(
            with_data(options={"data_dir": "data", "data_files": {"test": "test.jsonl", "train": "train.jsonl"}}),
            "data/test.jsonl",
            EVEN,
            ODD,
            id="file of a directory",
        ),
        pytest.param(with_data(options={"data_dir": "data"}), "data/test.jsonl", EVEN, ODD, id="directory"),
        pytest.param(
            with_data(options={}, settings={"dataset_path": "./data"}), "data/test.jsonl", EVEN, ODD, id="data set"
        ),
    ],
)
def test_changed_files_are_refused(
    tmp_path: Path, written: Callable[[Path], Path], changed: str, old: str, new: str
) -> None:
    file = written(tmp_path)
    spec = spec_of(file)
    assert check_task(spec).num_samples in (12, 24)
    replaced(tmp_path / changed, old, new)
    with pytest.raises(InvalidTask, match=rf"^{file}: this file or {CHANGED}"):
        check_task(spec)
    assert check_task(spec_of(file)).num_samples in (12, 24)


def test_a_changed_function_is_refused(tmp_path: Path) -> None:
    """The module of a function and the modules beside it count, and the message comes before a sandbox is needed."""
    file = write_choices(tmp_path)
    with file.open("a") as stream:
        stream.write("process_docs: !function utils.process_docs\n")
    (tmp_path / "utils.py").write_text(FUNCTION)
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "more.py").write_text(FUNCTION)
    for changed in ("utils.py", "inner/more.py"):
        spec = spec_of(file)
        replaced(tmp_path / changed, "return dataset", "return dataset.select([0])")
        with pytest.raises(InvalidTask, match=CHANGED):
            check_task(spec)


def test_swapped_files_are_refused(tmp_path: Path) -> None:
    file = write_choices(tmp_path)
    spec = spec_of(file)
    (tmp_path / "test.jsonl").rename(tmp_path / "other")
    (tmp_path / "train.jsonl").rename(tmp_path / "test.jsonl")
    (tmp_path / "other").rename(tmp_path / "train.jsonl")
    with pytest.raises(InvalidTask, match=CHANGED):
        check_task(spec)


def test_files_that_are_not_read_do_not_count(tmp_path: Path) -> None:
    """Neither other data, nor Python files of a folder whose tasks name no function, nor tasks of no group."""
    file = write_choices(tmp_path)
    spec = spec_of(file)
    (tmp_path / "other.jsonl").write_text("{}\n")
    (tmp_path / "utils.py").write_text(FUNCTION)
    (tmp_path / "other.yaml").write_text("task: other\n")
    assert check_task(spec).num_samples == 12


@pytest.mark.parametrize("written", [write_choices, including, group])
def test_a_copied_folder_has_the_same_content(tmp_path: Path, written: Callable[[Path], Path]) -> None:
    (tmp_path / "place").mkdir()
    file = written(tmp_path / "place")
    copy = shutil.copytree(tmp_path / "place", tmp_path / "deep" / "copy")
    (tmp_path / "link").symlink_to(copy)
    assert files_digest(file, None) == files_digest(copy / file.name, None)
    assert files_digest(file, None) == files_digest(tmp_path / "link" / file.name, None)


def test_files_outside_the_access_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They do not change the digest, whether a task names them by paths or links, and are never opened."""
    outside, place = tmp_path / "outside", tmp_path / "place"
    for directory in (outside, place):
        directory.mkdir()
    write_choices(outside)
    (outside / "secret.py").write_text(FUNCTION)
    file = write_choices(place, dataset_kwargs={"data_files": {"test": "../outside/test.jsonl", "train": "link.jsonl"}})
    (place / "link.jsonl").symlink_to(outside / "train.jsonl")
    (place / "link.py").symlink_to(outside / "secret.py")
    (place / "link.yaml").symlink_to(outside / "choices.yaml")
    with file.open("a") as stream:
        stream.write("include: [link.yaml, ../outside/choices.yaml]\nprocess_docs: !function utils.process_docs\n")
    read: list[Path] = []
    hashed = task_files._hash
    monkeypatch.setattr(task_files, "_hash", lambda each: read.append(each.resolve()) or hashed(each))
    files_digest(file, FileAccess((str(place),)))
    assert read == [file]
    files_digest(file, None)
    assert {each for each in read if each.is_relative_to(outside)} == {
        outside / name for name in ("test.jsonl", "train.jsonl", "secret.py", "choices.yaml")
    }
    with pytest.raises(InvalidTask, match="is not below a directory that studies may read"):
        yaml_content(str(file), FileAccess((str(outside),)))


def test_the_content_of_earlier_versions_is_accepted(tmp_path: Path) -> None:
    """It has the YAML file alone, so that changed data are not noticed, as when the study was created."""
    file = write_choices(tmp_path)
    spec = TaskSpec(str(file), "acc", content=content_hash(file))
    replaced(tmp_path / "test.jsonl", EVEN, ODD)
    assert check_task(spec).num_samples == 12
    replaced(file, "{{question}}", "{{question}}?")
    with pytest.raises(InvalidTask, match=r"choices\.yaml: has changed since the study was planned"):
        check_task(spec)


def test_large_files_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of a machine read a large data file once, and again after it has changed."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(task_files, "LARGE_BYTES", 1)
    file = write_choices(tmp_path)
    before = files_digest(file, None)
    assert len(list((tmp_path / "cache" / "records").iterdir())) == 3
    assert files_digest(file, None) == before
    replaced(tmp_path / "test.jsonl", EVEN, '"gold": 20')
    assert files_digest(file, None) != before


@pytest.mark.parametrize(
    "text", ["task: &a [*a]\ngroup: both\n", "include: choices.yaml\n", "- 1\n", "task: [unclosed"]
)
def test_files_that_are_no_tasks_have_a_content(tmp_path: Path, text: str) -> None:
    """A content is computed for them, and their errors are reported when the task is built."""
    (tmp_path / "choices.yaml").write_text(text)
    assert yaml_content(str(tmp_path / "choices.yaml"), None).startswith("files:")
    with pytest.raises(InvalidTask, match=r"no\.yaml: cannot be read"):
        yaml_content(str(tmp_path / "no.yaml"), None)

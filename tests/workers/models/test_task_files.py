"""Task files and data in an object store: equal to the tasks on disk, and downloaded once per version."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from tests.conftest import write_choices
from tests.s3_server import S3, failing
from workers.cache import CACHE_VARIABLE
from workers.errors import InvalidTask
from workers.evaluation.lm_eval_tasks import content_hash, yaml_content
from workers.evaluation.tasks import build_task, check_task
from workers.file_access import FileAccess
from workers.models.remote import local_file
from workers.object_store import ObjectStore
from workers.types import TaskSpec


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def url(s3: S3) -> str:
    """URL of a folder with data, named sums.jsonl."""
    url = f"{s3.bucket()}/data"
    write_sums(url, 9)
    s3.requests.clear()
    return url


def write_sums(url: str, size: int) -> None:
    lines = [json.dumps({"prompt": f"{i}+1=", "answer": str(i + 1)}) for i in range(size)]
    ObjectStore(url).write("sums.jsonl", "\n".join(lines).encode())


def inline(url: str, **changes: object) -> TaskSpec:
    return replace(TaskSpec({"file": f"{url}/sums.jsonl"}, "exact_match"), **changes)  # type: ignore[arg-type]


def test_data_are_downloaded_once(url: str, s3: S3) -> None:
    """Threads and processes of a machine download data once, whichever of them needs the data first."""
    with ThreadPoolExecutor(6) as pool:
        infos = list(pool.map(check_task, [inline(url)] * 6))
    assert {info.num_samples for info in infos} == {9}
    assert s3.num("GET") == 1
    built = build_task(inline(url, content=content_hash(f"{url}/sums.jsonl")))
    assert built.subtasks[0].task.doc_to_text(built.subtasks[0].task.eval_docs[3]) == "3+1="
    assert s3.num("GET") == 1


def test_changed_data_are_found_and_told(url: str) -> None:
    before = content_hash(f"{url}/sums.jsonl")
    write_sums(url, 5)
    assert check_task(inline(url)).num_samples == 5
    with pytest.raises(InvalidTask, match=rf"^{url}/sums\.jsonl: has changed since the study was planned"):
        check_task(inline(url, content=before))


def test_data_outlive_the_store(url: str, s3: S3) -> None:
    """What was downloaded is used while the store does not answer; other data are reported with the store's answer."""
    assert check_task(inline(url)).num_samples == 9
    with failing(s3, lambda *_: (403, "AccessDenied")):
        assert check_task(inline(url)).num_samples == 9
        with pytest.raises(InvalidTask, match=rf"^{url}/other\.jsonl: cannot be read: .*cannot look up it"):
            local_file(f"{url}/other.jsonl")


def test_an_interrupted_download_is_begun_again(url: str, s3: S3, empty_cache: Path) -> None:
    with (
        failing(s3, lambda method, _: (403, "AccessDenied") if method == "GET" else None),
        pytest.raises(InvalidTask, match="cannot read it"),
    ):
        check_task(inline(url))
    assert [path for path in empty_cache.rglob("*.jsonl*") if path.is_file() and path.suffix != ".lock"] == []
    assert check_task(inline(url)).num_samples == 9


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("{url}/none.jsonl", "{url}/none.jsonl: does not exist"),
        ("{url}/none.yaml", "{url}/none.yaml: does not exist"),
        ("https://host/x.jsonl", "'https://host/x.jsonl': is no URL of an object store; expected s3://BUCKET/FOLDER"),
        ("s3://key:secret@bucket/x.jsonl", "s3://***@bucket: credentials do not belong in a URL"),
        ("{url}/../x.jsonl", "{url}/../x.jsonl: has an empty part, or a part that is . or .."),
    ],
)
def test_what_is_no_file_is_told(url: str, name: str, message: str) -> None:
    with pytest.raises(InvalidTask) as raised:
        local_file(name.format(url=url))
    assert str(raised.value).startswith(message.format(url=url))


@pytest.fixture
def task(s3: S3, tmp_path: Path) -> str:
    """URL of an lm-eval task that includes another file of its folder; that file names the data beside it."""
    directory, url = tmp_path / "task", f"{s3.bucket()}/tasks/choices"
    directory.mkdir()
    file = write_choices(directory)
    file.rename(directory / "_common.yaml")
    (directory / "choices.yaml").write_text("include: _common.yaml\ntask: choices\n")
    content = (directory / "_common.yaml").read_text().replace(f"{directory}/", "")
    (directory / "_common.yaml").write_text(content)
    for each in directory.iterdir():
        ObjectStore(url).upload(each, each.name)
    return f"{url}/choices.yaml"


def test_a_task_file_comes_with_its_folder(task: str, tmp_path: Path) -> None:
    """Includes and data beside a task file are found as on disk."""
    spec = TaskSpec(task, "acc", permutation_seed=5, content=content_hash(task))
    local = TaskSpec(str(tmp_path / "task" / "choices.yaml"), "acc", permutation_seed=5)
    assert check_task(spec) == check_task(local)
    limited = replace(spec, access=FileAccess((), urls=(task.rpartition("/")[0],)))
    assert check_task(limited) == check_task(local)
    outside = replace(spec, access=FileAccess((str(tmp_path),), urls=("s3://other/folder",)))
    with pytest.raises(InvalidTask, match=r"is not below a URL that studies may read \(s3://other/folder\)"):
        check_task(outside)


def test_changed_files_of_a_folder_are_found(task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The content of a task is equal on all machines, and changes with the data that its folder has in the store."""
    spec = TaskSpec(task, "acc", content=yaml_content(task, None))
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "another" / "cache"))
    assert check_task(spec).num_samples == 12
    url = task.rpartition("/")[0]
    assert check_task(replace(spec, access=FileAccess((), urls=(url,)))).num_samples == 12
    changed = (tmp_path / "task" / "test.jsonl").read_text().replace('"gold": 1', '"gold": 2')
    ObjectStore(url).write("test.jsonl", changed.encode())
    with pytest.raises(InvalidTask, match=rf"^{task}: this file or one of the files that it reads has changed"):
        check_task(spec)


@pytest.mark.parametrize("access", [None, FileAccess(("/",), urls=("s3://",))])
def test_functions_of_a_remote_task_are_not_run(task: str, tmp_path: Path, access: FileAccess | None) -> None:
    objects = ObjectStore(task.rpartition("/")[0])
    ran = tmp_path / "ran"
    objects.write("code.py", f"open({str(ran)!r}, 'w')\n\ndef f(doc): return 'x'\n".encode())
    objects.write("choices.yaml", b"include: _common.yaml\ntask: choices\ndoc_to_text: !function code.f\n")
    if access is not None:
        access = replace(access, urls=(task.rpartition("/")[0],))
    with pytest.raises(InvalidTask, match=r"name Python functions \(!function\)"):
        check_task(TaskSpec(task, "acc", access=access))
    assert not ran.exists()


def test_a_folder_has_a_limit(task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.models.remote.task_files.MAX_FOLDER_BYTES", 1000)
    with pytest.raises(InvalidTask, match=r"has 0\.0 MiB, and all files beside a task file are downloaded with it"):
        local_file(task)


def test_versions_that_are_not_used_are_deleted(url: str, task: str) -> None:
    """A version that is asked for stays, however old; others are deleted when data are downloaded."""

    def age(path: Path) -> None:
        os.utime(path.parent, (0, 0))

    used, unused = local_file(task), local_file(f"{url}/sums.jsonl")
    age(used)
    age(unused)
    write_sums(url, 5)
    assert local_file(task) == used
    new = local_file(f"{url}/sums.jsonl")
    assert new.parent.parent == unused.parent.parent
    assert new.is_file()
    assert used.is_file()
    assert not unused.parent.exists()
    age(used)
    assert local_file(f"{url}/sums.jsonl") == new
    assert used.is_file(), "nothing was downloaded"

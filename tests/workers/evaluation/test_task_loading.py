"""What lm-eval may read while it builds a task: nothing outside the directories that a study may read."""

from __future__ import annotations

import shutil
import socket
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.conftest import write_choices
from workers.errors import InvalidTask
from workers.evaluation.tasks import build_task, check_task
from workers.file_access import FileAccess
from workers.types import TaskSpec

SECRET = '{"question": "SECRET", "options": ["a", "b"], "gold": 0}\n'


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """The directory that may be read. Beside it there is one that may not, `outside`."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret.jsonl").write_text(SECRET)
    (tmp_path / "place").mkdir()
    return tmp_path / "place"


def check(file: Path, *, trusted: bool = False) -> None:
    roots = (str(file.parent),)
    check_task(TaskSpec(str(file), "acc", access=FileAccess((), roots) if trusted else FileAccess(roots)))


def test_a_task_whose_files_may_be_read_is_built(place: Path) -> None:
    check(write_choices(place))


@pytest.mark.parametrize(
    "pattern", ["{outside}/secret.jsonl", "../outside/secret.jsonl", "../outside/*", "link.jsonl", "li*"]
)
def test_data_outside_is_refused(place: Path, pattern: str) -> None:
    (place / "link.jsonl").symlink_to(place.parent / "outside" / "secret.jsonl")
    data = {"data_files": {"test": pattern.format(outside=place.parent / "outside")}}
    file = write_choices(place, dataset_kwargs=data, fewshot_split="test")
    with pytest.raises(InvalidTask, match=r"is not below a directory that studies may read .* --allow-dir"):
        check(file)
    check_task(TaskSpec(str(file), "acc"))  # a user's own command reads what the user may


@pytest.mark.parametrize(
    "kwargs", [{"data_dir": "../outside"}, {"data_files": "test.jsonl", "cache_dir": "../outside"}]
)
def test_directories_outside_are_refused(place: Path, kwargs: dict[str, str]) -> None:
    with pytest.raises(InvalidTask, match="outside: is not below a directory that studies may read"):
        check(write_choices(place, dataset_kwargs=kwargs))


@pytest.mark.parametrize("address", ["file:///etc/hostname", "zip://a.jsonl::/etc/a.zip"])
def test_addresses_of_local_files_are_refused(place: Path, address: str) -> None:
    with pytest.raises(InvalidTask, match="give a path, or an https or hf address"):
        check(write_choices(place, dataset_kwargs={"data_files": address}))


def test_a_directory_of_data_outside_is_refused(place: Path) -> None:
    with pytest.raises(InvalidTask, match="is not below a directory that studies may read"):
        check(write_choices(place, dataset_path=str(place.parent / "outside"), dataset_kwargs={}))


def test_included_files_outside_are_refused(place: Path) -> None:
    outside = write_choices(place.parent / "outside")
    (place / "mine.yaml").write_text(f"include: {outside}\ntask: mine\n")
    with pytest.raises(InvalidTask, match=r"mine\.yaml: .*outside: is not below a directory that studies may read"):
        check(place / "mine.yaml")


def test_members_of_groups_are_checked_too(place: Path) -> None:
    write_choices(place, name="first", dataset_kwargs={"data_files": {"test": "../outside/secret.jsonl"}})
    (place / "both.yaml").write_text("group: both\ntask: [first]\n")
    with pytest.raises(InvalidTask, match="is not below a directory that studies may read"):
        check(place / "both.yaml")


def test_functions_are_run_only_from_trusted_directories(place: Path) -> None:
    mark = place / "ran"
    (place / "code.py").write_text(f"open({str(mark)!r}, 'w').close()\n\ndef text(doc):\n    return doc['question']\n")
    file = write_choices(place)
    file.write_text(file.read_text().replace("'{{question}}'", "!function code.text"))
    assert "!function" in file.read_text()
    with pytest.raises(InvalidTask, match=r"run only from directories .* trusts with --trust-dir \(none so far\)"):
        check(file)
    assert not mark.exists()
    check(file, trusted=True)
    assert mark.exists()


def test_templates_run_no_code(place: Path) -> None:
    template = "{{ cycler.__init__.__globals__.os.getcwd() }}"
    with pytest.raises(InvalidTask, match="SecurityError"):
        build_task(TaskSpec(str(write_choices(place, doc_to_text=template)), "acc"))


@pytest.mark.parametrize("kwargs", [None, {}, {"data_files": None}])
def test_a_file_format_without_files_is_refused_by_name(
    place: Path, kwargs: dict[str, None] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def search(*_: object, **__: object) -> None:
        raise AssertionError("the disk was searched")

    monkeypatch.setattr("datasets.load.get_data_patterns", search)
    with pytest.raises(InvalidTask, match=r"dataset_path: json is a file format, and no files are given: .*data_files"):
        check_task(TaskSpec(str(write_choices(place, dataset_kwargs=kwargs)), "acc"))


def test_an_unreachable_hub_is_not_waited_for(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        endpoint = f"http://127.0.0.1:{probe.getsockname()[1]}"  # nobody listens once it is closed
    for name in ("huggingface_hub.constants.ENDPOINT", "datasets.config.HF_ENDPOINT"):
        monkeypatch.setattr(name, endpoint)
    template = f"{endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", False)
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    with pytest.raises(InvalidTask, match=r"its data cannot be fetched \(ConnectionError: .*inline JSONL task"):
        check_task(TaskSpec(str(write_choices(place, dataset_path="owner/none", dataset_kwargs=None)), "acc"))
    assert sum(pauses) < 1.0


def test_rebuilt_task_is_checked_again(place: Path) -> None:
    """A study's task is checked again whenever it is built again.

    As a replica does, long after the study was accepted.
    """
    link = place / "sums.jsonl"
    link.write_text('{"prompt": "1+1=", "answer": "2"}\n')
    inline = TaskSpec({"file": str(link)}, "exact_match", access=FileAccess((str(place),)))
    choices = TaskSpec(str(write_choices(place)), "acc", access=inline.access)
    assert [len(build_task(spec).order) for spec in (inline, choices)] == [1, 12]
    for file in (link, place / "test.jsonl"):
        moved = place.parent / "outside" / file.name
        shutil.move(file, moved)
        file.symlink_to(moved)
    for spec in (inline, choices):
        with pytest.raises(InvalidTask, match=r"is not below a directory that studies may read"):
            build_task(spec)
        assert spec.digest == replace(spec, access=None).digest, "it is the same task"

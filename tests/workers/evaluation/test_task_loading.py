"""The files that lm-eval may read while it builds a task: only those in directories that the study may read."""

from __future__ import annotations

import json
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import write_choices
from workers.errors import InvalidTask
from workers.evaluation.tasks import build_task, check_task
from workers.file_access import FileAccess
from workers.types import TaskSpec

SECRET = '{"question": "SECRET", "options": ["a", "b"], "gold": 0}\n'


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """The directory that may be read. Beside it is the directory `outside`, which may not be read."""
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


@pytest.mark.parametrize("address", ["file:///etc/hostname", "zip://a.jsonl::/etc/a.zip", "file::/etc/hostname"])
def test_addresses_of_local_files_are_refused(place: Path, address: str) -> None:
    with pytest.raises(InvalidTask, match=r"is not accepted.*; give a path, .* or an hf address"):
        check(write_choices(place, dataset_kwargs={"data_files": address}))


def test_a_path_that_fsspec_reads_in_another_way_is_refused(place: Path) -> None:
    """What fsspec takes for a path outside is refused, although it looks like a path inside."""
    with pytest.raises(InvalidTask, match=r"outside/secret\.jsonl: is not below a directory that studies may read"):
        check(write_choices(place, dataset_kwargs={"data_files": f"file:{place.parent}/outside/secret.jsonl"}))


@pytest.fixture
def internal() -> Iterator[tuple[str, list[str]]]:
    """URL of a service on this machine that no task may reach, and the paths requested from it."""
    asked: list[str] = []

    class Service(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            self.send_header("Content-Length", str(len(SECRET)))
            self.end_headers()
            self.wfile.write(SECRET.encode() if self.command == "GET" else b"")

        def do_HEAD(self) -> None:
            self.do_GET()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Service) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", asked
        server.shutdown()


URL = "{internal}/a.jsonl"


@pytest.mark.parametrize(
    "kwargs",
    [
        {"data_files": URL},
        {"data_files": [URL]},
        {"data_files": {"test": URL}},
        {"data_files": {"test": ["test.jsonl", URL]}},
        {"data_files": [{"split": "test", "path": ["test.jsonl", URL]}]},
        {"data_files": {"test": "a.jsonl"}, "data_dir": "{internal}"},
        {"data_dir": "{internal}"},
        {"data_files": "simplecache::" + URL},
        {"data_files": "hf://datasets/owner/name/a.jsonl::" + URL},
        {"data_files": "hf://datasets/owner/name/a.jsonl", "storage_options": {"hf": {"endpoint": "{internal}"}}},
    ],
    ids=json.dumps,
)
def test_no_task_reaches_internal_services(place: Path, internal: tuple[str, list[str]], kwargs: object) -> None:
    """Addresses are refused before anything is sent, so that no answer can redirect to another one."""
    url, asked = internal
    changed = json.loads(json.dumps(kwargs).replace("{internal}", url))
    with pytest.raises(InvalidTask, match="is not accepted"):
        check(write_choices(place, dataset_kwargs=changed, fewshot_split="test"))
    assert asked == []


@pytest.mark.parametrize("file", ["{internal}/a.jsonl", "{outside}/secret.jsonl", "../outside/*.jsonl"])
def test_files_that_a_data_set_names_are_checked(place: Path, internal: tuple[str, list[str]], file: str) -> None:
    """The README.md of a data set names data files as `dataset_kwargs` does."""
    (place / "data").mkdir()
    (place / "data" / "test.jsonl").write_text(SECRET)
    file = file.format(internal=internal[0], outside=place.parent / "outside").replace("../", "../../")
    configs = [{"config_name": "default", "data_files": [{"split": "test", "path": file}]}]
    (place / "data" / "README.md").write_text(f"---\n{json.dumps({'configs': configs})}\n---\n")
    task = write_choices(place, dataset_path=str(place / "data"), dataset_kwargs={}, fewshot_split="test")
    with pytest.raises(InvalidTask, match=r"is not accepted|is not below a directory that studies may read"):
        check(task)
    assert internal[1] == []
    (place / "data" / "README.md").unlink()
    check(task)


def test_data_that_name_further_files_are_refused(place: Path, internal: tuple[str, list[str]]) -> None:
    """Columns of images are addresses that are opened when a sample is read."""
    (place / "data").mkdir()
    (place / "data" / "test.jsonl").write_text(json.dumps({"question": {"path": f"{internal[0]}/a.png"}}) + "\n")
    facts = {"features": [{"name": "question", "dtype": "image"}], "splits": [{"name": "test", "num_examples": 1}]}
    (place / "data" / "README.md").write_text(f"---\n{json.dumps({'dataset_info': facts})}\n---\n")
    with pytest.raises(InvalidTask, match="its data have columns of type Image; expected text and numbers"):
        check(write_choices(place, dataset_path=str(place / "data"), dataset_kwargs={}, fewshot_split="test"))
    kwargs = {"data_files": "test.jsonl"}
    with pytest.raises(InvalidTask, match="has data of the format webdataset; expected arrow, cache, csv, json"):
        check(write_choices(place, dataset_path="webdataset", dataset_kwargs=kwargs))
    assert internal[1] == []


def test_a_metric_runs_no_code(place: Path) -> None:
    """A metric that lm-eval does not have would be a Python file, which only a user's own command may run."""
    ran = place / "ran"
    (place / "metric.py").write_text(f"open({str(ran)!r}, 'w').close()\n")
    for name in (str(place / "metric.py"), "metric.py"):
        metrics = [{"metric": name, "aggregation": "mean", "higher_is_better": True}]
        with pytest.raises(InvalidTask, match=r"unknown metric .*; only metrics of lm-eval itself are accepted"):
            check(write_choices(place, metric_list=metrics))
    assert not ran.exists()


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
    (place / "code.py").write_text("def text(doc):\n    return doc['question']\n")
    file = write_choices(place)
    file.write_text(file.read_text().replace("'{{question}}'", "!function code.text"))
    assert "!function" in file.read_text()
    with pytest.raises(InvalidTask, match=r"run only from directories .* trusts with --trust-dir \(none so far\)"):
        check(file)
    check(file, trusted=True)


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


def test_a_template_is_compiled_once(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jinja compiles a task's template for the first document only; lm-eval asks for it with every document."""
    from lm_eval import utils

    check(write_choices(place))
    compiled, compile_template = [], utils.env.compile

    def counted(source: str, *arguments: Any, **options: Any) -> Any:
        compiled.append(source)
        return compile_template(source, *arguments, **options)

    monkeypatch.setattr(utils.env, "compile", counted)
    template = "{{question}} Answer by {{ options | join(' or ') }}."
    documents = [{"question": f"Is {i} even?", "options": ["yes", "no"]} for i in range(3)]
    found = [utils.apply_template(template, document) for document in documents]
    assert found == [f"Is {i} even? Answer by yes or no." for i in range(3)]
    assert compiled == [template]

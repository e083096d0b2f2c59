"""The index of named tasks: built once for each version of lm-eval, by one process at a time."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from lm_eval.tasks._index import TaskIndex

from tests.conftest import write_choices
from workers.cache import CACHE_VARIABLE
from workers.errors import InvalidTask
from workers.evaluation import task_index as module
from workers.evaluation.tasks import build_task, check_task
from workers.file_access import FileAccess
from workers.types import TaskSpec


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory instead of lm-eval's tasks, with a task, a group and a tag; and an empty cache."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    directory = tmp_path / "shipped"
    (directory / "below").mkdir(parents=True)
    (directory / "one.yaml").write_text("task: one\ntag: [few]\ndataset_path: json\n")
    (directory / "below" / "all.yaml").write_text("group: all\ntask: [one]\n")
    return directory


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Times at which lm-eval's index was built; a build takes a while here."""
    times: list[float] = []
    build = TaskIndex.build

    def slow(*args: object, **options: object) -> object:
        times.append(time.monotonic())
        time.sleep(0.2)
        return build(*args, **options)

    monkeypatch.setattr(TaskIndex, "build", staticmethod(slow))
    return times


def test_index_is_built_once_and_read_back(shipped: Path, builds: list[float]) -> None:
    """What the cache gives is what lm-eval's own index has."""
    built, read = (module._lm_eval_index(shipped) for _ in range(2))
    assert len(builds) == 1
    assert built.keys() == read.keys() == {"one", "all", "few"}
    for name, entry in built.items():
        found = read[name]
        assert (found.name, found.kind, found.yaml_path, found.tags) == (
            entry.name,
            entry.kind,
            entry.yaml_path,
            entry.tags,
        )


def test_several_at_once_build_one_index(shipped: Path, builds: list[float]) -> None:
    """Who comes while the index is built waits for it."""
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(module._lm_eval_index, [shipped] * 4))
    assert len(builds) == 1
    assert all(index.keys() == found[0].keys() for index in found)


def test_another_content_of_lm_eval_is_indexed_anew(
    shipped: Path, builds: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    module._lm_eval_index(shipped)
    monkeypatch.setattr(module, "_content", lambda: "another version")
    (shipped / "two.yaml").write_text("task: two\n")
    assert "two" in module._lm_eval_index(shipped)
    assert len(builds) == 2


def test_an_installation_without_a_record_is_not_kept(
    shipped: Path, builds: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An editable installation may change at any time."""
    monkeypatch.setattr(module, "_content", lambda: None)
    for _ in range(2):
        module._lm_eval_index(shipped)
    assert len(builds) == 2


@pytest.mark.parametrize("cut", [0, 40, -1])
def test_damaged_index_is_built_again(shipped: Path, builds: list[float], tmp_path: Path, cut: int) -> None:
    module._lm_eval_index(shipped)
    (record,) = (tmp_path / "cache" / "records").iterdir()
    record.write_bytes(record.read_bytes()[:cut])
    assert module._lm_eval_index(shipped).keys() == {"one", "all", "few"}
    assert len(builds) == 2


def test_a_killed_builder_holds_nobody_up(shipped: Path, builds: list[float]) -> None:
    """The next process builds the index as soon as the one that builds it is killed."""
    ready = multiprocessing.get_context("fork").Event()

    def hold() -> None:
        with module._turn():
            ready.set()
            time.sleep(60)

    builder = multiprocessing.get_context("fork").Process(target=hold)
    builder.start()
    assert ready.wait(20)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(module._lm_eval_index, shipped)
        time.sleep(0.3)
        assert not waiting.done()
        assert builder.pid is not None
        os.kill(builder.pid, signal.SIGKILL)
        assert waiting.result(20).keys() == {"one", "all", "few"}
    builder.join()
    assert len(builds) == 1


def test_a_cache_that_cannot_be_written_is_done_without(
    shipped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "file"))
    assert module._lm_eval_index(shipped).keys() == {"one", "all", "few"}


@pytest.fixture
def named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A shipped task named `shipped_choices`, in a directory of its own."""
    directory = tmp_path / "own"
    directory.mkdir()
    file = write_choices(directory, name="shipped_choices")
    index = TaskIndex.build([directory])
    monkeypatch.setattr(module, "_given", index)
    monkeypatch.setattr(module, "shipped_dirs", lambda: (directory.resolve(),))
    return file


def test_include_by_name(named: Path, tmp_path: Path) -> None:
    """`include` may be the name of a task, whose file is read; a file of that name comes first."""
    mine = tmp_path / "mine"
    mine.mkdir()
    for data in named.parent.glob("*.jsonl"):
        (mine / data.name).write_bytes(data.read_bytes())
    (mine / "a.yaml").write_text("include: shipped_choices\ntask: mine\ndoc_to_text: 'Q: {{question}}'\n")
    access = FileAccess((str(mine),))
    task = build_task(TaskSpec(str(mine / "a.yaml"), "acc", access=access))
    assert task.subtasks[0].name == "mine"
    assert task.subtasks[0].task.doc_to_text(task.subtasks[0].task.eval_docs[0]).startswith("Q: ")
    (mine / "shipped_choices").write_text("task: other\n")
    with pytest.raises(InvalidTask, match="cannot be built"):
        check_task(TaskSpec(str(mine / "a.yaml"), "acc"))


def test_include_of_an_unknown_name_is_named(named: Path, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("include: shipped_choice\ntask: mine\n")
    with pytest.raises(InvalidTask, match=r"a\.yaml: not an lm-eval task: .*shipped_choice"):
        check_task(TaskSpec(str(tmp_path / "a.yaml"), "acc"))


def test_index_is_loaded_outside_of_the_guards(named: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that names a task first loads the index, where lm-eval reads as it always does."""
    given, loads = dict(module._given), []
    monkeypatch.setattr(module, "_given", {})

    def load() -> dict[str, object]:
        from lm_eval.tasks import _yaml_loader

        loads.append(_yaml_loader.load_yaml.__name__)
        module._given.update(given)
        return given

    load.cache_info = lambda: type("Info", (), {"currsize": len(loads)})()  # type: ignore[attr-defined]
    monkeypatch.setattr(module, "_loaded_index", load)
    for data in named.parent.glob("*.jsonl"):
        (tmp_path / data.name).write_bytes(data.read_bytes())
    (tmp_path / "b.yaml").write_text("include: shipped_choices\ntask: mine\n")
    assert check_task(TaskSpec(str(tmp_path / "b.yaml"), "acc")).num_samples == 12
    assert loads == ["load_yaml"]

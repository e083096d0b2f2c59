"""Fixtures of all tests: one engine per model layout, one Ray, and the list of engine starts at the end.

Torch is imported in the fixtures that need it: every process that runs tests loads this file.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

# Before torch is imported: one thread for arithmetic, and no attempt to reach a hub.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("RAY_AUTH_MODE", "disabled")

import psutil
import pytest

from search_spaces.study.engine import EngineOptions
from tests import vllm_asker
from tests.postgresql import PostgreSQL, postgresql_server
from tests.s3_server import S3, serving_s3
from tests.tiers import LANES, MAX_ENGINE_STARTS, lane, misplaced, needs_ray_or_engine, starts_nothing
from workers.cache import CACHE_VARIABLE
from workers.engines.vllm import support
from workers.types import Family, TaskSpec

if TYPE_CHECKING:
    from workers.engines.vllm.engine import Engine
    from workers.serving.serve_scorer import ServeScorer

# A file system in memory, for the directories of tests where it has room: on a disk, tests spend a third of their time
# waiting until databases have written each transaction.
IN_MEMORY = Path("/dev/shm")
MIN_FREE_BYTES = 8 * 2**30
TEMPORARY = "PYTEST_DEBUG_TEMPROOT"  # of pytest


def _use_memory() -> None:
    has_room = IN_MEMORY.is_dir() and os.access(IN_MEMORY, os.W_OK) and psutil.disk_usage(str(IN_MEMORY)).free
    if has_room > MIN_FREE_BYTES and psutil.virtual_memory().available > 2 * MIN_FREE_BYTES:
        os.environ.setdefault(TEMPORARY, str(IN_MEMORY))


_use_memory()

ENGINE_STARTS: list[tuple[str, float]] = []  # of this process and, where pytest-xdist runs, of its workers
OUTPUT = "engine_starts"
LONGEST_ID = 80
HIDDEN = 128  # four heads of 32: vLLM's CPU attention has no kernel for smaller ones
WORKERS = Path(__file__).parents[1] / "workers"

# New objects before the garbage collector runs (default: 700), as in `mergesearch`. Imports and collection make
# millions of objects, none of which is garbage.
MANY_OBJECTS = 50_000
gc.set_threshold(MANY_OBJECTS)
# New modules after which the garbage collector is told to leave all present objects out.
MANY_MODULES = 100
OPTIONS = EngineOptions(max_model_len=256, threads=1)


def record_engine_start(label: str, seconds: float) -> None:
    """Record the start of an engine. Every test that starts one, in whatever process, calls this function."""
    ENGINE_STARTS.append((label, seconds))


def pytest_make_parametrize_id(val: object) -> str | None:
    """Replace long values of parameters by their length in the names of tests."""
    is_long = isinstance(val, str | bytes) and len(val) > LONGEST_ID
    return f"{len(val)} characters" if is_long else None  # type: ignore[arg-type]


@pytest.hookimpl(tryfirst=True)  # before `-m` selects by markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        fixtures = getattr(item, "fixturenames", ())
        if needs_ray_or_engine(item.path, fixtures):
            item.add_marker("heavy")
            if (name := lane(fixtures)) is not None:
                item.add_marker(pytest.mark.xdist_group(name))
    if files := misplaced([item.path for item in items if item.get_closest_marker("heavy")]):
        raise pytest.UsageError(f"{', '.join(map(str, files))}: add the directory to HEAVY in tests/tiers.py")
    items.sort(key=_rank)  # stable


def _rank(item: pytest.Item) -> int:
    """Sort key that puts the tests of a lane first, because they take longest."""
    marker = item.get_closest_marker("xdist_group")
    return LANES.index(marker.args[0]) if marker is not None else len(LANES)


def pytest_collection_finish() -> None:
    """Exclude the results of collection (modules and ten thousand tests) from garbage collection, to save time."""
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Exclude the objects of modules that earlier tests imported from garbage collection.

    Torch and transformers have millions of objects, over which `gc.collect` takes a second. Tests on a GPU measure what
    collections free there.
    """
    known = item.config.stash.get(_NUM_MODULES, 0)
    if len(sys.modules) > known + MANY_MODULES and item.get_closest_marker("gpu") is None:
        gc.collect(1)  # of the young generations: what is garbage now would stay
        gc.freeze()
        item.config.stash[_NUM_MODULES] = len(sys.modules)


_NUM_MODULES = pytest.StashKey[int]()
_ENDS = pytest.StashKey[dict[str, Callable[[], None]]]()  # by the name of a lane


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End what a lane's fixture has started after the lane's last test.

    Fixtures of a session end with the session. Until then an idle Ray Serve would take a tenth of a core.
    """
    name = lane(getattr(item, "fixturenames", ()))
    if name is not None and (nextitem is None or lane(getattr(nextitem, "fixturenames", ())) != name):
        end = item.config.stash.get(_ENDS, {}).pop(name, None)
        if end is not None:
            end()


@pytest.fixture(scope="session")
def at_end_of_lane(pytestconfig: pytest.Config) -> Callable[[str, Callable[[], None]], None]:
    """A function that takes the name of a lane and what is to be called after the last test of this lane."""
    return pytestconfig.stash.setdefault(_ENDS, {}).__setitem__


def pytest_unconfigure() -> None:
    """Include the collected objects in garbage collection again, so that libraries do not report them as leaks."""
    gc.unfreeze()


@pytest.fixture(scope="session", autouse=True)
def _cache_of_findings(pytestconfig: pytest.Config) -> Iterator[None]:
    """A cache of vLLM's answers and of checks of weights, which all tests share until the workers' code changes.

    vLLM is asked by one process for all tests.
    """
    code = hashlib.sha256(b"".join(file.read_bytes() for file in sorted(WORKERS.rglob("*.py"))))
    assert pytestconfig.cache is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE_VARIABLE, str(pytestconfig.cache.mkdir(f"findings-{code.hexdigest()[:16]}")))
        patch.setattr(support, "COMMAND", vllm_asker.command())
        yield


@pytest.fixture(scope="module")
def s3() -> Iterator[S3]:
    """An object store on this machine, which S3's clients use while the fixture is alive."""
    with serving_s3() as server:
        yield server


@pytest.fixture(autouse=True)
def _other_tests_start_nothing(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.node.get_closest_marker("heavy"):
        yield
    else:
        with starts_nothing():
            yield


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if ENGINE_STARTS:
        terminalreporter.section(f"engine starts: {len(ENGINE_STARTS)} (at most {MAX_ENGINE_STARTS})")
        for label, seconds in ENGINE_STARTS:
            terminalreporter.line(f"{seconds:7.1f} s  {label}")


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    ENGINE_STARTS.extend(getattr(node, "workeroutput", {}).get(OUTPUT, ()))  # a process that was ended has none


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if (output := getattr(session.config, "workeroutput", None)) is not None:
        output[OUTPUT] = ENGINE_STARTS
    elif len(ENGINE_STARTS) > MAX_ENGINE_STARTS and exitstatus == 0:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(scope="session")
def _postgresql() -> Iterator[PostgreSQL]:
    yield from postgresql_server()


@pytest.fixture
def postgresql(_postgresql: PostgreSQL) -> PostgreSQL:
    """A running PostgreSQL of this process's tests, which may stop and kill it."""
    if not _postgresql.is_running:
        _postgresql.start()
    return _postgresql


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """URL of a database with the newest tables; tests run once on each kind of database."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'mergesearch.db'}"
        return
    server: PostgreSQL = request.getfixturevalue("postgresql")
    url = server.migrated()
    yield url
    server.drop(url)


@pytest.fixture(scope="session")
def untied_family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    """A Llama in bfloat16 with its own output head, and a number of layers that no group size divides."""
    import torch

    from tests.builders import tiny_family

    directory = tmp_path_factory.mktemp("untied")
    return tiny_family(
        directory, experts=("math", "text"), tied=False, layers=5, hidden=HIDDEN, dtype=torch.bfloat16, noise=0.05
    )


@pytest.fixture(scope="session")
def grouped_family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    """A Llama with its own output head, grouped-query attention and biases everywhere."""
    from tests.builders import tiny_family

    settings: dict[str, Any] = {"num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True}
    directory = tmp_path_factory.mktemp("grouped")
    return tiny_family(directory, experts=("math", "text"), tied=False, layers=4, hidden=HIDDEN, noise=0.05, **settings)


@pytest.fixture(scope="session")
def tied_family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    """A Qwen2: tied head, grouped-query attention, biases on q, k and v, and a byte-level tokenizer without BOS."""
    from tests.builders import tiny_family, tiny_qwen2

    directory = tmp_path_factory.mktemp("tied")
    return tiny_family(directory, build=tiny_qwen2, experts=("math", "text"), hidden=HIDDEN, noise=0.05)


@pytest.fixture(scope="session")
def sums(tmp_path_factory: pytest.TempPathFactory) -> TaskSpec:
    """An inline task of 400 additions."""
    file = tmp_path_factory.mktemp("sums") / "sums.jsonl"
    lines = [json.dumps({"prompt": f"{i}+{i + 3}=", "answer": str(2 * i + 3)}) for i in range(400)]
    file.write_text("\n".join(lines) + "\n")
    return TaskSpec({"file": str(file), "max_tokens": 6}, "exact_match", permutation_seed=5)


@pytest.fixture(scope="session")
def choices(tmp_path_factory: pytest.TempPathFactory) -> TaskSpec:
    """An lm-eval YAML task: 12 questions with three options each, and examples for few-shot prompts."""
    directory = tmp_path_factory.mktemp("choices")
    return TaskSpec(str(write_choices(directory)), "acc", permutation_seed=5)


def write_choices(directory: Path, *, name: str = "choices", **settings: object) -> Path:
    """A multiple-choice lm-eval task over local files; `settings` are added to its YAML."""
    import yaml

    for split, size in (("test", 12), ("train", 6)):
        rows = [
            {"question": f"Is {i} + {size} even?", "options": ["yes", "no", "maybe"], "gold": i % 3}
            for i in range(size)
        ]
        (directory / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    config = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": "test.jsonl", "train": "train.jsonl"}},
        "test_split": "test",
        "fewshot_split": "train",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{options}}",
        "doc_to_target": "{{gold}}",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    file = directory / f"{name}.yaml"
    file.write_text(yaml.safe_dump(config | settings))
    return file


@pytest.fixture(scope="session")
def engine(untied_family: Family) -> Iterator[Engine]:
    """The only engine of this process that merges the base's layers (no other depths)."""
    from workers.engines.vllm.engine import Engine

    started = time.perf_counter()
    with Engine(untied_family, OPTIONS) as engine:
        record_engine_start("untied Llama, in the tests' process", time.perf_counter() - started)
        yield engine


@pytest.fixture(scope="session", params=["untied Llama", "tied Qwen2"])
def path_engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """An engine for merges of up to nine layers, with alignments: first one of Llama, then one of Qwen2."""
    from workers.engines.vllm.engine import Engine

    started = time.perf_counter()
    family = request.getfixturevalue("tied_family" if request.param == "tied Qwen2" else "grouped_family")
    family = replace(family, alignments_dir=str(tmp_path_factory.mktemp("alignments")))
    with Engine(family, OPTIONS.model_copy(update={"max_layers": 9})) as engine:
        record_engine_start(f"{request.param}, paths, in the tests' process", time.perf_counter() - started)
        yield engine


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """A local Ray that only this session uses."""
    import ray

    def start() -> None:
        ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")

    try:
        start()
    except Exception as error:  # Ray waits 30 s for its own node, no more
        if "timed out during startup" not in str(error):
            raise
        ray.shutdown()
        start()
    yield
    from ray import serve

    serve.shutdown()
    ray.shutdown()


@pytest.fixture(scope="session")
def scorer(
    ray_cluster: None, tied_family: Family, at_end_of_lane: Callable[[str, Callable[[], None]], None]
) -> ServeScorer:
    """One real replica on Ray Serve."""
    from ray import serve

    from workers.serving.deployment import deploy_scorer

    at_end_of_lane("scorer", serve.shutdown)
    started = time.perf_counter()
    scorer = deploy_scorer(tied_family, OPTIONS)
    record_engine_start("tied Qwen2, a replica on Ray Serve", time.perf_counter() - started)
    return scorer

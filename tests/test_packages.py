"""Rules for all modules: public names exist, light imports stay light, errors can be pickled, no machine is named."""

from __future__ import annotations

import importlib
import importlib.util
import pickle
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import search_spaces
import search_spaces.errors
import service
import service.errors
import workers
import workers.errors
from search_spaces.errors import InvalidStudy, Problem
from service.errors import InvalidQuery, RequestRefused
from workers.errors import InvalidModel
from workers.models.config import read_config
from workers.tiny_family import family_dir

ROOT = Path(__file__).parents[1]
HEAVY = ("torch", "ray", "vllm", "transformers", "lm_eval", "smac", "sklearn", "scipy", "sqlalchemy", "fastapi")


def modules_of(package: ModuleType) -> Iterator[str]:
    yield package.__name__
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        yield module.name


MODULES = [name for package in (search_spaces, workers, service) for name in modules_of(package)]
# Importing vLLM takes half a minute.
ONLY_IN_AN_ENGINE = {
    "workers.engines.vllm.worker_extension",
    "workers.engines.vllm.capabilities",
    "workers.engines.vllm.plugin",
    "workers.engines.vllm.canary",
    "workers.engines.vllm.paths.model",
}


@pytest.mark.parametrize("name", [name for name in MODULES if name not in ONLY_IN_AN_ENGINE])
def test_public_names_exist_and_are_given_once(name: str) -> None:
    module = importlib.import_module(name)
    names = getattr(module, "__all__", [])
    assert len(names) == len(set(names))
    assert [public for public in names if not hasattr(module, public)] == []


def test_every_module_with_code_says_what_is_public() -> None:
    silent = []
    for name in MODULES:
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.origin is not None
        source = Path(spec.origin).read_text()
        if re.search(r"^(def|class) [a-zA-Z]", source, re.MULTILINE) and "__all__" not in source:
            silent.append(name)
    assert silent == []


def loaded_by(*names: str) -> set[str]:
    """The heavy packages in memory after importing modules in a fresh interpreter."""
    program = f"import sys, {', '.join(names)}\nprint(*(n for n in {HEAVY!r} if n in sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True)
    return set(done.stdout.split())


def test_search_spaces_import_nothing_heavy() -> None:
    assert loaded_by(*modules_of(search_spaces)) == set()


def test_what_the_command_imports_first_is_light() -> None:
    light = (
        "service",
        "service.cli.main",
        "service.errors",
        "service.types",
        "workers",
        "workers.errors",
        "workers.types",
    )
    assert loaded_by(*light) == set()


def test_the_verbs_that_only_read_need_no_engine_and_no_ray() -> None:
    verbs = (
        "service.jobs.search.local_run",
        "service.results.load",
        "service.results.files",
        "service.cli.tables",
        "service.client",
        "service.cli.remote",
        "service.studies.export",
        "service.jobs.search.dry_run",
    )
    assert loaded_by(*verbs) & {"torch", "ray", "vllm", "transformers", "lm_eval", "smac"} == set()


MERGE = """
import sys
from service.cli.main import main

assert main(["merge", "docs/examples/mergekit.yml", "--out", sys.argv[1]]) == 0
print(*(name for name in sys.argv[2:] if name in sys.modules))
"""


@pytest.mark.slow
def test_small_merge_loads_torch_only(tmp_path: Path) -> None:
    """A merge of a small model loads torch and no other heavy package.

    Starting takes most of its time. What transformers knows of a model type is kept from an earlier merge.
    """
    read_config(family_dir() / "base")
    heavy = {*HEAVY, "numba", "pydantic", "rich", "tokenizers"} - {"torch"}
    command = [sys.executable, "-c", MERGE, str(tmp_path / "merged"), *sorted(heavy)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.splitlines()[-1] == ""


ERRORS = sorted(
    {
        error
        for module in (search_spaces.errors, workers.errors, service.errors)
        for error in vars(module).values()
        if isinstance(error, type) and issubclass(error, Exception)
    },
    key=lambda error: error.__name__,
)


def test_every_error_is_public() -> None:
    for module in (search_spaces.errors, workers.errors, service.errors):
        assert {error.__name__ for error in ERRORS if error.__module__ == module.__name__} <= set(module.__all__)


@pytest.mark.parametrize("error", ERRORS)
def test_errors_survive_pickling_with_their_message(error: type[Exception]) -> None:
    if error is InvalidStudy:
        raised: Exception = InvalidStudy((Problem("search.seed", "-1 is below 0"), Problem("", "no file")))
        told = "search.seed: -1 is below 0\nno file"
    elif error is InvalidModel:
        raised, told = InvalidModel(("a: is truncated", "b: is missing")), "a: is truncated\nb: is missing"
    elif error is RequestRefused:
        problems = [{"field": "name", "message": "3 is no text"}, {"field": "", "message": "no models"}]
        problem: Any = {"type": "about:blank", "title": "Invalid", "status": 422, "detail": "two", "problems": problems}
        raised, told = RequestRefused(problem, 2.0), "name: 3 is no text\nno models"
    elif error is InvalidQuery:
        raised, told = InvalidQuery("sort", "'speed' is no field"), "sort: 'speed' is no field"
    else:
        raised, told = error("what is wrong: 3; give 4"), "what is wrong: 3; give 4"
    again = pickle.loads(pickle.dumps(raised))
    assert type(again) is error
    assert str(again) == str(raised) == told
    assert getattr(again, "problems", None) == getattr(raised, "problems", None)


@pytest.mark.parametrize("error", ERRORS)
def test_errors_have_the_root_of_their_package(error: type[Exception]) -> None:
    roots = {
        "search_spaces.errors": search_spaces.errors.SearchSpaceError,
        "workers.errors": workers.errors.WorkerError,
        "service.errors": service.errors.ServiceError,
    }
    assert issubclass(error, roots[error.__module__])


FOLDERS = ("search_spaces", "workers", "service", "tests", "deploy", "docs", ".github")
TEXT = {".py", ".md", ".toml", ".txt", ".yaml", ".yml", ".j2", ".json", ".sh", ".cfg"}
# The image's user has the home directory /home/mergesearch, on every machine.
A_MACHINE = re.compile(r"(?<![\w.])/(?:home(?!/mergesearch\b)|root|Users|work)/")


def test_sources_name_no_path_of_a_machine() -> None:
    files = [
        file
        for folder in FOLDERS
        for file in (ROOT / folder).rglob("*")
        if file.suffix in TEXT and "node_modules" not in file.parts
    ]
    files += [ROOT / "Makefile", *ROOT.glob("*.toml"), *ROOT.glob("*.md")]
    assert len(files) > 100
    found = [
        f"{file.relative_to(ROOT)}:{number}: {line.strip()[:100]}"
        for file in files
        if file.name != Path(__file__).name and file.stat().st_size < 1_000_000
        for number, line in enumerate(file.read_text().splitlines(), start=1)
        if A_MACHINE.search(line)
    ]
    assert found == []

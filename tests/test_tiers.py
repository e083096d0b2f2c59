"""Test tiers: tests are marked by the fixtures and modules they use, and unmarked starts of Ray or vLLM are caught."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tests.tiers import (
    APART,
    COMMANDS,
    HEAVY,
    LANES,
    MAX_ENGINE_STARTS,
    STARTERS,
    heavy_arguments,
    lane,
    misplaced,
    needs_ray_or_engine,
    starts_nothing,
)

HERE = Path(__file__)


@pytest.mark.parametrize(("has_gpu", "expected"), [(True, "1"), (False, "2")])
def test_engines_run_one_at_a_time_on_a_gpu(monkeypatch: pytest.MonkeyPatch, has_gpu: bool, expected: str) -> None:
    """Two engines would each take most of the only GPU; the Makefile leaves the number to `heavy_arguments`."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    assert heavy_arguments() == ["--numprocesses", expected, *HEAVY]
    (line,) = (line for line in (HERE.parents[1] / "Makefile").read_text().splitlines() if "tests.tiers" in line)
    assert "--numprocesses" not in line


@pytest.mark.parametrize("fixture", ["engine", "scorer", "ray_cluster"])
def test_whatever_uses_an_engine_or_ray_is_heavy(fixture: str) -> None:
    assert needs_ray_or_engine(HERE, ["tmp_path", fixture])


def test_whatever_starts_commands_is_heavy() -> None:
    for directory in COMMANDS:
        assert directory.is_dir()
        assert needs_ray_or_engine(directory / "test_run.py", [])


def test_heavy_tests_that_would_not_be_collected_are_named() -> None:
    assert all((HERE.parents[1] / directory).is_dir() for directory in (*HEAVY, *APART))
    collected = [HERE.parents[1] / directory / "test_run.py" for directory in (*HEAVY, *APART)]
    assert misplaced([*collected, HERE]) == [HERE]


def test_all_else_is_not() -> None:
    assert not needs_ray_or_engine(HERE, ["tmp_path", "monkeypatch"])


def test_starters_are_fixtures_and_tests_are_marked_by_them(request: pytest.FixtureRequest) -> None:
    """A fixture that was renamed would no longer mark what uses it."""
    manager: Any = request.session._fixturemanager
    for name in STARTERS:
        assert manager.getfixturedefs(name, request.node), name
    assert request.node.get_closest_marker("heavy") is None
    for item in request.session.items:
        heavy = item.get_closest_marker("heavy") is not None
        assert heavy == needs_ray_or_engine(item.path, getattr(item, "fixturenames", ())), item.nodeid


def test_tests_of_one_run_or_engine_share_a_lane(request: pytest.FixtureRequest) -> None:
    assert lane(["ray_cluster", "scorer"]) == lane(["scorer"]) == "scorer"
    assert lane(["ray_cluster"]) is None
    for item in request.session.items:
        if item.get_closest_marker("heavy") is None:
            continue
        groups = [marker.args[0] for marker in item.iter_markers("xdist_group")]
        assert groups == [name for name in LANES if name in getattr(item, "fixturenames", ())][:1]


def test_another_test_that_imports_vllm_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    with pytest.raises(AssertionError, match="not marked heavy started vLLM; use a fixture"), starts_nothing():
        monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))


def test_another_test_that_starts_ray_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    ray: Any = SimpleNamespace(is_initialized=lambda: False)
    monkeypatch.setitem(sys.modules, "ray", ray)
    with pytest.raises(AssertionError, match="not marked heavy started Ray"), starts_nothing():
        ray.is_initialized = lambda: True


def test_earlier_starts_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Earlier starts do not count, and the import of Ray is allowed."""
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    with starts_nothing():
        monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: False))


def test_contributing_names_the_engine_limit() -> None:
    text = (HERE.parents[1] / "CONTRIBUTING.md").read_text()
    assert f"One session starts at most {MAX_ENGINE_STARTS} engines" in text

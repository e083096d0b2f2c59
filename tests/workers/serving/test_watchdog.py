"""Time limits of replicas that grow with the bytes of their models."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from search_spaces.recipe import Recipe
from workers.serving import watchdog
from workers.serving.fake import FakeScorer
from workers.serving.replica import ScoringReplica
from workers.serving.watchdog import TimeLimits, weight_bytes
from workers.types import CanaryReport, Family, ModelSource, Span, TaskSpec, VerificationReport

GB = 10**9


def test_small_models_have_the_defaults() -> None:
    assert TimeLimits.of_bytes(0) == TimeLimits()
    small = TimeLimits.of_bytes(6 * GB)
    assert replace(small, verified_sample_s=0.0) == TimeLimits()
    assert small.verification_s(48) == TimeLimits().other_s


def test_working_replicas_of_70b_are_not_killed() -> None:
    """Four models of 70B have hours: docs/how-to/plan.md plans up to 19,917 s for the 16 samples of a verification."""
    limits = TimeLimits.of_bytes(564 * GB)
    download_s, read_s = 564 * 10, 564 * 3 * 2  # at 100 MB/s; hashed, searched and copied at 0.5 GB/s
    assert limits.start_s > download_s + read_s + 1800 + 478
    assert limits.verification_s(16) > 2 * 19_917
    assert limits.verification_s(48) > 2 * 3 * 19_917
    assert (limits.first_chunk_s, limits.chunk_s) == (16_920, 5_640)


def test_bytes_are_those_of_all_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files here count with their sizes, files to be downloaded with the stated ones, unknown models not at all."""
    for name, size in (("base", 3), ("math", 5), ("whole", 7)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(bytes(size))
    base, unknown = (ModelSource(name, str(tmp_path / name), "0") for name in ("base", "unknown"))
    expert = ModelSource("math", str(tmp_path / "math"), "0", adapts=str(tmp_path / "whole"))
    assert weight_bytes(Family(base, (expert, replace(base, alias="again")))) == 15
    assert weight_bytes(Family(unknown, ())) == 0
    monkeypatch.setattr(watchdog, "absent_bytes", lambda directories: 564 * GB)
    assert TimeLimits.of_family(Family(base, ())).start_s == pytest.approx(16_920)


class SlowVerifier(FakeScorer):
    """A fake scorer that takes 0.3 s for a verification or a check, and notes in `skips_canaries` that it has begun."""

    def verify(self, recipe: Recipe, *_: Any) -> VerificationReport:
        self._begin()
        return VerificationReport(recipe.digest, 0, 0, 0.0, 1e-3, (), 0)

    def check(self) -> tuple[CanaryReport, ...]:
        self._begin()
        return super().check()

    def _begin(self) -> None:
        self.skips_canaries = "it verifies"
        time.sleep(0.3)


def problem_meanwhile(limits: TimeLimits, work: Callable[[ScoringReplica], Coroutine[Any, Any, Any]]) -> str:
    """The reason for which a replica counts as hung 0.1 s after it has begun to work; "" if it does not."""
    worker = SlowVerifier()
    replica = ScoringReplica(lambda: worker, limits)

    async def run() -> str:
        working = asyncio.ensure_future(work(replica))
        while not worker.skips_canaries:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        try:
            await replica.check_health()
        except RuntimeError as error:
            return str(error)
        finally:
            await working
        return ""

    return asyncio.run(run())


@pytest.mark.parametrize(("sample_s", "expected"), [(5.0, ""), (0.0, "counts as hung: it has worked on verification")])
def test_verification_has_time_for_each_sample(sample_s: float, expected: str) -> None:
    recipe = Recipe.of_model("base", models={"base": "0" * 64}, base="base", num_layers=1)
    spans = (Span("x", TaskSpec("any", "exact_match"), 0, 16),)
    limits = TimeLimits(other_s=0.05, verified_sample_s=sample_s)
    found = problem_meanwhile(limits, lambda replica: replica.verify(recipe, (), spans))
    assert expected in found
    assert bool(found) == bool(expected)


def test_check_of_an_engine_has_the_limit_of_other_work() -> None:
    found = problem_meanwhile(TimeLimits(other_s=0.05), ScoringReplica.check)
    assert "counts as hung: it has worked on checking the engine" in found
    assert problem_meanwhile(TimeLimits(other_s=60.0), ScoringReplica.check) == ""

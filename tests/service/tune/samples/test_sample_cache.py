"""The samples still to be scored: those without values, in chunks within the plan's limit."""

from __future__ import annotations

from pathlib import Path

from search_spaces.recipe import Recipe
from service.tune.samples.sample_cache import SampleCache
from tests.service.tune.harness import make_plan, new_study
from workers.types import SampleResult, Span, Split


def book(directory: Path, *, chunk_samples: int = 30) -> tuple[SampleCache, Recipe]:
    store, study = new_study(directory)
    plan = make_plan(study, chunk_samples=chunk_samples)
    return SampleCache(plan, store), plan.baselines[0][2]


def results(objective: str, *positions: int) -> list[SampleResult]:
    return [SampleResult(objective, position, f"d{position}", 0.5, "", False) for position in positions]


def bounds(spans: list[Span] | tuple[Span, ...]) -> list[tuple[str, int, int]]:
    return [(span.objective, span.start, span.stop) for span in spans]


def test_missing_samples_include_holes(tmp_path: Path) -> None:
    """The missing samples are those without a score, holes included."""
    samples, recipe = book(tmp_path)
    assert bounds(samples.missing(recipe.digest, 0, Split.SEARCH)) == [("math", 0, 4), ("text", 0, 4)]
    samples.add(recipe.digest, Split.SEARCH, [*results("math", 0, 1, 2, 3, 4), *results("text", 1, 3)])
    assert samples.num_scored == 7
    assert bounds(samples.missing(recipe.digest, 0, Split.SEARCH)) == [("text", 0, 1), ("text", 2, 3)]
    assert bounds(samples.missing(recipe.digest, 1, Split.SEARCH))[0] == ("math", 5, 12)
    assert bounds(samples.missing(recipe.digest, 0, Split.HOLDOUT)) == [("math", 0, 50), ("text", 0, 50)]
    assert len(samples.missing("another", 0, Split.SEARCH)) == 2


def test_chunks_hold_missing_samples_once(tmp_path: Path) -> None:
    """Chunks hold every missing sample once and cut long spans."""
    samples, recipe = book(tmp_path, chunk_samples=30)
    chunks = samples.missing_chunks(recipe.digest, 2, Split.SEARCH)
    assert [bounds(chunk) for chunk in chunks] == [
        [("math", 0, 30)],
        [("math", 30, 36), ("text", 0, 24)],
        [("text", 24, 36)],
    ]
    missing = samples.missing(recipe.digest, 0, Split.SEARCH)
    assert samples.missing_chunks(recipe.digest, 0, Split.SEARCH) == (tuple(missing),)


def test_a_chunk_has_one_span_of_an_objective(tmp_path: Path) -> None:
    samples, _ = book(tmp_path, chunk_samples=30)
    positions = {"math": [0, 1, 2, 20, 21], "text": [5, *range(8, 36)]}
    assert [bounds(chunk) for chunk in samples.chunks(positions, Split.SEARCH)] == [
        [("math", 0, 3)],
        [("math", 20, 22), ("text", 5, 6)],
        [("text", 8, 36)],
    ]


def test_finished_rung_has_mean_and_error(tmp_path: Path) -> None:
    """A finished rung has the mean of its samples and its standard error."""
    samples, recipe = book(tmp_path)
    scored = [SampleResult("math", i, f"d{i}", float(i % 2), "", False) for i in range(12)]
    samples.add(recipe.digest, Split.SEARCH, [*scored, *results("text", *range(12))])
    rung = samples.rung_record(recipe, 0)
    assert rung.num_samples == {"math": 4, "text": 4}
    assert rung.values == {"math": 0.5, "text": 0.5}
    error = rung.standard_errors["math"]
    assert error is not None
    assert error > 0.1

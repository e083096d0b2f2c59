"""Tests of arms on file, and of the tables in the docs that are made from arms."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.benchmarks import arms, tables
from tests.benchmarks.arms import NotKept, compared, files_alone, kept, packed, unpacked

# Of an arm. Most have 2,000; a front has 3,000 or 6,000 answers a merge, a bit each, and the largest has 68 merges.
MAX_BYTES = 48_000
FILES = sorted(arms.RESULTS.rglob("*.json"))


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(arms, "RESULTS", tmp_path)
    monkeypatch.setattr(arms, "_measured", set())
    monkeypatch.delenv("FRESH", raising=False)
    return tmp_path


@pytest.fixture
def counter() -> Iterator[int]:
    return iter(range(100))


def arm(counter: Iterator[int], code: str = "a", **settings: Any) -> int:
    found = kept("bench", "arm", settings, lambda: {"value": next(counter)}, depends=lambda: {"code": code})
    return int(found["value"])


def test_an_arm_is_measured_once(results: Path, counter: Iterator[int]) -> None:
    assert [arm(counter, seed=0, budget=(1, 2)) for _ in range(3)] == [0, 0, 0]


def test_other_settings_or_other_code_are_measured(results: Path, counter: Iterator[int]) -> None:
    found = [arm(counter, seed=0), arm(counter, seed=1), arm(counter, "b", seed=1), arm(counter, "b", seed=1)]
    assert found == [0, 1, 2, 2]


def test_fresh_measures_each_arm_once_more(
    results: Path, counter: Iterator[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    arm(counter)
    monkeypatch.setattr(arms, "_measured", set())  # as in another process
    monkeypatch.setenv("FRESH", "1")
    assert [arm(counter), arm(counter)] == [1, 1]


def test_an_arm_that_is_interrupted_leaves_no_file(results: Path) -> None:
    def interrupted() -> dict[str, Any]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        kept("bench", "arm", {}, interrupted)
    assert list(results.rglob("*.json")) == []


def test_tables_measure_nothing(results: Path, counter: Iterator[int]) -> None:
    arm(counter, "old", seed=0)
    with files_alone() as commits:
        assert arm(counter, "new", seed=0) == 0, "whatever the code is now"
        with pytest.raises(NotKept, match="bench: the arm arm is not on file"):
            arm(counter, "new", seed=1)
    assert commits == {arms.commit()}


def test_a_comparison_belongs_to_the_answers(results: Path, counter: Iterator[int]) -> None:
    def difference(ours: Any, theirs: Any) -> dict[str, float]:
        return {"value": next(counter)}

    zeros, ones = np.zeros((1, 3), bool), np.ones((1, 3), bool)
    pairs: Any = (([zeros], [ones]), ([zeros], [ones]), ([ones], [zeros]), ([ones], [zeros[0]]), ([zeros], []))
    assert [compared("bench", "a-b", difference, *pair)["value"] for pair in pairs] == [0, 0, 1, 2, 3]


def test_answers_are_kept_as_bits() -> None:
    answers = np.random.default_rng(0).random((2, 3, 1001)) < 0.7
    found = json.loads(json.dumps(packed(answers)))
    assert len(found["bits"]) < answers.size / 5
    np.testing.assert_array_equal(unpacked(found), answers)


def test_arms_on_file_are_small_and_of_committed_code() -> None:
    assert FILES
    for file in FILES:
        document = json.loads(file.read_text())
        assert file.stat().st_size < MAX_BYTES, file
        assert re.fullmatch(r"[0-9a-f]{7,40}", document["commit"]), f"{file}: {document['commit']}"
        assert {"settings", "depends", "figures", "versions", "machine", "date"} <= set(document)
        assert file == arms.RESULTS / document["benchmark"] / f"{document['arm']}.json"
        assert str(Path.home()) not in file.read_text()
        # The bits of answers are base64, which may begin with a slash.
        assert not re.search(r'(?<!"bits": )"/', file.read_text()), f"{file}: an absolute path"


# -- tables in docs ----------------------------------------------------------------------------------------------------

BLOCKS = [(page, *found) for page in tables.pages() for found in tables.BLOCK.findall(page.read_text())]


def test_every_table_of_a_benchmark_is_in_docs_once() -> None:
    named = [(benchmark, name) for _, benchmark, name, _ in BLOCKS]
    assert len(named) == len(set(named))
    assert set(named) == set(tables.declared())


@pytest.mark.parametrize(
    ("page", "benchmark", "name", "content"), BLOCKS, ids=[f"{benchmark}-{name}" for _, benchmark, name, _ in BLOCKS]
)
def test_tables_in_docs_are_those_of_the_arms(page: Path, benchmark: str, name: str, content: str) -> None:
    """`python -m tests.benchmarks tables` writes them; a table with an arm missing says so."""
    made = tables.rendered(benchmark, name)
    if made is None:
        assert tables.NOT_KEPT.search(content), f"{page.name}: say at which commit {benchmark} {name} was recorded"
    else:
        assert content == made


def test_some_tables_are_made() -> None:
    assert any(tables.rendered(benchmark, name) is not None for _, benchmark, name, _ in BLOCKS)


def test_a_table_is_made_anew_and_others_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "rendered", lambda benchmark, name: "| new |\n" if name == "b" else None)
    page = (
        "a\n<!-- table: x b -->\n| old |\n<!-- end of table -->\n\n<!-- table: x c -->\n| c |\n<!-- end of table -->\n"
    )
    assert tables.written(page) == page.replace("old", "new")

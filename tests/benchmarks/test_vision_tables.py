"""The vision tables on the image family: which merge an arm chooses, who trains what, and tables of arms on file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml

from search_spaces.recipe import Merge
from tests.benchmarks import arms, bench_hm3_images, bench_mergopt_images, search_intervals
from tests.benchmarks.arms import NotKept, files_alone
from tests.benchmarks.bench_images import Arm, ImageFamily
from tests.benchmarks.image_family import TASKS, finetune_document

NUM_IMAGES = 20


@pytest.fixture(autouse=True)
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder in which made-up arms are kept apart."""
    monkeypatch.setattr(arms, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(arms, "commit", lambda: "0123456")
    return tmp_path / "results"


def right(share: float, num: int = NUM_IMAGES) -> Any:
    """Answers of which this share is right."""
    return np.arange(num) < round(share * num)


def unwanted(*arguments: Any) -> Any:
    """Stand-in for a measurement that is not asked for."""
    raise AssertionError(f"measured: {arguments}")


class MadeUpBench:
    """A bench whose merges answer a share of the images of each task right: one share of each split."""

    judge = SimpleNamespace(tasks=SimpleNamespace(search={"split": "held"}))

    def __init__(self, shares: Mapping[str, Mapping[str, Sequence[float]]]) -> None:
        self._shares = shares

    def tasks(self, seed: int) -> Any:
        return {"split": "search"}

    def answers(self, recipe: Any, tasks: Any, num: int | None = None) -> dict[str, Any]:
        shares = self._shares[recipe][tasks["split"]]
        return {task: right(share, num or 100) for task, share in zip(TASKS, shares, strict=True)}


# -- HM3 ---------------------------------------------------------------------------------------------------------------


def test_the_best_merge_of_a_front_is_chosen_on_search_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """Merges that another dominates are not judged, and held-out images choose nothing."""
    shares = {
        "first": {"search": (0.8, 0.2, 0.5), "held": (0.9, 0.9, 0.9)},
        "second": {"search": (0.6, 0.7, 0.5), "held": (0.5, 0.6, 0.4)},
    }
    monkeypatch.setattr(bench_hm3_images, "bench", lambda: MadeUpBench(shares))
    merges: list[Any] = [
        ("trial 3", "first", (0.9, 0.1, 0.5)),
        ("trial 4", "dominated", (0.8, 0.1, 0.5)),
        ("trial 5", "second", (0.5, 0.8, 0.5)),
    ]
    found = bench_hm3_images.chosen(merges, 0, spent=270)
    assert (found.best.label, found.best.spent, found.different) == ("trial 5", 270, 3)
    assert found.best.search == pytest.approx(0.6, abs=0.01)
    assert found.best.values == {"mnist": 0.5, "fashion": 0.6, "digits": 0.4}
    assert found.front.shape == (2, 3, bench_hm3_images.FRONT_IMAGES)
    np.testing.assert_allclose(found.front.mean(axis=2), [[0.9] * 3, [0.5, 0.6, 0.4]])
    # The union of two boxes from the reference point, which is 0.1 below each value of 0.
    assert found.volume == pytest.approx(0.6 * (1.0 * 0.2 + 0.6 * 0.9 - 0.6 * 0.2))


def test_hm3s_tables_have_seeds_with_all_arms(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(name: str, seed: int) -> bench_hm3_images.Found:
        share = 0.5 + 0.05 * bench_hm3_images.ARMS.index(name)
        front = np.broadcast_to(right(share), (2, len(TASKS), NUM_IMAGES))
        return bench_hm3_images.Found(Arm(name, share, 270, dict.fromkeys(TASKS, right(share))), share**3, front, 7)

    monkeypatch.setattr(search_intervals, "NUM_RESAMPLES_OF_VOLUMES", 40)
    monkeypatch.setattr(bench_hm3_images, "of_search", found)
    monkeypatch.setattr(bench_hm3_images, "of_fixed", found)
    with files_alone(), pytest.raises(NotKept, match="hm3_images: no seed has all arms on file"):
        bench_hm3_images.vision_table(bench_hm3_images.kept_seeds())
    monkeypatch.setenv("HM3_IMAGES_SEEDS", "0")
    result = bench_hm3_images.run()
    monkeypatch.setenv("HM3_IMAGES_SEEDS", "1")
    monkeypatch.setenv("HM3_IMAGES_ARMS", "pcb,hm3")
    assert bench_hm3_images.run()["seeds"] == 1
    monkeypatch.setattr(bench_hm3_images, "code_of", lambda algorithm: "changed")
    monkeypatch.setattr(bench_hm3_images, "seeds_of", lambda name: [])
    monkeypatch.setattr(bench_hm3_images, "of_search", unwanted)
    monkeypatch.setattr(bench_hm3_images, "of_fixed", unwanted)
    assert bench_hm3_images.run() == result, "arms of other code are read, not measured again"
    with files_alone():
        vision, fronts = (
            table(bench_hm3_images.kept_seeds())
            for table in (bench_hm3_images.vision_table, bench_hm3_images.fronts_table)
        )
    assert [vision, fronts] == result["tables"]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in vision.splitlines()]
    assert rows[0][0] == "merge (seeds: 1)"
    assert [row[0] for row in rows[2:]] == [bench_hm3_images.label(name) for name in bench_hm3_images.ARMS]
    ours, theirs = rows[2 + bench_hm3_images.ARMS.index("hm3_pcb")], rows[2 + bench_hm3_images.ARMS.index("pcb")]
    assert ours[1:] == ["0.800", "0.800", "0.800", "0.800", "", "270"]
    assert theirs[4] == "0.650"
    assert theirs[5].startswith("+0.150 [")
    assert "| PCB-Merging | 0.275 | 0.422 | +0.307 [" in fronts


# -- MergOPT -----------------------------------------------------------------------------------------------------------


def test_optimizers_differ_in_method_and_seed_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for task in TASKS:
        (tmp_path / "heads" / task).mkdir(parents=True)
    (tmp_path / "finetune.yaml").write_text(yaml.safe_dump(finetune_document(), sort_keys=False))
    monkeypatch.setattr(ImageFamily, "directory", lambda self: tmp_path)
    plain = bench_mergopt_images.specs("adamw", 0, 0.0)
    for optimizer in bench_mergopt_images.OPTIMIZERS:
        specs = bench_mergopt_images.specs(optimizer, 3, 0.002)
        assert list(specs) == list(TASKS)
        for task, spec in specs.items():
            assert (spec.method.kind, spec.seed, spec.evaluation) == (optimizer, 3, None)
            assert (spec.data, spec.training) == (plain[task].data, plain[task].training)
    assert bench_mergopt_images.specs("mergopt", 3, 0.002)["mnist"].method.scale == 0.002


def test_coefficients_are_chosen_on_search_images(monkeypatch: pytest.MonkeyPatch) -> None:
    def share(merge: Merge, split: str) -> tuple[float, ...]:
        strength = merge.coefficients.get("lambda", 0.0)
        return ((0.9 if strength == 0.3 else 0.5) if split == "search" else 0.4,) * 3

    class Bench(MadeUpBench):
        def answers(self, recipe: Any, tasks: Any, num: int | None = None) -> dict[str, Any]:
            return dict(zip(TASKS, (right(each, num or 100) for each in share(recipe, tasks["split"])), strict=True))

    monkeypatch.setattr(bench_mergopt_images, "recipe_of", lambda bench, merge: merge)
    best: dict[str, Arm] = bench_mergopt_images.best_merges(Bench({}), 0)  # type: ignore[arg-type]
    chosen: Any = {method: (arm.label, arm.search, arm.mean) for method, arm in best.items()}
    assert chosen == {
        "weight averaging": ("", 0.5, pytest.approx(0.4)),
        **dict.fromkeys(("task arithmetic", "TIES", "DARE"), ("0.3", pytest.approx(0.9), pytest.approx(0.4))),
        "WUDI": ("0.5", 0.5, pytest.approx(0.4)),
    }
    assert best["task arithmetic"].spent == 13 * 3 * bench_mergopt_images.VALIDATION_IMAGES


@pytest.mark.parametrize(
    ("key", "fresh", "is_left"),
    [({"rate": 0.1}, "", True), ({"rate": 0.2}, "", False), ({"rate": 0.1}, "1", False), (None, "", False)],
)
def test_experts_of_other_code_are_trained_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: dict[str, Any] | None, fresh: str, is_left: bool
) -> None:
    """Experts stay if settings and digests do; those of an older version, with no key, do not."""
    place = tmp_path / "adamw-0"
    (place / "mnist").mkdir(parents=True)
    if key is not None:
        bench_mergopt_images.keep_only(place, key)
    (place / "mnist").mkdir(exist_ok=True)
    (place / "mnist" / "seconds.json").write_text("2.0")
    monkeypatch.setenv("FRESH", fresh)
    bench_mergopt_images.keep_only(place, {"rate": 0.1})
    assert (place / "mnist" / "seconds.json").exists() == is_left
    assert (place / "key.json").exists()


def test_mergopts_table_compares_optimizers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shares = {"adamw": 0.5, "sam": 0.6, "mergopt": 0.45}
    asked: list[str] = []

    def trained(experts: Any, place: Path) -> float:
        assert not (place / "mnist").exists(), "an expert of other code or settings"
        (place / "mnist").mkdir()
        asked.append(place.name)
        return 2.0

    monkeypatch.setattr(bench_mergopt_images, "CACHE", tmp_path)
    monkeypatch.setattr(bench_mergopt_images, "scale_of_family", lambda: 0.002)
    monkeypatch.setattr(bench_mergopt_images, "specs", lambda *arguments: {})
    monkeypatch.setattr(bench_mergopt_images, "trained", trained)
    monkeypatch.setattr(bench_mergopt_images, "recipe_of", lambda bench, merge: merge.sources[0].model)

    def merges(bench: Any, seed: int) -> dict[str, Arm]:
        return {"TIES": Arm("0.3", 0.9, 90, dict.fromkeys(TASKS, right(shares[asked[-1].partition("-")[0]])))}

    class Bench:
        judge = SimpleNamespace(tasks=SimpleNamespace(search=dict.fromkeys(TASKS)))

        def __init__(self, family: ImageFamily) -> None:
            assert asked[-1] in family.experts

        def answers(self, recipe: Any, tasks: Any) -> Any:
            return dict.fromkeys(tasks, right(0.95 if recipe in tasks else 0.0))

    monkeypatch.setattr(bench_mergopt_images, "ImageBench", Bench)
    monkeypatch.setattr(bench_mergopt_images, "best_merges", merges)
    monkeypatch.setenv("MERGOPT_IMAGES_SEEDS", "0-1")
    result = bench_mergopt_images.run()
    assert asked == [f"{optimizer}-{seed}" for seed in (0, 1) for optimizer in shares]
    monkeypatch.setattr(bench_mergopt_images, "depends", lambda: {"code": "changed"})
    monkeypatch.setenv("MERGOPT_IMAGES_SEEDS", "1")
    assert bench_mergopt_images.run()["tables"] == result["tables"]
    assert asked[6:] == [f"{optimizer}-1" for optimizer in shares], "seed 0 was not asked for"
    (table,) = result["tables"]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
    assert (result["seeds"], rows[0][0]) == (2, "merge (seeds: 2)")
    assert [row[:2] for row in rows[2:]] == [
        [merge, name] for merge in ("TIES", bench_mergopt_images.ALONE) for name in ("AdamW", "SAM", "MergOPT")
    ]
    assert rows[2][2:] == ["0.500", "0.500", "0.500", "0.500", ""]
    assert rows[3][6].startswith("+0.100 [")
    assert rows[4][6].startswith("-0.050 [")
    assert rows[5][5] == "0.950"

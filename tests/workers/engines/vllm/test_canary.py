"""The canary's detection of merged tensors that an engine did not write, on the shipped models in bfloat16.

Transformers, computing in bfloat16, stands in for the engine.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from search_spaces.recipe import Recipe
from tests.workers.recipes import arithmetic
from workers.cache import CACHE_VARIABLE
from workers.engines.source_recipes import base_recipe
from workers.engines.transformers.backend import logprobs
from workers.engines.transformers.merged_models import merged_model
from workers.engines.vllm import canary
from workers.engines.vllm.canary import Calibration, Canary, calibrate, canary_prompts, read, typical_difference
from workers.errors import EvidenceMismatch
from workers.merging.bank import Bank
from workers.merging.materialize import merged_tensors
from workers.models.family import open_family
from workers.tiny_family import family_dir
from workers.types import CanaryReport, Family

PROMPTS = canary_prompts(vocabulary=104, max_length=512)


@pytest.fixture(scope="module")
def shipped() -> Family:
    root = family_dir()
    return open_family(root / "base", {name: root / "experts" / name for name in ("math", "text", "lookup")})


@pytest.fixture(scope="module")
def bank(shipped: Family) -> Bank:
    return Bank(shipped)


@pytest.fixture(scope="module")
def calibration(shipped: Family, bank: Bank) -> Calibration:
    return calibrate(merged_model(base_recipe(shipped), bank, dtype="bfloat16"), PROMPTS, dtype="bfloat16")


def check(
    recipe: Recipe, family: Family, bank: Bank, calibration: Calibration, *, missed: Callable[[str], bool]
) -> float:
    """The canary's value for an engine in bfloat16 that has the base's tensors instead of those in `missed`."""
    model = merged_model(recipe, bank, dtype="bfloat16")
    theirs = read(model, PROMPTS)
    held: dict[str, Any] = dict(model.named_parameters())
    with torch.no_grad():
        for name, tensor in merged_tensors(base_recipe(family), bank, torch.bfloat16):
            if name in held and missed(name):
                held[name].copy_(tensor)
        for parameter in model.parameters():
            parameter.data = parameter.data.to(torch.bfloat16)
    return calibration.check(read(model, PROMPTS), theirs, of="this merge")


def of_layers(*layers: int) -> Callable[[str], bool]:
    return lambda name: any(f"layers.{layer}." in name for layer in layers)


def test_tolerance_follows_rounding(calibration: Calibration) -> None:
    """The tolerance is a small multiple of the model's rounding."""
    assert calibration.rounding is not None
    assert 0.02 < calibration.rounding < 0.08
    assert calibration.tolerance == pytest.approx(2.5 * calibration.rounding)
    assert Calibration("bfloat16", (), 0.0).tolerance == 0.01
    assert Calibration("float32", (), None).tolerance == 1e-3


@pytest.mark.parametrize("weights", [(0.0, 0.0, 0.0), (0.4, 0.4, 0.4), (1.0, 0.0, 0.0), (0.1, 0.1, 0.1)])
def test_a_whole_merge_passes(
    weights: tuple[float, ...], shipped: Family, bank: Bank, calibration: Calibration
) -> None:
    recipe = arithmetic(shipped, *weights)
    assert check(recipe, shipped, bank, calibration, missed=of_layers()) < 2 * (calibration.rounding or 0.0)


@pytest.mark.parametrize("layers", [(0,), (1,), (2,), (3,), (4,), (5,), (6, 7), (3, 4, 5, 6, 7)])
def test_layers_left_at_the_base_models_weights_are_seen(
    layers: tuple[int, ...], shipped: Family, bank: Bank, calibration: Calibration
) -> None:
    recipe = arithmetic(shipped, 0.4, 0.4, 0.4)
    with pytest.raises(EvidenceMismatch, match=r"this merge: log-probabilities .* differ by .* of the way to the base"):
        check(recipe, shipped, bank, calibration, missed=of_layers(*layers))


def test_a_layer_of_a_merge_near_the_base_is_seen_by_its_share(
    shipped: Family, bank: Bank, calibration: Calibration
) -> None:
    recipe = arithmetic(shipped, 0.1, 0.1, 0.1)
    for layer in (4, 5):  # their difference is no more than rounding
        with pytest.raises(EvidenceMismatch) as caught:
            check(recipe, shipped, bank, calibration, missed=of_layers(layer))
        difference = float(str(caught.value).split("differ by ")[1].split(";")[0])
        assert difference < calibration.tolerance


def test_one_far_off_token_is_rounding_in_16_bits_and_not_in_32() -> None:
    ours, theirs = [-1.0] * 47 + [-20.0], [-1.0] * 47 + [-20.4]
    assert typical_difference(ours, theirs, dtype="float32") == pytest.approx(0.4)
    assert typical_difference(ours, theirs, dtype="bfloat16") == pytest.approx(0.4 / 48**0.5)
    assert not typical_difference([float("nan")], [-1.0], dtype="bfloat16") <= 1.0
    with pytest.raises(EvidenceMismatch):
        Calibration("bfloat16", (-2.0,), 0.05).check([math.nan], [-1.0], of="this merge")


def test_the_base_is_measured_once_on_a_machine(
    shipped: Family, bank: Bank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replicas that start together build one model of the base; each dtype, and each other base, has its own."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    built: list[str] = []

    def merged(recipe: Recipe, bank: Bank, *, dtype: str) -> Any:
        built.append(recipe.digest)
        time.sleep(0.2)
        return merged_model(recipe, bank, dtype=dtype)

    monkeypatch.setattr(canary, "merged_model", merged)
    monkeypatch.setattr(canary, "open_bank", lambda document: bank)
    base = base_recipe(shipped)
    model = merged_model(base, bank, dtype="float32")

    def start(replica: str, *, dtype: str = "float32", free_bytes: int = 1 << 40) -> CanaryReport:
        one = Canary(shipped, base=base, replica=replica, dtype=dtype, vocabulary=104, max_length=512)
        return one.make(
            base,
            lambda prompts: [logprobs(model, prompt) for prompt in prompts],
            free_bytes=lambda: free_bytes,
            swap_count=1,
        )

    with ThreadPoolExecutor(4) as pool:
        assert [report.canaries for report in pool.map(start, "abcd")] == [1] * 4
    assert built == [base.digest]
    # Once it is known, a start needs no memory for a second model. Without it, the check is left out.
    assert start("e", free_bytes=0).skipped == ""
    assert "more memory than is free" in start("f", dtype="bfloat16", free_bytes=0).skipped
    assert start("g", dtype="bfloat16").canaries == 1
    assert built == [base.digest] * 2
    # A record that is damaged is measured again.
    for record in (tmp_path / "records").iterdir():
        record.write_text("x")
    start("h")
    assert len(built) == 3


def test_engines_of_a_machine_build_one_model_at_a_time(
    shipped: Family, bank: Bank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each engine of a machine looks for free memory when it has its turn, so that no two take the same memory."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(canary, "open_bank", lambda document: bank)
    recipe, num_models, most = arithmetic(shipped, 0.4, 0.3, 0.2), 0, 0
    known = [logprobs(merged_model(recipe, bank, dtype="float32"), prompt) for prompt in PROMPTS]

    def merged(recipe: Recipe, bank: Bank, *, dtype: str) -> Any:
        nonlocal num_models, most
        num_models += 1
        most = max(most, num_models)
        time.sleep(0.2)
        found = merged_model(recipe, bank, dtype=dtype)
        num_models -= 1
        return found

    monkeypatch.setattr(canary, "merged_model", merged)

    def check(replica: str) -> CanaryReport:
        one = Canary(
            shipped, base=base_recipe(shipped), replica=replica, dtype="float32", vocabulary=104, max_length=512
        )
        return one.make(recipe, lambda _: known, free_bytes=lambda: 0 if num_models else 1 << 40, swap_count=32)

    with ThreadPoolExecutor(4) as pool:
        assert [(report.canaries, report.skipped) for report in pool.map(check, "abcd")] == [(1, "")] * 4
    assert most == 1


def test_a_canary_is_skipped_if_rounding_hides_wrong_swaps(
    shipped: Family, bank: Bank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(canary, "open_bank", lambda document: bank)
    monkeypatch.setattr(canary, "calibrate", lambda *_, dtype: Calibration(dtype, (-1.0,) * 188, math.inf))
    one = Canary(shipped, base=base_recipe(shipped), replica="a", dtype="bfloat16", vocabulary=104, max_length=512)

    def garbage(prompts: Any) -> list[list[float]]:
        return [[-9.0] * (len(prompt) - 1) for prompt in prompts]

    report = one.make(base_recipe(shipped), garbage, free_bytes=lambda: 1 << 40, swap_count=1)
    assert report.canaries == 0
    assert "rounding to bfloat16 alone changes the log-probabilities of this model by inf nats" in report.skipped

"""Shards over ranks (FSDP2): a training has the result of one rank, in less memory, also after a kill."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from tests.builders import tiny_llama
from tests.vision import image_folder, tiny_clip, tiny_vit
from tests.workers.training.finetuning.ranks import TRAININGS, spec_of
from workers.models.checkpoints import open_checkpoint
from workers.training.finetuning.history import CHECKPOINTS, EXPERT, METRICS, read_history
from workers.training.finetuning.memory_plan import training_memory
from workers.training.finetuning.sharding import decoder_layers, unread_model

pytestmark = pytest.mark.slow  # models are trained

# Sums of gradients in another order change a weight by a few units in the last place of float32 at each update; AdamW
# divides small gradients by themselves, so that rounding of theirs is seen. bfloat16 has 8 bits.
TOLERANCE = {"lora": 0.02}
DEFAULT = 1e-4


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of all trainings in `ranks`."""
    directory = tmp_path_factory.mktemp("ranks")
    tiny_llama(directory / "base")
    tiny_llama(directory / "expert", seed=3)
    tiny_llama(directory / "large", layers=4, hidden=384)
    tiny_vit(directory / "vit", initializer_range=0.02)
    tiny_clip(directory / "clip")
    image_folder(directory / "images")
    lines = [json.dumps({"prompt": f"{i}+1=", "completion": str(i + 1), "answer": str(i + 1)}) for i in range(40)]
    (directory / "data.jsonl").write_text("\n".join(lines) + "\n")
    command = [sys.executable, "-m", "tests.workers.training.finetuning.ranks", str(directory)]
    # Memory of tensors is returned when they are freed, as it is on a GPU. transformers reads weights without threads,
    # in which torch does not compute after a fork.
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 16), "HF_DEACTIVATE_ASYNC_LOAD": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=env)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return directory


def weights(out: Path) -> dict[str, torch.Tensor]:
    (file,) = (out / EXPERT).glob("*.safetensors")
    tensors: dict[str, torch.Tensor] = load_file(file)
    return tensors


def largest_difference(one: Path, other: Path) -> float:
    first, second = weights(one), weights(other)
    assert first.keys() == second.keys()
    return max(float((first[name].float() - second[name].float()).abs().max()) for name in first)


def facts_of(out: Path, rank: int = 0) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads((out / f"facts-{rank}.json").read_text())
    return facts


@pytest.mark.parametrize("name", TRAININGS)
def test_two_ranks_train_as_one(place: Path, name: str) -> None:
    """Two ranks with a shard each end with the weights and losses of one rank, except for rounding."""
    one, two = place / f"{name}-1", place / f"{name}-2"
    tolerance = TOLERANCE.get(name, DEFAULT)
    assert largest_difference(one, two) < tolerance
    losses = [[line["loss"] for line in read_history(out / METRICS) if "loss" in line] for out in (one, two)]
    assert losses[0] == pytest.approx(losses[1], rel=tolerance)
    assert sorted(path.name for path in (one / EXPERT).iterdir()) == sorted(
        path.name for path in (two / EXPERT).iterdir()
    )
    assert facts_of(one)["values"] == facts_of(two)["values"]
    assert facts_of(two, rank=1)["values"] == facts_of(two)["values"] or name == "tangent"
    base = load_file(place / TRAININGS[name].get("base", "base") / "model.safetensors")
    if name != "lora":
        assert any(float((base[key] - each).abs().max()) > 20 * tolerance for key, each in weights(two).items())


def test_a_killed_rank_changes_nothing(place: Path) -> None:
    """A training of which a rank was killed by SIGKILL ends with the same weights, on two ranks with the same bits.

    It is resumed on as many ranks, on one, and on three, beside the files of a killed writer of four ranks.
    """
    assert largest_difference(place / "mergopt-2", place / "killed-2") == 0
    for size in (1, 3):
        assert largest_difference(place / "mergopt-1", place / f"killed-{size}") < DEFAULT
        steps = [line["step"] for line in read_history(place / f"killed-{size}" / METRICS)]
        assert steps == [1, 2, 3, 4, 5, 6]
        (newest,) = (place / f"killed-{size}" / CHECKPOINTS).glob("step-00000006")
        assert len(list(newest.glob("shard-*"))) == size


@pytest.mark.parametrize("is_tied", [True, False])
def test_weights_are_read_unit_by_unit(tmp_path: Path, is_tied: bool) -> None:
    """Until a unit is read, its weights take one element each; then they are those of the base, tied ones once."""
    base = tiny_llama(tmp_path / "base", tied=is_tied)
    found = unread_model(base, torch.float32)
    assert found is not None
    model, unread = found
    assert {parameter.untyped_storage().nbytes() for parameter in model.parameters()} == {4}
    for layer in decoder_layers(model):
        unread.read_into(layer, torch.device("cpu"))
    assert model.lm_head.weight.untyped_storage().nbytes() == 4
    unread.read_into(model, torch.device("cpu"))
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == is_tied
    for name, tensor in load_file(base / "model.safetensors").items():
        assert torch.equal(model.get_parameter(name), tensor)


def test_ranks_share_a_checkpoint_and_write_one_expert(place: Path) -> None:
    """Each rank writes its half of each tensor to a checkpoint; the expert is one ordinary model."""
    stored = []
    for file in sorted((place / "mergopt-2" / CHECKPOINTS / "step-00000006").glob("shard-*")):
        with safe_open(file, "pt") as opened:
            stored.append({name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()})  # noqa: SIM118
    assert len(stored) == 2
    name = "weights.model.layers.0.mlp.down_proj.weight"
    assert [each[name] for each in stored] == [(16, 64), (16, 64)]
    expert, base = open_checkpoint(place / "mergopt-2" / EXPERT), open_checkpoint(place / "base")
    shapes = [{name: tensor.shape for name, tensor in each.tensors.items()} for each in (expert, base)]
    assert shapes[0] == shapes[1]
    assert not list((place / "mergopt-2").rglob("*.gathered"))


def test_two_ranks_take_half_the_memory(place: Path) -> None:
    """Weights, gradients and AdamW's moments take half of the memory on each of two ranks, measured and as planned."""
    one, *two = (
        json.loads((place / f"large-{name}.json").read_text()) for name in ("1/memory-0", "2/memory-0", "2/memory-1")
    )
    weights = (place / "large" / "model.safetensors").stat().st_size
    print(f"weights {weights / 1e6:.0f} MB; one rank {one}, two ranks {two} bytes")
    assert one[0] > 3.8 * weights
    for held, peak in two:
        assert 0.45 * one[0] < held < 0.6 * one[0]
        assert peak < one[1] - weights
    for count, held in ((1, one[0]), (2, two[0][0]), (2, two[1][0])):
        spec = spec_of(place, base="large", method={"kind": "adamw"}, workers=count)
        planned = training_memory(spec, open_checkpoint(place / "large"), is_bfloat16=False).state
        assert planned == pytest.approx(held, rel=0.2)


def test_an_adapters_base_has_no_float32_copy(place: Path) -> None:
    """Where activations are bfloat16, so are the frozen weights below an adapter; adapters are float32."""
    for rank in (0, 1):
        found = json.loads((place / f"dtypes-{rank}.json").read_text())
        assert found == {"trained": ["torch.float32"], "frozen": ["torch.bfloat16"]}

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.func import functional_call

from search_spaces.errors import InvalidRecipe
from search_spaces.methods import METHODS
from search_spaces.recipe import LayerRecipe, Merge, Recipe, Source
from search_spaces.study.engine import EngineOptions
from tests.benchmarks import bench_gradients, merge_family
from tests.workers.merging.methods.examples import EXAMPLES
from tests.workers.recipes import num_layers
from workers.errors import InvalidModel, TrialFailed
from workers.evaluation.references import Reading
from workers.merging.bank import Bank
from workers.merging.materialize import operands_of
from workers.merging.methods.plain import PLAIN
from workers.merging.plan import plan_as_stated
from workers.training import gradients, text_losses
from workers.training.gradients import MAX_TOKENS, CoefficientGradients
from workers.training.losses import minibatches, sample_losses
from workers.training.memory import pass_bytes, reduction_bytes, tokens_within
from workers.training.model import moved
from workers.types import Family, GradientResult, TaskSpec

OPTIONS = EngineOptions(max_model_len=256, dtype="float32")
BATCH = {"sums": range(6), "names": range(3, 8)}
WEIGHTS = {"sums": 0.7, "names": 0.3}


@pytest.fixture(scope="module")
def tasks(sums: TaskSpec, tmp_path_factory: pytest.TempPathFactory) -> dict[str, TaskSpec]:
    file = tmp_path_factory.mktemp("names") / "names.jsonl"
    rows = [{"prompt": f"what comes after {'la' * (i % 4)} {i}? ", "answer": f"it is {i + 1}"} for i in range(20)]
    file.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return {"sums": sums, "names": TaskSpec({"file": str(file), "max_tokens": 12}, "exact_match")}


@pytest.fixture(scope="module")
def tied(tied_family: Family, tasks: Mapping[str, TaskSpec]) -> CoefficientGradients:
    return CoefficientGradients(tied_family, OPTIONS, tasks)


def recipe_by(family: Family, method: str, coefficients: Mapping[str, float | tuple[float, ...]]) -> Recipe:
    """A recipe with the method in layers, task arithmetic outside them, and the base's head."""
    aliases = [expert.alias for expert in family.experts][: METHODS[method].max_sources]

    def merge(layer: int | None, name: str = method) -> Merge:
        seed = 1 if METHODS[name].takes_seed else None
        numbers = coefficients if name == method else {"lambda": (0.3, 0.6)}
        return Merge(name, tuple(Source(alias, layer) for alias in aliases), numbers, seed)

    layers = tuple(LayerRecipe(merge(i), merge(i), merge(i)) for i in range(num_layers(family)))
    head = Merge("passthrough", (Source("base"),))
    return Recipe(family.fingerprints, "base", layers, merge(None, "task_arithmetic"), head)


def arithmetic(family: Family, *lambdas: float) -> Recipe:
    return recipe_by(family, "task_arithmetic", {"lambda": lambdas})


def examples(method: str, count: int) -> dict[str, float | tuple[float, ...]]:
    """Coefficients for `count` sources; coefficients per source differ in size."""
    declared = METHODS[method].gradients_by
    numbers: dict[str, float | tuple[float, ...]] = {
        c.name: EXAMPLES[c.name] for c in METHODS[method].coefficients if c.name in EXAMPLES
    }
    return numbers | {c.name: (0.4, 0.7)[:count] for c in declared if c.per_model}


def by_autograd(trained: CoefficientGradients, recipe: Recipe) -> tuple[float, dict[str, list[float]]]:
    """Loss and derivatives from a single autograd graph, from the coefficients to the loss.

    The graph has all merged tensors and transformers' model, for which models of a real size need too much memory.
    """
    bank = trained.bank
    plan = plan_as_stated(recipe, bank)
    leaves: dict[str, list[torch.Tensor]] = {}
    merged = {}
    for tensor in plan.tensors:
        merge, given = tensor.merge, {}
        for c in METHODS[merge.method].gradients_by:
            if c.name in merge.coefficients:
                numbers = merge.per_source(c.name) if c.per_model else [merge.number(c.name)]
                each = [torch.tensor(number, dtype=torch.float64, requires_grad=True) for number in numbers]
                leaves[f"{tensor.name} {c.name}"] = each
                given[c.name] = each if c.per_model else each[0]
        operands = operands_of(tensor, plan, bank).in_float32()
        merged[tensor.name] = PLAIN[merge.method].merge(operands, merge, given=given)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(bank.family.base.directory, dtype=torch.float32)
    loss = torch.zeros(())
    for name, positions in BATCH.items():
        targets = tuple(trained._of_tasks[name].at.values())
        size = sum(reading.num_scored for target in targets for reading in target.readings) / len(targets)
        for position in positions:
            (reading,) = targets[position].readings
            output = functional_call(model, merged, kwargs={"input_ids": torch.tensor([reading.tokens])})
            loss = loss + WEIGHTS[name] * negative_log_likelihood(output.logits[0], reading) / len(positions) / size
    every = [leaf for each in leaves.values() for leaf in each]
    slopes = iter(torch.autograd.grad(loss, every, materialize_grads=True))
    return loss.item(), {name: [next(slopes).item() for _ in each] for name, each in leaves.items()}


def negative_log_likelihood(logits: torch.Tensor, reading: Reading) -> torch.Tensor:
    scores = logits.log_softmax(-1)
    tokens = torch.tensor(reading.tokens)
    found = -scores[reading.num_context - 1 : -1].gather(-1, tokens[reading.num_context :, None]).sum()
    return found - scores[-1, list(reading.ends)].exp().sum().log() if reading.ends else found


def flat(result: GradientResult, methods: Mapping[str, str]) -> dict[str, list[float]]:
    """The derivatives by tensor and coefficient; `methods` has the name of each tensor's coefficient per source."""
    found = {f"{name} {methods[name]}": list(slopes.values()) for name, slopes in result.by_source.items()}
    return found | {
        f"{name} {coefficient}": [slope] for name, each in result.shared.items() for coefficient, slope in each.items()
    }


def check_against_autograd(trained: CoefficientGradients, recipe: Recipe) -> None:
    result = trained.loss_and_gradient(recipe, BATCH, WEIGHTS)
    loss, expected = by_autograd(trained, recipe)
    assert sum(WEIGHTS[name] * mean for name, mean in result.losses.items()) == pytest.approx(loss, rel=1e-5)
    plan = plan_as_stated(recipe, trained.bank)
    per_source = {
        tensor.name: c.name for tensor in plan.tensors for c in METHODS[tensor.merge.method].gradients_by if c.per_model
    }
    found = flat(result, per_source)
    assert found.keys() == expected.keys()
    scale = max(abs(slope) for slopes in expected.values() for slope in slopes)
    for name, slopes in expected.items():
        assert found[name] == pytest.approx(slopes, rel=1e-3, abs=1e-5 * scale), name


@pytest.mark.parametrize(
    "method",
    [
        "task_arithmetic",
        "linear",
        "ties",
        "dare_linear",
        pytest.param("ties_weighted", marks=pytest.mark.slow),
        pytest.param("slerp", marks=pytest.mark.slow),
    ],
)
def test_derivatives_are_of_one_graph(tied: CoefficientGradients, method: str) -> None:
    """Derivatives are those of one graph from coefficients to loss."""
    family = tied.bank.family
    check_against_autograd(tied, recipe_by(family, method, examples(method, len(family.experts))))


def test_an_output_head_of_its_own_and_bfloat16_sources(
    untied_family: Family, tasks: Mapping[str, TaskSpec], tmp_path: Path
) -> None:
    trained = CoefficientGradients(untied_family, OPTIONS, tasks, cache=tmp_path)
    recipe = arithmetic(untied_family, 0.3, 0.5)
    check_against_autograd(trained, replace(recipe, head=recipe.embedding))


def test_the_forward_pass_reads_the_merge_that_engines_hold(tied: CoefficientGradients) -> None:
    recipe = arithmetic(tied.bank.family, 0.4, 0.2)
    found = tied.losses(recipe, BATCH)
    expected = tied.loss_and_gradient(recipe, BATCH, WEIGHTS)
    assert {name: len(each) for name, each in found.items()} == {"sums": 6, "names": 5}
    for name, each in found.items():
        assert sum(each) / len(each) == pytest.approx(expected.losses[name], rel=1e-6)
    assert expected.num_samples == 11
    assert expected.seconds > 0


def test_a_source_without_influence_has_a_derivative(tied: CoefficientGradients) -> None:
    family = tied.bank.family
    nothing = tied.loss_and_gradient(arithmetic(family, 0.0, 0.0), BATCH, WEIGHTS)
    assert tied.losses(arithmetic(family, 0.0, 0.0), BATCH) == tied.losses(recipe_of_base(family), BATCH)
    name = "model.layers.1.mlp.up_proj.weight"
    assert nothing.by_source[name].keys() == {"math", "text"}
    assert min(map(abs, nothing.by_source[name].values())) > 0
    check_against_autograd(tied, arithmetic(family, 0.5, 0.0))


def recipe_of_base(family: Family) -> Recipe:
    return arithmetic(family, 1.0, 1.0).rewritten(lambda merge: Merge("passthrough", (replace_model(merge, "base"),)))


def replace_model(merge: Merge, model: str) -> Source:
    return Source(model, merge.sources[0].layer)


def test_a_step_along_the_derivatives_lowers_the_loss(tied: CoefficientGradients) -> None:
    family = tied.bank.family
    before = tied.loss_and_gradient(arithmetic(family, 0.3, 0.3), BATCH, WEIGHTS)
    layers = [name for name in before.by_source if ".layers." in name]
    slopes = [sum(before.by_source[name][alias] for name in layers) for alias in ("math", "text")]
    step = [0.3 - 0.05 * slope / max(map(abs, slopes)) for slope in slopes]
    after = tied.loss_and_gradient(arithmetic(family, *step), BATCH, WEIGHTS)
    assert total(after) < total(before)


def total(result: GradientResult) -> float:
    return sum(WEIGHTS[name] * loss for name, loss in result.losses.items())


def test_equal_calls_give_equal_bits_whatever_was_called_before(tied: CoefficientGradients) -> None:
    first = tied.loss_and_gradient(arithmetic(tied.bank.family, 0.4, 0.2), BATCH, WEIGHTS)
    tied.losses(arithmetic(tied.bank.family, 0.9, 0.1), {"sums": range(40)})
    again = tied.loss_and_gradient(arithmetic(tied.bank.family, 0.4, 0.2), BATCH, WEIGHTS)
    assert replace(again, seconds=0.0) == replace(first, seconds=0.0)


@pytest.mark.parametrize(("max_tokens", "num_passes"), [(MAX_TOKENS, 1), (80, 4)])
def test_sources_are_read_once_for_the_merge_and_each_pass(
    tied: CoefficientGradients, tasks: Mapping[str, TaskSpec], max_tokens: int, num_passes: int, tmp_path: Path
) -> None:
    """Gradients are not kept, so each pass reads the sources to reduce its own; the merge before has read them once."""
    limited = CoefficientGradients(tied.bank.family, OPTIONS, tasks, cache=tmp_path, max_tokens=max_tokens)
    targets = [limited._of_tasks[name].at[position] for name, positions in BATCH.items() for position in positions]
    assert len(list(minibatches(targets, max_tokens))) == num_passes
    read = []
    for coefficients in ((0.4, 0.2), (0.5, 0.1)):
        before = limited.bank.elements_read
        limited.losses(arithmetic(limited.bank.family, *(each + 0.01 for each in coefficients)), BATCH)
        merged = limited.bank.elements_read - before
        limited.loss_and_gradient(arithmetic(limited.bank.family, *coefficients), BATCH, WEIGHTS)
        read.append((limited.bank.elements_read - before - merged) / merged)
    assert read == pytest.approx([1 + num_passes] * 2, rel=0.1)


def test_gradients_are_freed_and_settings_left_as_they_were(tied: CoefficientGradients) -> None:
    was = torch.are_deterministic_algorithms_enabled()
    tied.loss_and_gradient(arithmetic(tied.bank.family, 0.4, 0.2), BATCH, WEIGHTS)
    leaves = [leaf for leaf, _ in tied.model.leaves]
    assert len(leaves) == len(tied.model.memory) + 1  # the tied head is a leaf of its own, in the same memory
    assert {leaf.data_ptr() for leaf in leaves} == {memory.data_ptr() for memory in tied.model.memory.values()}
    assert all(leaf.grad is None for leaf in leaves)
    assert not any(getattr(leaf, "_post_accumulate_grad_hooks", None) for leaf in leaves)
    assert torch.are_deterministic_algorithms_enabled() == was


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"max_tokens": 40}, {"recomputes": True}])
def test_memory_is_saved_without_changing_the_result(
    tied: CoefficientGradients, tasks: Mapping[str, TaskSpec], settings: Mapping[str, int], tmp_path: Path
) -> None:
    recipe = recipe_by(tied.bank.family, "ties", {"lambda": 0.7, "k": 0.4})
    saving = CoefficientGradients(tied.bank.family, OPTIONS, tasks, cache=tmp_path, **settings)  # type: ignore[arg-type]
    expected = tied.loss_and_gradient(recipe, BATCH, WEIGHTS)
    found = saving.loss_and_gradient(recipe, BATCH, WEIGHTS)
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)
    for name, each in expected.shared.items():
        assert found.shared[name] == pytest.approx(each, rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("recomputes", [False, True])
def test_layers_on_several_devices_give_the_bits_of_one(
    tied: CoefficientGradients,
    tasks: Mapping[str, TaskSpec],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    recomputes: bool,
) -> None:
    """A model whose layers are divided over devices has the losses and gradients of one device, bit for bit.

    The devices are two names of the CPU here, so that the inputs that are moved to each can be counted.
    """
    recipe = arithmetic(tied.bank.family, 0.3, 0.6)
    names = ("cpu", "cpu:0", "cpu")
    divided = CoefficientGradients(
        tied.bank.family, OPTIONS, tasks, cache=tmp_path, device=names[0], more_devices=names[1:], recomputes=recomputes
    )
    moves: list[str] = []
    depth = 0

    def counted(value: Any, device: torch.device) -> Any:
        nonlocal depth
        if depth == 0 and not isinstance(value, dict):  # positional inputs of a layer, or the last output
            moves.append(str(device))
        depth += 1  # a call for each part of the value follows
        try:
            return moved(value, device)
        finally:
            depth -= 1

    monkeypatch.setattr("workers.training.model.moved", counted)
    expected, found = (each.loss_and_gradient(recipe, BATCH, WEIGHTS) for each in (tied, divided))
    assert replace(found, seconds=0.0) == replace(expected, seconds=0.0)
    counts = divided.model.num_layers_on
    layers = num_layers(tied.bank.family)
    assert (len(counts), sum(counts)) == (3, layers)
    forward = [name for name, count in zip(names, counts, strict=True) for _ in range(count)] + [names[0]]
    assert moves[: len(forward)] == forward, "each layer has its inputs on its device, and the head its own"
    if not recomputes:
        assert moves == forward * (len(moves) // len(forward))
    assert tied.model.num_layers_on == (layers,)


def test_parts_of_a_model_are_where_the_plan_says(
    tied_family: Family, tasks: Mapping[str, TaskSpec], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights of layers lie on their devices, all else on the first, and each is merged by the bank of its device."""
    merged: dict[str, set[str]] = {}

    def merge_into(plan: Any, bank: Bank, destinations: Mapping[str, torch.Tensor]) -> None:
        merged.setdefault(bank.device.type, set()).update(destinations)
        assert {memory.device for memory in destinations.values()} == {bank.device}

    monkeypatch.setattr(gradients, "merge_into", merge_into)
    divided = CoefficientGradients(tied_family, OPTIONS, tasks, cache=tmp_path, more_devices=("meta",))
    divided._hold(arithmetic(tied_family, 0.3, 0.6))
    on_meta = {name for name, memory in divided.model.memory.items() if memory.device.type == "meta"}
    assert merged == {"meta": on_meta, "cpu": divided.model.memory.keys() - on_meta}
    counts = divided.model.num_layers_on
    assert {int(re.findall(r"layers\.(\d+)\.", name)[0]) for name in on_meta} == set(
        range(counts[0], counts[0] + counts[1])
    )
    assert counts[1] > 0


def test_free_memory_of_each_gpu_limits_the_tokens_of_a_pass(
    tied_family: Family, tasks: Mapping[str, TaskSpec], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passes have the tokens for which every GPU has room; where few fit, activations are recomputed."""
    bank = CoefficientGradients(tied_family, OPTIONS, tasks, cache=tmp_path)
    config, layers = bank.model.module.config.to_dict(), num_layers(tied_family)
    passing = reduction_bytes(bank.bank.sources, on_gpu=False)
    passing += max(memory.nbytes for memory in bank.model.memory.values())

    def limited(tokens: int, *, recomputes: bool = False) -> CoefficientGradients:
        room = pass_bytes(config, tokens, 4, recomputes=recomputes, layers=layers) + passing
        monkeypatch.setattr(gradients, "free_bytes", lambda device: room)
        return CoefficientGradients(tied_family, OPTIONS, tasks, cache=tmp_path)

    assert limited(10**6)._max_tokens == gradients.MAX_TOKENS
    found = limited(2000)
    assert abs(found._max_tokens - 2000) <= 1
    assert not found._recomputes
    found = limited(500, recomputes=False)
    assert found._recomputes
    assert gradients.LEAST_TOKENS < found._max_tokens < gradients.MAX_TOKENS
    assert limited(100, recomputes=True)._max_tokens == gradients.LEAST_TOKENS
    # The fullest of several GPUs decides, by the layers that it has.
    one = pass_bytes(config, 3000, 4, recomputes=False, layers=1) + passing
    monkeypatch.setattr(gradients, "free_bytes", lambda device: one if str(device) == "cpu:0" else 10**12)
    divided = CoefficientGradients(tied_family, OPTIONS, tasks, cache=tmp_path, more_devices=("cpu:0",))
    on_second = divided.model.num_layers_on[1]
    assert divided._max_tokens == tokens_within(one - passing, config, 4, recomputes=False, layers=on_second) < 3000
    assert bank._max_tokens == gradients.MAX_TOKENS, "the free memory of this machine has room for more"
    # A CPU is limited by the free memory of its machine or container.
    monkeypatch.undo()
    room = pass_bytes(config, 2000, 4, recomputes=False, layers=layers) + passing
    monkeypatch.setattr(gradients, "free_host_bytes", lambda: round(room / gradients.FREE_HOST_SHARE))
    found = CoefficientGradients(tied_family, OPTIONS, tasks, cache=tmp_path)
    assert abs(found._max_tokens - 2000) <= 1
    monkeypatch.setattr(gradients, "free_host_bytes", lambda: 0)
    found = CoefficientGradients(tied_family, OPTIONS, tasks, cache=tmp_path)
    assert (found._max_tokens, found._recomputes) == (gradients.LEAST_TOKENS, True)


@pytest.mark.slow
@pytest.mark.parametrize("most_tokens", [100, 30])
def test_a_full_gpu_gets_smaller_passes(
    tied: CoefficientGradients,
    tasks: Mapping[str, TaskSpec],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    most_tokens: int,
) -> None:
    """A step for which memory is too small is computed again, by smaller passes, then with recomputed activations.

    Without recomputed activations the memory is that of `most_tokens` tokens here, else that of 100.
    """
    recipe = arithmetic(tied.bank.family, 0.3, 0.6)
    expected = tied.loss_and_gradient(recipe, BATCH, WEIGHTS)
    saving = CoefficientGradients(tied.bank.family, OPTIONS, tasks, cache=tmp_path, max_tokens=400)
    monkeypatch.setattr(gradients, "LEAST_TOKENS", 75)
    sizes = []

    def losses(model: Any, targets: Sequence[Any]) -> torch.Tensor:
        found: torch.Tensor = sample_losses(model, targets)
        rows = [len(reading.tokens) for target in targets for reading in target.readings]
        sizes.append(max(rows) * len(rows))
        if sizes[-1] > (100 if saving._recomputes else most_tokens):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return found

    monkeypatch.setattr(text_losses, "sample_losses", losses)
    found = saving.loss_and_gradient(recipe, BATCH, WEIGHTS)
    assert saving._recomputes == (most_tokens == 30)
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)
    names = dict.fromkeys(found.by_source, "lambda")
    for name, slopes in flat(expected, names).items():
        assert flat(found, names)[name] == pytest.approx(slopes, rel=1e-3, abs=1e-6)
    once = len(sizes)
    assert saving.loss_and_gradient(recipe, BATCH, WEIGHTS).losses == found.losses, "the smaller passes are kept"
    assert max(sizes[once:]) <= 100
    monkeypatch.setattr(text_losses, "sample_losses", no_memory)
    with pytest.raises(InvalidModel, match="too little memory for forward passes of 75 tokens with recomputed"):
        saving.losses(recipe, BATCH)


def no_memory(model: Any, targets: Sequence[Any]) -> torch.Tensor:
    raise torch.OutOfMemoryError("CUDA out of memory")


def test_device_is_given_and_not_looked_for(
    tied_family: Family, tasks: Mapping[str, TaskSpec], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients are computed on the CPU unless a device is given: a visible GPU may be an engine's."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    found = CoefficientGradients(tied_family, OPTIONS, tasks, cache=tmp_path)
    assert found.bank.device == found.model.device == torch.device("cpu")


def test_bfloat16_is_near_float32(tied: CoefficientGradients, tasks: Mapping[str, TaskSpec], tmp_path: Path) -> None:
    coarse = CoefficientGradients(
        tied.bank.family, OPTIONS.model_copy(update={"dtype": "bfloat16"}), tasks, cache=tmp_path
    )
    recipe = arithmetic(tied.bank.family, 0.4, 0.2)
    expected = tied.loss_and_gradient(recipe, BATCH, WEIGHTS)
    found = coarse.loss_and_gradient(recipe, BATCH, WEIGHTS)
    assert coarse.dtype == torch.bfloat16
    assert found.losses == pytest.approx(expected.losses, rel=0.02)
    assert cosine(found, expected) > 0.99


def cosine(first: GradientResult, second: GradientResult) -> float:
    x, y = (
        torch.tensor([slope for each in result.by_source.values() for slope in each.values()])
        for result in (first, second)
    )
    return float(torch.cosine_similarity(x, y, dim=0))


@pytest.mark.parametrize("method", [name for name, method in METHODS.items() if not method.gradients_by])
def test_methods_without_a_gradient_are_refused_by_name(tied: CoefficientGradients, method: str) -> None:
    count = METHODS[method].max_sources or 2
    recipe = recipe_by(tied.bank.family, method, examples(method, count))
    message = rf"^model\.layers\.0\.\S+: {method} has no gradient by coefficients; methods that have are .*linear, "
    with pytest.raises(InvalidRecipe, match=message):
        tied.loss_and_gradient(recipe, BATCH, WEIGHTS)


def test_a_model_named_twice_in_a_merge_is_refused(tied: CoefficientGradients) -> None:
    twice = Merge("linear", (Source("math", 0), Source("math", 1)), {"weight": 0.5})
    recipe = arithmetic(tied.bank.family, 0.4, 0.2)
    layer = replace(recipe.layers[0], mlp=twice)
    with pytest.raises(InvalidRecipe, match="several layers of one model among its sources, math, math; gradients are"):
        tied.loss_and_gradient(replace(recipe, layers=(layer, *recipe.layers[1:])), BATCH, WEIGHTS)


def test_sources_as_they_are_have_no_derivative(tied: CoefficientGradients) -> None:
    result = tied.loss_and_gradient(recipe_of_base(tied.bank.family), BATCH, WEIGHTS)
    assert result.by_source == result.shared == {}
    scaled = recipe_of_base(tied.bank.family).rewritten(lambda merge: replace(merge, coefficients={"scale": 1.0}))
    found = tied.loss_and_gradient(scaled, BATCH, WEIGHTS)
    assert found.losses == result.losses
    assert found.shared.keys() == tied.model.memory.keys()
    check_against_autograd(tied, scaled)


def test_completions_are_read_in_place_of_the_tasks_references(tied: CoefficientGradients) -> None:
    family, recipe = tied.bank.family, arithmetic(tied.bank.family, 0.4, 0.2)
    expected = tied.losses(recipe, BATCH)
    # The references themselves as completions, ended by a token: those of positions 3 and 4 only.
    readings = {position: tied._of_tasks["names"].at[position].readings[0] for position in (4, 3)}
    tokens = {p: (*reading.tokens[reading.num_context :], *reading.ends[:1]) for p, reading in readings.items()}
    tied.set_completions({"names": tokens})
    found = tied.losses(recipe, {"names": (3, 4)}, completions=["names"])
    unit = sum(reading.num_scored for reading in readings.values()) / 2
    factor = tied._of_tasks["names"].unit / unit
    assert found["names"] == pytest.approx([loss * factor for loss in expected["names"][:2]], rel=1e-5)
    # Others, with derivatives of their own, and the task's references where they are not asked for.
    tied.set_completions({"names": {3: tokens[4], 4: tokens[3]}})
    own = tied.loss_and_gradient(recipe, {"names": (3, 4)}, WEIGHTS)
    other = tied.loss_and_gradient(recipe, {"names": (3, 4)}, WEIGHTS, completions=["names"])
    assert own.losses["names"] == pytest.approx(sum(expected["names"][:2]) / 2, rel=1e-5)
    assert other.losses["names"] > own.losses["names"]
    assert other.by_source != own.by_source
    with pytest.raises(ValueError, match=r"'names' at positions \[5\]; give some of 0 to 4 with a completion"):
        tied.losses(arithmetic(family, 0.4, 0.2), {"names": (3, 5)}, completions=["names"])
    with pytest.raises(ValueError, match="objective without completions 'sums'; known are names"):
        tied.losses(arithmetic(family, 0.4, 0.2), BATCH, completions=["sums"])


@pytest.mark.parametrize(
    ("batch", "weights", "message"),
    [
        ({"code": [0]}, {"code": 1.0}, "unknown objective 'code'; known are names, sums"),
        ({"names": [0, 20]}, {"names": 1.0}, r"objective 'names' at positions \[20\]; give some of 0 to 19"),
        ({"names": []}, {"names": 1.0}, r"objective 'names' at positions \[\]; give some of 0 to 19"),
        ({"names": [0]}, {"sums": 1.0}, "no weight for objective 'names'; given are sums"),
    ],
)
def test_what_cannot_be_read_is_named(
    tied: CoefficientGradients, batch: Mapping[str, Sequence[int]], weights: Mapping[str, float], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        tied.loss_and_gradient(arithmetic(tied.bank.family, 0.4, 0.2), batch, weights)


def test_overflowing_merge_fails_alone(tied: CoefficientGradients) -> None:
    """A merge that overflows fails, and the next is read as before."""
    sane, broken = arithmetic(tied.bank.family, 0.4, 0.2), arithmetic(tied.bank.family, 1e30, 1e30)
    expected = tied.losses(sane, BATCH)
    with pytest.raises(TrialFailed, match="the loss on a reference of objective 'sums' is nan"):
        tied.loss_and_gradient(broken, BATCH, WEIGHTS)
    assert tied.losses(sane, BATCH) == expected


def test_arguments_and_results_can_be_pickled(tied: CoefficientGradients, tasks: Mapping[str, TaskSpec]) -> None:
    given = (tied.bank.family, OPTIONS, tasks)
    assert pickle.loads(pickle.dumps(given)) == given
    result = tied.loss_and_gradient(arithmetic(tied.bank.family, 0.4, 0.2), BATCH, WEIGHTS)
    assert pickle.loads(pickle.dumps(result)) == result


@pytest.mark.slow
def test_memory_of_a_step(tmp_path: Path) -> None:
    """A step needs a merged model, its largest gradient, the activations and a tenth."""
    merge_family.make(
        tmp_path, hidden=256, intermediate_size=704, num_attention_heads=4, num_key_value_heads=4, vocab_size=8000
    )
    found = bench_gradients.measure_memory(tmp_path)
    assert found["activations"] < found["model"] / 2  # else a second model of gradients would go unnoticed
    assert 0.8 < found["ratio"] <= bench_gradients.MEMORY

"""The samples from which alignments are learned, and a model's activations for them."""

from __future__ import annotations

import json
from itertools import product
from statistics import median

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import AutoModelForCausalLM, AutoTokenizer

from workers.alignments.activations import Activations, _Recorder, activation_bytes, read_activations
from workers.alignments.fitting import fit_moments
from workers.alignments.pairs import AlignmentInputs
from workers.alignments.samples import MIN_SAMPLES, lack_of_samples, positions_of, prompts_of
from workers.tiny_family import family_dir


def test_a_tenth_of_the_samples_is_read_and_too_few_are_refused() -> None:
    assert positions_of({"math": 95, "text": 30}) == {"math": range(10), "text": range(3)}
    assert lack_of_samples({"math": 60, "text": 40}) is None
    lack = lack_of_samples({"math": 90})
    assert lack is not None
    assert f"10% of the search samples, here 9 of 90; they need at least {MIN_SAMPLES}: give 100" in lack


def test_activations_are_those_of_the_model_in_its_own_order(inputs: AlignmentInputs) -> None:
    prompts = prompts_of(inputs.family.base.directory, inputs.options, inputs.tasks, inputs.positions)
    assert len(prompts) == 12
    (expert,) = (model for model in inputs.family.models if model.alias == "text")
    model = AutoModelForCausalLM.from_pretrained(expert.directory, dtype=torch.float32)
    activations = read_activations(model, prompts)
    assert activations.before.shape[:2] == (6, sum(len(prompt) - 1 for prompt in prompts))
    shortest = min(range(12), key=lambda each: (len(prompts[each]), each))
    size = len(prompts[shortest]) - 1
    with torch.no_grad():
        states = model(torch.tensor([prompts[shortest]]), output_hidden_states=True).hidden_states
    # transformers states the last one after the final norm.
    for layer in range(5):
        assert torch.allclose(activations.before[layer, :size], states[layer][0, 1:], atol=1e-4)
        assert torch.allclose(activations.first[layer, 0], states[layer][0, 0], atol=1e-4)
    assert activations.first.shape == (6, 12, activations.before.shape[2])
    assert torch.equal(activations.after(2), activations.before[3])
    # Two of the texts are held out, whole.
    held_out = sum(len(prompts[index]) - 1 for index in (4, 9))
    assert int(activations.is_held_out.sum()) == held_out


def test_each_pass_frees_its_activations_before_the_next(
    inputs: AlignmentInputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are as many as those of all layers: gigabytes for models of billions of parameters."""
    monkeypatch.setattr("workers.alignments.activations.MAX_TOKENS", 64)
    prompts = prompts_of(inputs.family.base.directory, inputs.options, inputs.tasks, inputs.positions)
    model = AutoModelForCausalLM.from_pretrained(inputs.family.base.directory, dtype=torch.float32)
    taken: list[StorageWeakRef] = []
    take = _Recorder.take

    def watched(recorder: _Recorder) -> torch.Tensor:
        assert all(earlier.expired() for earlier in taken)
        found = take(recorder)
        taken.append(StorageWeakRef(found.untyped_storage()))
        return found

    monkeypatch.setattr(_Recorder, "take", watched)
    read_activations(model, prompts)
    assert len(taken) > 1


def test_bytes_of_activations_grow_with_texts_up_to_a_pass() -> None:
    """A pass has 16,384 tokens or one longer text; it records inputs of layers and the last output, and joins them."""
    config = {"hidden_size": 4096, "num_hidden_layers": 32, "intermediate_size": 14_336}
    of_token = 4 * 2 * 33 * 4096
    found = [
        activation_bytes(config, num_prompts=number, max_tokens=tokens)
        for number, tokens in ((2, 1000), (500, 2048), (3, 32_768))
    ]
    assert found == [2000 * of_token, 16_384 * of_token, 32_768 * of_token]
    wide = config | {"num_hidden_layers": 2}  # within a layer there are more than are recorded
    assert activation_bytes(wide, num_prompts=1, max_tokens=1) == 4 * (3 * 4096 + 4 * 14_336)


def shipped(skill: str, prompts: list[list[int]]) -> Activations:
    model = AutoModelForCausalLM.from_pretrained(family_dir() / "experts" / skill, dtype=torch.float32)
    return read_activations(model, prompts)


def test_alignments_bring_ordinary_first_tokens_closer() -> None:
    """They are fitted to the other tokens; in the shipped family first tokens are no outliers."""
    tokenizer = AutoTokenizer.from_pretrained(family_dir() / "base")
    skills = ("math", "text", "lookup")
    tasks = [(family_dir() / "tasks" / f"{skill}_search.jsonl").read_text().splitlines()[:30] for skill in skills]
    prompts = [tokenizer(json.loads(line)["prompt"]).input_ids for lines in tasks for line in lines]
    of = {skill: shipped(skill, prompts) for skill in skills}
    for each in of.values():
        ratio = each.first.norm(dim=-1).mean(dim=1) / each.before.norm(dim=-1).mean(dim=1)
        assert 0.8 < float(ratio.min()) < float(ratio.max()) < 1.8
        beyond = (each.first - each.before.mean(dim=1, keepdim=True)) / each.before.std(dim=1, keepdim=True)
        assert beyond.abs().max() < 4.5
    before, after = [], []
    for (first, second), layer, jump in product(product(skills, skills), range(8), (0, 1, 2)):
        x, y = of[first], of[second]
        if 1 <= layer + jump < 8 and (first, jump) != (second, 1):
            expected = y.first[layer + jump]
            aligned = fit_moments(x.after(layer), y.before[layer + jump])(x.first[layer + 1])
            before.append(float((x.first[layer + 1] - expected).norm() / expected.norm()))
            after.append(float((aligned - expected).norm() / expected.norm()))
    assert len(before) == 159
    assert median(after) < 0.3 < 0.36 < median(before)

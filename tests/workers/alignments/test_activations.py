"""The samples that alignments are learned from, and the activations of a model that reads them."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM

from workers.alignments.activations import read_activations
from workers.alignments.pairs import AlignmentInputs
from workers.alignments.samples import MIN_SAMPLES, lack_of_samples, positions_of, prompts_of


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
    assert torch.equal(activations.after(2), activations.before[3])
    # Two of the texts are held out, whole.
    held_out = sum(len(prompts[index]) - 1 for index in (4, 9))
    assert int(activations.is_held_out.sum()) == held_out

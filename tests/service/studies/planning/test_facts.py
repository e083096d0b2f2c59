"""Sizes of a family's models, computed by hand for tiny models."""

from __future__ import annotations

from pathlib import Path

from service.studies.planning.facts import facts_of
from tests.layouts import LAYOUTS, layout_family
from workers.models.family import resolve_model


def test_experts_not_chosen_for_a_token_are_idle(tmp_path: Path) -> None:
    """A token goes through 2 of a mixture's 6 experts; a pass over many tokens reads all of them."""
    model = layout_family(tmp_path, "qwen3_moe").models[0].directory
    facts = facts_of(resolve_model(model))
    of_expert = 3 * 32 * 72
    mixtures = 3 - len(LAYOUTS["qwen3_moe"]["mlp_only_layers"])
    assert facts.idle == mixtures * 4 * of_expert
    assert facts.active == facts.multiplied - facts.idle
    assert facts.deepened(6).idle == 2 * facts.idle


def test_other_models_have_no_idle_parameters(tmp_path: Path) -> None:
    """A token goes through all parameters of a dense model, also if its configuration names 0 experts."""
    for kind in ("llama", "granitemoehybrid"):
        model = layout_family(tmp_path / kind, kind).models[0].directory
        assert facts_of(resolve_model(model)).idle == 0

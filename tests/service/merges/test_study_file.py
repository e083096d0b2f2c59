"""Initial study files made from mergekit configurations."""

from __future__ import annotations

from typing import Any

import pytest

from search_spaces.errors import InvalidRecipe
from search_spaces.study.file import parse_study
from service.merges.study_file import study_from_mergekit

TASK = {"name": "task", "task": "gsm8k", "metric": "exact_match"}


def begun(document: Any) -> tuple[dict[str, Any], list[str]]:
    warnings: list[str] = []
    study = study_from_mergekit(document, name="mine", warn=warnings.append)
    search = parse_study({**study, "objectives": [TASK]}).search
    assert search.recipes[0].label == "mine"
    assert search.proposes
    return study, warnings


def test_models_and_merge_are_those_of_the_configuration() -> None:
    """Slices, bases of slices and the tokenizer's source get the study's names of the models."""
    slices = [
        {
            "sources": [{"model": "/m/base", "layer_range": [0, 2]}, {"model": "/m/math", "layer_range": [0, 2]}],
            "base_model": "/m/base",
            "parameters": {"t": 0.5},
        }
    ]
    document = {"merge_method": "slerp", "slices": slices, "tokenizer_source": "/m/math", "base_model": "/m/base"}
    study, warnings = begun(document)
    assert study["models"] == {"base": "/m/base", "experts": {"math": "/m/math"}}
    merge = study["search"]["recipes"][0]["recipe"]
    assert [source["model"] for source in merge["slices"][0]["sources"]] == ["base", "math"]
    assert (merge["slices"][0]["base_model"], merge["tokenizer_source"]) == ("base", "math")
    assert slices[0]["base_model"] == "/m/base", "the configuration is not changed"
    assert warnings == []


def test_the_first_model_is_the_base_if_none_is_named() -> None:
    """A linear merge without a base has its first model as the base, which is said."""
    study, warnings = begun({"merge_method": "linear", "models": [{"model": "a/base"}, {"model": "b/base"}]})
    assert study["models"] == {"base": "a/base", "experts": {"base-2": "b/base"}}
    assert any("names no base_model" in warning for warning in warnings)


def test_an_adapter_is_an_expert() -> None:
    """MODEL+LORA is an expert at the adapter's place, if it changes the base."""
    document = {"merge_method": "linear", "base_model": "a/base", "models": [{"model": "a/base+a/lora"}]}
    study, _ = begun(document)
    assert study["models"]["experts"] == {"lora": "a/lora"}
    assert study["search"]["recipes"][0]["recipe"]["models"] == [{"model": "lora"}]


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"format": "mergesearch-recipe/1"}, "has no merge_method"),
        ([], "has no merge_method"),
        ({"merge_method": "passthrough", "models": [{"model": "a"}]}, "names one model only"),
        (
            {"merge_method": "linear", "base_model": "a", "models": [{"model": "b+c"}]},
            r"b\+c: the adapter's model is not the base a",
        ),
        ({"merge_method": "linear", "models": [{"model": "a+b"}, {"model": "c"}]}, r"a\+b is a model with an adapter"),
    ],
)
def test_what_no_study_can_have_is_refused(document: Any, message: str) -> None:
    with pytest.raises(InvalidRecipe, match=message):
        study_from_mergekit(document, name="mine", warn=lambda _: None)

"""mergekit and we compute the same tensors from the same YAML; methods that we lack are refused by name."""

from __future__ import annotations

import copy
import datetime
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from search_spaces.errors import InvalidRecipe
from search_spaces.recipe import Recipe
from tests.workers.mergekit.masks import draw_our_masks, keys_of_task_vectors
from workers.export.checkpoint import export
from workers.mergekit.exporter import mergekit_config
from workers.mergekit.importer import to_recipe
from workers.mergekit.methods import MERGEKIT_METHODS
from workers.mergekit.reader import read_configuration, shown
from workers.merging.bank import Bank
from workers.merging.materialize import merged_tensors
from workers.types import Family


@pytest.fixture(scope="module")
def tied(tied_family: Family, tmp_path_factory: pytest.TempPathFactory) -> Bank:
    """Qwen2 sources in float32: three layers, tied embeddings, biases in attention."""
    return Bank(tied_family, cache=tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def untied(untied_family: Family, tmp_path_factory: pytest.TempPathFactory) -> Bank:
    """Llama sources in bfloat16: five layers and an untied output head."""
    return Bank(untied_family, cache=tmp_path_factory.mktemp("cache"))


def recipe_from(text: str, bank: Bank) -> Recipe:
    """The recipe of a YAML text in which BASE, MATH and TEXT stand for the bank's models."""
    directories = {model.directory: model.alias for model in bank.family.models}
    configuration = read_configuration(yaml.safe_load(filled(text, bank)))
    recipe = to_recipe(configuration, directories, fingerprints=bank.family.fingerprints, layout=bank.layout)
    return Recipe.from_json(json.loads(json.dumps(recipe.to_json())))


def filled(text: str, bank: Bank) -> str:
    for model in bank.family.models:
        text = text.replace(model.alias.upper(), model.directory)
    return text


def mergekits(text: str, bank: Bank, directory: Path, dtype: str) -> dict[str, torch.Tensor]:
    """Tensors by mergekit for the YAML text, computed in `dtype` and returned in float32."""
    from mergekit.config import MergeConfiguration
    from mergekit.merge import run_merge
    from mergekit.options import MergeOptions

    document = yaml.safe_load(filled(text, bank)) | {"dtype": dtype, "out_dtype": "float32"}
    options = MergeOptions(device="cpu", copy_tokenizer=False, write_model_card=False, quiet=True)
    run_merge(MergeConfiguration.model_validate(document), str(directory), options)
    return {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}


def compare(text: str, bank: Bank, directory: Path, *, dtype: str = "float32") -> None:
    theirs = mergekits(text, bank, directory, dtype)
    ours = dict(merged_tensors(recipe_from(text, bank), bank, torch.float32))
    assert theirs.keys() == ours.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(theirs[name], tensor, rtol=1e-6, atol=1e-6, msg=(name + ": {}").format)


EXPERTS = """
models:
  - model: MATH
    parameters: {weight: 0.6, density: 0.5}
  - model: TEXT
    parameters: {weight: 0.3, density: [0.3, 0.8]}
base_model: BASE
"""

PAIR = """
models:
  - model: MATH
    parameters: {weight: 0.7}
  - model: TEXT
    parameters: {weight: [0.1, 0.5, 1]}
"""

# Each with the model family it is for; those that compare magnitudes need float32: in bfloat16 many are equal, and
# mergekit cuts among equal ones in no defined order.
CONFIGURATIONS = {
    "linear": (
        "tied",
        """
        models:
          - model: MATH
            parameters: {weight: 0.3}
          - model: TEXT
            parameters: {weight: 0.9}
          - model: {model: {path: BASE}}
            parameters: {weight: 5e-1}
        merge_method: linear
        """,
    ),
    "linear, gradients and filters per model, a base that is one more model": (
        "untied",
        """
        models:
          - model: MATH
            parameters:
              weight:
                - {filter: self_attn, value: [0.1, 0.9, 0.2]}
                - {filter: lm_head, value: 0.8}
                - {filter: embed_tokens, value: 0.4}
                - value: 0.5
          - model: TEXT
            parameters: {weight: {filter: mlp, value: [1, 0.25]}}
        base_model: BASE
        merge_method: linear
        parameters: {weight: 0.2, int8_mask: true}
        """,
    ),
    "linear, weights that sum to one as they are": (
        "tied",
        """
        models:
          - {model: MATH, parameters: {weight: 1.4}}
          - {model: TEXT, parameters: {weight: -0.4}}
        parameters: {normalize: false}
        merge_method: linear
        """,
    ),
    "slerp of slices": (
        "untied",
        """
        slices:
          - sources:
              - {model: MATH, layer_range: [0, 5]}
              - {model: TEXT, layer_range: [0, 5]}
        merge_method: slerp
        base_model: MATH
        parameters:
          t:
            - filter: self_attn
              value: [0, 0.5, 0.3, 0.7, 1]
            - filter: mlp
              value: [1, 0.5, 0.7, 0.3, 0]
            - value: 0.5
        dtype: bfloat16
        """,
    ),
    "slerp, filters that divide components": (
        "tied",
        """
        models: [{model: MATH}]
        merge_method: slerp
        base_model: TEXT
        parameters:
          t:
            - {filter: post_attention_layernorm, value: 1}
            - {filter: input_layernorm, value: [0.2, 0.4]}
            - {filter: q_proj.bias, value: 0.9}
            - {filter: k_proj, value: [0.3, 0.3, 0.6]}
            - {filter: model.layers.1., value: 0.45}
            - {filter: lm_head, value: 0.7}
            - {filter: "*", value: 1e-1}
        """,
    ),
    "slerp, a base for each slice, shifted layers": (
        "untied",
        """
        slices:
          - sources: [{model: MATH, layer_range: [0, 2]}, {model: TEXT, layer_range: [1, 3]}]
            base_model: MATH
            parameters: {t: [0.1, 0.9]}
          - sources: [{model: MATH, layer_range: [2, 5]}, {model: TEXT, layer_range: [0, 3]}]
            base_model: TEXT
        parameters: {t: 0.35}
        merge_method: slerp
        """,
    ),
    "task_arithmetic": (
        "untied",
        """
        models:
          - {model: BASE}
          - {model: MATH, parameters: {weight: [0.2, 1.2]}}
          - {model: TEXT, parameters: {weight: {value: 0.4}}}
        base_model: BASE
        merge_method: task_arithmetic
        parameters: {lambda: [1, 0.5], density: 0.1}
        """,
    ),
    "task_arithmetic, divided by the weights; slices": (
        "tied",
        """
        slices:
          - sources:
              - {model: MATH, layer_range: [0, 1], parameters: {weight: 0.9}}
              - {model: BASE, layer_range: [0, 1]}
              - {model: TEXT, layer_range: [0, 1], parameters: {weight: 0.3}}
          - sources:
              - {model: TEXT, layer_range: [1, 2]}
              - {model: BASE, layer_range: [1, 2], parameters: {weight: 3}}
            parameters: {normalize: false}
          - sources: [{model: BASE, layer_range: [0, 1]}]
        base_model: BASE
        merge_method: task_arithmetic
        parameters: {normalize: true, weight: [0.2, 0.7], rescale: true}
        """,
    ),
    "ties": ("tied", EXPERTS + "merge_method: ties"),
    "ties, in the only module, whose parameters come first": (
        "tied",
        """
        modules:
          default:
            models:
              - {model: MATH, parameters: {density: 0.5}}
              - {model: TEXT}
            parameters: {weight: {filter: mlp, value: 0.3}, density: 0.7}
        base_model: BASE
        merge_method: ties
        int8_mask: true
        parameters: {weight: [0.9, 0.3], density: 0.1, normalize: 1.0}
        """,
    ),
    "ties, not divided, by component": (
        "tied",
        EXPERTS
        + """
merge_method: ties
parameters:
  normalize: [false, false, true]
  lambda: [{filter: mlp, value: [0.5, 1.5]}, {filter: attn, value: 0.7}]
""",
    ),
    "dare_linear": ("tied", EXPERTS + "merge_method: dare_linear\nparameters: {lambda: 0.8}"),
    "dare_linear, divided": ("tied", EXPERTS + "merge_method: dare_linear\nparameters: {normalize: true}"),
    "dare_ties": ("tied", EXPERTS + "merge_method: dare_ties"),
    "dare_ties from bfloat16": ("untied", EXPERTS + "merge_method: dare_ties\nparameters: {rescale: true}"),
    "della": ("tied", EXPERTS + "merge_method: della\nparameters: {epsilon: 0.1}"),
    "della_linear": ("tied", EXPERTS + "merge_method: della_linear"),
    "della, whole": ("tied", EXPERTS.replace("0.5}", "1}") + "merge_method: della"),
    "breadcrumbs": ("tied", EXPERTS + "merge_method: breadcrumbs\nparameters: {gamma: [0.0, 0.1], lambda: 1.5}"),
    "breadcrumbs, whole": ("tied", EXPERTS.replace("0.5}", "1.5}") + "merge_method: breadcrumbs"),
    "breadcrumbs_ties": ("tied", EXPERTS + "merge_method: breadcrumbs_ties\nparameters: {normalize: true}"),
    "model_stock": ("untied", EXPERTS.replace("parameters", "#") + "merge_method: model_stock"),
    "model_stock of rows": (
        "tied",
        EXPERTS.replace("parameters", "#") + "merge_method: model_stock\nparameters: {filter_wise: true}",
    ),
    "nuslerp": ("untied", PAIR + "merge_method: nuslerp"),
    "nuslerp of task vectors": ("tied", PAIR + "base_model: BASE\nmerge_method: nuslerp"),
    "nuslerp of rows": ("tied", PAIR + "merge_method: nuslerp\nparameters: {nuslerp_flatten: false}"),
    "nuslerp of columns": (
        "untied",
        PAIR + "merge_method: nuslerp\nparameters: {nuslerp_flatten: false, nuslerp_row_wise: true}",
    ),
    "multislerp": ("untied", PAIR + "merge_method: multislerp"),
    "multislerp of task vectors": ("tied", PAIR + "base_model: BASE\nmerge_method: multislerp"),
    "karcher": ("untied", "models: [{model: MATH}, {model: TEXT}, {model: BASE}]\nmerge_method: karcher"),
    "nearswap": (
        "tied",
        "models: [{model: MATH}, {model: BASE}]\nbase_model: MATH\nmerge_method: nearswap\nparameters: {t: [0.01, 1]}",
    ),
    "arcee_fusion": ("tied", "models: [{model: MATH}]\nbase_model: TEXT\nmerge_method: arcee_fusion"),
    "ram": ("tied", "models: [{model: MATH}, {model: TEXT}]\nbase_model: BASE\nmerge_method: ram"),
    "sce": (
        "tied",
        """
        models: [{model: BASE}, {model: MATH}, {model: TEXT}]
        merge_method: sce
        base_model: BASE
        parameters: {select_topk: 0.3}
        dtype: float32
        """,
    ),
    "ramplus_tl": (
        "untied",
        """
        models: [{model: MATH}, {model: TEXT}]
        base_model: BASE
        merge_method: ramplus_tl
        parameters: {epsilon: 0.03, r: 0.5, alpha: [0.1, 0.9]}
        """,
    ),
    "linear, weights as they are": ("tied", PAIR + "merge_method: linear\nparameters: {normalize: false}"),
    "slerp, beyond the ends": (
        "tied",
        "models: [{model: MATH}]\nmerge_method: slerp\nbase_model: TEXT\nparameters: {t: [-0.3, 1.2]}",
    ),
    "ties, rescaled": ("tied", EXPERTS + "merge_method: ties\nparameters: {rescale: true}"),
    "ties, nothing kept of one": ("tied", EXPERTS.replace("0.5}", "0.0}") + "merge_method: ties"),
    "breadcrumbs, rescaled": ("tied", EXPERTS + "merge_method: breadcrumbs\nparameters: {rescale: true}"),
    "breadcrumbs_ties, rescaled": ("tied", EXPERTS + "merge_method: breadcrumbs_ties\nparameters: {rescale: true}"),
    "breadcrumbs, more kept and cut than there is": (
        "tied",
        EXPERTS.replace("0.5}", "0.9}") + "merge_method: breadcrumbs\nparameters: {gamma: 0.3}",
    ),
    "dare_linear, not rescaled": ("tied", EXPERTS + "merge_method: dare_linear\nparameters: {rescale: false}"),
    "dare_linear, divided, nothing kept of one": (
        "tied",
        EXPERTS.replace("0.5}", "0.0}") + "merge_method: dare_linear\nparameters: {normalize: true}",
    ),
    "dare_ties, not rescaled": ("tied", EXPERTS + "merge_method: dare_ties\nparameters: {rescale: false}"),
    "della, not rescaled": ("tied", EXPERTS + "merge_method: della\nparameters: {rescale: false}"),
    "della_linear, not rescaled": ("tied", EXPERTS + "merge_method: della_linear\nparameters: {rescale: false}"),
    "nuslerp of rows of task vectors": (
        "tied",
        PAIR + "base_model: BASE\nmerge_method: nuslerp\nparameters: {nuslerp_flatten: false}",
    ),
    "nuslerp of columns of task vectors": (
        "tied",
        PAIR + "base_model: BASE\nmerge_method: nuslerp\nparameters: {nuslerp_flatten: no, nuslerp_row_wise: 'on'}",
    ),
    "multislerp, weights as they are": (
        "untied",
        PAIR + "merge_method: multislerp\nparameters: {normalize_weights: false, eps: 1e-6}",
    ),
    "karcher to convergence": (
        "untied",
        "models: [{model: MATH}, {model: TEXT}, {model: BASE}]\nmerge_method: karcher\n"
        "parameters: {max_iter: 30, tol: 1e-9}",
    ),
    "ties across layers": (
        "tied",
        """
        slices:
          - sources:
              - {model: BASE, layer_range: [0, 2]}
              - {model: MATH, layer_range: [1, 3], parameters: {weight: 0.6, density: 0.5}}
              - {model: TEXT, layer_range: [0, 2], parameters: {weight: 0.3, density: 0.7}}
          - sources:
              - {model: BASE, layer_range: [2, 3]}
              - {model: MATH, layer_range: [0, 1], parameters: {weight: 0.6, density: 0.5}}
              - {model: TEXT, layer_range: [0, 1], parameters: {weight: 0.3, density: 0.7}}
        base_model: BASE
        merge_method: ties
        """,
    ),
    "task_arithmetic, a base for each slice": (
        "untied",
        """
        slices:
          - sources: [{model: BASE, layer_range: [0, 2]}, {model: MATH, layer_range: [0, 2]}]
          - sources: [{model: TEXT, layer_range: [2, 5]}, {model: MATH, layer_range: [2, 5]}]
            base_model: TEXT
        base_model: BASE
        merge_method: task_arithmetic
        parameters: {weight: 0.4}
        """,
    ),
    "linear, empty parameters": (
        "tied",
        """
        models:
          - {model: MATH, parameters: }
          - {model: TEXT, parameters: {}}
        merge_method: linear
        parameters: {weight: [{filter: mlp, value: [0.5]}, {value: 0.7}], normalize: []}
        """,
    ),
    "passthrough, layers of two models, some again": (
        "untied",
        """
        slices:
          - sources: [{model: MATH, layer_range: [0, 4]}]
          - sources: [{model: TEXT, layer_range: [2, 5]}]
          - sources: [{model: TEXT, layer_range: [1, 2]}]
        merge_method: passthrough
        """,
    ),
    "passthrough, new layers that do nothing at first": (
        "untied",
        """
        slices:
          - sources: [{model: MATH, layer_range: [0, 3]}]
          - sources:
              - model: MATH
                layer_range: [2, 3]
                parameters:
                  scale:
                    - {filter: o_proj, value: 0.0}
                    - {filter: down_proj, value: 0.0}
                    - value: 1.0
          - sources: [{model: MATH, layer_range: [3, 5]}]
        merge_method: passthrough
        """,
    ),
}


# Summing norms and dot products in float32, as it does, mergekit is off by more than 1e-6.
IN_FLOAT64 = {"multislerp", "multislerp, weights as they are"}


@pytest.fixture
def our_masks(tied: Bank, untied: Bank, monkeypatch: pytest.MonkeyPatch) -> None:
    keys: dict[bytes, int] = {}
    for bank in (tied, untied):
        base = {name: bank.get("base", name) for name in bank.layout.places}
        for expert in bank.family.experts:
            tensors = {name: bank.get(expert.alias, name) for name in base}
            keys |= keys_of_task_vectors(base, tensors, expert.fingerprint)
    draw_our_masks(monkeypatch, keys)


@pytest.mark.usefixtures("our_masks")
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_mergekit_gives_the_same_tensors(tied: Bank, untied: Bank, tmp_path: Path, name: str) -> None:
    family, text = CONFIGURATIONS[name]
    dtype = "float64" if name in IN_FLOAT64 else "float32"
    compare(text, {"tied": tied, "untied": untied}[family], tmp_path, dtype=dtype)


def test_every_method_of_mergekit_is_merged() -> None:
    from mergekit.merge_methods.registry import registered_methods

    assert {method.spec.name for method in registered_methods()} == set(MERGEKIT_METHODS)
    assert {yaml.safe_load(text)["merge_method"] for _, text in CONFIGURATIONS.values()} == set(MERGEKIT_METHODS)


def test_a_frankenmerge_is_a_model_of_its_own_depth(untied: Bank, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    _, text = CONFIGURATIONS["passthrough, layers of two models, some again"]
    out = export(recipe_from(text, untied), untied, tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    assert model.config.num_hidden_layers == len(model.model.layers) == 8
    assert torch.equal(
        model.model.layers[4].mlp.up_proj.weight, untied.get("text", "model.layers.2.mlp.up_proj.weight").float()
    )
    assert torch.isfinite(model(torch.arange(5)[None]).logits).all()


def test_what_we_write_for_mergekit_is_read_again(tied: Bank) -> None:
    for name in ("linear", "slerp, a base for each slice, shifted layers", "task_arithmetic"):
        _, text = CONFIGURATIONS[name]
        recipe = recipe_from(
            text.replace("[0, 2]", "[0, 1]").replace("[1, 3]", "[1, 2]").replace("[2, 5]", "[0, 3]"), tied
        )
        document = mergekit_config(recipe, tied.layout, {m.alias: m.directory for m in tied.family.models})
        again = recipe_from(yaml.safe_dump(document), tied)
        ours = dict(merged_tensors(recipe, tied, torch.float32))
        for tensor, found in merged_tensors(again, tied, torch.float32):
            torch.testing.assert_close(found, ours[tensor], rtol=0, atol=2e-6)


def test_component_filter_stays_whole(untied: Bank) -> None:
    """A filter that matches whole components makes no single tensors."""
    assert not recipe_from(CONFIGURATIONS["slerp of slices"][1], untied).tensors
    found = recipe_from(
        CONFIGURATIONS["linear, gradients and filters per model, a base that is one more model"][1], untied
    )
    assert list(found.tensors) in (["lm_head.weight"], ["model.norm.weight"])


# Refusals.

GOOD: dict[str, Any] = {
    "slices": [
        {
            "sources": [
                {"model": "BASE", "layer_range": [0, 3]},
                {"model": "MATH", "layer_range": [0, 3], "parameters": {"weight": 0.5}},
                {"model": "TEXT", "layer_range": [0, 3], "parameters": {"weight": [0.1, 0.5]}},
            ],
        }
    ],
    "merge_method": "ties",
    "base_model": "BASE",
    "parameters": {"density": 0.5},
    "dtype": "float32",
}

FIRST = "slices.0.sources.1"

REFUSALS: list[tuple[Mapping[str, Any], str]] = [
    ({"modules": {"text": {}}}, "modules: text is not supported: models of several modules, which read images or "),
    ({"modules": {"default": {"models": []}}}, "expected exactly one of models, slices and modules"),
    ({"slices": None, "modules": {"default": {}}}, "modules.default: expected exactly one of models and slices"),
    ({"slices": None, "modules": {"default": {"models": 1}}}, "modules.default.models: 1 is not accepted; give a list"),
    ({"chat_template": 5}, "chat_template: 5 is not accepted; give auto, a name, a file or a template"),
    (
        {"tokenizer": {"tokens": {"a": {"force": True}}}},
        "tokenizer.tokens.a.source: is missing; give a model, kind: zero",
    ),
    ({"tokenizer": {"tokens": {"a": None}}}, "tokenizer.tokens.a.source: is missing; give a model, kind: zero"),
    ({"tokenizer": {"source": 5}}, "tokenizer.source: 5 is not a model; "),
    ({"tokenizer": {"tokens": [1]}}, "tokenizer.tokens: [1] is not accepted; give a mapping (token: source)"),
    (
        {"tokenizer": {"tokens": {"a": {"source": {"kind": "model_token", "model": "MATH"}}}}},
        "tokenizer.tokens.a.source: expected either token, a text, or token_id, a whole number",
    ),
    ({"tokenizer": {"pad_to_multiple_of": 1.5}}, "tokenizer.pad_to_multiple_of: 1.5 is not accepted; give a whole"),
    ({"tokenizer": {"source": "base"}, "tokenizer_source": "union"}, "tokenizer: tokenizer_source is given too; "),
    ({"merge_method": "tie"}, "merge_method: 'tie' is not supported; did you mean \"ties\"? known: passthrough, "),
    ({"merge_method": None}, "merge_method: nothing is not supported; known: passthrough, linear, "),
    ({"models": [{"model": "MATH"}]}, "expected exactly one of models and slices"),
    ({"slices": None}, "slices: nothing is not accepted; give a list with at least one entry"),
    ({"slices": [5]}, "slices.0: 5 is not accepted; give a mapping with sources, base_model, parameters"),
    ({"out_dtype": 16}, "out_dtype: 16 is not supported; "),
    ({"base_model": 7}, "base_model: 7 is not a model; give a directory or the id of a hub model"),
    ({"base_model": None}, "base_model: is missing; ties needs it"),
    ({"base_model": "OTHER"}, "base_model: OTHER is not among the sources of slices.0; add it, with its layer_range"),
    ({f"{FIRST}.model": "MATH+"}, f"{FIRST}.model: MATH+ is not a model; give MODEL+LORA, or a name without +"),
    (
        {f"{FIRST}.model": {"model": "MATH", "lora": 5}},
        f"{FIRST}.model.lora: 5 is not a model; give a directory or the ",
    ),
    ({f"{FIRST}.model": {"path": "MATH", "revision": 1e3}}, f"{FIRST}.model.revision: 1000.0 is not a branch, tag or "),
    ({f"{FIRST}.model": "BASE"}, f"{FIRST}.model: BASE is listed twice; a model is merged once"),
    (
        {f"slices.0.sources.{i}.layer_range": [0, 9] for i in range(3)},
        f"{FIRST}.layer_range: ends at 9; MATH has 3 layers",
    ),
    ({f"{FIRST}.layer_range": [0, 2]}, "slices.0: its sources have 2 and 3 layers; their numbers must agree"),
    (
        {f"{FIRST}.layer_range": [2, 1]},
        f"{FIRST}.layer_range: [2, 1] is not a range of layers; give [START, END] from 0",
    ),
    (
        {f"slices.0.sources.{i}.layer_range": [1, 1] for i in range(3)},
        "slices: there is no layer in any layer_range; END is not included",
    ),
    ({f"{FIRST}.layer_range": [None, True]}, f"{FIRST}.layer_range: [null, true] is not a range of layers; "),
    ({f"{FIRST}.layer_range": {"to": None}}, f"{FIRST}.layer_range: {{'to': null}} is not a range of layers; "),
    ({f"{FIRST}.layer_range": None}, f"{FIRST}.layer_range: nothing is not a range of layers; "),
    (
        {f"{FIRST}.parameters": {}},
        f"{FIRST}.parameters.weight: is missing (for model.embed_tokens.weight); ties needs it",
    ),
    (
        {f"{FIRST}.parameters.weight": "much"},
        f"{FIRST}.parameters.weight: 'much' is not accepted; give a number, or a ",
    ),
    ({f"{FIRST}.parameters.weight": [1, None]}, f"{FIRST}.parameters.weight.1: nothing is not accepted; give a number"),
    ({"parameters.density": 2e-7}, "slices.0: ties.density is 0; give a number in [1e-06, 1]"),
    ({"parameters.density": float("nan")}, "parameters.density: .nan is not accepted; give a number"),
    ({"parameters.normalize": "maybe"}, "parameters.normalize: 'maybe' is not accepted; give true or false"),
    (
        {"parameters.density": {"value": 1, "filter": 3}},
        "parameters.density.filter: 3 is not accepted; give a part of ",
    ),
    ({"parameters": [1]}, "parameters: [1] is not accepted; give a mapping (name: value)"),
]


def changed(document: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    found = copy.deepcopy(dict(document))
    for place, value in changes.items():
        *parents, last = place.split(".")
        node: Any = found
        for part in parents:
            node = node[int(part)] if part.isdigit() else node.setdefault(part, {})
        node[last] = value
    return found


def refusal(document: Mapping[str, Any], bank: Bank) -> str:
    models = {"BASE": "base", "MATH": "math", "TEXT": "text", "OTHER": "text"}
    with pytest.raises(InvalidRecipe) as caught:
        to_recipe(read_configuration(document), models, fingerprints=bank.family.fingerprints, layout=bank.layout)
    return str(caught.value)


@pytest.mark.parametrize(("changes", "message"), REFUSALS, ids=[message.split(";")[0] for _, message in REFUSALS])
def test_what_is_not_merged_is_refused_with_its_place(tied: Bank, changes: Mapping[str, Any], message: str) -> None:
    found = refusal(changed(GOOD, changes), tied).splitlines()
    assert any(line.startswith(message) for line in found), found


METHOD_REFUSALS = [
    ("slerp", {"t": 0.5}, ["MATH", "TEXT"], "models: slerp has 3 sources; it takes 2"),
    ("slerp", {}, ["MATH"], "parameters.t: is missing (for model.embed_tokens.weight); slerp needs it"),
    ("passthrough", {}, ["MATH"], "models: passthrough has 2 sources; it takes 1"),
    ("linear", {"weight": 0}, ["MATH"], "models: linear: weights (0.0, 0.0) sum to zero; they must not, as they are "),
    ("karcher", {"max_iter": 1.5}, ["MATH", "TEXT"], "models: karcher.max_iter is 1.5; give a whole number in "),
    (
        "breadcrumbs",
        {"weight": 1, "density": 0.5, "gamma": 2},
        ["MATH"],
        "models: breadcrumbs.gamma is 2; give a number in [0, 1]",
    ),
    ("della", {"weight": 1, "density": 0.9}, ["MATH"], "models: della: density 0.9 and epsilon 0.15: "),
    ("model_stock", {}, ["MATH"], "models: model_stock has 1 sources; it takes at least 2"),
]


@pytest.mark.parametrize(("method", "parameters", "models", "message"), METHOD_REFUSALS)
def test_what_a_method_does_not_take_is_refused(
    tied: Bank, method: str, parameters: dict[str, Any], models: list[str], message: str
) -> None:
    listed = [{"model": model} for model in models]
    document = {"merge_method": method, "models": listed, "base_model": "BASE", "parameters": parameters}
    assert refusal(document, tied).startswith(message)


# What mergekit passes over.

WARNINGS: list[tuple[Mapping[str, Any], str]] = [
    (
        {"merge_methods": "ties"},
        "merge_methods: 'ties' has no effect: unknown key; did you mean \"merge_method\"? known ",
    ),
    ({"normalize": True}, "normalize: true has no effect: a parameter is read under parameters only"),
    ({"out_path": "out"}, "out_path: 'out' has no effect: the result's directory is given by --out"),
    ({"experts": [1]}, "experts: [1] has no effect: mergekit-moe reads it"),
    ({"slices.0.residual_weight": 0.5}, "slices.0.residual_weight: 0.5 has no effect: mergekit accepts it and never "),
    ({"dtype": "float64"}, "dtype: float64 is not kept: merges are computed and written in float32"),
    ({f"{FIRST}.parameters.foo": 1}, f"{FIRST}.parameters.foo: 1 has no effect: ties takes no such parameter; it tak"),
    (
        {"parameters.denisty": 1},
        'parameters.denisty: 1 has no effect: ties takes no such parameter; did you mean "density"? it takes ',
    ),
    ({f"{FIRST}.parameters.lambda": 1}, f"{FIRST}.parameters.lambda: 1 has no effect: ties has one lambda for all mod"),
    ({f"{FIRST}.revision": "v1"}, f"{FIRST}.revision: 'v1' has no effect: write the revision with the model's name, "),
    (
        {"parameters.density": [{"filter": "self_atn", "value": 1}]},
        "parameters.density.0.filter: 'self_atn' has no effect: it is in no tensor's name; did you mean \"self_attn\"? "
        "a filter is a part of one: input_layernorm, mlp, post_attention_layernorm, self_attn, "
        "model.embed_tokens.weight, model.norm.weight",
    ),
    (
        {"parameters.density": {"value": 1, "layers": [0]}},
        "parameters.density.layers: [0] has no effect: unknown key; known keys: filter, value",
    ),
    (
        {"slices.0.sources.0.parameters": {"weight": 1}},
        "slices.0.sources.0.parameters.weight: 1 has no effect: BASE is the base, and weight is read only for the ",
    ),
]


@pytest.mark.parametrize(("changes", "message"), WARNINGS, ids=[message.split(":")[0] for _, message in WARNINGS])
def test_ignored_options_give_one_warning(tied: Bank, changes: Mapping[str, Any], message: str) -> None:
    """An option that mergekit ignores gives one warning with its place and value."""
    warnings: list[str] = []
    models = {"BASE": "base", "MATH": "math", "TEXT": "text"}
    recipes = [
        to_recipe(
            read_configuration(document, warn=warnings.append),
            models,
            fingerprints=tied.family.fingerprints,
            layout=tied.layout,
            warn=warnings.append,
        )
        for document in (GOOD, changed(GOOD, changes))
    ]
    assert len(warnings) == 1
    assert warnings[0].startswith(message)
    if "density" not in changes.get("parameters", {}) and "parameters.density" not in changes:
        assert recipes[0] == recipes[1]


def test_models_are_named_in_one_way(tied: Bank) -> None:
    """As text, or part by part."""
    named: dict[Any, str] = {
        "a/b": "a/b",
        "a/b@v1+c": "a/b@v1+c",
        ("path", "a/b"): "a/b",
        ("path", "a/b", "revision", "v1"): "a/b@v1",
        ("path", "a/b", "revision", None): "a/b",
        ("model", "a/b", "lora", "c/d@v2"): "a/b+c/d@v2",
    }
    for written, expected in named.items():
        entry = written if isinstance(written, str) else dict(zip(written[::2], written[1::2], strict=True))
        for model in (entry, {"model": entry}) if isinstance(entry, str) or "path" in entry else (entry,):
            document = {"merge_method": "linear", "models": [{"model": model}]}
            assert read_configuration(document).slices[0].inputs[0].model == expected
    both = {"model": {"path": "a", "revision": "x"}, "lora": {"path": "b", "revision": "y"}}
    assert read_configuration({"merge_method": "linear", "models": [{"model": both}]}).models == ("a@x+b@y",)


@pytest.mark.parametrize(
    ("tokenizer", "expected"),
    [({}, "union"), ({"source": "base"}, "base"), ({"source": {"path": "MATH"}}, "MATH"), (None, None)],
)
def test_a_tokenizer_is_the_union_unless_it_says_more(tokenizer: Any, expected: str | None) -> None:
    assert read_configuration({**GOOD, "tokenizer": tokenizer}).tokenizer_source == expected


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (True, "true"),
        (None, "nothing"),
        ("yes", "'yes'"),
        (float("inf"), ".inf"),
        (float("-inf"), "-.inf"),
        (datetime.date(2024, 1, 31), "2024-01-31"),
        (datetime.datetime(2024, 1, 31, 5), "2024-01-31 05:00:00"),
        ([None, {"a": [False, 1.5]}], "[null, {'a': [false, 1.5]}]"),
    ],
)
def test_values_are_shown_as_the_file_has_them(value: Any, text: str) -> None:
    assert shown(value) == text
    assert value is None or yaml.safe_load(text) == value


def test_a_tokens_number_may_be_text() -> None:
    source = {"kind": "model_token", "model": "MATH", "token_id": "70"}
    found = read_configuration({**GOOD, "tokenizer": {"source": "base", "tokens": {"<a>": {"source": source}}}})
    assert found.tokens["<a>"].id == 70


def test_everything_wrong_is_reported_at_once(tied: Bank) -> None:
    both = changed(GOOD, {"dtype": "int8", "parameters.density": "x", f"{FIRST}.model": "a+"})
    assert len(refusal(both, tied).splitlines()) == 3


@pytest.mark.parametrize(
    "document", [None, 3, [], "text", {}, {"merge_method": {}}, {"merge_method": "ties", "models": {}}]
)
def test_what_is_no_configuration_has_a_message(document: Any) -> None:
    with pytest.raises(InvalidRecipe, match=r"\w"):
        read_configuration(document)

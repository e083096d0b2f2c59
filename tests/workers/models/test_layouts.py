"""Every layout of `tests.layouts`, from files to an export: places, merges, and transformers' model of the result."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from search_spaces.errors import InvalidRecipe
from search_spaces.recipe import LayerRecipe, Merge, Recipe, Source
from tests.layouts import LAYOUTS, layout_family
from tests.workers.recipes import arithmetic, slerp
from workers.engines.transformers.merged_models import merged_model
from workers.errors import InvalidModel
from workers.export.checkpoint import export
from workers.merging.bank import Bank
from workers.merging.materialize import merged_tensors
from workers.models.checkpoints import BY_CONFIG
from workers.models.family import open_family, resolve_family
from workers.types import Family


@dataclass(frozen=True)
class Made:
    family: Family
    bank: Bank


@pytest.fixture(scope="module", params=LAYOUTS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    directory = tmp_path_factory.mktemp(request.param)
    family = layout_family(directory, request.param)
    return Made(family, Bank(family, cache=directory / "cache"))


def transformers_model(directory: str | Path) -> Any:
    """The model in a folder, after a check that the folder has exactly the tensors needed."""
    from transformers import AutoModelForCausalLM

    model, found = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, output_loading_info=True)
    assert not any(found.values()), found
    return model


def merged(family: Family, out: Path) -> dict[str, torch.Tensor]:
    """Exported tensors of a merge of one expert; with several, results would depend on their order."""
    bank = Bank(family, cache=out.parent / "cache")
    exported = export(arithmetic(family, 0.4, 0.0), bank, out)
    tensors: dict[str, torch.Tensor] = load_file(exported / "model.safetensors")
    return tensors


def layers_from(family: Family, *layers: tuple[str, int]) -> Recipe:
    """A frankenmerge, with (model, layer) for each layer; all else is the base's."""
    merges = [Merge("passthrough", (Source(model, layer),)) for model, layer in layers]
    whole = Merge("passthrough", (Source(family.base.alias),))
    return Recipe(family.fingerprints, family.base.alias, tuple(LayerRecipe(m, m, m) for m in merges), whole, whole)


def test_layers_in_another_order_and_number_make_a_model(made: Made, tmp_path: Path) -> None:
    layers = (("math", 0), ("math", 1), ("text", 1), ("base", 2), ("text", 0))
    model = transformers_model(export(layers_from(made.family, *layers), made.bank, tmp_path / "out"))
    assert len(model.base_model.get_submodule(made.bank.layout.layer_prefix.split(".", 1)[-1].rstrip("."))) == 5


def open_family_again(family: Family, root: Path) -> Family:
    return open_family(family.base.directory, {m.alias: m.directory for m in family.experts}, cache=root / "cache")


def by_class(model: Any) -> dict[str, str]:
    """The component of every parameter by the classes of its modules, which `layout` does not use."""
    modules = dict(model.named_modules())
    (layers,) = (f"{name}." for name, module in modules.items() if isinstance(module, torch.nn.ModuleList))
    found = {}
    for name, _ in model.named_parameters():
        ends = [i for i, character in enumerate(name) if character == "."]
        holders = [modules[name[:end]] for end in reversed(ends)]
        if not name.startswith(layers):
            found[name] = "embedding" if isinstance(holders[0], torch.nn.Embedding) else "head"
        elif "Norm" in type(holders[0]).__name__:
            found[name] = "norm"
        else:
            mixes = any(re.search("Attention|Mamba", type(module).__name__) for module in holders)
            found[name] = "attention" if mixes else "mlp"
    return found


def in_memory(name: str) -> str:
    """The name that a stored tensor has in transformers' model, where all experts are one tensor."""
    name = name.replace("block_sparse_moe", "mlp").replace("embed_out", "lm_head")
    name = re.sub(r"experts\.\d+\.(?:w1|w3|gate_proj|up_proj)\.weight", "experts.gate_up_proj", name)
    return re.sub(r"experts\.\d+\.(?:w2|down_proj)\.weight", "experts.down_proj", name)


def test_places_are_those_of_the_modules(made: Made) -> None:
    found = made.bank.layout
    model = transformers_model(made.family.base.directory)
    expected = by_class(model)
    assert {in_memory(name) for name in found.places} == expected.keys()
    assert {name: place.component for name, place in found.places.items()} == {
        name: expected[in_memory(name)] for name in found.places
    }
    assert found.num_layers == 3
    for name, place in found.places.items():
        number = re.search(r"\.(\d+)\.", name)
        assert place.layer == (None if number is None else int(number[1]))
        assert found.name(place.suffix, place.layer) == name
    assert found.is_tied == (model.get_output_embeddings().weight is model.get_input_embeddings().weight)


def test_exports_are_whole_models_with_the_tensors_of_the_merge(made: Made, tmp_path: Path) -> None:
    recipe = slerp(made.family, 0.3)
    directory = export(recipe, made.bank, tmp_path / "export")
    merged = dict(merged_tensors(recipe, made.bank, torch.float32))
    stored = load_file(directory / "model.safetensors")
    assert stored.keys() == merged.keys()
    assert all(torch.equal(stored[name], tensor) for name, tensor in merged.items())
    model = transformers_model(directory)
    model.save_pretrained(tmp_path / "again")
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert again.keys() == stored.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in stored.items())


def test_merged_tensors_are_merged_models(made: Made) -> None:
    """Merged tensors are the merge of the models that transformers builds of them."""
    base, math, text = (transformers_model(model.directory).state_dict() for model in made.family.models)
    merged = merged_model(arithmetic(made.family, 0.4, 0.9), made.bank, dtype="float32").state_dict()
    assert merged.keys() == base.keys()
    for name, tensor in merged.items():
        expected = base[name] + 0.4 * (math[name] - base[name]) + 0.9 * (text[name] - base[name])
        torch.testing.assert_close(tensor, expected, rtol=0, atol=1e-5, msg=name)


@pytest.mark.parametrize("model_type", ["gpt2", "gpt_neox"])
def test_masks_and_tied_heads_that_old_files_hold_are_left_out(tmp_path: Path, model_type: str) -> None:
    family = layout_family(tmp_path, model_type, tie_word_embeddings=True)
    plain = merged(family, tmp_path / "plain")
    prefix, attention, embedding, head = {
        "gpt2": ("transformer.h.", "attn", "transformer.wte.weight", "lm_head.weight"),
        "gpt_neox": ("gpt_neox.layers.", "attention", "gpt_neox.embed_in.weight", "embed_out.weight"),
    }[model_type]
    for model in family.models:
        file = Path(model.directory) / "model.safetensors"
        found = {name: tensor.clone() for name, tensor in load_file(file).items()}  # its file is written over
        found[head] = found[embedding].clone()
        for layer in range(3):
            where = f"{prefix}{layer}.{attention}"
            found[f"{where}.bias"] = torch.ones(8, 8).tril()[None, None].to(torch.bool)
            found[f"{where}.masked_bias"] = torch.tensor(-1e4)
            found[f"{where}.rotary_emb.inv_freq"] = torch.ones(4)
        save_file(found, file)
    found = merged(open_family_again(family, tmp_path), tmp_path / "old")
    assert found.keys() == plain.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in plain.items())


def test_names_without_the_prefix_of_the_whole_model_are_kept(tmp_path: Path) -> None:
    family = layout_family(tmp_path, "gpt2")
    plain = merged(family, tmp_path / "plain")
    for model in family.models:  # as the hub's gpt2 has them
        file = Path(model.directory) / "model.safetensors"
        save_file({name.removeprefix("transformer."): t.clone() for name, t in load_file(file).items()}, file)
    found = merged(open_family_again(family, tmp_path), tmp_path / "bare")
    assert {f"transformer.{name}" for name in found} == plain.keys()
    assert all(torch.equal(tensor, plain[f"transformer.{name}"]) for name, tensor in found.items())
    transformers_model(tmp_path / "bare")


def test_fields_that_a_layout_names_in_its_own_way_are_compared(tmp_path: Path) -> None:
    family = layout_family(tmp_path, "gpt2")
    for alias, own, value in (("math", "n_head", 8), ("text", "n_layer", 4)):
        file = tmp_path / alias / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {own: value}))
    with pytest.raises(InvalidModel) as caught:
        resolve_family(family.base.directory, {model.alias: model.directory for model in family.experts})
    assert {problem.partition(": ")[2] for problem in caught.value.problems} == {
        f"{tmp_path}/math: num_attention_heads is 8; the base has 4",
        f"{tmp_path}/text: num_hidden_layers is 4 {BY_CONFIG}, its tensors are of 3 layers",
    }


def test_a_model_that_transformers_does_not_know_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama9"}))
    save_file({"model.norm.weight": torch.ones(4)}, tmp_path / "model.safetensors")
    with pytest.raises(InvalidModel, match=r"config\.json: model_type 'llama9' is not one that transformers .* knows"):
        resolve_family(tmp_path, {"same": tmp_path})


@pytest.mark.parametrize(
    ("model_type", "fields", "expected"),
    [
        ("gemma2", {}, ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]),
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
            ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        ),
    ],
)
def test_attention_kind_follows_its_layer(
    tmp_path: Path, model_type: str, fields: dict[str, Any], expected: list[str]
) -> None:
    """A layer keeps its kind of attention where a file says nothing.

    Older files have no layer_types; transformers works them out from the layers' numbers.
    """
    family = layout_family(tmp_path, model_type, **fields)
    for model in family.models:
        file = Path(model.directory) / "config.json"
        config = json.loads(file.read_text())
        del config["layer_types"]
        file.write_text(json.dumps(config))
    family = open_family_again(family, tmp_path)
    recipe = layers_from(family, ("math", 0), ("math", 1), ("text", 1), ("text", 0))
    model = transformers_model(export(recipe, Bank(family, cache=tmp_path / "cache"), tmp_path / "out"))
    assert model.config.layer_types == expected


def test_undescribable_mixture_is_refused(tmp_path: Path) -> None:
    """A mixture whose configuration cannot name its dense layers is refused."""
    family = layout_family(tmp_path, "qwen3_moe")
    for model in family.models:
        file = Path(model.directory) / "config.json"
        config = json.loads(file.read_text())
        del config["mlp_only_layers"], config["decoder_sparse_step"]
        file.write_text(json.dumps(config))
    bank = Bank(open_family_again(family, tmp_path), cache=tmp_path / "cache")
    with pytest.raises(InvalidRecipe, match="layers with a mixture of experts and layers without, and a configuration"):
        export(layers_from(bank.family, ("math", 1), ("math", 0)), bank, tmp_path / "out")
    assert not (tmp_path / "out").exists()

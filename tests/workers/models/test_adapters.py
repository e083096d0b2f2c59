"""PEFT's LoRA adapters as experts, compared with peft itself."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.builders import character_tokenizer, lora_adapter, save, tiny_llama, tiny_qwen2
from tests.layouts import COMMON
from tests.workers.recipes import arithmetic
from workers.errors import InvalidModel
from workers.merging.bank import Bank
from workers.merging.materialize import merged_tensors
from workers.models.family import open_family, resolve_family

MLP = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama in float32 with a head of its own."""
    return tiny_llama(tmp_path_factory.mktemp("llama") / "base", tied=False)


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT-2, whose layers store transposed weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    directory = tmp_path_factory.mktemp("gpt2") / "base"
    config = GPT2Config(vocab_size=128, n_positions=64, n_embd=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2)
    torch.manual_seed(0)
    GPT2LMHeadModel(config).save_pretrained(directory)
    return directory


def problems_of(base: Path, adapter: Path) -> list[str]:
    with pytest.raises(InvalidModel) as caught:
        resolve_family(base, {"tuned": adapter})
    return [problem.removeprefix("expert 'tuned': ") for problem in caught.value.problems]


@pytest.mark.parametrize("rank", [1, 8, 64])
def test_order_of_an_adapters_terms_is_bounded(rank: int) -> None:
    """Two orders of the terms of a changed weight differ, by no more than the bound that model cards state."""
    generator = torch.Generator().manual_seed(rank)
    weight = torch.randn(96, 80, generator=generator)
    b, a = torch.randn(96, rank, generator=generator), torch.randn(rank, 80, generator=generator)
    scaling = 0.37
    terms = scaling * b.abs().double() @ a.abs().double() + weight.abs()
    forward = weight.clone().addmm_(b, a, alpha=scaling)
    backward = weight.clone()
    for k in reversed(range(rank)):
        backward += scaling * (b[:, k : k + 1] * a[k : k + 1])
    difference = (forward.double() - backward.double()).abs()
    assert (difference <= (rank + 3) * 2**-23 * terms).all()
    assert difference.max() > 0


LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"target_modules": LINEAR, "r": 8, "use_rslora": True},
        {"rank_pattern": {"down_proj": 2, r"layers\.0\.self_attn\.q_proj": 3}, "alpha_pattern": {"q_proj": 20}},
        {"target_modules": ["embed_tokens", "lm_head", "q_proj"]},
        {"modules_to_save": ["lm_head", "embed_tokens", "norm"]},
        {"bias": "all", "init_lora_weights": "gaussian"},
        {"use_dora": True, "target_modules": LINEAR},
        {"use_dora": True, "target_modules": ["embed_tokens", "q_proj"]},
        {"trainable_token_indices": [3, 9]},
        {"trainable_token_indices": {"embed_tokens": [5]}, "use_rslora": True},
    ],
    ids=[
        *("plain", "rank-stabilised", "patterns", "embedding", "whole modules", "biases"),
        *("DoRA", "DoRA of an embedding", "single tokens", "single tokens by module"),
    ],
)
def test_an_adapters_weights_are_those_that_peft_merges(base: Path, tmp_path: Path, config: dict[str, Any]) -> None:
    expected = lora_adapter(base, tmp_path / "tuned", **config).merge_and_unload().state_dict()
    assert_equal(base, tmp_path, expected)


def test_biases_of_its_matrices_change_those_of_the_base(tmp_path: Path) -> None:
    base = tiny_qwen2(tmp_path / "base", hidden=32)
    model = lora_adapter(base, tmp_path / "tuned", lora_bias=True, target_modules=["q_proj", "v_proj"])
    assert_equal(base, tmp_path, model.merge_and_unload().state_dict())
    lora_adapter(base, tmp_path / "other", lora_bias=True)
    (problem,) = {each.partition(": model.")[2][9:] for each in problems_of(base, tmp_path / "other")}
    assert problem == "mlp.down_proj: lora_bias has a bias, and the base has none there to change"


def test_dora_of_conv1d_scales_columns(gpt2: Path, tmp_path: Path) -> None:
    model = lora_adapter(gpt2, tmp_path / "tuned", target_modules=["c_attn", "c_fc"], use_dora=True)
    assert_equal(gpt2, tmp_path, model.merge_and_unload().state_dict())


@pytest.mark.parametrize("modules", [["c_attn", "c_proj", "c_fc"], ["c_proj"]])
def test_weights_of_conv1d_are_transposed(gpt2: Path, tmp_path: Path, modules: list[str]) -> None:
    model = lora_adapter(gpt2, tmp_path / "tuned", target_modules=modules)
    assert_equal(gpt2, tmp_path, model.merge_and_unload().state_dict())


def assert_equal(base: Path, tmp_path: Path, expected: dict[str, torch.Tensor]) -> None:
    family = open_family(base, {"tuned": tmp_path / "tuned"}, cache=tmp_path / "cache")
    bank = Bank(family, cache=tmp_path / "cache")
    changed = 0
    for name in bank.base.tensors:
        found = bank.get("tuned", name)
        torch.testing.assert_close(found, expected[name], atol=1e-6, rtol=1e-6)
        changed += not torch.equal(found, bank.get("base", name))
    assert changed > 0
    assert bank.num_bytes < 2 * sum(bank.get("base", name).nbytes for name in bank.base.tensors)


@pytest.fixture(scope="module", params=["mixtral", "qwen3_moe", "gpt_oss"])
def mixture(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a mixture of experts, which transformers holds in memory as one stack of experts.

    The three models store experts in three forms: one by one, one by one under another module's name, and as a
    transposed stack.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = {**COMMON, "hidden_size": 32, "intermediate_size": 40, "head_dim": 8, "num_hidden_layers": 2}
    fields |= {"num_local_experts": 3, "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(request.param, **fields))
    return save(model, character_tokenizer(), tmp_path_factory.mktemp(request.param) / "base")


@pytest.mark.parametrize(
    ("parameters", "settings"),
    [
        (["experts.gate_up_proj", "experts.down_proj"], {"target_modules": ["q_proj"]}),
        (["mlp.experts.down_proj"], {"target_modules": [], "rank_pattern": {r"layers\.0\.mlp\.experts\.down_proj": 2}}),
        (["experts.gate_up_proj"], {"target_modules": [], "use_rslora": True}),
    ],
    ids=["both", "the last", "the first"],
)
def test_experts_of_a_mixture_change_as_peft_merges_them(
    mixture: Path, tmp_path: Path, parameters: list[str], settings: dict[str, Any]
) -> None:
    tuned = lora_adapter(mixture, tmp_path / "tuned", target_parameters=parameters, **settings)
    tuned.merge_and_unload().save_pretrained(tmp_path / "merged")
    assert_equal(mixture, tmp_path, load_file(tmp_path / "merged" / "model.safetensors"))


def test_an_adapter_of_a_mixture_with_more_experts_is_refused(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    bases = []
    for num_experts in (2, 3):
        fields = {**COMMON, "hidden_size": 32, "intermediate_size": 40, "head_dim": 8, "num_local_experts": num_experts}
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("mixtral", **fields | {"num_hidden_layers": 1}))
        bases.append(save(model, character_tokenizer(), tmp_path / f"base{num_experts}"))
    lora_adapter(bases[1], tmp_path / "tuned", target_parameters=["experts.down_proj"], target_modules=[])
    (problem,) = problems_of(bases[0], tmp_path / "tuned")
    assert "its matrices are A [12, 40] and B [32, 12]; expected A [8, 40] and B [32, 8] for 2 experts of" in problem


def test_base_without_outermost_module(gpt2: Path, tmp_path: Path) -> None:
    """A checkpoint saved without its outermost module is the same base."""
    expected = lora_adapter(gpt2, tmp_path / "tuned", target_modules=["c_fc"]).merge_and_unload().state_dict()
    bare = shutil.copytree(gpt2, tmp_path / "base")
    tensors = load_file(bare / "model.safetensors")
    save_file(
        {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}, bare / "model.safetensors"
    )
    _, tuned = resolve_family(bare, {"tuned": tmp_path / "tuned"}).checkpoints.values()
    name = "h.1.mlp.c_fc.weight"
    torch.testing.assert_close(tuned.read(name), expected[f"transformer.{name}"], atol=1e-6, rtol=1e-6)


def test_small_changes_of_a_bfloat16_base_are_not_rounded_away(tmp_path: Path) -> None:
    base = tiny_llama(tmp_path / "base", dtype=torch.bfloat16)
    lora_adapter(base, tmp_path / "tuned", scale=1e-4, init_lora_weights=False)
    checkpoint, tuned = resolve_family(base, {"tuned": tmp_path / "tuned"}).checkpoints.values()
    stored = load_file(tmp_path / "tuned" / "adapter_model.safetensors")
    b, a = (stored[f"base_model.model.{MLP.replace('weight', f'lora_{side}.weight')}"] for side in "BA")
    found = tuned.read(MLP)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found - checkpoint.read(MLP).float(), 2.0 * b.float() @ a.float(), atol=1e-7, rtol=1e-2)


def test_the_same_bits_come_with_any_number_of_threads(base: Path, tmp_path: Path) -> None:
    lora_adapter(base, tmp_path / "tuned", target_modules=LINEAR, r=16)
    _, tuned = resolve_family(base, {"tuned": tmp_path / "tuned"}).checkpoints.values()
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append({name: tuned.read(name) for name in tuned.tensors})
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(found[0][name], other[name]) for other in found[1:] for name in found[0])


def test_adapters_and_whole_models_merge(base: Path, tmp_path: Path) -> None:
    tuned = lora_adapter(base, tmp_path / "tuned", 1).merge_and_unload()
    whole = lora_adapter(base, tmp_path / "other", 2).merge_and_unload()
    whole.save_pretrained(tmp_path / "whole")
    family = open_family(base, {a: tmp_path / a for a in ("tuned", "whole")}, cache=tmp_path / "cache")
    merged = dict(merged_tensors(arithmetic(family, 0.3, 0.4), Bank(family, cache=tmp_path / "cache"), torch.float32))
    stored = load_file(base / "model.safetensors")
    first, second = tuned.state_dict(), whole.state_dict()
    for name, tensor in merged.items():
        expected = stored[name] + 0.3 * (first[name] - stored[name]) + 0.4 * (second[name] - stored[name])
        torch.testing.assert_close(tensor, expected, atol=2e-6, rtol=1e-5)


def test_the_fingerprint_is_of_the_adapter_and_its_base(base: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    lora_adapter(base, tmp_path / "tuned")
    other = tiny_llama(tmp_path / "other", seed=1, tied=False)
    before = resolve_family(base, {"tuned": tmp_path / "tuned"}, cache=cache).fingerprints["tuned"]
    assert open_family(base, {"tuned": tmp_path / "tuned"}, cache=cache).experts[0].fingerprint == before
    assert resolve_family(other, {"tuned": tmp_path / "tuned"}, cache=cache).fingerprints["tuned"] != before
    edit(tmp_path / "tuned", lora_alpha=9)
    assert resolve_family(base, {"tuned": tmp_path / "tuned"}, cache=cache).fingerprints["tuned"] != before


def test_values_that_are_not_finite_are_found_in_adapters(base: Path, tmp_path: Path) -> None:
    lora_adapter(base, tmp_path / "tuned")
    change(
        tmp_path / "tuned", lambda name, tensor: tensor * float("inf") if "1.mlp.down_proj.lora_B" in name else tensor
    )
    family = open_family(base, {"tuned": tmp_path / "tuned"}, cache=tmp_path / "cache")
    with pytest.raises(InvalidModel, match=rf"model 'tuned': .*tuned: tensor '{MLP}' holds 2048 values that are NaN"):
        Bank(family, cache=tmp_path / "cache")


# What is refused.


def edit(adapter: Path, **settings: Any) -> None:
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


def change(adapter: Path, how: Any) -> None:
    file = adapter / "adapter_model.safetensors"
    changed = {name: how(name, tensor) for name, tensor in load_file(file).items()}
    save_file({name: tensor for name, tensor in changed.items() if tensor is not None}, file)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"peft_type": "IA3"}, "an adapter of peft_type 'IA3'; only LORA is merged"),
        (
            {"trainable_token_indices": ["a"]},
            "trainable_token_indices is ['a']; expected numbers of tokens, by module ",
        ),
        ({"target_parameters": "x"}, "target_parameters is 'x'; expected a list of names"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights is 'pissa_niter_4', which changes the base"),
        ({"r": 0}, "r is 0; expected a whole number from 1"),
        ({"lora_alpha": "8"}, "lora_alpha is '8'; expected a number"),
        ({"lora_alpha": 10**309}, "lora_alpha is 1000000000"),
        ({"lora_alpha": float("nan")}, "lora_alpha is nan; expected a number"),
        ({"init_lora_weights": {}}, "init_lora_weights is {}, which changes the base"),
        ({"rank_pattern": {"(": 2}}, "rank_pattern is {'(': 2}; expected ranks by regular expressions"),
        ({"alpha_pattern": {"q_proj": "x"}}, "alpha_pattern is {'q_proj': 'x'}; expected numbers by regular"),
        ({"modules_to_save": "lm_head"}, "modules_to_save is 'lm_head'; expected a list of names"),
    ],
)
def test_what_is_no_plain_lora_is_refused(base: Path, tmp_path: Path, settings: dict[str, Any], expected: str) -> None:
    lora_adapter(base, tmp_path)
    edit(tmp_path, **settings)
    (problem,) = problems_of(base, tmp_path)
    assert problem.startswith(f"{tmp_path / 'adapter_config.json'}: {expected}")


def test_every_problem_of_every_adapter_is_reported_together(base: Path, tmp_path: Path) -> None:
    other = tiny_llama(tmp_path / "larger", layers=4, hidden=64, tied=False)
    lora_adapter(other, tmp_path / "tuned", target_modules=["q_proj"])
    edit(tmp_path / "tuned", rank_pattern={r"layers\.1\..*": 5})
    file = tmp_path / "tuned" / "adapter_model.safetensors"
    layer = "model.layers.{}.self_attn.q_proj"
    another = f"{file}: an adapter of another model: "
    shapes = "its change has shape [64, 64], the base's weight [32, 32]"
    assert problems_of(base, tmp_path / "tuned") == [
        f"{another}{layer.format(0)}: {shapes}",
        f"{file}: {layer.format(1)}: its matrices are of rank 4, adapter_config.json says 5",
        f"{another}{layer.format(1)}: {shapes}",
        f"{another}it changes {layer.format(2)}.weight, {layer.format(3)}.weight, which the base {base} does not have",
    ]
    with pytest.raises(InvalidModel) as caught:
        resolve_family(tmp_path / "nowhere", {"a": tmp_path / "tuned", "b": tmp_path})
    assert [problem.split(":")[0] for problem in caught.value.problems] == ["base model", *2 * ["expert 'b'"]]


def test_tensors_that_no_plain_lora_has_are_named(base: Path, tmp_path: Path) -> None:
    lora_adapter(base, tmp_path, target_modules=["q_proj"])
    file = tmp_path / "adapter_model.safetensors"
    stored = load_file(file)
    key = "base_model.model.model.layers.0.self_attn.q_proj."
    del stored[f"{key}lora_B.weight"]
    flat = stored[f"{key.replace('0', '1')}lora_A.weight"][0].clone()
    save_file(
        {**stored, f"{key}lora_magnitude_vector": torch.ones(32), f"{key.replace('0', '1')}lora_A.weight": flat}, file
    )
    assert problems_of(base, tmp_path) == [
        f"{file}: holds {key}lora_magnitude_vector; expected A and B of LoRA layers and whole tensors",
        f"{file}: model.layers.0.self_attn.q_proj: its LoRA matrix B is missing",
        f"{file}: model.layers.1.self_attn.q_proj: matrices were expected, found A [32], B [32, 4], the base's weight "
        "[32, 32]",
    ]
    save_file({}, file)
    assert problems_of(base, tmp_path) == [
        f"{file}: holds no tensors; expected A and B of LoRA layers and whole tensors"
    ]


def test_pickled_and_cut_off_adapters_are_refused(base: Path, tmp_path: Path) -> None:
    lora_adapter(base, tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    (problem,) = problems_of(base, tmp_path)
    assert problem.startswith(f"{file}: is truncated: its header declares ")
    file.rename(tmp_path / "adapter_model.bin")
    (problem,) = problems_of(base, tmp_path)
    assert problem.startswith(f"{tmp_path}: only pickles (adapter_model.bin), which are never loaded")


def test_separate_embedding_is_not_tied(tmp_path: Path) -> None:
    """A model whose embedding was trained apart from its head is not tied."""
    base = tiny_llama(tmp_path / "base")
    lora_adapter(base, tmp_path / "lora", target_modules=["embed_tokens", "q_proj"])
    lora_adapter(base, tmp_path / "head", target_modules=["lm_head", "q_proj"])
    lora_adapter(base, tmp_path / "whole", modules_to_save=["lm_head"])
    for adapter, name in (("lora", "model.embed_tokens"), ("head", "lm_head"), ("whole", "lm_head.weight")):
        (problem,) = problems_of(base, tmp_path / adapter)
        assert problem.startswith(f"{tmp_path / adapter}: changes {name} alone, but in the base embedding")
    expected = lora_adapter(base, tmp_path / "tuned", modules_to_save=["lm_head"], ensure_weight_tying=True)
    assert_equal(base, tmp_path, expected.merge_and_unload().state_dict())


@pytest.mark.parametrize("modules", [["embed_tokens", "q_proj"], ["lm_head"], ["embed_tokens", "lm_head", "down_proj"]])
def test_an_embedding_trained_with_its_head_is_changed_once(tmp_path: Path, modules: list[str]) -> None:
    """As the adapted model computes: peft's own merge adds the change for each of the two names of the one tensor."""
    base = tiny_llama(tmp_path / "base")
    adapted = lora_adapter(base, tmp_path / "tuned", target_modules=modules, ensure_weight_tying=True)
    tokens = torch.arange(60)[None]
    with torch.no_grad():
        expected = adapted(tokens).logits
        model = type(adapted.get_base_model()).from_pretrained(base)
        found = resolve_family(base, {"tuned": tmp_path / "tuned"}).checkpoints["tuned"]
        model.load_state_dict({name: found.read(name) for name in found.tensors}, strict=False)
        assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
        torch.testing.assert_close(model(tokens).logits, expected, rtol=0, atol=1e-4)


def test_an_adapter_is_no_base(base: Path, tmp_path: Path) -> None:
    lora_adapter(base, tmp_path)
    with pytest.raises(
        InvalidModel, match=r"base model: .*: a PEFT adapter; expected a whole model: merge the adapter"
    ):
        resolve_family(tmp_path, {"tuned": base})


def test_an_adapter_to_another_expert_is_refused(base: Path, tmp_path: Path) -> None:
    math = tiny_llama(tmp_path / "math", seed=1, tied=False)
    lora_adapter(math, tmp_path / "tuned")
    with pytest.raises(InvalidModel) as caught:
        resolve_family(base, {"tuned": tmp_path / "tuned", "math": math})
    (problem,) = caught.value.problems
    assert problem == (
        f"expert 'tuned': {tmp_path / 'tuned'}: an adapter to the expert 'math' (base_model_name_or_path is {math}); "
        "expected adapters to the base model: merge it into 'math' with peft first, and give the whole model"
    )
    resolve_family(math, {"tuned": tmp_path / "tuned", "copy": math})


def test_the_name_of_another_base_is_said_once(base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lora_adapter(base, tmp_path / "tuned")
    resolve_family(base, {"tuned": tmp_path / "tuned"})
    assert not caplog.records
    edit(tmp_path / "tuned", base_model_name_or_path="someone/other-7b")
    for _ in range(2):
        resolve_family(base, {"tuned": tmp_path / "tuned"})
    assert [record.getMessage() for record in caplog.records if record.name.startswith("workers.models.adapters")] == [
        f"{tmp_path / 'tuned'}: says that it was trained on someone/other-7b; it is merged with {base}"
    ]

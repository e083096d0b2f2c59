from __future__ import annotations

import pytest

from workers.errors import InvalidModel
from workers.models.components import TensorPlace, first_few, layout

NAMES = ["model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight", "model.norm.weight"]


def test_layout_follows_the_modules() -> None:
    names = [
        "model.embed_tokens.weight",
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.0.self_attn.q_norm.weight",
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "model.layers.0.post_attention_layernorm.weight",
        "model.layers.0.mlp.gate_proj.weight",
        "model.layers.1.mlp.experts.3.w1.weight",
        "model.layers.1.mlp.gate.weight",
        "model.layers.1.mlp.shared_expert_gate.weight",
        "model.norm.weight",
        "lm_head.weight",
    ]
    found = layout({}, names)
    assert found.places == {
        "model.embed_tokens.weight": TensorPlace("embedding", None, "model.embed_tokens.weight"),
        "model.layers.0.self_attn.q_proj.weight": TensorPlace("attention", 0, "self_attn.q_proj.weight"),
        "model.layers.0.self_attn.q_proj.bias": TensorPlace("attention", 0, "self_attn.q_proj.bias"),
        "model.layers.0.self_attn.q_norm.weight": TensorPlace("norm", 0, "self_attn.q_norm.weight"),
        "model.layers.0.post_attention_layernorm.weight": TensorPlace("norm", 0, "post_attention_layernorm.weight"),
        "model.layers.0.mlp.gate_proj.weight": TensorPlace("mlp", 0, "mlp.gate_proj.weight"),
        "model.layers.1.mlp.experts.3.w1.weight": TensorPlace("mlp", 1, "mlp.experts.3.w1.weight"),
        "model.layers.1.mlp.gate.weight": TensorPlace("mlp", 1, "mlp.gate.weight"),
        "model.layers.1.mlp.shared_expert_gate.weight": TensorPlace("mlp", 1, "mlp.shared_expert_gate.weight"),
        "model.norm.weight": TensorPlace("head", None, "model.norm.weight"),
        "lm_head.weight": TensorPlace("head", None, "lm_head.weight"),
    }
    assert found.num_layers == 2
    assert found.suffixes("attention", 0) == ("self_attn.q_proj.bias", "self_attn.q_proj.weight")
    assert found.name("mlp.up_proj.weight", 7) == "model.layers.7.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("prefix", "attention", "mlp", "norm", "embedding", "head"),
    [
        (
            "transformer.h.",
            "attn.c_attn.bias",
            "mlp.c_fc.weight",
            "ln_1.weight",
            "transformer.wte.weight",
            "lm_head.weight",
        ),
        (
            "gpt_neox.layers.",
            "attention.dense.weight",
            "mlp.dense_h_to_4h.weight",
            "post_attention_layernorm.bias",
            "gpt_neox.embed_in.weight",
            "embed_out.weight",
        ),
        (
            "model.decoder.layers.",
            "self_attn.out_proj.weight",
            "fc1.weight",
            "final_layer_norm.weight",
            "model.decoder.embed_positions.weight",
            "lm_head.weight",
        ),
        (
            "model.layers.",
            "self_attn.o_proj.weight",
            "block_sparse_moe.gate.weight",
            "pre_feedforward_layernorm.weight",
            "model.embed_tokens.weight",
            "lm_head.weight",
        ),
    ],
)
def test_layout_knows_other_decoders(
    prefix: str, attention: str, mlp: str, norm: str, embedding: str, head: str
) -> None:
    found = layout({}, [*(f"{prefix}0.{suffix}" for suffix in (attention, mlp, norm)), embedding, head])
    components = {place.component: place.suffix for place in found.places.values()}
    assert components == {"attention": attention, "mlp": mlp, "norm": norm, "embedding": embedding, "head": head}
    assert found.layer_prefix == prefix


def test_the_innermost_module_that_says_what_it_is_decides() -> None:
    prefix = "transformer.blocks.0."
    components = {
        "norm_attn_norm.attn.Wqkv.weight": "attention",
        "norm_attn_norm.norm_1.weight": "norm",
        "ffn.experts.mlp.w1": "mlp",
        "attn.c_attn.bias": "attention",
    }
    found = layout({}, ["transformer.wte.weight", *(prefix + suffix for suffix in components)])
    assert {p.suffix: p.component for p in found.places.values() if p.layer == 0} == components


def test_what_mixes_positions_in_attentions_place_is_attention() -> None:
    components = {  # of LFM2, Falcon-H1, Jamba, RecurrentGemma, Qwen3-Next and Inkling
        "conv.conv.weight": "attention",
        "conv.in_proj.weight": "attention",
        "operator_norm.weight": "norm",
        "mamba.A_log": "attention",
        "mamba.conv1d.bias": "attention",
        "mamba.dt_layernorm.weight": "norm",
        "temporal_block.rg_lru.recurrent_param": "attention",
        "mlp_block.up_proj.weight": "mlp",
        "linear_attn.conv1d.weight": "attention",
        "linear_attn.norm.weight": "norm",
        "mlp_sconv.conv1d.weight": "mlp",
    }
    found = layout({}, ["model.embed_tokens.weight", *(f"model.layers.0.{suffix}" for suffix in components)])
    assert {p.suffix: p.component for p in found.places.values() if p.layer == 0} == components


def test_final_norm_has_any_name() -> None:
    """The only norm outside of layers is the final one, whatever its name."""
    layer = "model.layers.0.self_attn.q_proj.weight"
    lfm2 = layout({}, [layer, "model.embed_tokens.weight", "model.embedding_norm.weight"])
    assert lfm2.suffixes("head") == ("model.embedding_norm.weight",)
    assert lfm2.suffixes("embedding") == ("model.embed_tokens.weight",)
    bloom = layout({}, [layer, "word_embeddings.weight", "word_embeddings_layernorm.weight", "ln_f.weight"])
    assert bloom.suffixes("head") == ("ln_f.weight",)
    assert bloom.suffixes("embedding") == ("word_embeddings.weight", "word_embeddings_layernorm.weight")


@pytest.mark.parametrize(
    "name", ["vision_embed_tokens.weight", "model.vision_tower.layers.0.mlp.fc1.weight", "audio_tower.norm.weight"]
)
def test_a_model_that_reads_more_than_text_is_refused(name: str) -> None:
    with pytest.raises(InvalidModel, match=rf"more than text, which is not merged: {name}$"):
        layout({}, [*NAMES, name])


@pytest.mark.parametrize("mask", ["attn.bias", "attn.masked_bias", "attn.attention.bias", "attention.masked_bias"])
def test_masks_are_no_weights(mask: str) -> None:
    names = ["transformer.wte.weight", "transformer.h.0.attn.c_proj.bias", f"transformer.h.0.{mask}"]
    assert set(layout({}, names).places) == set(names[:2])


def test_a_tied_head_that_is_stored_is_no_tensor_of_the_layout() -> None:
    found = layout({"tie_word_embeddings": True}, [*NAMES, "lm_head.weight"])
    assert found.is_tied
    assert found.tied_head == "lm_head.weight"
    assert "lm_head.weight" not in found.places
    assert not layout({"tie_word_embeddings": False}, [*NAMES, "lm_head.weight"]).is_tied


def test_a_tensor_that_fits_nowhere_is_named() -> None:
    with pytest.raises(InvalidModel, match=r"decoder-only model: model\.layers\.0\.adapter\.weight$"):
        layout({}, [*NAMES, "model.layers.0.adapter.weight"])


def test_messages_name_a_few_and_count_the_rest() -> None:
    assert first_few(["b", "a"]) == "a, b"
    assert first_few("gfedcba") == "a, b, c, d, e and 2 more"

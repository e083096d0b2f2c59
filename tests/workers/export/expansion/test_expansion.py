"""Models of different sizes, expanded to one shape: they compute the same, and what cannot be expanded is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.builders import byte_tokenizer, character_tokenizer, save, with_random_norms_and_biases
from workers.engines.vllm.paths.geometry import PATH_TYPES
from workers.errors import InvalidModel
from workers.export.expansion.expanded_model import Expansion
from workers.export.expansion.files import expand
from workers.export.expansion.form import Shape, common_form
from workers.models.checkpoints import open_checkpoint

HEAD_SIZE, ROWS = 16, 384
COMMON = {"max_position_embeddings": 512, "initializer_range": 0.15, "bos_token_id": None}

# One has more channels and key-value heads. The other has more layers, a wider MLP, more query heads for each key-value
# head, an output head of its own, and rows of the vocabulary without a token.
WIDE: dict[str, Any] = {
    "hidden_size": 96,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "vocab_size": ROWS,
    "tie_word_embeddings": True,
}
DEEP: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 200,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "vocab_size": ROWS + 40,
    "tie_word_embeddings": False,
}


def build(directory: Path, kind: str, sizes: dict[str, Any], *, tokenizer: Any = None, **settings: Any) -> Path:
    """A random model of the type `kind`; `tokenizer` is a byte-level one by default."""
    head = {} if kind == "qwen2" else {"head_dim": HEAD_SIZE}
    config = AutoConfig.for_model(kind, **{**COMMON, **head, **sizes, **settings})
    torch.manual_seed(len(str(sorted(sizes.items()))))
    model = with_random_norms_and_biases(AutoModelForCausalLM.from_config(config))
    return save(model, tokenizer or byte_tokenizer(), directory)


@torch.no_grad()
def logits(directory: Path) -> torch.Tensor:
    tokens = torch.randint(0, ROWS, (2, 40), generator=torch.Generator().manual_seed(0))
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    found: torch.Tensor = model(tokens).logits[..., :ROWS]
    return found


@pytest.mark.parametrize("kind", PATH_TYPES)
def test_expanded_models_compute_the_same(kind: str, tmp_path: Path) -> None:
    models = {name: build(tmp_path / name, kind, sizes) for name, sizes in (("wide", WIDE), ("deep", DEEP))}
    found = expand(models, tmp_path / "out", max_shard_bytes=200_000)
    assert found.form.shape == Shape(96, 200, 5, 6, 3, HEAD_SIZE, ROWS, is_tied=False)
    for name, directory in models.items():
        expanded = found.directories[name]
        assert expanded == tmp_path / "out" / name
        assert Shape.of(open_checkpoint(expanded)) == found.form.shape
        before, after = logits(directory), logits(expanded)
        assert after.shape == before.shape
        # rms_norm_eps counts more beside the smaller mean square of a model with zeros among its channels.
        assert (after - before).abs().max() < 1e-3 * before.abs().max()
        assert torch.equal(after.argmax(-1), before.argmax(-1))
    shapes = {
        name: {key: tensor.shape for key, tensor in open_checkpoint(directory).tensors.items()}
        for name, directory in found.directories.items()
    }
    assert shapes["wide"] == shapes["deep"], "they are one family"


def test_query_heads_stay_with_their_key_head(tmp_path: Path) -> None:
    """A model with more query heads for each key-value head has its key-value heads repeated, and all else is zeros."""
    models = {name: build(tmp_path / name, "llama", sizes) for name, sizes in (("wide", WIDE), ("deep", DEEP))}
    opened = {name: open_checkpoint(directory) for name, directory in models.items()}
    expansion = Expansion(opened["deep"], common_form(opened))
    queries = expansion.tensor("model.layers.0.self_attn.q_proj.weight").view(6, HEAD_SIZE, 96)
    keys = expansion.tensor("model.layers.0.self_attn.k_proj.weight").view(3, HEAD_SIZE, 96)
    own = opened["deep"].read("model.layers.0.self_attn.q_proj.weight").view(4, HEAD_SIZE, 64)
    (key,) = opened["deep"].read("model.layers.0.self_attn.k_proj.weight").view(1, HEAD_SIZE, 64)
    # Two query heads for each key-value head: four of the model's take two places of its one key-value head.
    assert torch.equal(queries[:4, :, :64], own)
    assert torch.equal(keys[:, :, :64], torch.stack([key, key, torch.zeros_like(key)]))
    assert queries[4:].count_nonzero() == queries[..., 64:].count_nonzero() == keys[..., 64:].count_nonzero() == 0
    norm = opened["deep"].read("model.layers.0.input_layernorm.weight")
    assert torch.allclose(expansion.tensor("model.layers.0.input_layernorm.weight")[:64], norm * (64 / 96) ** 0.5)


def test_layers_are_spread_over_the_depth(tmp_path: Path) -> None:
    models = {name: build(tmp_path / name, "llama", sizes) for name, sizes in (("wide", WIDE), ("deep", DEEP))}
    opened = {name: open_checkpoint(directory) for name, directory in models.items()}
    expansion = Expansion(opened["wide"], common_form(opened))
    down = [expansion.tensor(f"model.layers.{at}.mlp.down_proj.weight") for at in range(5)]
    assert [bool(tensor.count_nonzero()) for tensor in down] == [True, False, True, False, True]
    assert torch.equal(down[4][:, :128], opened["wide"].read("model.layers.2.mlp.down_proj.weight"))


def test_a_model_of_the_common_form_stays_where_it_is(tmp_path: Path) -> None:
    """Only the others are written, once: a second call keeps them, and refuses folders with other content."""
    small = {**WIDE, "hidden_size": 48, "num_attention_heads": 3}
    models = {"large": build(tmp_path / "large", "qwen3", WIDE), "small": build(tmp_path / "small", "qwen3", small)}
    first = expand(models, tmp_path / "out")
    assert first.directories == {"large": tmp_path / "large", "small": tmp_path / "out" / "small"}
    file = tmp_path / "out" / "small" / "model.safetensors"
    written = file.stat().st_mtime_ns
    assert expand(models, tmp_path / "out") == first
    assert file.stat().st_mtime_ns == written
    (tmp_path / "small" / "chat_template.jinja").write_text("{{ messages }}")
    with pytest.raises(FileExistsError, match="small: exists and is not this model"):
        expand(models, tmp_path / "out")
    (tmp_path / "small" / "chat_template.jinja").unlink()
    (tmp_path / "out" / "small" / "expansion.json").write_text(json.dumps({"key": "another"}))
    with pytest.raises(FileExistsError, match="small: exists and is not this model, expanded to this form"):
        expand(models, tmp_path / "out")


@pytest.mark.parametrize(
    ("kinds", "settings", "message"),
    [
        (("qwen3", "qwen3"), {"head_dim": 32}, "head_dim is 32; {first} has 16, and the layers of a path are computed"),
        (("qwen3", "qwen3"), {"rope_theta": 500.0}, "rope_theta is 500.0; {first} has 10000.0"),
        (("qwen3", "qwen3"), {"rms_norm_eps": 1e-4}, "rms_norm_eps is 0.0001; {first} has 1e-06"),
        (("llama", "qwen3"), {}, "model_type is 'qwen3'; {first} has 'llama'"),
        (("llama", "llama"), {"hidden_act": "relu"}, "hidden_act is 'relu'; {first} has 'silu'"),
        (("qwen2", "mistral"), {"sliding_window": 8}, "sliding_window is 8; {first} has None"),
        (("llama", "mistral"), {"sliding_window": 8}, "attends to windows of 8 tokens, and a Llama to all"),
        (
            ("qwen2", "qwen2"),
            {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2, "layer_types": None},
            "layer_types has full_attention and sliding_attention",
        ),
        (
            ("llama", "qwen2"),
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 2.0}},
            "rope_type is 'dynamic', and the frequencies depend on the length of the text",
        ),
        (
            ("llama", "mistral"),
            {"tokenizer": character_tokenizer},
            "has another vocabulary than {first}; expected the same tokens with the same ids, or a model whose tokens",
        ),
        (("llama", "llama"), {"vocab_size": 300}, "its embedding has 300 rows; expected one for each token, up to id"),
    ],
)
def test_what_no_path_could_compute_is_refused(
    kinds: tuple[str, str], settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    first = build(tmp_path / "first", kinds[0], WIDE)
    make = settings.pop("tokenizer", byte_tokenizer)
    other = build(tmp_path / "other", kinds[1], {**DEEP, **settings}, tokenizer=make())
    with pytest.raises(InvalidModel) as refused:
        expand({"first": first, "other": other}, tmp_path / "out")
    assert any(f"{other}: {message.format(first=first)}" in problem for problem in refused.value.problems)
    assert not (tmp_path / "out").exists()


def test_one_model_alone_is_refused(tmp_path: Path) -> None:
    model = open_checkpoint(build(tmp_path / "only", "llama", WIDE))
    with pytest.raises(InvalidModel, match="1 model; give at least two"):
        common_form({"only": model})


def test_a_full_disk_is_noticed_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = {name: build(tmp_path / name, "llama", sizes) for name, sizes in (("wide", WIDE), ("deep", DEEP))}
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 1000})())
    with pytest.raises(InvalidModel, match=r"GiB are needed; 0\.0 GiB are free"):
        expand(models, tmp_path / "out")
    assert not (tmp_path / "out").exists()

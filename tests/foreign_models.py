"""Models of another width that compute the same as a given one, in channels that do not correspond to its own."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from workers.export.expansion.files import expand
from workers.models.tokenizers import TOKENIZER_FILES

__all__ = ["foreign_model", "loaded"]


def foreign_model(model: Path, directory: Path, *, width: int, seed: int = 1) -> Path:
    """Write a model of `width` channels that computes the same as `model`, a Llama, and return its directory.

    The model is expanded to more channels, and the residual stream is then rotated at random, so that none of the
    channels are zeros.
    """
    larger = _saved(_wider(loaded(model), width), model, directory / "random")
    same = expand({"model": model, "larger": larger}, directory / "same").directories["model"]
    return _saved(_turned(loaded(same), seed), model, directory / "foreign")


def loaded(directory: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)


def _wider(model: Any, width: int) -> Any:
    """A model of `width` channels with random weights, and otherwise the sizes and settings of `model`."""
    head_size = model.config.hidden_size // model.config.num_attention_heads
    heads = {"num_attention_heads": width // head_size, "num_key_value_heads": width // head_size}
    config = copy.deepcopy(model.config)
    config.update({"hidden_size": width, "head_dim": head_size, **heads})
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config)


@torch.no_grad()
def _turned(model: Any, seed: int) -> Any:
    """`model` after a random rotation of the residual stream, which leaves what it computes unchanged.

    RMSNorm commutes with rotations once its weights are multiplied into the matrices that follow it.
    """
    generator = torch.Generator().manual_seed(seed)
    size = model.config.hidden_size
    rotation = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))[0].float()
    head = model.lm_head.weight * model.model.norm.weight
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(head @ rotation)
    model.model.embed_tokens.weight = torch.nn.Parameter(model.model.embed_tokens.weight @ rotation)
    model.model.norm.weight.fill_(1)
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for norm, readers in (
            (layer.input_layernorm, (attention.q_proj, attention.k_proj, attention.v_proj)),
            (layer.post_attention_layernorm, (mlp.gate_proj, mlp.up_proj)),
        ):
            for reader in readers:
                reader.weight.copy_(reader.weight * norm.weight @ rotation)
            norm.weight.fill_(1)
        for writer in (attention.o_proj, mlp.down_proj):
            writer.weight.copy_(rotation.T @ writer.weight)
    return model


def _saved(model: Any, tokenizer_dir: Path, directory: Path) -> Path:
    model.save_pretrained(directory)
    for name in TOKENIZER_FILES:
        if (tokenizer_dir / name).is_file():
            shutil.copyfile(tokenizer_dir / name, directory / name)
    return directory

"""Made-up models for tests of spaces: names and places of tensors, without weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from search_spaces.spaces import SPACES
from search_spaces.spaces.base import Part, SearchedModels, TensorLocation

IN_LAYERS: tuple[tuple[Part, str], ...] = (
    ("attention", "self_attn.o_proj.weight"),
    ("attention", "self_attn.qkv_proj.weight"),
    ("mlp", "mlp.down_proj.weight"),
    ("mlp", "mlp.up_proj.weight"),
    ("norm", "input_layernorm.weight"),
)
EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"


def models(
    experts: Sequence[str] = ("math", "code", "text"),
    num_layers: int = 4,
    *,
    in_layers: Sequence[tuple[Part, str]] = IN_LAYERS,
    is_tied: bool = False,
    tokenizer: str = "base",
    max_layers: int | None = None,
) -> SearchedModels:
    """A family of Llama-like models. Fingerprints are in another order than aliases, so that canonical order shows."""
    tensors = {EMBEDDING: TensorLocation("embedding", None, EMBEDDING)}
    for layer in range(num_layers):
        tensors |= {f"model.layers.{layer}.{name}": TensorLocation(part, layer, name) for part, name in in_layers}
    tensors |= {name: TensorLocation("head", None, name) for name in ((NORM,) if is_tied else (HEAD, NORM))}
    return SearchedModels(
        base="base",
        experts=tuple(experts),
        fingerprints={alias: f"{9 - i}{alias}" for i, alias in enumerate(("base", *experts))},
        num_layers=num_layers,
        tensors=tensors,
        tied={HEAD: EMBEDDING} if is_tied else {},
        tokenizer=tokenizer,
        max_layers=max_layers,
    )


def space(kind: str, family: SearchedModels | None = None, **options: Any) -> Any:
    """The space of this kind over a family, by default `models()`; its class depends on the kind."""
    required = {"model": "math"} if kind == "sfs" and family is None else {}
    return SPACES[kind](kind=kind, **{**required, **options}).build(family or models())

"""Tensors in a LoRA adapter's file: LoRA matrices, whole tensors and token rows, distinguished by peft's names."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from workers.models.adapters.settings import Settings
from workers.models.headers import TensorInfo

__all__ = ["Matrices", "Parts", "parts_of", "unexpected"]

# peft wraps the model in two modules of these names.
PREFIX = "base_model.model."

LORA = re.compile(r"(?P<module>.+)\.lora_(?P<embedding>embedding_)?(?P<side>[AB])(?P<weight>\.weight)?")
# The name under which peft keeps a module that it wraps.
WRAPPERS = re.compile(r"\.(?:base_layer|modules_to_save)(?=\.)")


# Names of what is stored beside matrices: DoRA's magnitudes, the bias of B, and rows of single tokens.
MAGNITUDE, BIAS, TOKENS = ".lora_magnitude_vector", ".lora_B.bias", ".token_adapter.trainable_tokens_delta"


@dataclass
class Matrices:
    """LoRA matrices A and B of one module.

    `sides` has the matrices, keyed by their names, "A" and "B"; a matrix that the file lacks is left out. `magnitude`
    is the vector of lengths that DoRA trains, and `bias` is the bias of B; each is None if the file does not have it.
    If `is_embedding`, the module is an embedding, and the matrices change the transpose of its weight.
    """

    is_embedding: bool
    sides: dict[str, TensorInfo] = field(default_factory=dict)
    magnitude: TensorInfo | None = None
    bias: TensorInfo | None = None


@dataclass
class Parts:
    matrices: dict[str, Matrices] = field(default_factory=dict)
    whole: dict[str, TensorInfo] = field(default_factory=dict)
    rows: dict[str, TensorInfo] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)


def parts_of(stored: Mapping[str, TensorInfo]) -> Parts:
    parts = Parts()
    more: dict[str, TensorInfo] = {}
    for key, info in stored.items():
        name = key.removeprefix(PREFIX)
        lora = LORA.fullmatch(name)
        if name == key:
            parts.unknown.append(key)
        elif lora and bool(lora["embedding"]) != bool(lora["weight"]):
            matrices = parts.matrices.setdefault(lora["module"], Matrices(bool(lora["embedding"])))
            matrices.sides[lora["side"]] = info
        elif name.endswith((MAGNITUDE, BIAS)):
            more[name] = info
        elif name.endswith(TOKENS):
            parts.rows[name.removesuffix(TOKENS)] = info
        elif "lora_" in name or "trainable_tokens" in name:
            parts.unknown.append(key)
        else:
            parts.whole[WRAPPERS.sub("", name)] = info
    for name, info in more.items():
        kind = MAGNITUDE if name.endswith(MAGNITUDE) else BIAS
        of_module = parts.matrices.get(name.removesuffix(kind))
        if of_module is None:
            parts.unknown.append(f"{PREFIX}{name}")
        elif kind == MAGNITUDE:
            of_module.magnitude = info
        else:
            of_module.bias = info
    return parts


def unexpected(parts: Parts, settings: Settings) -> Iterator[str]:
    """Yield the names of stored tensors that the LoRA adapter's settings exclude.

    `parts` are the adapter's tensors, keyed by module. Settings are named here as in adapter_config.json. DoRA's
    magnitudes are unexpected without the setting `use_dora`, and biases of the matrices B are unexpected without the
    setting `lora_bias`. Trained embedding rows of single tokens are unexpected if the setting `trainable_token_indices`
    lists no tokens for the module.
    """
    for module, matrices in parts.matrices.items():
        if matrices.magnitude is not None and not settings.is_dora:
            yield f"{PREFIX}{module}{MAGNITUDE}"
        if matrices.bias is not None and not settings.has_biases:
            yield f"{PREFIX}{module}{BIAS}"
    yield from (f"{PREFIX}{module}{TOKENS}" for module in parts.rows if not settings.token_numbers(module))

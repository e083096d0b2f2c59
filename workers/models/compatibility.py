"""Checks of whether a base and its experts can be merged, by their configurations and safetensors headers."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from workers.models.adapters import stated_base
from workers.models.checkpoints import Checkpoint
from workers.models.components import Layout, first_few, is_output_head

__all__ = ["differences", "foreign_adapters", "structure"]

# Configuration fields, in common names, that must agree for layers of two models to be interchangeable.
STRUCTURE = (
    "model_type",
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "vocab_size",
    "layer_types",
    "num_experts",
    "num_experts_per_tok",
    "norm_topk_prob",
    "query_pre_attn_scalar",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "partial_rotary_factor",
    "use_parallel_residual",
)

# The fields of STRUCTURE that follow from the number of layers.
OF_DEPTH = ("num_hidden_layers", "layer_types")

# A report lists this many shapes of one model that differ, then counts the rest.
MAX_SHAPES = 5


def foreign_adapters(opened: Mapping[str, Checkpoint], given: Mapping[str, str]) -> Iterator[str]:
    """Yield a problem for each LoRA adapter that was trained on an expert, not on the base model.

    The matrices of such an adapter fit the base as well. The problem shows only in the adapter's configuration, which
    states the model that it was trained on. `opened` are the models, keyed by alias, the base first. `given` has the
    directory or hub id by which the caller named each model; the stated model is compared with these names.
    """
    base_alias = next(iter(opened))
    for alias, adapter in opened.items():
        if adapter.base is None:
            continue
        stated = stated_base(adapter.directory)
        bases = [
            other
            for other, model in opened.items()
            if model.base is None
            and (
                stated == given[other].partition("@")[0]
                or (os.path.isdir(stated) and os.path.samefile(stated, model.directory))
            )
        ]
        if bases and base_alias not in bases:
            yield (
                f"expert {alias!r}: {adapter.directory}: an adapter to the expert {bases[0]!r} "
                f"(base_model_name_or_path is {stated}); expected adapters to the base model: merge it into "
                f"{bases[0]!r} with peft first, and give the whole model"
            )


def differences(base: Checkpoint, expert: Checkpoint, *, any_depth: bool = False) -> Iterator[str]:
    """Yield the reasons why layers of `expert` cannot replace layers of `base`; yield nothing if they can.

    With `any_depth` the models may have different numbers of layers, and only the layers that both models have are
    compared.
    """
    where = str(expert.directory)
    if expert.modality is not base.modality:
        yield (
            f"{where}: is a model of the modality {expert.modality.name}, the base is one of {base.modality.name}; "
            "expected models of one modality"
        )
        return
    yield from base.modality.differences(base.directory, expert.directory)
    own = base.modality.structure
    stated, wanted = structure(expert.settings, own), structure(base.settings, own)
    for name in wanted:
        if any_depth and name in OF_DEPTH:
            continue
        if name in stated and stated[name] != wanted[name]:
            yield f"{where}: {name} is {stated[name]!r}; the base has {wanted[name]!r}"
    if base.layout.is_tied != expert.layout.is_tied:
        names = {True: "tied to the embedding", False: "a tensor of its own"}
        yield (
            f"{where}: its output head is {names[expert.layout.is_tied]}, the base's is {names[base.layout.is_tied]}; "
            "both must be the same (tie_word_embeddings, lm_head.weight)"
        )
    depth = min(base.layout.num_layers, expert.layout.num_layers) if any_depth else None
    base_names, names_ = _comparable(base.layout, depth), _comparable(expert.layout, depth)
    if missing := base_names - names_:
        yield f"{where}: lacks {len(missing)} tensors of the base: {first_few(missing)}"
    if extra := names_ - base_names:
        yield f"{where}: has {len(extra)} tensors that the base lacks: {first_few(extra)}"
    shapes = [
        f"tensor {name!r} has shape {list(theirs)}; the base has {list(ours)}"
        for name in sorted(base_names & names_)
        if (theirs := expert.tensors[name].shape) != (ours := base.tensors[name].shape)
    ]
    yield from (f"{where}: {shape}" for shape in shapes[:MAX_SHAPES])
    if len(shapes) > MAX_SHAPES:
        yield f"{where}: {len(shapes) - MAX_SHAPES} more tensors differ in shape from the base's"


def structure(settings: Mapping[str, Any], of_modality: Sequence[str]) -> dict[str, Any]:
    """Settings in a configuration that must be equal for two models to be merged; absent settings are left out.

    `of_modality` are the names of settings that only models of one modality have. The settings include those of the
    rotary embeddings, because a merge has the rotary embeddings of the base; without a type, they are not scaled, which
    transformers calls "default".
    """
    rope = settings.get("rope_parameters") or settings.get("rope_scaling")
    rope = rope if isinstance(rope, Mapping) else {}
    fields = {name: settings.get(name) for name in (*of_modality, *STRUCTURE, "rope_theta")}
    fields |= rope
    if not any(isinstance(value, Mapping) for value in rope.values()):  # else there is a type for each kind of layer
        fields["rope_type"] = rope.get("rope_type") or rope.get("type") or "default"
    return {name: value for name, value in fields.items() if value is not None}


def _comparable(found: Layout, depth: int | None) -> set[str]:
    """Names of the tensors whose shapes must be equal in two models that are merged.

    `found` is the layout of one of the two models. The result contains the model's tensors outside layers and in the
    first `depth` layers, the number of layers that both models have; with None, it contains the tensors of all layers.
    Output heads are left out, because the function `differences` reports a difference between them separately.
    """
    return {
        name
        for name, place in found.places.items()
        if not is_output_head(name) and (depth is None or place.layer is None or place.layer < depth)
    }

"""Model card (README.md) of an export: its sources, recipe, held-out scores and licences."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import yaml

from search_spaces.methods import METHODS
from search_spaces.recipe import COMPONENTS, Merge, Recipe, Source
from workers.models.adapters import is_adapter
from workers.models.remote import id_of, source_name
from workers.types import Family

__all__ = ["Score", "licence", "lineage", "model_card", "recipe_rows"]

ALIGNED = """Alignments stand between some of its layers, which no ordinary model class computes. The file
`modeling_aligned.py` beside the weights does, which transformers runs when it may:

    AutoModelForCausalLM.from_pretrained(DIR, trust_remote_code=True)

Without `trust_remote_code` it is refused. It is the recipe's `alignment` that names them."""


ADAPTED = """Weights that {names} change are computed from the matrices of LoRA adapters of rank r, in float32. An
engine that scored them on a GPU adds up their r + 1 terms in another order than the CPU that wrote this checkpoint, so
that the two differ by at most (r + 3) 2^-23 of the sum of the terms' magnitudes before they are merged and rounded to
{dtype}. A method that cuts at a rank may then keep another of two elements of almost equal magnitude. All other weights
are those that were scored, bit for bit."""


BY_DEVICE = """The last bits of tensors merged by {methods} depend on the device: an engine that scored them on a GPU
had other bits than this checkpoint, which the CPU wrote."""


class Score(Protocol):
    """Held-out score of an objective: its value, the 95 % confidence interval and the number of samples."""

    @property
    def value(self) -> float: ...

    @property
    def ci95(self) -> tuple[float, float]: ...

    @property
    def samples(self) -> int: ...


def model_card(
    recipe: Recipe,
    family: Family,
    *,
    dtype: str,
    scores: Mapping[str, Score],
    study: str | None,
    mergekit: Mapping[str, Any] | str,
    loading: str = "",
) -> str:
    """Text of an export's README.md: its sources, recipe, held-out scores and licences.

    `family` is the base model and its experts, with their directories. `dtype` is the dtype of the tensors. `scores`
    maps an objective to its value on held-out samples. `study` is the name of the study, or None if the export is not
    of a study. `mergekit` is the mergekit configuration, or the reason why there is none. `loading` says how the model
    is loaded; "" if it is loaded like any other model.
    """
    held = {model.fingerprint: model for model in family.models}
    sources = [(alias, Path(held[content].directory), content) for alias, content in recipe.models.items()]
    licences = {alias: licence(directory) for alias, directory, _ in sources}
    front: dict[str, Any] = {"library_name": "transformers", "tags": ["merge", "mergesearch"]}
    stated = {text for text in licences.values() if text}
    if hub_ids := sorted({name for _, directory, _ in sources if (name := id_of(directory))}):
        front["base_model"] = hub_ids
    if stated:
        front["license"] = stated.pop() if len(set(licences.values())) == 1 else "other"
    origin = f' by the study "{study}"' if study else ""
    lines = [
        f"---\n{yaml.safe_dump(front, sort_keys=False)}---",
        f"# Merge {recipe.digest[:12]}",
        f"{len(sources)} models merged{origin} by mergesearch, in float32, and stored in {dtype}.",
        "## Sources",
        _table(
            ("model", "role", "source", "licence", "fingerprint"),
            [
                (
                    alias,
                    "base" if alias == recipe.base else "expert",
                    source_name(directory) if id_of(directory) else _merge_name(directory) or directory.name,
                    licences[alias] or "not stated",
                    f"`{content}`",
                )
                for alias, directory, content in sources
            ],
        ),
        "## Recipe",
        f"Digest `{recipe.digest}`; the complete recipe is in `recipe.json`."
        + (f" Its tokens are those of {recipe.tokenizer}." if recipe.tokenizer != "base" else "")
        + (" All experts of a layer are merged as one tensor." if recipe.stacks_experts else "")
        + (" Shares of task vectors are kept of the whole model." if recipe.trim == "model" else ""),
        _table(("layers", "component", "method", "sources", "coefficients"), recipe_rows(recipe)),
    ]
    if adapters := [alias for alias, directory, _ in sources if is_adapter(directory)]:
        lines.append(ADAPTED.format(names=" and ".join(adapters), dtype=dtype))
    if methods := sorted({each.method for each in recipe.merges() if METHODS[each.method].depends_on_device}):
        lines.append(BY_DEVICE.format(methods=" and ".join(methods)))
    if any(layer.alignment is not None for layer in recipe.layers):
        lines += ["## Loading", ALIGNED]
    if loading:
        lines += ["## Loading", loading.rstrip()]
    if scores:
        rows = [
            (name, f"{score.value:.4f}", f"{score.ci95[0]:.4f} to {score.ci95[1]:.4f}", str(score.samples))
            for name, score in scores.items()
        ]
        lines += ["## Held-out scores", _table(("objective", "value", "95 % interval", "samples"), rows)]
    models = " ".join(f"--model {alias}=DIR" for alias in recipe.models)
    lines += ["## Reproduce", f"    mergesearch merge recipe.json {models} --out DIR"]
    if isinstance(mergekit, str):
        lines.append(f"There is no mergekit configuration: {mergekit}.")
    else:
        lines.append("`mergekit_config.yml` gives the same tensors with mergekit, up to float32 rounding.")
    return "\n\n".join(lines) + "\n"


def recipe_rows(recipe: Recipe) -> list[tuple[str, ...]]:
    """Rows of the table that describes a recipe: (layers, component, method, sources, coefficients).

    Adjacent layers with equal merges form one group. A group has a row for each component, and a row for each scale
    (factor on the residual stream after a layer, or on the output of its MLP) that is not 1. Merges of single tensors
    come last.
    """
    recipe = recipe.canonical()
    rows = [("embedding", "embedding", *_described(recipe.embedding))]
    groups: list[tuple[object, list[int]]] = []
    for index, layer in enumerate(recipe.layers):
        key = layer.scale, layer.mlp_scale, *(_relative(layer.component(name), index) for name in COMPONENTS)
        if groups and groups[-1][0] == key:
            groups[-1][1].append(index)
        else:
            groups.append((key, [index]))
    for _, indices in groups:
        first, last = indices[0], indices[-1]
        layers, layer = str(first) if first == last else f"{first}-{last}", recipe.layers[first]
        rows += [(layers, name, *_described(layer.component(name), first, last - first + 1)) for name in COMPONENTS]
        if layer.scale != 1:
            rows.append((layers, "output", "scale", "", f"{layer.scale:g}"))
        if layer.mlp_scale != 1:
            rows.append((layers, "output of the MLP", "scale", "", f"{layer.mlp_scale:g}"))
    rows.append(("head", "final norm, output head", *_described(recipe.head)))
    return [*rows, *(("tensor", name, *_described(merge)) for name, merge in recipe.tensors.items())]


def licence(directory: Path) -> str | None:
    """Licences of a source model, as the README.md in its directory states them; None if it states no licence.

    The licences are the value of the key `license` in the front matter, separated by commas.
    """
    try:
        parts = (directory / "README.md").read_text().split("---", 2)
        front = yaml.safe_load(parts[1]) if len(parts) == 3 and not parts[0].strip() else None
    except (OSError, ValueError, yaml.YAMLError):
        return None
    stated = front.get("license") if isinstance(front, dict) else None
    return ", ".join(map(str, stated)) if isinstance(stated, list) and stated else str(stated) if stated else None


def lineage(recipe: Recipe, family: Family) -> dict[str, Any]:
    """Recipes of those source models of `recipe` that are merges themselves, for the file recipe.json of an export.

    `family` is the base model and its experts, with their directories. The result is {"lineage": {name of the source
    model in `recipe`: the source model's own recipe}}. It is empty if no source model is an export of mergesearch.
    """
    held = {model.fingerprint: Path(model.directory) for model in family.models}
    found = {alias: _recipe_document(held[content]) for alias, content in recipe.models.items()}
    merges = {alias: document for alias, document in found.items() if document is not None}
    return {"lineage": merges} if merges else {}


def _recipe_document(directory: Path) -> dict[str, Any] | None:
    """Content of recipe.json in `directory`; None if the directory is not an export."""
    try:
        document = json.loads((directory / "recipe.json").read_text())
        Recipe.from_json(document)
    except (OSError, ValueError):  # InvalidRecipe is a ValueError
        return None
    return dict(document)


def _merge_name(directory: Path) -> str | None:
    """Name of a source model in a model card, made from its recipe if it is itself an export; otherwise None.

    `directory` is the source's directory. The name has the recipe's digest and models and, if it is known, the study
    that found the recipe.
    """
    document = _recipe_document(directory)
    if document is None:
        return None
    recipe, study = Recipe.from_json(document), document.get("study")
    origin = f' by the study "{study}"' if study else ""
    return f"merge {recipe.digest[:12]} of {', '.join(recipe.models)}{origin}"


def _relative(merge: Merge, index: int) -> object:
    """Key for grouping adjacent layers in a model card: equal keys mean that layers are merged in the same way.

    `merge` is the merge of a part of a layer, such as the MLP, in the merged layer with the index `index`. In the key,
    the layers of sources are numbered relative to `index`.
    """
    offsets = tuple((source.model, (source.layer or 0) - index) for source in merge.sources)
    base = merge.base and (merge.base.model, (merge.base.layer or 0) - index)
    return merge.method, offsets, tuple(merge.coefficients.items()), merge.seed, base


def _described(merge: Merge, index: int | None = None, length: int = 1) -> tuple[str, str, str]:
    """The method, sources and coefficients of a merge as texts, for a row in the recipe's table.

    The row is for `length` adjacent layers of the merged model, of which the first has the index `index`. `merge` is
    the merge of the first layer; the other layers are merged in the same way from the next layers of the sources.
    `index` is None outside layers. The text of the sources names a source's layers only if their numbers differ from
    the numbers of the merged layers.
    """

    def described(source: Source) -> str:
        if source.layer is None or source.layer == index:
            return source.model
        last = source.layer + length - 1
        return f"{source.model} (layer {last})" if length == 1 else f"{source.model} (layers {source.layer}-{last})"

    sources = ", ".join(map(described, merge.sources)) + (f", from {described(merge.base)}" if merge.base else "")
    coefficients = ", ".join(
        f"{name} = " + (", ".join(f"{v:g}" for v in value) if isinstance(value, tuple) else f"{value:g}")
        for name, value in merge.coefficients.items()
    )
    return merge.method, sources, coefficients


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)

"""Write a recipe as an ordinary Hugging Face checkpoint: the same tensors that the engine scored, and their story.

The tensors are streamed into the files one by one; a directory appears under its name only when it is complete. How
tensors are merged is not known here.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import shutil
import struct
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import yaml

from search_spaces.recipe import COMPONENTS, Merge, Recipe
from workers.bank import Bank
from workers.checkpoints import TOKENIZER_FILES, open_checkpoint
from workers.mergekit_yaml import Inexpressible, mergekit_config
from workers.merging import merged_names, merged_tensors

__all__ = ["Score", "export"]

MAX_SHARD_BYTES = 2 * 10**9

DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}

PARTIAL = ".partial"

COPIED = ("generation_config.json", *TOKENIZER_FILES)


class Score(Protocol):
    """A held-out value, its 95 % interval and the number of samples behind it."""

    @property
    def value(self) -> float: ...

    @property
    def ci95(self) -> tuple[float, float]: ...

    @property
    def samples(self) -> int: ...


def export(
    recipe: Recipe,
    bank: Bank,
    out_dir: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    scores: Mapping[str, Score] | None = None,
    study: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Path:
    """Write the merged model to `out_dir`: tensors, config.json, tokenizer, README.md, recipe.json and, where mergekit
    can express the recipe, mergekit_config.yml. Returns the directory.

    Its tensors are bit for bit what `merged_tensors` gives for `dtype`. `scores` maps an objective to its held-out
    value, `study` names the study for the model card. An existing export of the same recipe and dtype is left as it
    is. Raises FileExistsError for any other directory that is not empty, InvalidRecipe, InvalidModel.
    """
    if dtype not in DTYPES:
        raise ValueError(f"export: dtype {_name(dtype)}; expected one of {', '.join(map(_name, DTYPES))}")
    out = Path(out_dir).absolute()
    shapes = merged_names(recipe, bank)
    if _is_finished(out, recipe, dtype):
        return out
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise FileExistsError(
            f"{out}: exists and is not an export of recipe {recipe.digest[:12]} in {_name(dtype)}; "
            "expected a new or empty directory"
        )
    with _appearing(out) as directory:
        shards = _shards(shapes, dtype.itemsize, max_shard_bytes)
        stream = merged_tensors(recipe, bank, dtype)
        for shard in shards:
            _write_shard(directory / shard.file, shard.shapes, dtype, stream)
        if len(shards) > 1:
            weight_map = {name: shard.file for shard in shards for name in shard.shapes}
            total = sum(shard.num_bytes for shard in shards)
            _write_json(
                directory / "model.safetensors.index.json",
                {"metadata": {"total_size": total}, "weight_map": weight_map},
            )
        _write_json(directory / "config.json", _config(recipe, bank, dtype))
        for name in COPIED:
            if (bank.base.directory / name).is_file():
                shutil.copyfile(bank.base.directory / name, directory / name)
        _write_json(
            directory / "recipe.json",
            {**recipe.to_json(), "digest": recipe.digest, "dtype": _name(dtype), "study": study},
        )
        configuration = _mergekit(recipe, bank, dtype)
        if isinstance(configuration, dict):
            text = yaml.safe_dump(configuration, sort_keys=False)
            (directory / "mergekit_config.yml").write_text(text)
        (directory / "README.md").write_text(_model_card(recipe, bank, dtype, scores or {}, study, configuration))
    return out


@dataclass(frozen=True)
class _Shard:
    file: str
    shapes: Mapping[str, tuple[int, ...]]
    num_bytes: int


def _shards(shapes: Mapping[str, tuple[int, ...]], itemsize: int, max_bytes: int) -> list[_Shard]:
    """Tensors in order, as many in a file as fit; a larger tensor has a file of its own."""
    parts: list[dict[str, tuple[int, ...]]] = [{}]
    sizes = [0]
    for name, shape in shapes.items():
        num_bytes = math.prod(shape) * itemsize
        if parts[-1] and sizes[-1] + num_bytes > max_bytes:
            parts.append({})
            sizes.append(0)
        parts[-1][name] = shape
        sizes[-1] += num_bytes
    if len(parts) == 1:
        return [_Shard("model.safetensors", parts[0], sizes[0])]
    return [
        _Shard(f"model-{number:05}-of-{len(parts):05}.safetensors", part, size)
        for number, (part, size) in enumerate(zip(parts, sizes, strict=True), start=1)
    ]


def _write_shard(
    file: Path,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    stream: Iterator[tuple[str, torch.Tensor]],
) -> None:
    """The next `len(shapes)` tensors of `stream` as one safetensors file; only one of them is in memory at a time."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors must begin at a multiple of eight bytes
    with file.open("wb") as output:
        output.write(struct.pack("<Q", len(text)) + text)
        for expected, (name, tensor) in zip(shapes, stream, strict=False):
            assert (name, tuple(tensor.shape)) == (expected, shapes[expected]), f"{name} came, not {expected}"
            output.write(tensor.contiguous().flatten().view(torch.uint8).numpy().data)


def _config(recipe: Recipe, bank: Bank, dtype: torch.dtype) -> dict[str, Any]:
    """The base's configuration with the merged model's dtype and depth."""
    config = {key: value for key, value in bank.base.config.items() if key != "_name_or_path"}
    for key in {"dtype", "torch_dtype"} & config.keys() or {"dtype"}:
        config[key] = _name(dtype)
    if len(recipe.layers) != bank.layout.num_layers:
        config["num_hidden_layers"] = len(recipe.layers)
        if kinds := config.get("layer_types"):
            config["layer_types"] = [kinds[layer.attention.sources[0].layer or 0] for layer in recipe.layers]
    return config


def _mergekit(recipe: Recipe, bank: Bank, dtype: torch.dtype) -> dict[str, Any] | str:
    """The mergekit configuration, or why there is none."""
    held = {model.alias: model.directory for model in bank.family.models}
    directories = {alias: held[bank.alias(content) or alias] for alias, content in recipe.models.items()}
    try:
        return mergekit_config(recipe, bank.layout, directories, dtype=_name(dtype))
    except Inexpressible as error:
        return str(error)


def _model_card(
    recipe: Recipe,
    bank: Bank,
    dtype: torch.dtype,
    scores: Mapping[str, Score],
    study: str | None,
    configuration: dict[str, Any] | str,
) -> str:
    held = {model.fingerprint: model for model in bank.family.models}
    sources = [(alias, Path(held[content].directory), content) for alias, content in recipe.models.items()]
    licences = {alias: _licence(directory) for alias, directory, _ in sources}
    front: dict[str, Any] = {"library_name": "transformers", "tags": ["merge", "mergesearch"]}
    stated = {licence for licence in licences.values() if licence}
    if stated:
        front["license"] = stated.pop() if len(set(licences.values())) == 1 else "other"
    origin = f' by the study "{study}"' if study else ""
    lines = [
        f"---\n{yaml.safe_dump(front, sort_keys=False)}---",
        f"# Merge {recipe.digest[:12]}",
        f"{len(sources)} models merged{origin} by mergesearch, in float32, and stored in {_name(dtype)}.",
        "## Sources",
        _table(
            ("model", "role", "folder", "licence", "fingerprint"),
            [
                (
                    alias,
                    "base" if alias == recipe.base else "expert",
                    directory.name,
                    licences[alias] or "not stated",
                    f"`{content}`",
                )
                for alias, directory, content in sources
            ],
        ),
        "## Recipe",
        f"Digest `{recipe.digest}`; the whole of it is in `recipe.json`.",
        _table(("layers", "component", "method", "sources", "coefficients"), _recipe_rows(recipe)),
    ]
    if scores:
        rows = [
            (name, f"{score.value:.4f}", f"{score.ci95[0]:.4f} to {score.ci95[1]:.4f}", str(score.samples))
            for name, score in scores.items()
        ]
        lines += ["## Held-out scores", _table(("objective", "value", "95 % interval", "samples"), rows)]
    models = " ".join(f"--model {alias}=DIR" for alias in recipe.models)
    lines += ["## Make it again", f"    mergesearch merge recipe.json {models} --out DIR"]
    if isinstance(configuration, str):
        lines.append(f"There is no mergekit configuration: {configuration}.")
    else:
        lines.append("`mergekit_config.yml` gives the same tensors with mergekit, up to float32 rounding.")
    return "\n\n".join(lines) + "\n"


def _recipe_rows(recipe: Recipe) -> list[tuple[str, ...]]:
    """Adjacent layers of equal merges as one group, a row for each component."""
    recipe = recipe.canonical()
    rows = [("embedding", "embedding", *_described(recipe.embedding))]
    groups: list[tuple[object, list[int]]] = []
    for index, layer in enumerate(recipe.layers):
        key = tuple(_relative(layer.component(name), index) for name in COMPONENTS)
        if groups and groups[-1][0] == key:
            groups[-1][1].append(index)
        else:
            groups.append((key, [index]))
    for _, indices in groups:
        first, last = indices[0], indices[-1]
        layers = str(first) if first == last else f"{first}-{last}"
        rows += [(layers, name, *_described(recipe.layers[first].component(name), first)) for name in COMPONENTS]
    return [*rows, ("head", "final norm, output head", *_described(recipe.head))]


def _relative(merge: Merge, index: int) -> object:
    """The merge with its source layers counted from the merged layer."""
    offsets = tuple((source.model, (source.layer or 0) - index) for source in merge.sources)
    return merge.method, offsets, tuple(merge.coefficients.items()), merge.seed


def _described(merge: Merge, index: int | None = None) -> tuple[str, str, str]:
    sources = ", ".join(
        source.model if source.layer == index else f"{source.model} (layer {source.layer})" for source in merge.sources
    )
    coefficients = ", ".join(
        f"{name} = " + (", ".join(f"{v:g}" for v in value) if isinstance(value, tuple) else f"{value:g}")
        for name, value in merge.coefficients.items()
    )
    return merge.method, sources, coefficients


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _licence(directory: Path) -> str | None:
    """The licence that a source's model card states in its head."""
    try:
        parts = (directory / "README.md").read_text().split("---", 2)
        front = yaml.safe_load(parts[1]) if len(parts) == 3 and not parts[0].strip() else None
    except (OSError, ValueError, yaml.YAMLError):
        return None
    licence = front.get("license") if isinstance(front, dict) else None
    return str(licence) if licence else None


def _is_finished(out: Path, recipe: Recipe, dtype: torch.dtype) -> bool:
    """`out` is a whole export of this recipe in this dtype."""
    try:
        found = json.loads((out / "recipe.json").read_text())
        open_checkpoint(out)
    except (OSError, ValueError):  # InvalidModel is a ValueError
        return False
    return isinstance(found, dict) and (found.get("digest"), found.get("dtype")) == (recipe.digest, _name(dtype))


@contextmanager
def _appearing(out: Path) -> Iterator[Path]:
    """A directory beside `out` to write to, which becomes `out` once it is whole and on disk."""
    out.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(out)
    temporary = out.parent / f".{out.name}.{uuid.uuid4().hex[:8]}{PARTIAL}"
    temporary.mkdir()
    try:
        with _opened(temporary) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield temporary
            for file in temporary.iterdir():
                _sync(file)
            os.fsync(lock)
            try:
                temporary.rename(out)
            except OSError as error:
                raise FileExistsError(f"{out}: appeared meanwhile; expected a new or empty directory") from error
        _sync(out.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _remove_abandoned(out: Path) -> None:
    """Remove what killed exports to `out` left; one that still runs holds its lock."""
    for path in out.parent.iterdir():
        if path.name.startswith(f".{out.name}.") and path.name.endswith(PARTIAL):
            with suppress(FileNotFoundError, BlockingIOError), _opened(path) as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _sync(path: Path) -> None:
    with _opened(path) as descriptor:
        os.fsync(descriptor)


def _write_json(file: Path, document: Any) -> None:
    file.write_text(json.dumps(document, indent=2) + "\n")


def _name(dtype: torch.dtype) -> str:
    """ "float32" and the like, as configurations spell it."""
    return str(dtype).removeprefix("torch.")

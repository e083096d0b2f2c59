"""Write a recipe as an ordinary Hugging Face checkpoint: the same tensors that the engine scored, and their story.

The tensors are streamed into the files one by one; a directory appears under its name only when it is complete. What
is written first lies in a hidden directory beside it, with the checksums of the files that are complete: an export that
was killed keeps them when it is started again. How tensors are merged is not known here.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import math
import os
import shutil
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import torch
import yaml

from search_spaces.errors import InvalidRecipe
from search_spaces.recipe import COMPONENTS, Merge, Recipe
from workers.mergekit.exporter import Inexpressible, mergekit_config
from workers.merging.bank import Bank
from workers.merging.materialize import merged_names, merged_tensors
from workers.models.adapters import is_adapter
from workers.models.checkpoints import open_checkpoint
from workers.models.config import LAYERS_WITHOUT_EXPERTS, of_each_layer
from workers.models.hub import commit_of, id_of
from workers.models.tokenizers import TOKENIZER_FILES
from workers.types import digest_of

__all__ = [
    "MAX_SHARD_BYTES",
    "Progress",
    "Score",
    "export",
    "is_written",
    "left_behind_bytes",
    "licence",
    "merged_config",
    "recipe_rows",
]

MAX_SHARD_BYTES = 5 * 10**9

DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}

# The hidden directory's name ends so; it holds the model as far as it is written, and the state of the export.
PARTIAL = ".partial"
MODEL, STATE = "model", "state.json"

# Where configurations say how many layers there are.
DEPTH_KEYS = ("num_hidden_layers", "n_layer", "num_layers")


class Score(Protocol):
    """A held-out value, its 95 % interval and the number of samples behind it."""

    @property
    def value(self) -> float: ...

    @property
    def ci95(self) -> tuple[float, float]: ...

    @property
    def samples(self) -> int: ...


@dataclass(frozen=True)
class Progress:
    """Bytes of tensors: `written` of `total`, `kept` of them by an earlier export that was killed."""

    written: int
    kept: int
    total: int


def export(
    recipe: Recipe,
    bank: Bank,
    out_dir: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    scores: Mapping[str, Score] | None = None,
    study: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: Callable[[Progress], None] = lambda _: None,
) -> Path:
    """Write the merged model to `out_dir`: tensors, config.json, tokenizer, README.md, recipe.json and, where mergekit
    can express the recipe, mergekit_config.yml. Returns the directory.

    Its tensors are bit for bit what `merged_tensors` gives for `dtype`. `scores` maps an objective to its held-out
    value, `study` names the study for the model card; the tokenizer is that of the bank's family;
    `progress` is told of every tensor. An existing export of the same recipe and dtype is left as it is, and the whole
    shards of one that was killed or interrupted are checked and kept. Raises FileExistsError for any other directory
    that is not empty and while another process writes to it, PermissionError, InvalidRecipe, InvalidModel.
    """
    if dtype not in DTYPES:
        raise ValueError(f"export: dtype {_name(dtype)}; expected one of {', '.join(map(_name, DTYPES))}")
    out = Path(out_dir).resolve()  # through links: what they lead to is made
    shards = _shards(merged_names(recipe, bank), dtype.itemsize, max_shard_bytes)
    config = merged_config(recipe, bank, dtype)
    if is_written(recipe, out, dtype):
        return out
    with _appearing(out, _job(recipe, bank, dtype, max_shard_bytes)) as directory:
        _write_shards(shards, recipe, bank, dtype, directory, progress)
        _write_json(directory / "config.json", config)
        source = Path(bank.sources.result_dir)
        for name in (*TOKENIZER_FILES, "generation_config.json"):
            if (source / name).is_file():
                shutil.copyfile(source / name, directory / name)
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


def is_written(recipe: Recipe, out_dir: str | Path, dtype: torch.dtype) -> bool:
    """Whether `out_dir` is a whole export of this recipe in this dtype. Raises FileExistsError if it is anything else
    than that, missing, or an empty directory; PermissionError if it cannot be made."""
    out = Path(out_dir).resolve()
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        above = next(parent for parent in out.parents if parent.exists())
        if not above.is_dir():
            raise FileExistsError(f"{out}: cannot be made, for {above} is no directory")
        if not os.access(above, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(above))
        return False
    try:
        found = json.loads((out / "recipe.json").read_text())
        open_checkpoint(out)
    except (OSError, ValueError):  # InvalidModel is a ValueError
        found = None
    if isinstance(found, dict) and (found.get("digest"), found.get("dtype")) == (recipe.digest, _name(dtype)):
        return True
    raise FileExistsError(
        f"{out}: exists and is not an export of recipe {recipe.digest[:12]} in {_name(dtype)}; "
        "expected a new or empty directory"
    )


def left_behind_bytes(out_dir: str | Path) -> int:
    """What killed exports to `out_dir` have left on the disk; the next keeps it or removes it."""
    places = _partial_directories(Path(out_dir).resolve())
    return sum(file.stat().st_size for place in places for file in place.rglob("*") if file.is_file())


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


def _write_shards(
    shards: Sequence[_Shard],
    recipe: Recipe,
    bank: Bank,
    dtype: torch.dtype,
    directory: Path,
    progress: Callable[[Progress], None],
) -> None:
    """Every shard that is not there yet, and the index. A shard counts as there once it is on disk and its checksum is
    in the state, and only while the file has that checksum."""
    state = directory.parent / STATE
    checksums = _whole_shards(shards, directory, state)
    kept = sum(shard.num_bytes for shard in shards if shard.file in checksums)
    told = Progress(kept, kept, sum(shard.num_bytes for shard in shards))
    progress(told)
    missing = [shard for shard in shards if shard.file not in checksums]
    stream = merged_tensors(recipe, bank, dtype, names={name for shard in missing for name in shard.shapes})

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal told
        for name, tensor in stream:
            told = replace(told, written=told.written + tensor.nbytes)
            progress(told)
            yield name, tensor

    counted = tensors()
    for shard in missing:
        checksums[shard.file] = _write_shard(directory / shard.file, shard.shapes, dtype, counted)
        _sync(directory / shard.file)
        new_state = state.with_suffix(".new")
        _write_json(new_state, checksums)
        _sync(new_state)
        new_state.replace(state)
    if len(shards) > 1:
        weight_map = {name: shard.file for shard in shards for name in shard.shapes}
        _write_json(
            directory / "model.safetensors.index.json",
            {"metadata": {"total_size": told.total}, "weight_map": weight_map},
        )


def _whole_shards(shards: Sequence[_Shard], directory: Path, state: Path) -> dict[str, str]:
    """The checksums of the files that an earlier export has finished, of those that still have them."""
    try:
        checksums = dict(json.loads(state.read_text()))
    except (OSError, ValueError, TypeError):
        return {}
    whole = {}
    for name in [shard.file for shard in shards if shard.file in checksums]:
        with suppress(OSError), (directory / name).open("rb") as file:
            checksum = hashlib.file_digest(file, "sha256").hexdigest()
            if checksum == checksums[name]:
                whole[name] = checksum
    return whole


def _write_shard(
    file: Path,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    stream: Iterator[tuple[str, torch.Tensor]],
) -> str:
    """The next `len(shapes)` tensors of `stream` as one safetensors file; only one of them is in memory at a time.
    Returns the file's sha256 (hex)."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors must begin at a multiple of eight bytes
    beginning = struct.pack("<Q", len(text)) + text
    checksum = hashlib.sha256(beginning)
    with file.open("wb") as output:
        output.write(beginning)
        for expected, (name, tensor) in zip(shapes, stream, strict=False):
            assert (name, tuple(tensor.shape)) == (expected, shapes[expected]), f"{name} came, not {expected}"
            content = tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().data
            output.write(content)
            checksum.update(content)
    return checksum.hexdigest()


def merged_config(recipe: Recipe, bank: Bank, dtype: torch.dtype) -> dict[str, Any]:
    """config.json of the merged model: the base's, with its dtype and depth. Raises InvalidRecipe."""
    config = {key: value for key, value in bank.base.config.items() if key != "_name_or_path"}
    for key in {"dtype", "torch_dtype"} & config.keys() or {"dtype"}:
        config[key] = _name(dtype)
    depth = bank.layout.num_layers
    sources = [layer.attention.sources[0].layer or 0 for layer in recipe.layers]
    if sources != list(range(depth)):
        listed = of_each_layer(config, depth)
        config |= {key: [values[layer] for layer in sources] for key, values in listed.items()}
        config |= dict.fromkeys(DEPTH_KEYS & config.keys() or DEPTH_KEYS[:1], len(sources))
        # In a mixture of experts some layers may have none; one kind of configuration tells them by their numbers.
        kinds = [frozenset(bank.layout.suffixes("mlp", layer)) for layer in range(depth)]
        if len(set(kinds)) > 1 and "mlp_layer_types" not in listed:
            if not {LAYERS_WITHOUT_EXPERTS, "decoder_sparse_step"} & config.keys():
                raise InvalidRecipe(
                    "layers: the models have layers with a mixture of experts and layers without, and a configuration "
                    f"of type {config['model_type']!r} cannot say which is which in another order"
                )
            dense = min(kinds, key=len)
            mlps = [layer.mlp.sources[0].layer or 0 for layer in recipe.layers]
            numbers = [number for number, layer in enumerate(mlps) if kinds[layer] == dense]
            config |= {LAYERS_WITHOUT_EXPERTS: numbers, "decoder_sparse_step": 1}
    return config


def _mergekit(recipe: Recipe, bank: Bank, dtype: torch.dtype) -> dict[str, Any] | str:
    """The mergekit configuration, or why there is none."""
    base = _called(Path(bank.family.base.directory))
    held = {
        model.alias: f"{base}+{_called(directory)}" if is_adapter(directory) else _called(directory)
        for model in bank.family.models
        for directory in [Path(model.directory)]
    }
    directories = {alias: held[bank.alias(content) or alias] for alias, content in recipe.models.items()}
    alignment, tokenizer = bank.alignment, bank.family.tokenizer
    if alignment.tensors and alignment.num_unnamed:
        return f"{alignment.num_unnamed} rows of the embedding stand for no token, which mergekit drops"
    try:
        document = mergekit_config(recipe, bank.layout, directories, dtype=_name(dtype))
        if alignment.tensors or tokenizer != "base":
            document["tokenizer_source"] = held.get(tokenizer, tokenizer)
        return document
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
        f"{len(sources)} models merged{origin} by mergesearch, in float32, and stored in {_name(dtype)}.",
        "## Sources",
        _table(
            ("model", "role", "source", "licence", "fingerprint"),
            [
                (
                    alias,
                    "base" if alias == recipe.base else "expert",
                    _called(directory) if id_of(directory) else directory.name,
                    licences[alias] or "not stated",
                    f"`{content}`",
                )
                for alias, directory, content in sources
            ],
        ),
        "## Recipe",
        f"Digest `{recipe.digest}`; the whole of it is in `recipe.json`."
        + (f" Its tokens are those of {recipe.tokenizer}." if recipe.tokenizer != "base" else ""),
        _table(("layers", "component", "method", "sources", "coefficients"), recipe_rows(recipe)),
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


def _called(directory: Path) -> str:
    """A hub model by its name and commit, which mean the same elsewhere; any other by its directory."""
    name = id_of(directory)
    return f"{name}@{commit_of(directory)}" if name else str(directory)


def recipe_rows(recipe: Recipe) -> list[tuple[str, ...]]:
    """The recipe as a table: (layers, component, method, sources, coefficients). Adjacent layers of equal merges are
    one group with a row for each component; single tensors come last."""
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
    rows.append(("head", "final norm, output head", *_described(recipe.head)))
    return [*rows, *(("tensor", name, *_described(merge)) for name, merge in recipe.tensors.items())]


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


def licence(directory: Path) -> str | None:
    """The licence that a source's model card states in its head; several are separated by commas."""
    try:
        parts = (directory / "README.md").read_text().split("---", 2)
        front = yaml.safe_load(parts[1]) if len(parts) == 3 and not parts[0].strip() else None
    except (OSError, ValueError, yaml.YAMLError):
        return None
    stated = front.get("license") if isinstance(front, dict) else None
    return ", ".join(map(str, stated)) if isinstance(stated, list) and stated else str(stated) if stated else None


def _job(recipe: Recipe, bank: Bank, dtype: torch.dtype, max_shard_bytes: int) -> str:
    """What must be the same for files of one export to belong to another."""
    return digest_of([recipe.digest, bank.fingerprint, _name(dtype), max_shard_bytes, version("mergesearch")])[:16]


@contextmanager
def _appearing(out: Path, job: str) -> Iterator[Path]:
    """A directory to write to, which becomes `out` once it is whole and on disk. It lies in one beside `out` that the
    next export for the same `job` finds again if this process is killed or interrupted, but not if it fails."""
    out.parent.mkdir(parents=True, exist_ok=True)
    place = out.parent / f".{out.name}.{job}{PARTIAL}"
    _remove_abandoned(out, but=place)
    place.mkdir(exist_ok=True)
    with _opened(place) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(lock), place.stat()):
                raise FileNotFoundError(place)  # whoever held the lock has removed it; the name is another's
        except (BlockingIOError, FileNotFoundError) as error:
            raise FileExistsError(
                f"{out}: another process is writing this model there; wait for it, or give another directory"
            ) from error
        directory = place / MODEL
        try:
            directory.mkdir(exist_ok=True)
            yield directory
            for file in directory.iterdir():
                _sync(file)
            _sync(directory)
            try:
                directory.rename(out)
            except OSError as error:
                raise FileExistsError(f"{out}: appeared meanwhile; expected a new or empty directory") from error
            _sync(out.parent)
        except Exception:  # only what is killed or interrupted may be gone on with
            shutil.rmtree(place, ignore_errors=True)
            raise
        shutil.rmtree(place, ignore_errors=True)


def _partial_directories(out: Path) -> list[Path]:
    if not out.parent.is_dir():
        return []
    return [
        path for path in out.parent.iterdir() if path.name.startswith(f".{out.name}.") and path.name.endswith(PARTIAL)
    ]


def _remove_abandoned(out: Path, *, but: Path) -> None:
    """Remove what killed exports to `out` left, except `but`; one that still runs holds its lock."""
    for path in _partial_directories(out):
        if path != but:
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

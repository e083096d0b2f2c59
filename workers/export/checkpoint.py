"""Export of a recipe as a Hugging Face checkpoint with exactly the tensors that the engine scored.

Tensors are streamed into the files one by one. The directory has its name only once it is complete. Until then the
files are in a hidden directory next to it, together with the checksums of the finished ones, so that an export that was
killed continues from them.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import math
import os
import shutil
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import xxhash
import yaml

from search_spaces.recipe import Recipe
from workers.alignments.export import MODELING_FILE, aligned_parts
from workers.alignments.recipes import unaligned
from workers.directories import appearing, partial_directories, sync, write_file
from workers.export.model_card import Score, lineage, model_card, source_name
from workers.mergekit.exporter import Inexpressible, mergekit_config
from workers.merging.bank import Bank
from workers.merging.materialize import Scratch, is_small, merged_names, merged_tensors
from workers.models.chat_templates import write_template
from workers.models.checkpoints import open_checkpoint
from workers.models.merged_files import merged_config
from workers.models.tokenizers import TOKENIZER_FILES
from workers.types import digest_of

__all__ = [
    "MAX_SHARD_BYTES",
    "Progress",
    "check_place",
    "export",
    "is_written",
    "left_behind_bytes",
]

MAX_SHARD_BYTES = 5 * 10**9

DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}

# Methods that compute each element from one element of each source, so that experts may be stacked or not.
ELEMENT_BY_ELEMENT = {"passthrough", "linear", "weighted_sum", "task_arithmetic", "nearswap"}

# The file, beside an incomplete directory, with the checksums of its complete files.
STATE = "state.json"

# Detects damage by a crash only. sha256 of a file would take as long as merging it.
CHECKSUM = xxhash.xxh3_128


@dataclass(frozen=True)
class Progress:
    """Bytes of tensors: `written` of `total`, of which `kept` were written by an earlier export that was killed."""

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
    chat_template: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: Callable[[Progress], None] = lambda _: None,
) -> Path:
    """Write the merged model to the directory `out_dir`, and return it.

    The files are tensors, config.json, tokenizer, README.md, recipe.json and, where mergekit can express the recipe,
    mergekit_config.yml. A merge with alignments also has their tensors and the file of the model class that computes
    them, which transformers loads with trust_remote_code.

    The tensors are bit for bit those of `merged_tensors` for `dtype`; the tokenizer is that of the bank's family.
    `scores` maps an objective to its held-out value, `study` names the study in the model card; `chat_template`
    replaces the tokenizer's; `progress` is called for every tensor. An existing export of the same recipe, dtype and
    template is left unchanged; complete shards of an export that was killed or interrupted are checked and kept. Raises
    FileExistsError for any other directory that is not empty and while another process writes to it, PermissionError,
    InvalidRecipe, InvalidModel, and EvidenceMismatch if files of the sources change.
    """
    if dtype not in DTYPES:
        raise ValueError(f"export: dtype {_name(dtype)}; expected one of {', '.join(map(_name, DTYPES))}")
    out = Path(out_dir).resolve()  # a symbolic link's target is what gets created
    aligned = aligned_parts(recipe, bank, dtype)
    added = {} if aligned is None else aligned.tensors()
    plain = unaligned(recipe)
    shapes = merged_names(plain, bank) | {name: tuple(tensor.shape) for name, tensor in added.items()}
    shards = _shards(shapes, dtype.itemsize, max_shard_bytes)
    config = merged_config(plain, bank.base, bank.views(recipe.models), dtype=_name(dtype))
    if is_written(recipe, out, dtype, chat_template=chat_template):
        return out
    with appearing(out, _job(recipe, bank, dtype, max_shard_bytes)) as directory:
        _write_shards(shards, plain, bank, dtype, directory, progress, added=added)
        bank.sources.check_unchanged()  # a file may have changed while it was read
        _write_json(directory / "config.json", config if aligned is None else aligned.config(config))
        if aligned is not None:
            shutil.copyfile(MODELING_FILE, directory / MODELING_FILE.name)
        source = Path(bank.sources.result_dir)
        for name in (*TOKENIZER_FILES, "generation_config.json"):
            if (source / name).is_file():
                shutil.copyfile(source / name, directory / name)
        if chat_template is not None:
            write_template(directory, chat_template)
        template = {} if chat_template is None else {"chat_template": chat_template}
        _write_json(
            directory / "recipe.json",
            {
                **recipe.to_json(),
                "digest": recipe.digest,
                "dtype": _name(dtype),
                "study": study,
                **template,
                **lineage(recipe, bank.family),
            },
        )
        configuration = _mergekit(recipe, bank, dtype) if aligned is None else "it has no alignments between layers"
        if isinstance(configuration, dict):
            configuration |= template
            text = yaml.safe_dump(configuration, sort_keys=False)
            (directory / "mergekit_config.yml").write_text(text)
        card = model_card(
            recipe, bank.family, dtype=_name(dtype), scores=scores or {}, study=study, mergekit=configuration
        )
        (directory / "README.md").write_text(card)
    return out


def is_written(recipe: Recipe, out_dir: str | Path, dtype: torch.dtype, *, chat_template: str | None = None) -> bool:
    """Whether `out_dir` is a complete export of this recipe, dtype and chat template; False if it is missing or empty.

    Raises FileExistsError if it contains anything else, PermissionError if it cannot be created.
    """
    out = Path(out_dir).resolve()
    wanted_export = f"an export of recipe {recipe.digest[:12]} in {_name(dtype)}"
    if not check_place(out, expected=wanted_export):
        return False
    try:
        found = json.loads((out / "recipe.json").read_text())
        _check_weights(out, recipe)
    except (OSError, ValueError):  # InvalidModel is a ValueError
        found = None
    wanted = {"digest": recipe.digest, "dtype": _name(dtype), "chat_template": chat_template}
    if isinstance(found, dict) and {key: found.get(key) for key in wanted} == wanted:
        return True
    raise FileExistsError(f"{out}: exists and is not {wanted_export}; expected a new or empty directory")


def _check_weights(out: Path, recipe: Recipe) -> None:
    """Check that the files of the weights are present and whole. Raises OSError or ValueError if not."""
    if all(layer.alignment is None for layer in recipe.layers):
        open_checkpoint(out)
        return
    from safetensors import safe_open

    index = out / "model.safetensors.index.json"
    files = set(json.loads(index.read_text())["weight_map"].values()) if index.is_file() else {"model.safetensors"}
    for name in (MODELING_FILE.name, "config.json", *files):
        if not (out / name).is_file():
            raise FileNotFoundError(out / name)
    for name in files:
        try:
            with safe_open(out / name, framework="pt"):
                pass
        except Exception as error:  # safetensors raises its own class, which is no more than an Exception
            raise ValueError(f"{out / name}: {error}") from error


def check_place(out_dir: str | Path, *, expected: str = "an export") -> bool:
    """Whether there may be an export at `out_dir`; False if it is missing or empty. `expected` is for the message.

    Raises FileExistsError if something else is there, PermissionError if it cannot be created.
    """
    out = Path(out_dir).resolve()
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        above = next(parent for parent in out.parents if parent.exists())
        if not above.is_dir():
            raise FileExistsError(f"{out}: cannot be created, because {above} is not a directory")
        if not os.access(above, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(above))
        return False
    if not (out / "recipe.json").is_file():
        raise FileExistsError(f"{out}: exists and is not {expected}; expected a new or empty directory")
    return True


def left_behind_bytes(out_dir: str | Path) -> int:
    """Bytes on the disk left by killed exports to `out_dir`; the next export continues from them or removes them."""
    places = partial_directories(Path(out_dir).resolve())
    return sum(file.stat().st_size for place in places for file in place.rglob("*") if file.is_file())


@dataclass(frozen=True)
class _Shard:
    file: str
    shapes: Mapping[str, tuple[int, ...]]
    num_bytes: int


def _shards(shapes: Mapping[str, tuple[int, ...]], itemsize: int, max_bytes: int) -> list[_Shard]:
    """The shards: as many tensors per file as fit, in order; a tensor larger than `max_bytes` has its own file."""
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
    *,
    added: Mapping[str, torch.Tensor],
) -> None:
    """Write the shards that do not exist yet, and the index. Tensors that are `added` to the merge's come last.

    A shard is complete once it is on disk and its checksum is in the state file, as long as the file has that checksum.
    """
    state = directory.parent / STATE
    checksums = _complete_shards(shards, directory, state)
    kept = sum(shard.num_bytes for shard in shards if shard.file in checksums)
    current = Progress(kept, kept, sum(shard.num_bytes for shard in shards))
    progress(current)
    missing = [shard for shard in shards if shard.file not in checksums]
    wanted = {name for shard in missing for name in shard.shapes}
    memory, compiles = Scratch(bank, dtype), not is_small(recipe, bank)
    stream = merged_tensors(recipe, bank, dtype, names=wanted - {*added}, into=memory.tensor, compiles=compiles)

    rest = ((name, tensor) for name, tensor in added.items() if name in wanted)

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal current
        for name, tensor in itertools.chain(stream, rest):
            current = replace(current, written=current.written + tensor.nbytes)
            progress(current)
            yield name, tensor

    counted = tensors()
    for shard in missing:
        checksums[shard.file] = _write_shard(directory / shard.file, shard.shapes, dtype, counted)
        sync(directory / shard.file)
        write_file(state, json.dumps(checksums))
    if len(shards) > 1:
        weight_map = {name: shard.file for shard in shards for name in shard.shapes}
        _write_json(
            directory / "model.safetensors.index.json",
            {"metadata": {"total_size": current.total}, "weight_map": weight_map},
        )


def _complete_shards(shards: Sequence[_Shard], directory: Path, state: Path) -> dict[str, str]:
    """The checksums of the files that an earlier export finished and that are unchanged."""
    try:
        checksums = dict(json.loads(state.read_text()))
    except (OSError, ValueError, TypeError):
        return {}
    complete = {}
    for name in [shard.file for shard in shards if shard.file in checksums]:
        with suppress(OSError), (directory / name).open("rb") as file:
            checksum = hashlib.file_digest(file, CHECKSUM).hexdigest()
            if checksum == checksums[name]:
                complete[name] = checksum
    return complete


def _write_shard(
    file: Path,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    stream: Iterator[tuple[str, torch.Tensor]],
) -> str:
    """Write the next `len(shapes)` tensors of `stream` as one safetensors file, and return its checksum (hex).

    Only one of the tensors is in memory at a time.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors must start at a multiple of eight bytes
    beginning = struct.pack("<Q", len(text)) + text
    checksum = CHECKSUM(beginning)
    with file.open("wb") as output:
        output.write(beginning)
        for expected, (name, tensor) in zip(shapes, stream, strict=False):
            assert (name, tuple(tensor.shape)) == (expected, shapes[expected]), f"got {name}, expected {expected}"
            content = tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().data
            output.write(content)
            checksum.update(content)
    return checksum.hexdigest()


def _mergekit(recipe: Recipe, bank: Bank, dtype: torch.dtype) -> dict[str, Any] | str:
    """The mergekit configuration, or the reason why there is none."""
    held = {}
    for alias, checkpoint in bank.sources.checkpoints.items():
        parts = (checkpoint,) if checkpoint.base is None else (checkpoint.base, checkpoint)
        held[alias] = "+".join(source_name(part.directory.resolve()) for part in parts)
    directories = {alias: held[bank.alias(content) or alias] for alias, content in recipe.models.items()}
    alignment, tokenizer = bank.alignment, bank.family.tokenizer
    if alignment.tensors and alignment.num_unnamed:
        return f"{alignment.num_unnamed} rows of the embedding stand for no token, which mergekit drops"
    if bank.family.vocabulary.keys() - {"by_id"}:
        return "rows of single tokens are chosen, or the vocabulary is padded"
    of_mlps = {layer.mlp.method for layer in recipe.canonical().layers}
    if bank.layout.stacks and not recipe.stacks_experts and (whole := of_mlps - ELEMENT_BY_ELEMENT):
        return (
            f"experts are merged one by one, by {', '.join(sorted(whole))}, and mergekit merges a layer's as one tensor"
        )
    try:
        layout = bank.layout.stacked if recipe.stacks_experts else bank.layout
        document = mergekit_config(recipe, layout, directories, dtype=_name(dtype))
        if recipe.stacks_experts:
            document["experts"] = "stacked"  # mergekit ignores it
        if alignment.tensors or tokenizer != "base":
            document["tokenizer_source"] = held.get(tokenizer, tokenizer)
        return document
    except Inexpressible as error:
        return str(error)


def _job(recipe: Recipe, bank: Bank, dtype: torch.dtype, max_shard_bytes: int) -> str:
    """A digest of what two exports must have in common so that one can continue from the files of the other."""
    return digest_of([recipe.digest, bank.fingerprint, _name(dtype), max_shard_bytes, version("mergesearch")])[:16]


def _write_json(file: Path, document: Any) -> None:
    file.write_text(json.dumps(document, indent=2) + "\n")


def _name(dtype: torch.dtype) -> str:
    """The name of a dtype in configurations, such as "float32"."""
    return str(dtype).removeprefix("torch.")

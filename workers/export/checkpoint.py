"""Export of a recipe's merged model as a Hugging Face checkpoint.

The exported tensors equal, bit for bit, the tensors of the engine that scored the merge, with two exceptions. The first
exception is tensors that LoRA adapters change, if the engine was on a GPU (constant `model_card.ADAPTED`). The second
exception is merges by methods whose bits depend on the device (constant `model_card.BY_DEVICE`).

The directory gets its name only when it is complete. Until then its files are in a hidden directory next to it,
together with the checksums of the finished files. An export that was killed continues from these files.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from search_spaces.recipe import Recipe
from workers.alignments.export import MODELING_FILE, aligned_parts
from workers.alignments.recipes import unaligned
from workers.directories import appearing, partial_directories
from workers.export.heads import unmerged_parts
from workers.export.model_card import Score, lineage, model_card
from workers.export.shards import DTYPES, Progress, plan_shards, write_shards
from workers.mergekit.exporter import Inexpressible, configuration_text, family_config
from workers.merging.bank import Bank
from workers.merging.plan import merged_names
from workers.models.chat_templates import write_template
from workers.models.checkpoints import open_checkpoint
from workers.models.merged_files import merged_config
from workers.types import digest_of

__all__ = ["MAX_SHARD_BYTES", "check_place", "export", "is_written", "left_behind_bytes"]

MAX_SHARD_BYTES = 5 * 10**9


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
    has_directories: bool = True,
    progress: Callable[[Progress], None] = lambda _: None,
) -> Path:
    """Write the merged model of a recipe as a Hugging Face checkpoint to `out_dir`, and return the directory.

    `bank` has the weights of the recipe's models. The files are tensors, config.json, tokenizer, README.md, recipe.json
    and, if mergekit can express the recipe, mergekit_config.yml. If the merge has alignments (maps of the residual
    stream between layers), there are also their tensors and the file of the model class that computes them;
    transformers loads this class with trust_remote_code. If the models are classifiers, the checkpoint has the head of
    one model, and the folder `heads` has the heads of all models, each for one task.

    The tensors are bit for bit the result of the function `merged_tensors` for `dtype`, in files of at most
    `max_shard_bytes`. The tokenizer has the vocabulary to which `bank` has converted the models. `scores` maps an
    objective to its value on held-out samples, and `study` is the name of the study; both are shown in the model card,
    README.md. `chat_template` replaces the tokenizer's chat template. If `has_directories` is False,
    mergekit_config.yml has no directories of this machine, but the models' aliases. `progress` is called for every
    tensor. An existing export of the same recipe, dtype and template is left unchanged. If an earlier export was killed
    or interrupted, its complete files of tensors are checked and kept.

    Raises:
        FileExistsError: `out_dir` has other content, or another process writes to it.
        PermissionError: The directory cannot be created.
        InvalidRecipe, InvalidModel: The merge cannot be computed.
        EvidenceMismatch: Files of the sources have changed.
    """
    if dtype not in DTYPES:
        raise ValueError(f"export: dtype {_name(dtype)}; expected one of {', '.join(map(_name, DTYPES))}")
    out = Path(out_dir).resolve()  # a symbolic link's target is what gets created
    aligned = aligned_parts(recipe, bank, dtype)
    unmerged = unmerged_parts(bank, dtype)
    added = {} if aligned is None else aligned.tensors()
    added = added if unmerged is None else {**added, **unmerged.added}
    plain = unaligned(recipe)
    shapes = merged_names(plain, bank) | {name: tuple(tensor.shape) for name, tensor in added.items()}
    shards = plan_shards(shapes, dtype.itemsize, max_shard_bytes)
    config = merged_config(plain, bank.base, bank.views(recipe.models), dtype=_name(dtype))
    config = config if unmerged is None else {**config, **unmerged.config}
    if is_written(recipe, out, dtype, chat_template=chat_template):
        return out
    with appearing(out, _content_key(recipe, bank, dtype, max_shard_bytes)) as directory:
        write_shards(shards, plain, bank, dtype, directory, progress, added=added)
        bank.sources.check_unchanged()  # a file may have changed while it was read
        _write_json(directory / "config.json", config if aligned is None else aligned.config(config))
        if unmerged is not None:
            unmerged.write(directory)
        if aligned is not None:
            shutil.copyfile(MODELING_FILE, directory / MODELING_FILE.name)
        source = Path(bank.sources.result_dir)
        for name in (*bank.sources.modality.files, "generation_config.json"):
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
        configuration: dict[str, Any] | str
        try:
            configuration = (
                family_config(recipe, bank.sources, dtype=_name(dtype), has_directories=has_directories) | template
            )
            text = configuration_text(configuration, bank.sources, has_directories=has_directories)
            (directory / "mergekit_config.yml").write_text(text)
        except Inexpressible as error:
            configuration = str(error) if aligned is None else "it has no alignments between layers"
        card = model_card(
            recipe,
            bank.family,
            dtype=_name(dtype),
            scores=scores or {},
            study=study,
            mergekit=configuration,
            loading="" if unmerged is None else unmerged.loading,
        )
        (directory / "README.md").write_text(card)
    return out


def is_written(recipe: Recipe, out_dir: str | Path, dtype: torch.dtype, *, chat_template: str | None = None) -> bool:
    """Whether `out_dir` contains the complete export of the given recipe, dtype and chat template.

    `chat_template` is the chat template that was given to the function `export`, or None. Returns False if `out_dir` is
    missing or empty. Raises FileExistsError if `out_dir` contains anything else, such as an incomplete export or an
    export of another recipe, and PermissionError if `out_dir` cannot be created.
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
    """Check that an export has all files for loading the model, and that its weight files are complete.

    `out` is the directory of the export. If `recipe` has alignments (maps of the residual stream between layers), the
    file of the model class is also required. Raises OSError or ValueError if a file is missing or damaged.
    """
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
    """Whether the directory `out_dir` has an export (a recipe.json); False if it is missing or empty.

    Raises FileExistsError if the path contains anything else; `expected` names, for the message, what the caller
    expected there. Raises PermissionError if the directory is missing and cannot be created.
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
    """Bytes on disk that killed exports to `out_dir` left in hidden directories.

    The next export to `out_dir` reuses or removes these files.
    """
    places = partial_directories(Path(out_dir).resolve())
    return sum(file.stat().st_size for place in places for file in place.rglob("*") if file.is_file())


def _content_key(recipe: Recipe, bank: Bank, dtype: torch.dtype, max_shard_bytes: int) -> str:
    """Key of an export's content; an export may continue from files that an interrupted export with the same key left.

    The key depends on the recipe, the sources in `bank`, the dtype, the largest size of a weight file
    (`max_shard_bytes`) and the version of mergesearch.
    """
    return digest_of([recipe.digest, bank.fingerprint, _name(dtype), max_shard_bytes, version("mergesearch")])[:16]


def _write_json(file: Path, document: Any) -> None:
    file.write_text(json.dumps(document, indent=2) + "\n")


def _name(dtype: torch.dtype) -> str:
    """Name of a dtype as configuration files write it, such as "float32"."""
    return str(dtype).removeprefix("torch.")

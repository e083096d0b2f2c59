"""Writing of models that are expanded to one form, as Hugging Face checkpoints."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from workers.directories import appearing
from workers.errors import InvalidModel
from workers.export.expansion.expanded_model import Expansion
from workers.export.expansion.form import Form, common_form
from workers.export.shards import Progress, plan_shards, write_index
from workers.models.checkpoints import Checkpoint, open_checkpoint
from workers.models.remote import locate
from workers.models.remote.downloads import fetched
from workers.models.tokenizers import tokenizer_digest
from workers.models.vocabulary import token_ids
from workers.types import digest_of

__all__ = ["Expanded", "expand"]

log = logging.getLogger(__name__)

MAX_SHARD_BYTES = 5 * 10**9


@dataclass(frozen=True)
class Expanded:
    """Models of one form, `form`, and the directory of each of them, keyed by alias."""

    form: Form
    directories: Mapping[str, Path]


def expand(
    models: Mapping[str, str | Path],
    out_dir: str | Path,
    *,
    tokens_of: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: Callable[[Progress], None] = lambda _: None,
    note: Callable[[str], None] = log.info,
) -> Expanded:
    """Expand models to their common form, and return this form and the directory of each model.

    `models` has the directory or hub id of each model, keyed by alias; models of a hub are downloaded. A model that has
    the common form already stays where it is. The others are written to folders of `out_dir` that are called like their
    aliases, as Hugging Face checkpoints with files of at most `max_shard_bytes`; a folder with this model, in this
    form, is left as it is. With `tokens_of`, the alias of a model, all models get its tokens, which changes what models
    with other tokens compute. `progress` is called for every tensor, and `note` with messages about downloads and
    tokens.

    Raises:
        InvalidModel: The models cannot be expanded to one form, or the disk has too little space.
        FileExistsError: A folder has other content, or another process writes to it.
    """
    form = common_form({alias: open_checkpoint(given) for alias, given in models.items()}, tokens_of=tokens_of)
    places = fetched([locate(directory) for directory in models.values()], note=note)
    opened = {alias: open_checkpoint(place) for alias, place in zip(models, places, strict=True)}
    expansions = {
        alias: Expansion(model, form, tokens_of=_other_tokens(model, opened.get(tokens_of or "")))
        for alias, model in opened.items()
    }
    outs = {alias: Path(out_dir).resolve() / alias for alias, each in expansions.items() if each.is_needed}
    missing = [alias for alias, out in outs.items() if not _is_written(out, expansions[alias])]
    current = Progress(0, 0, sum(expansions[alias].num_bytes for alias in missing))
    _check_space(Path(out_dir).resolve(), current.total)
    for alias in missing:
        if (rows := expansions[alias].rows) is not None:
            note(
                f"{alias}: has {rows.num_equal} of the {len(rows.sources)} tokens of {tokens_of}; the rows of the "
                "others are means"
            )
        with appearing(outs[alias], _key(expansions[alias])[:16]) as directory:
            for written in _write(expansions[alias], directory, max_shard_bytes):
                current = replace(current, written=current.written + written)
                progress(current)
    return Expanded(form, {alias: model.directory for alias, model in opened.items()} | outs)


def _other_tokens(model: Checkpoint, tokens_of: Checkpoint | None) -> Checkpoint | None:
    """`tokens_of`, or None if `model` has the same tokens."""
    if tokens_of is None or token_ids(model.tokenizer_dir) == token_ids(tokens_of.tokenizer_dir):
        return None
    return tokens_of


def _check_space(out_dir: Path, needed: int) -> None:
    above = next(parent for parent in (out_dir, *out_dir.parents) if parent.exists())
    if needed > (free := shutil.disk_usage(above).free):
        raise InvalidModel((f"{out_dir}: {needed / 2**30:.1f} GiB are needed; {free / 2**30:.1f} GiB are free",))


def _key(expansion: Expansion) -> str:
    """Digest of what decides the content: the weights' files, their sizes and times, all small files, and the form."""
    model = expansion.model
    files = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in model.files]
    form = expansion.form
    digests = [tokenizer_digest(directory) for directory in (model.directory, expansion.vocabulary_of.tokenizer_dir)]
    computed = [form.kind, form.in_layer, form.rms_norm_eps, form.rotary.stated]
    return digest_of([files, str(expansion.shape), *computed, *digests, version("mergesearch")])


def _is_written(out: Path, expansion: Expansion) -> bool:
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return False
    try:
        found = json.loads((out / "expansion.json").read_text())["key"]
        open_checkpoint(out)
    except (OSError, ValueError, KeyError, TypeError):
        found = None
    if found == _key(expansion):
        return True
    raise FileExistsError(f"{out}: exists and is not this model, expanded to this form; expected a new directory")


def _write(expansion: Expansion, directory: Path, max_shard_bytes: int) -> Iterator[int]:
    """Write an expanded model to `directory`, and yield the number of bytes of each tensor."""
    from safetensors.torch import save_file

    model = expansion.model
    shards = plan_shards(expansion.shapes, expansion.itemsize, max_shard_bytes)
    for shard in shards:
        tensors = {}
        for name in shard.shapes:
            tensors[name] = expansion.tensor(name).clone(memory_format=torch.contiguous_format)
            yield tensors[name].nbytes
        save_file(tensors, directory / shard.file, metadata={"format": "pt"})
    write_index(shards, directory)
    _write_json(directory / "config.json", expansion.config())
    named = expansion.vocabulary_of  # special tokens of generation_config.json are among its tokens
    for name in (*model.modality.files, "generation_config.json"):
        source = named.tokenizer_dir if (named.tokenizer_dir / name).is_file() else named.directory
        if (source / name).is_file():
            shutil.copyfile(source / name, directory / name)
    _write_json(
        directory / "expansion.json",
        {"model": str(model.directory), "shape": str(expansion.own.shape), "expanded_to": str(expansion.shape)}
        | {"key": _key(expansion)},
    )


def _write_json(file: Path, document: Any) -> None:
    file.write_text(json.dumps(document, indent=2) + "\n")

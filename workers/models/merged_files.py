"""The files of a merged model that hold no tensors: configuration and tokenizer, as an engine and transformers read
them. What the merge is, is not known here: all merges of a family have the same.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory

from workers.errors import InvalidModel
from workers.evaluation.prompts import load_tokenizer
from workers.models.checkpoints import TOKENIZER_FILES, Checkpoint, aligned, open_sources
from workers.models.vocabulary import BASE, UNION, added_tokens, token_ids
from workers.types import Family

__all__ = ["result_dir"]

GENERATION_CONFIG = "generation_config.json"

# What tokenizer.json says of an added token.
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def result_dir(family: Family) -> str:
    """A directory with config.json, the tokenizer and generation_config.json of every merge of `family`.

    It is the base's where merges have the base's vocabulary, else a temporary one that lives as long as this process,
    without weights. Raises InvalidModel.
    """
    if family.tokenizer == BASE:
        return family.base.directory
    files = (Path(model.directory) / name for model in family.models for name in ("config.json", *TOKENIZER_FILES))
    return _made(family, tuple(file.stat().st_mtime_ns for file in files if file.is_file())).name


@lru_cache
def _made(family: Family, changed_ns: tuple[int, ...]) -> TemporaryDirectory[str]:
    """`changed_ns`, when the files that it is made of were last changed, only tells what is known from what is not."""
    sources = open_sources(family)
    views, alignment = aligned(sources, family.tokenizer)
    made = TemporaryDirectory(prefix="mergesearch-result-")
    place, base = Path(made.name), Path(family.base.directory)
    if family.tokenizer == UNION:
        _save_union(place, base, alignment.added, sources)
        owner = base
    else:
        owner = sources[family.tokenizer].directory
        has_tokenizer = any((owner / name).is_file() for name in TOKENIZER_FILES)
        _copy(owner if has_tokenizer else base, place, TOKENIZER_FILES)
    _copy(owner if (owner / GENERATION_CONFIG).is_file() else base, place, (GENERATION_CONFIG,))
    (place / "config.json").write_text(json.dumps(views[family.base.alias].config, indent=2) + "\n")
    return made


def _save_union(place: Path, base: Path, added: tuple[str, ...], sources: Mapping[str, Checkpoint]) -> None:
    """The base's tokenizer with the tokens that others have added; where these describe one differently, whatever their
    order, the same description is taken."""
    from tokenizers import AddedToken

    described: dict[str, tuple[bool, ...]] = {}
    for source in sources.values():
        for content, token in added_tokens(source.directory).items():
            flags = tuple(bool(token.get(flag)) for flag in FLAGS)
            described[content] = max(flags, described.get(content, flags))
    tokenizer = load_tokenizer(str(base))
    tokenizer.add_tokens([AddedToken(token, **dict(zip(FLAGS, described[token], strict=True))) for token in added])
    tokenizer.save_pretrained(place)
    before = token_ids(base) or {}
    first = 1 + max(before.values(), default=-1)
    expected = {**before, **{content: first + i for i, content in enumerate(added)}}
    if (found := token_ids(place)) != expected:
        wrong = sorted(expected.items() ^ (found or {}).items())
        raise InvalidModel(
            (f"{base}: its tokenizer cannot be given the tokens of the others: {len(wrong)} ids come out otherwise",)
        )


def _copy(source: Path, target: Path, names: tuple[str, ...]) -> None:
    for name in names:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)

"""The files of a merged model that hold no tensors: configuration and tokenizer, as an engine and transformers read
them. All merges of a family have the same.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from workers.errors import InvalidModel
from workers.models.checkpoints import Checkpoint
from workers.models.tokenizers import TOKENIZER_FILES, load_tokenizer
from workers.models.vocabulary import BASE, UNION, Alignment, added_tokens, token_ids

__all__ = ["make_result_dir"]

GENERATION_CONFIG = "generation_config.json"

# The properties of an added token in tokenizer.json.
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def make_result_dir(
    sources: Mapping[str, Checkpoint], config: Mapping[str, Any], alignment: Alignment, tokenizer: str
) -> TemporaryDirectory[str]:
    """A temporary directory with the files of every merge of `sources`, by alias, the base first, in the vocabulary
    `tokenizer`: config.json (`config`), the tokenizer and generation_config.json. Raises InvalidModel."""
    made = TemporaryDirectory(prefix="mergesearch-result-")
    place, base = Path(made.name), next(iter(sources.values())).tokenizer_dir
    if tokenizer == UNION or alignment.added:
        owner = base if tokenizer in (BASE, UNION) else sources[tokenizer].tokenizer_dir
        _save_union(place, owner, alignment.added, sources)
    else:
        owner = base if tokenizer == BASE else sources[tokenizer].tokenizer_dir
        has_tokenizer = any((owner / name).is_file() for name in TOKENIZER_FILES)
        _copy(owner if has_tokenizer else base, place, TOKENIZER_FILES)
    _copy(owner if (owner / GENERATION_CONFIG).is_file() else base, place, (GENERATION_CONFIG,))
    (place / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return made


def _save_union(place: Path, base: Path, added: tuple[str, ...], sources: Mapping[str, Checkpoint]) -> None:
    """The tokenizer in `base` with tokens that others have, and with new ones.

    Where models describe a token differently, the choice does not depend on their order."""
    from tokenizers import AddedToken

    described: dict[str, tuple[bool, ...]] = {}
    for source in sources.values():
        for content, token in added_tokens(source.tokenizer_dir).items():
            flags = tuple(bool(token.get(flag)) for flag in FLAGS)
            described[content] = max(flags, described.get(content, flags))
    tokenizer = load_tokenizer(base)
    plain = tuple(flag == "normalized" for flag in FLAGS)  # as add_tokens describes a text
    of_tokens = {token: dict(zip(FLAGS, described.get(token, plain), strict=True)) for token in added}
    tokenizer.add_tokens([AddedToken(token, **properties) for token, properties in of_tokens.items()])
    tokenizer.save_pretrained(place)
    before = token_ids(base) or {}
    first = 1 + max(before.values(), default=-1)
    expected = {**before, **{content: first + i for i, content in enumerate(added)}}
    if (found := token_ids(place)) != expected:
        wrong = sorted(expected.items() ^ (found or {}).items())
        raise InvalidModel(
            (f"{base}: its tokenizer cannot be given the tokens of the others: {len(wrong)} ids would differ",)
        )


def _copy(source: Path, target: Path, names: tuple[str, ...]) -> None:
    for name in names:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)

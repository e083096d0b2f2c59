"""Models, vocabulary, chat template and dtype that a mergekit configuration names, and the locations of the models."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from search_spaces.errors import InvalidRecipe
from workers.mergekit.config import MergekitConfig, split_adapter
from workers.models.chat_templates import NAMED, most_common
from workers.models.family import ResolvedFamily
from workers.models.remote import HUB_ID
from workers.object_store import is_object_url

__all__ = [
    "aliases_of",
    "chat_template_of",
    "check_own_tokens",
    "directory_of",
    "place_of",
    "stored_dtype",
    "tokenizer_of",
    "vocabulary_kept",
    "vocabulary_of",
]


def place_of(name: str, directories: Mapping[str, Path], file: Path, warn: Callable[[str], None]) -> str | Path:
    """Find the model or adapter that a mergekit configuration calls `name`; return its directory, hub id or URL.

    The model is the first of these that exists:

    - the entry in `directories`
    - `name`, if it is the URL of a folder in an object store
    - the directory with the path `name`, relative to the folder of `file` or to the current directory
    - `name` as a hub id

    `warn` is called if `name` has a revision ("model@revision") that has no effect. Raises InvalidRecipe if `name` is
    neither an entry of `directories`, nor such a URL, directory or hub id.
    """
    if name in directories:
        return directories[name]
    if is_object_url(name):
        return name
    if (directory := directory_of(name, file, warn)) is not None:
        return directory
    if HUB_ID.fullmatch(name):
        return name
    where = "" if Path(name).is_absolute() else f", neither next to {file.name} nor in the current directory"
    raise InvalidRecipe(f"{name}: there is no such directory{where}; give it with --model {name}=DIR")


def directory_of(name: str, file: Path, warn: Callable[[str], None]) -> Path | None:
    """Directory with the path `name`, relative to the folder of `file` or to the current directory; None if missing.

    `warn` is called if `name` has a revision ("model@revision"), which has no effect on a directory.
    """
    without_revision, at, _ = name.rpartition("@")
    for text in (name, without_revision) if at else (name,):
        path = Path(text).expanduser()
        for place in (file.parent / path, path):
            if place.exists():
                if text != name:
                    warn(f"{name}: the revision has no effect: {text} is a directory")
                return place
    return None


def aliases_of(models: tuple[str, ...]) -> dict[str, str]:
    """Choose an alias, a short name, for each model of a mergekit configuration.

    The alias is the last part of the model's path or hub id. For MODEL+LORA, a model with an adapter, it is the last
    part of the adapter's path or hub id. A number is appended if the alias is taken.
    """
    aliases: dict[str, str] = {}
    for model in models:
        whole, adapter = split_adapter(model)
        without_revision = (adapter or whole).partition("@")[0]
        name = re.sub(r"[^\w.-]+", "-", Path(without_revision).name) or "model"
        alias, number = name, 2
        while alias in aliases.values() or alias == "union" or (aliases and alias == "base"):
            alias, number = f"{name}-{number}", number + 1
        aliases[model] = alias
    return aliases


def tokenizer_of(configuration: MergekitConfig, aliases: Mapping[str, str]) -> str:
    """Vocabulary that a mergekit configuration states for the merged model: "base", "union", or a model's alias.

    If the configuration states no vocabulary, the result is "base". `aliases` contains the alias of each model, keyed
    by its name in the configuration.
    """
    source = configuration.tokenizer_source
    if source is None or source in ("base", "union", configuration.base):
        return source if source == "union" else "base"
    return aliases[source]


def vocabulary_of(configuration: MergekitConfig, aliases: Mapping[str, str]) -> dict[str, Any]:
    """Convert a mergekit configuration's options about the merged vocabulary to a recipe's key `vocabulary`.

    `aliases` contains the alias of each model, keyed by its name in the configuration.
    """
    found: dict[str, Any] = {}
    if configuration.tokenizer_source == "union":
        found["by_id"] = True
    if configuration.pad_to_multiple_of:
        found["multiple_of"] = configuration.pad_to_multiple_of
    for token, source in configuration.tokens.items():
        row = {"model": source.model and aliases[source.model], "token": source.token, "id": source.id}
        of_token = {key: value for key, value in row.items() if value is not None}
        found.setdefault("tokens", {})[token] = of_token | ({"force": True} if source.force else {})
    return found


def vocabulary_kept(
    configuration: MergekitConfig, aliases: Mapping[str, str], sources: ResolvedFamily, warn: Callable[[str], None]
) -> str:
    """Choose the vocabulary of the merged model: "base" (the base's tokens), "union" (all tokens), or a model's alias.

    If `configuration` states a vocabulary, this vocabulary is chosen. If `configuration` states no vocabulary, the
    base's vocabulary is chosen, unless an adapter among the opened models (`sources`) has embedding rows for new
    tokens: then the union is chosen. `aliases` contains the alias of each model, keyed by its name in the
    configuration. `warn` is called with messages about embedding rows that are left out, and about tokens without a
    row.
    """
    wanted = chosen = tokenizer_of(configuration, aliases)
    for model, alias in aliases.items():
        with_rows, without = sources.new_tokens(alias)
        if (without and alias in (wanted, sources.base_alias)) or (without and sources.checkpoints[alias].base):
            where = "they get zeros" if alias == wanted else "they are left out"
            warn(f"{model}: its tokenizer has tokens without a row of their own: {_some(without)}; {where}")
        if not with_rows or configuration.tokenizer_source is not None:
            continue
        if sources.checkpoints[alias].base is not None:
            chosen = "union"
            warn(
                f"{model}: the adapter has rows for tokens of its own: {_some(with_rows)}; the merge has the union of "
                "all tokens; give tokenizer_source: base to leave them out"
            )
        else:
            warn(
                f"{model}: its tokens that the base does not have are left out: {_some(with_rows)}; give "
                "tokenizer_source: union to keep them"
            )
    return chosen


def check_own_tokens(
    configuration: MergekitConfig, aliases: Mapping[str, str], sources: ResolvedFamily, warn: Callable[[str], None]
) -> None:
    """Check the entries of the key `tokenizer.tokens` of a mergekit configuration that have no key `source`.

    The key `source` names the model from which a token gets its embedding row. If every model in `sources` has an
    embedding row for the token, the entry has no effect, and `warn` is called with a message that says so. Raises
    InvalidRecipe if a model has no embedding row for the token. `aliases` contains the alias of each model, keyed by
    its name in the configuration.
    """
    problems = []
    for token in configuration.own_tokens:
        lacking = [model for model, alias in aliases.items() if token not in sources.tokens_with_rows(alias)]
        if lacking:
            problems.append(
                f"tokenizer.tokens.{token}.source: is missing, and {lacking[0]} has no such token; give a model, "
                "kind: zero, or kind: model_token"
            )
        else:
            warn(f"tokenizer.tokens.{token} has no effect: it has no source, and every model has a row for the token")
    if problems:
        raise InvalidRecipe("\n".join(problems))


def _some(tokens: Sequence[str]) -> str:
    return ", ".join(map(repr, tokens[:5])) + (f" and {len(tokens) - 5} more" if len(tokens) > 5 else "")


def stored_dtype(sources: ResolvedFamily) -> str:
    """Dtype of the stored tensors of the models `sources`, adapters excluded; float32 if they have several dtypes."""
    names = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
    whole = [checkpoint for checkpoint in sources.checkpoints.values() if checkpoint.base is None]
    dtypes = {checkpoint.tensors[name].dtype for checkpoint in whole for name in checkpoint.layout.places}
    return names[dtypes.pop()] if len(dtypes) == 1 else "float32"


def chat_template_of(choice: str | None, file: Path, sources: ResolvedFamily | None) -> str | None:
    """Chat template that `choice`, the value of a configuration's key `chat_template`, selects.

    `choice` is one of these:

    - "auto": the most common template of the models in `sources`
    - the name of a published format
    - a file, relative to the folder of `file` or to the current directory
    - the template itself

    Raises InvalidRecipe for any other value of `choice`. If the key is absent, `choice` is None, and the result is
    None: no template is selected.
    """
    if choice is None or "{" in choice or "\n" in choice:
        return choice
    if choice == "auto":
        assert sources is not None, "auto without models"
        wholes = [checkpoint.base or checkpoint for checkpoint in sources.checkpoints.values()]
        return most_common(whole.directory for whole in wholes)
    if choice in NAMED:
        return NAMED[choice]
    path = Path(choice).expanduser()
    for place in (file.parent / path, path):
        if place.is_file():
            return place.read_text()
    raise InvalidRecipe(
        f"chat_template: {choice!r} is neither a name, nor a file, nor a template; give auto, {', '.join(NAMED)}, a "
        "file in Jinja, or its text"
    )

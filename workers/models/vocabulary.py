"""Alignment of vocabularies: the rows of embeddings and output heads of all models get the order of one vocabulary.

This vocabulary is the base's vocabulary, the base's vocabulary with the tokens that other models have added (union), or
the vocabulary of one expert. Rows are found by the token's string. A model without a row for a token gets the base's
row. If the base, too, has no row for the token, the model and the base get the mean of the rows of the models that have
a row for it. Therefore the task vectors of models without the token are zero in this row. Some rows represent no token;
in all models, these rows are taken from the model whose vocabulary is used.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workers.errors import InvalidModel
from workers.models.components import first_few, is_output_head
from workers.models.computed_tensors import Padded, Rows, RowsOfOthers, SourceTensor

__all__ = [
    "BASE",
    "EMBEDDING_NAMES",
    "NO_OPTIONS",
    "UNION",
    "TokenAlignment",
    "TokenRow",
    "Vocabulary",
    "VocabularyOptions",
    "added_tokens",
    "align",
    "token_ids",
]

# Vocabularies other than that of a single expert.
BASE, UNION = "base", "union"

EMBEDDING_NAMES = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight")

TOKENIZER = "tokenizer.json"


@dataclass(frozen=True)
class TokenRow:
    """Source of the embedding row of a token, as the vocabulary options state it.

    The source is the row of `model` for the token itself, for another `token`, or for the token with the id `id`. If
    `model` is None, the row is zero. Only models without the token get the row; with `is_forced`, all models get it.
    """

    model: str | None = None
    token: str | None = None
    id: int | None = None
    is_forced: bool = False


@dataclass(frozen=True)
class VocabularyOptions:
    """Options of the vocabulary of merged models.

    - `tokens`: the sources of the embedding rows of single tokens; tokens that the vocabulary lacks are added
    - `multiple_of`: the number of rows is rounded up to a multiple of this number
    - `by_id`: whether a union (the base's vocabulary with the tokens that other models added) has the added tokens in
      the order of their ids; otherwise they are in the order of their names
    """

    tokens: Mapping[str, TokenRow] = field(default_factory=dict)
    multiple_of: int = 1
    by_id: bool = False

    @property
    def models(self) -> frozenset[str]:
        """Aliases of the models whose embedding rows the options use."""
        return frozenset(row.model for row in self.tokens.values() if row.model is not None)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> VocabularyOptions:
        """Read vocabulary options from the field `vocabulary` of a recipe.

        `document` has these keys, all of which may be missing:

        - tokens: the sources of the embedding rows of single tokens, keyed by token; each is {"model", "token", "id",
          "force"}, with the meaning of the fields of the class `TokenRow`
        - multiple_of: the number of rows is rounded up to a multiple of this number
        - by_id: whether tokens that other models add to the base's vocabulary are in the order of their ids

        Raises InvalidModel for any other document.
        """
        try:
            tokens = {
                token: TokenRow(row.get("model"), row.get("token"), row.get("id"), bool(row.get("force")))
                for token, row in document.get("tokens", {}).items()
            }
            return cls(tokens, int(document.get("multiple_of", 1)), bool(document.get("by_id")))
        except (AttributeError, TypeError, ValueError) as error:
            raise InvalidModel((f"vocabulary: not one of a recipe: {error}",)) from error


NO_OPTIONS = VocabularyOptions()


@dataclass(frozen=True)
class Vocabulary:
    """Model data that the alignment of vocabularies needs: directory, tensors and token ids.

    `tokens` maps a token to its id; it is None if the model has no readable tokenizer.json.
    """

    directory: Path
    tensors: Mapping[str, SourceTensor]
    tokens: Mapping[str, int] | None

    @cached_property
    def num_rows(self) -> int:
        return next((tensor.shape[0] for name, tensor in self.tensors.items() if name.endswith(EMBEDDING_NAMES)), 0)

    def has_rows(self, name: str) -> bool:
        """Whether the tensor `name` is an embedding or output head, which has a row for each token."""
        is_one = name.endswith(EMBEDDING_NAMES) or is_output_head(name)
        return is_one and name in self.tensors and self.tensors[name].shape[0] == self.num_rows


@dataclass(frozen=True)
class TokenAlignment:
    """Common vocabulary of several models, and the new embeddings and output heads of each model.

    - `num_rows`: the number of rows of every embedding and output head
    - `tensors`: the embeddings and output heads that change, as model alias -> tensor name -> tensor
    - `added`: the tokens that are added to the tokenizer, in the order of their ids
    - `num_unnamed`: the number of rows that stand for no token
    """

    num_rows: int
    tensors: Mapping[str, Mapping[str, SourceTensor]]
    added: tuple[str, ...] = ()
    num_unnamed: int = 0


def align(models: Mapping[str, Vocabulary], tokenizer: str, options: VocabularyOptions = NO_OPTIONS) -> TokenAlignment:
    """Align the embeddings and output heads of `models` to one vocabulary.

    `models` maps the alias of each model to its vocabulary; the first model is the base. `tokenizer` selects the common
    vocabulary: BASE, UNION (the base's tokens and the tokens that other models added), or the alias of the model whose
    vocabulary is used. `options` are further options, such as the sources of single embedding rows. If a model has no
    tokenizer.json but as many embedding rows as the base, its tokens are assumed to be the base's tokens.

    Returns the size of the vocabulary, the added tokens, and the embeddings and output heads that change. Raises
    InvalidModel with every problem.
    """
    base, *_ = models
    tokens, problems = _tokens_with_rows(models)
    owner = base if tokenizer in (BASE, UNION) else tokenizer
    if problems:
        raise InvalidModel(tuple(problems))
    num_rows = models[owner].num_rows
    num_padded = -(-num_rows // options.multiple_of) * options.multiple_of
    is_equal = all(tokens[alias] == tokens[owner] and model.num_rows == num_rows for alias, model in models.items())
    is_equal &= owner == base or tokens[owner] == (models[owner].tokens or tokens[owner])
    if is_equal and not options.tokens and num_padded == num_rows:
        return TokenAlignment(num_rows, {})
    target, added = dict(tokens[owner]), list[str]()
    # Ids of added tokens follow those of the tokenizer, so tokens of the tokenizer without a row get one.
    if owner != base or not options.tokens.keys() <= target.keys():
        target |= models[owner].tokens or {}
        num_rows = max(num_rows, 1 + max(target.values(), default=-1))
    if tokenizer == UNION:
        added = _added_by_others(models, tokens, by_id=options.by_id)
    added += [token for token in options.tokens if token not in target and token not in added]
    if added:
        first = 1 + max((models[owner].tokens or target).values(), default=-1)
        target |= {token: first + i for i, token in enumerate(added)}
        num_rows = max(num_rows, first + len(added))
    chosen = _chosen_rows(models, tokens, options)
    num_owned = models[owner].num_rows
    plans = {alias: _Plan(alias, owner, base, tokens, target, num_rows, num_owned, chosen) for alias in models}
    names = [name for name in models[base].tensors if all(model.has_rows(name) for model in models.values())]
    tensors = {
        alias: {name: plan.applied(name, models) for name in names}
        for alias, plan in plans.items()
        if not plan.is_identity(models[alias].num_rows)
    }
    num_padded = -(-num_rows // options.multiple_of) * options.multiple_of
    if num_padded > num_rows:
        # Rows that are added are the mean of the tokens' rows; rows without a token may hold anything.
        num_named = 1 + max(target.values(), default=num_rows - 1)
        for alias, model in models.items():
            found = {name: tensors.get(alias, {}).get(name, model.tensors[name]) for name in names}
            tensors[alias] = {name: Padded(tensor, num_padded, num_named) for name, tensor in found.items()}
        num_rows = num_padded
    return TokenAlignment(num_rows, tensors, tuple(added), num_rows - len(set(target.values())))


def token_ids(directory: Path) -> Mapping[str, int] | None:
    """The id of each token of the tokenizer in `directory`, including added tokens, keyed by the token's text.

    Returns None if there is no readable tokenizer.json.
    """
    try:
        document = json.loads((directory / TOKENIZER).read_bytes())
        vocabulary = document["model"]["vocab"]
        # Unigram models list their tokens with a score, in the order of their ids.
        listed = vocabulary if isinstance(vocabulary, dict) else {entry[0]: i for i, entry in enumerate(vocabulary)}
        return {str(token): int(id_) for token, id_ in listed.items()} | {
            str(token["content"]): int(token["id"]) for token in document.get("added_tokens", ())
        }
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
        return None


def added_tokens(directory: Path) -> Mapping[str, Mapping[str, Any]]:
    """Tokens that the tokenizer in `directory` has in addition to its original vocabulary.

    The keys are the texts of the tokens, and the values are their entries in tokenizer.json.
    """
    file = directory / TOKENIZER
    document = json.loads(file.read_bytes()) if file.is_file() else {}
    return {str(token["content"]): token for token in document.get("added_tokens", ())}


def _tokens_with_rows(models: Mapping[str, Vocabulary]) -> tuple[dict[str, Mapping[str, int]], list[str]]:
    """The ids of the tokens that have an embedding row in each of `models`, and a list of problems.

    `models` are keyed by alias, the base first. The first result maps each model's alias to a mapping from its tokens
    to their ids. A problem is a text about a model whose tokens are unknown.
    """
    base, *_ = models
    tokens: dict[str, Mapping[str, int]] = {}
    problems: list[str] = []
    for alias, model in models.items():
        known = model.tokens
        if known is None and model.num_rows == models[base].num_rows:
            known = models[base].tokens or {}
        if known is None or (models[base].tokens is None and model.num_rows != models[base].num_rows):
            place = model.directory if known is None else models[base].directory
            problems.append(
                f"model {alias!r}: {model.directory}: has {model.num_rows} rows for tokens, the base "
                f"{models[base].num_rows}, and {place} no {TOKENIZER} to align them by"
            )
        elif models[base].tokens is None:
            known = {}
        tokens[alias] = {token: id_ for token, id_ in (known or {}).items() if id_ < model.num_rows}
    return tokens, problems


Chosen = Mapping[str, tuple[tuple[str, int] | None, bool]]


def _chosen_rows(
    models: Mapping[str, Vocabulary], tokens: Mapping[str, Mapping[str, int]], options: VocabularyOptions
) -> Chosen:
    """Embedding rows of single tokens that the vocabulary options name, keyed by token.

    A value is (row, is_forced). The row is (alias of the model, index), or None for a row of zeros. If is_forced is
    True, all models get the row; otherwise, only models without the token get it. `tokens` are the ids of each model's
    tokens, keyed by alias. Raises InvalidModel if a model does not have the row that the options name.
    """
    found: dict[str, tuple[tuple[str, int] | None, bool]] = {}
    problems = []
    for token, row in options.tokens.items():
        number: int | None = row.id
        if row.model is not None and row.id is None:
            number = tokens[row.model].get(row.token or token)
        if row.model is not None and (number is None or not 0 <= number < models[row.model].num_rows):
            which = f"a token of id {row.id}" if row.id is not None else f"no token {row.token or token!r}"
            problems.append(f"tokens: {token!r}: model {row.model!r} has {which} without a row; give another source")
        found[token] = (None if row.model is None else (row.model, number or 0)), row.is_forced
    if problems:
        raise InvalidModel(tuple(problems))
    return found


def _added_by_others(
    models: Mapping[str, Vocabulary], tokens: Mapping[str, Mapping[str, int]], *, by_id: bool
) -> list[str]:
    """Tokens that other models have and the base lacks, in the order in which the union vocabulary adds them.

    The union vocabulary has the tokens of all models. `models` are keyed by alias, the base first; `tokens` has the ids
    of each model's tokens, keyed by alias. The result is sorted by token, or with `by_id` by the smallest id of each
    token. The result does not depend on the order of the models.

    Raises InvalidModel if the base's tokenizer has tokens without a row in the embedding. Raises InvalidModel also if a
    model has a token of the result in its tokenizer's trained vocabulary (such as BPE) rather than as an added token.
    """
    base, *others = models
    problems = []
    if rowless := (models[base].tokens or {}).keys() - tokens[base].keys():
        problems.append(
            f"model {base!r}: {models[base].directory}: its tokenizer has {len(rowless)} tokens without a row "
            f"({first_few(map(repr, rowless))}), so that a union has no ids for more"
        )
    added: set[str] = set()
    for alias in others:
        new = tokens[alias].keys() - tokens[base].keys()
        own = new - added_tokens(models[alias].directory).keys()
        if own:
            problems.append(
                f"model {alias!r}: {models[alias].directory}: {len(own)} tokens of its tokenizer's own vocabulary are "
                f"not the base's ({first_few(map(repr, own))}); a union can only have added ones: give {BASE} or "
                f"{alias}"
            )
        added |= new
    if problems:
        raise InvalidModel(tuple(problems))
    ids = {token: min(known[token] for known in tokens.values() if token in known) for token in added}
    return sorted(added, key=lambda token: (ids[token] if by_id else 0, token))


class _Plan:
    """Plan for converting one model to a new vocabulary: the source of each row of its embedding and output head.

    - `alias`: the model that is converted
    - `owner`: the model whose rows are used where a row of the new vocabulary stands for no token; rows that it lacks
      are zero
    - `base`: the alias of the base model, whose row is preferred for a token that the model lacks
    - `tokens`: the ids of each model's tokens, keyed by alias
    - `target`: the new vocabulary, a mapping from tokens to ids
    - `num_rows`: the number of rows of the new embedding
    - `num_owned`: the number of rows of the owner's embedding
    - `chosen`: the rows that options choose for single tokens (function `_chosen_rows`)
    """

    def __init__(
        self,
        alias: str,
        owner: str,
        base: str,
        tokens: Mapping[str, Mapping[str, int]],
        target: Mapping[str, int],
        num_rows: int,
        num_owned: int,
        chosen: Chosen,
    ) -> None:
        self._alias = alias
        self._index = np.full(num_rows, -1, dtype=np.int64)
        own = tokens[alias]
        positions: dict[tuple[str, ...], list[int]] = {}
        rows: dict[tuple[str, ...], list[tuple[int, ...]]] = {}
        for token, position in target.items():
            stated, is_forced = chosen.get(token, (None, False))
            if token in own and not is_forced:
                self._index[position] = own[token]
                continue
            if token in chosen:
                positions.setdefault((stated[0],) if stated else (), []).append(position)
                rows.setdefault((stated[0],) if stated else (), []).append((stated[1],) if stated else ())
                continue
            donors = (base,) if token in tokens[base] else tuple(other for other in tokens if token in tokens[other])
            positions.setdefault(donors, []).append(position)
            rows.setdefault(donors, []).append(tuple(tokens[donor][token] for donor in donors))
        unnamed = np.setdiff1d(np.arange(num_rows), np.fromiter(target.values(), dtype=np.int64))
        owned, lacking = unnamed[unnamed < num_owned], unnamed[unnamed >= num_owned]
        if alias == owner:
            self._index[owned] = owned
        elif len(owned):
            positions.setdefault((owner,), []).extend(owned.tolist())
            rows.setdefault((owner,), []).extend((row,) for row in owned.tolist())
        if len(lacking):  # ids that the owner's tokenizer leaves out
            positions.setdefault((), []).extend(lacking.tolist())
            rows.setdefault((), []).extend(() for _ in lacking)
        self._others = {donors: (_array(positions[donors]), _columns(rows[donors])) for donors in positions}

    def is_identity(self, num_rows: int) -> bool:
        return not self._others and np.array_equal(self._index, np.arange(num_rows))

    def applied(self, name: str, models: Mapping[str, Vocabulary]) -> SourceTensor:
        """The model's tensor `name` (embedding or output head) with its rows in the order of the common vocabulary.

        `models` has the tensors of all models, keyed by alias, because rows that the model lacks are taken from other
        models.
        """
        others = tuple(
            RowsOfOthers(positions, tuple(models[donor].tensors[name] for donor in donors), rows)
            for donors, (positions, rows) in self._others.items()
        )
        return Rows(models[self._alias].tensors[name], self._index, others)


def _array(numbers: Iterable[int]) -> NDArray[np.int64]:
    return np.fromiter(numbers, dtype=np.int64)


def _columns(rows: list[tuple[int, ...]]) -> tuple[NDArray[np.int64], ...]:
    return tuple(_array(column) for column in zip(*rows, strict=True))

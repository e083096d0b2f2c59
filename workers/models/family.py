"""Families of models (a base model and its experts) that are located, opened, checked and fingerprinted.

The class `types.Family` is a small description of the same models, which is sent to other processes. These processes
open the models with the function `open_sources`.
"""

from __future__ import annotations

import logging
import math
import os
import socket
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from workers.errors import EvidenceMismatch, InvalidModel
from workers.models.checkpoints import Checkpoint, aligned, read_checkpoint, read_expert, stored_bytes
from workers.models.compatibility import differences, foreign_adapters
from workers.models.components import Layout
from workers.models.fingerprints import FileState, content_problems, file_states, fingerprint
from workers.models.merged_files import make_result_dir
from workers.models.modalities import Modality
from workers.models.remote import absent_bytes, commit_of, fetched, id_of, lack_of_space, locate, named
from workers.models.vocabulary import BASE, EMBEDDING_NAMES, UNION, TokenAlignment, VocabularyOptions, token_ids
from workers.object_store import is_object_url
from workers.types import Family, ModelSource

__all__ = [
    "LocatedFamily",
    "ResolvedFamily",
    "locate_family",
    "on_this_machine",
    "open_family",
    "open_sources",
    "resolve_family",
    "resolve_model",
]

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class ResolvedFamily:
    """A base model and its experts, which were found, opened and checked for merging.

    All mappings are keyed by the aliases of the models. A single model is a base without experts.

    - `checkpoints`: the models as they are stored
    - `views`: the same models, with embeddings and output heads converted to the vocabulary that `tokenizer` selects;
      `token_alignment` describes this conversion
    - `vocabulary`: the options of this vocabulary in the form of a recipe
    - `given`: the directory or hub id by which the caller named each model
    - `adapted`: for each adapter that changes another model than the base, the directory of that model
    - `any_depth`: whether the numbers of layers may differ
    - `cache`: the directory of the cache for fingerprints, or None for the default directory

    Fingerprints are computed from the contents of the models when they are first used.
    """

    given: Mapping[str, str]
    checkpoints: Mapping[str, Checkpoint]
    views: Mapping[str, Checkpoint]
    token_alignment: TokenAlignment
    tokenizer: str
    cache: str | Path | None = None
    adapted: Mapping[str, Path] = field(default_factory=dict)
    any_depth: bool = False
    vocabulary: Mapping[str, Any] = field(default_factory=dict)

    @property
    def base_alias(self) -> str:
        return next(iter(self.checkpoints))

    @property
    def base(self) -> Checkpoint:
        """Base model with embedding and output head converted to the vocabulary of the merges.

        The fields `tokenizer` and `vocabulary` select this vocabulary. Merges take their configuration, tensor shapes
        and layout from this model.
        """
        return self.views[self.base_alias]

    @property
    def layout(self) -> Layout:
        return self.base.layout

    @property
    def modality(self) -> Modality:
        """The kind of data that the models read, which is the same for the base and all experts."""
        return self.base.modality

    @property
    def directories(self) -> Mapping[str, Path]:
        return {alias: checkpoint.directory for alias, checkpoint in self.checkpoints.items()}

    def new_tokens(self, alias: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Tokens of the model `alias` that the base lacks.

        The first tuple has the tokens that have a row in the model's embedding, and the second tuple has the tokens
        without a row. The tokens of a tuple are in the order of their ids.
        """
        known = token_ids(self.checkpoints[self.base_alias].tokenizer_dir) or {}
        checkpoint = self.checkpoints[alias]
        found = token_ids(checkpoint.tokenizer_dir) or {}
        new = sorted(found.keys() - known.keys(), key=found.__getitem__)
        rows = self.tokens_with_rows(alias)
        return tuple(token for token in new if token in rows), tuple(token for token in new if token not in rows)

    def tokens_with_rows(self, alias: str) -> Mapping[str, int]:
        """Mapping from each token that has a row in the embedding of the model `alias` to the token's id.

        A model without a tokenizer.json is assumed to have the tokens of the base.
        """
        checkpoint = self.checkpoints[alias]
        found = token_ids(checkpoint.tokenizer_dir)
        if found is None:
            found = token_ids(self.checkpoints[self.base_alias].tokenizer_dir) or {}
        rows = [tensor.shape[0] for name, tensor in checkpoint.tensors.items() if name.endswith(EMBEDDING_NAMES)]
        return {token: id_ for token, id_ in found.items() if rows and id_ < rows[0]}

    @property
    def num_parameters(self) -> int:
        """Number of parameters (elements of all tensors) of a merged model with as many layers as the base."""
        return sum(math.prod(tensor.shape) for tensor in self.base.tensors.values())

    @property
    def stored_bytes(self) -> int:
        """Total bytes of the stored tensors from which the base model and its experts are made."""
        return stored_bytes(self.views.values())

    @cached_property
    def commits(self) -> Mapping[str, str]:
        """Commit of each hub model, keyed by the hub id that the caller gave."""
        commits = {
            self.given[alias]: commit_of(directory)
            for alias, directory in self.directories.items()
            if not os.path.isdir(self.given[alias])
        }
        return {name: commit for name, commit in commits.items() if commit}

    @cached_property
    def fingerprints(self) -> Mapping[str, str]:
        """Fingerprint (a hash of the files' contents) of each model, keyed by the model's alias.

        Raises InvalidModel if a file cannot be read.
        """
        _ = self._states  # taken before the contents are read, so that a change meanwhile is noticed
        base = fingerprint(self.checkpoints[self.base_alias], cache=self.cache)
        return {
            alias: base if alias == self.base_alias else self._fingerprint(checkpoint, base)
            for alias, checkpoint in self.checkpoints.items()
        }

    def _fingerprint(self, checkpoint: Checkpoint, base: str) -> str:
        is_of_base = checkpoint.base is self.checkpoints[self.base_alias]
        return fingerprint(checkpoint, base=base if is_of_base else None, cache=self.cache)

    @cached_property
    def _states(self) -> dict[str, dict[Path, FileState]]:
        states = {}
        for alias, checkpoint in self.checkpoints.items():
            states[alias] = file_states(checkpoint)
            if checkpoint.base is not None and alias in self.adapted:
                states[alias] |= file_states(checkpoint.base)
        return states

    def check_unchanged(self) -> None:
        """Check that the models' files have not changed since their fingerprints were computed.

        Sizes, times of modification and inodes of files are compared. If one of these differs, the model is read again,
        because a file may have been touched, or replaced by a copy, without a change of its content. A file that no
        longer exists does not count as changed. Raises EvidenceMismatch if the contents of a model have changed.
        """
        for alias, checkpoint in self.checkpoints.items():
            states = self._states[alias]
            changes = [f"{file}: {change}" for file, state in states.items() if (change := state.change(file))]
            if not changes:
                continue
            now = {file: FileState.of(file) for file in states if file.is_file()}
            if self._fingerprint(checkpoint, self.fingerprints[self.base_alias]) != self.fingerprints[alias]:
                raise EvidenceMismatch(
                    f"model {alias!r} has changed since it was opened: {'; '.join(changes)}; expected the contents of "
                    f"fingerprint {self.fingerprints[alias][:12]}: restore them, or start a new study"
                )
            states.update(now)

    @cached_property
    def family(self) -> Family:
        """Short description of the base model and its experts (the family), which is sent to other processes.

        Raises InvalidModel if the weights of a model are not valid.
        """
        base, *experts = (
            ModelSource(
                alias,
                str(checkpoint.directory.resolve()),
                self.fingerprints[alias],
                self._adapts(alias),
                self._origin(alias),
            )
            for alias, checkpoint in self.checkpoints.items()
        )
        return Family(base, tuple(experts), self.tokenizer, self.vocabulary, modality=self.modality.name)

    def _origin(self, alias: str) -> str | None:
        """Location from which other machines get the model `alias`: hub id with commit, or object-store URL.

        Returns None if the model was given as a directory.
        """
        given = self.given[alias]
        if is_object_url(given):
            return given
        directory = self.directories[alias]
        commit = None if os.path.isdir(given) else commit_of(directory)
        return None if commit is None else f"{id_of(directory)}@{commit}"

    def _adapts(self, alias: str) -> str | None:
        return str(self.adapted[alias].resolve()) if alias in self.adapted else None

    def content_problems(self, *, exclude: Collection[str] = ()) -> dict[str, tuple[str, ...]]:
        """Problems in the weights of each model, keyed by the model's alias.

        Possible problems are NaN, infinite values, and a tied output head that differs from the embedding. The weights
        of the models with the aliases in `exclude` are not read.
        """
        problems = {
            alias: content_problems(checkpoint, self.fingerprints[alias], cache=self.cache)
            for alias, checkpoint in self.checkpoints.items()
            if alias not in exclude
        }
        for alias in problems.keys() & self.adapted.keys():
            whole = self.checkpoints[alias].base
            assert whole is not None
            problems[alias] += content_problems(whole, fingerprint(whole, cache=self.cache), cache=self.cache)
        return problems

    @property
    def result_dir(self) -> str:
        """Directory with the config.json, tokenizer and generation_config.json of all merges of these models.

        If merges have the base's vocabulary, the result is the base's directory. Otherwise the result is a temporary
        directory without weights, which exists as long as this object. Raises InvalidModel if the files cannot be made.
        """
        if self.tokenizer == BASE and not self.vocabulary and self.checkpoints[self.base_alias].base is None:
            return str(self.checkpoints[self.base_alias].directory)
        return self._made_result_dir.name

    @cached_property
    def _made_result_dir(self) -> TemporaryDirectory[str]:
        return make_result_dir(self.checkpoints, self.base.config, self.token_alignment, self.tokenizer)

    @property
    def absent_bytes(self) -> int:
        """Number of bytes of the models' weights that are not on this machine, and must still be downloaded."""
        return absent_bytes((*self.directories.values(), *self.adapted.values()))

    @property
    def lack_of_space(self) -> str | None:
        """Error text if a disk is too small for the weights that the method `fetched` would download, else None."""
        return lack_of_space((*self.directories.values(), *self.adapted.values()))

    def fetched(self, *, note: Callable[[str], None] = log.info) -> ResolvedFamily:
        """Download the models' missing weights, and return the same models, opened again.

        Returns this object itself if nothing is missing. `note` is called with lines about downloads. Raises
        InvalidModel if a download fails or the downloaded models have problems.
        """
        before = [*self.directories.values(), *self.adapted.values()]
        after = [*fetched(before, note=note)]
        if after == before:
            return self
        count = len(self.checkpoints)
        directories = dict(zip(self.checkpoints, after[:count], strict=True))
        located = LocatedFamily(self.given, directories, {}, dict(zip(self.adapted, after[count:], strict=True)))
        return located.resolve(
            tokenizer=self.tokenizer, vocabulary=self.vocabulary, any_depth=self.any_depth, cache=self.cache
        )


@dataclass(frozen=True)
class LocatedFamily:
    """The directories where a base model and its experts were found, before the models are opened.

    All fields are keyed by alias; the first alias of `given` is the base's alias.

    - `given`: the directory or hub id by which the caller named each model
    - `directories`: the directory of each model that was found
    - `problems`: for each model that was not found, the reasons why it was not found
    - `adapted`: for each adapter that changes another model than the base, the directory of that model
    """

    given: Mapping[str, str]
    directories: Mapping[str, Path]
    problems: Mapping[str, tuple[str, ...]]
    adapted: Mapping[str, Path] = field(default_factory=dict)

    @property
    def base_dir(self) -> Path | None:
        return self.directories.get(next(iter(self.given)))

    def resolve(
        self,
        *,
        tokenizer: str = BASE,
        vocabulary: Mapping[str, Any] | None = None,
        any_depth: bool = False,
        cache: str | Path | None = None,
        names: Mapping[str, str] | None = None,
    ) -> ResolvedFamily:
        """Open and check the base model and all experts.

        `tokenizer` and `vocabulary` select the vocabulary of merges. With `any_depth` the models may have different
        numbers of layers. `cache` is the directory of the cache, or None for the default directory. `names` maps
        aliases to what messages call these models; by default a model is called an expert, with its alias. Raises
        InvalidModel with every problem of every model.
        """
        base_alias, *experts = self.given
        names = {alias: f"expert {alias!r}" for alias in experts} | dict(names or {})
        names[base_alias] = "base model" if experts else ""
        opened: dict[str, Checkpoint] = {}
        problems: list[str] = []
        for alias in self.given:
            where = names[alias]
            try:
                checkpoint = self._open(alias, opened)
            except InvalidModel as error:
                problems += [f"{where}: {problem}" if where else problem for problem in error.problems]
            else:
                opened |= {alias: checkpoint} if checkpoint else {}
        views, alignment = opened, None
        foreign = [alias for alias in experts if alias in opened and not _are_alike(opened, base_alias, alias)]
        if foreign:  # nothing else about them can be compared
            problems += [f"{names[a]}: {each}" for a in foreign for each in differences(opened[base_alias], opened[a])]
        elif base_alias in opened:
            own = {alias: checkpoint for alias, checkpoint in opened.items() if alias not in self.adapted}
            problems += foreign_adapters(own, self.given) if base_alias in own else ()
            if tokenizer in (BASE, UNION, *opened):
                try:
                    options = VocabularyOptions.from_json(vocabulary or {})
                    if unknown := options.models - self.given.keys():
                        raise InvalidModel((f"vocabulary: there are no models {', '.join(sorted(unknown))}",))
                    if options.models <= opened.keys():
                        views, alignment = aligned(opened, tokenizer, options)
                except InvalidModel as error:
                    problems += error.problems
            base = views[base_alias]
            for alias in [alias for alias in experts if alias in views]:
                found = differences(base, views[alias], any_depth=any_depth)
                problems += [f"{names[alias]}: {problem}" for problem in found]
        read = opened[base_alias].modality if base_alias in opened else None
        if read is not None and not read.has_vocabulary and (tokenizer != BASE or vocabulary):
            problems.append(f"tokenizer: models of the modality {read.name} have none; leave it out")
        if not problems and alignment is None:
            problems.append(f"tokenizer: {tokenizer!r}; expected {BASE}, {UNION}, or one of {', '.join(experts)}")
        if problems or alignment is None:
            raise InvalidModel(tuple(map(named, problems)))
        return ResolvedFamily(
            self.given, opened, views, alignment, tokenizer, cache, self.adapted, any_depth, vocabulary or {}
        )

    def _open(self, alias: str, opened: Mapping[str, Checkpoint]) -> Checkpoint | None:
        """Open the model `alias`; `opened` has the models opened before, keyed by alias.

        Returns None if the model is an adapter of the base and the base could not be opened. Raises InvalidModel if the
        model was not found or has problems.
        """
        if alias in self.problems:
            raise InvalidModel(self.problems[alias])
        base_alias, directory = next(iter(self.given)), self.directories[alias]
        if (whole := self.adapted.get(alias)) is not None:
            known = (checkpoint for checkpoint in _wholes(opened.values()) if checkpoint.directory == whole)
            return read_expert(directory, next(known, None) or read_checkpoint(whole))
        return read_checkpoint(directory) if alias == base_alias else read_expert(directory, opened.get(base_alias))


def _are_alike(opened: Mapping[str, Checkpoint], base_alias: str, alias: str) -> bool:
    """Whether the base and the model `alias` read the same kind of data; True if the base could not be opened."""
    return base_alias not in opened or opened[base_alias].modality is opened[alias].modality


def _wholes(checkpoints: Iterable[Checkpoint]) -> Iterator[Checkpoint]:
    for checkpoint in checkpoints:
        yield checkpoint if checkpoint.base is None else checkpoint.base


def locate_family(
    base: str | Path,
    experts: Mapping[str, str | Path],
    *,
    base_alias: str = BASE,
    adapted: Mapping[str, str | Path] | None = None,
) -> LocatedFamily:
    """Find the directories of a base model and its experts, which are given as directories or hub ids.

    An expert is a whole model or an adapter, a set of small matrices that change another model. `experts` maps aliases
    to experts, and `base_alias` is the alias of the base. An adapter changes the base unless `adapted` maps the
    adapter's alias to another model. Models that are not found are listed in the field `problems` of the result.
    """
    directories: dict[str, Path] = {}
    wholes: dict[str, Path] = {}
    problems: dict[str, tuple[str, ...]] = {}
    given = {base_alias: base, **experts}
    for alias, model in given.items():
        try:
            directories[alias] = locate(model)
            if adapted and alias in adapted:
                wholes[alias] = locate(adapted[alias])
        except InvalidModel as error:
            problems[alias] = error.problems
    return LocatedFamily({alias: str(model) for alias, model in given.items()}, directories, problems, wholes)


def resolve_family(
    base: str | Path,
    experts: Mapping[str, str | Path],
    *,
    tokenizer: str = BASE,
    base_alias: str = BASE,
    adapted: Mapping[str, str | Path] | None = None,
    any_depth: bool = False,
    vocabulary: Mapping[str, Any] | None = None,
    cache: str | Path | None = None,
    names: Mapping[str, str] | None = None,
) -> ResolvedFamily:
    """Locate, open and check a base and its experts, which are whole models or LoRA adapters.

    The models are given as directories or hub ids; `base_alias` is the alias of the base. The models must have the same
    structure, and their embeddings must be alignable to the vocabulary that `tokenizer` selects. `vocabulary` has
    further options of this vocabulary, as in a recipe. Only configurations, headers and tokenizers are read; for hub
    models, these files are downloaded. Weights are neither read nor downloaded.

    An adapter changes the base unless `adapted` maps the adapter's alias to another model. With `any_depth` the models
    may have different numbers of layers, and recipes must name layers that exist. `cache` is the directory of the
    cache, or None for the default directory. `names` maps aliases to what messages call these models; by default a
    model is called an expert, with its alias. Raises InvalidModel with every problem of every model.
    """
    if not experts:
        raise InvalidModel(("models.experts: there are none; name at least one model fine-tuned from the base",))
    located = locate_family(base, experts, base_alias=base_alias, adapted=adapted)
    return located.resolve(tokenizer=tokenizer, vocabulary=vocabulary, any_depth=any_depth, cache=cache, names=names)


def resolve_model(
    model: str | Path,
    *,
    alias: str = BASE,
    adapts: str | Path | None = None,
    vocabulary: Mapping[str, Any] | None = None,
    cache: str | Path | None = None,
) -> ResolvedFamily:
    """Locate, open and check one model, which is returned as a family: a base model, here without experts.

    `model` is a directory or a hub id, and `alias` is the name that it gets in the family. If the model is an adapter,
    `adapts` is the model that it changes. `vocabulary` has options of the vocabulary, as in a recipe. `cache` is the
    directory of the cache, or None for the default directory. Raises InvalidModel with every problem.
    """
    adapted = {} if adapts is None else {alias: adapts}
    return locate_family(model, {}, base_alias=alias, adapted=adapted).resolve(vocabulary=vocabulary, cache=cache)


def open_sources(family: Family, *, cache: str | Path | None = None) -> ResolvedFamily:
    """Open and check a base model and its experts again, from the description that was sent to this process.

    `family` is the description. `cache` is the directory of the cache, or None for the default directory. The function
    does not check whether the contents of the models are still the same. Raises InvalidModel with every problem.
    """
    experts = {model.alias: model.directory for model in family.experts}
    adapted = {model.alias: model.adapts for model in family.models if model.adapts is not None}
    located = locate_family(family.base.directory, experts, base_alias=family.base.alias, adapted=adapted)
    return located.resolve(tokenizer=family.tokenizer, vocabulary=family.vocabulary, cache=cache)


def on_this_machine(family: Family, *, note: Callable[[str], None] = log.info) -> Family:
    """Replace the directories in a description of models by the directories of these models on this machine.

    `family` describes a base model and its experts, and may have been sent by another machine. A model whose directory
    does not exist here is looked up by its origin (a hub id or URL), and downloaded unless this machine has it. If a
    model is looked up, the contents of all models are compared with the fingerprints in `family`. `note` is called with
    lines about downloads. Raises InvalidModel if a model cannot be found, or if its contents differ from the
    fingerprint.
    """
    base, *experts = (_on_this_machine(model, note) for model in family.models)
    found = replace(family, base=base, experts=tuple(experts))
    if found != family:
        fingerprints = open_sources(found).fingerprints
        changed = [model for model in found.models if fingerprints[model.alias] != model.fingerprint]
        if changed:
            raise InvalidModel(
                tuple(
                    f"model {model.alias!r}: {model.origin} has changed since it was checked: its fingerprint is "
                    f"{fingerprints[model.alias][:12]}, expected {model.fingerprint[:12]}"
                    for model in changed
                )
            )
    return found


def _on_this_machine(model: ModelSource, note: Callable[[str], None]) -> ModelSource:
    if os.path.isdir(model.directory):
        return model
    if model.origin is None:
        raise InvalidModel(
            (
                f"model {model.alias!r}: {model.directory} does not exist on the machine {socket.gethostname()}: mount "
                "it at the same path on every machine, or give the model as a hub id or as the URL of a folder in an "
                "object store",
            )
        )
    (directory,) = fetched([locate(model.origin)], note=note)
    return replace(model, directory=str(directory.resolve()))


def open_family(
    base: str | Path,
    experts: Mapping[str, str | Path],
    *,
    tokenizer: str = BASE,
    cache: str | Path | None = None,
    note: Callable[[str], None] = log.info,
) -> Family:
    """Locate, check and, if needed, download a base model and its experts, and return their short description.

    The description can be sent to other processes. `base` and `experts` (keyed by alias) are directories or hub ids.
    `tokenizer` selects the vocabulary of merges. `cache` is the directory of the cache, or None for the default
    directory. `note` is called with lines about downloads. Raises InvalidModel with every problem of every model.
    """
    return resolve_family(base, experts, tokenizer=tokenizer, cache=cache).fetched(note=note).family

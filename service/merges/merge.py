"""The command `mergesearch merge` for a file with one merge: checks the merge, and writes the merged model.

The file's keys decide whether the file is a recipe or a mergekit configuration. Everything is checked before anything
is written, and the headers of the models' files are checked before weights are read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from threading import Timer
from typing import TYPE_CHECKING, Any

from search_spaces.recipe import Recipe
from service.disk import free_bytes, gib
from service.merges.documents import Problems, read_document
from service.merges.sources import (
    aliases_of,
    chat_template_of,
    check_own_tokens,
    place_of,
    stored_dtype,
    tokenizer_of,
    vocabulary_kept,
    vocabulary_of,
)
from service.studies.export import model_bytes, write_model
from service.studies.preflight.dtype import DTYPE_BYTES
from workers.errors import InvalidModel
from workers.export.model_card import licence, recipe_rows
from workers.mergekit.config import DTYPES, split_adapter
from workers.mergekit.importer import to_recipe
from workers.mergekit.reader import read_configuration, shown
from workers.models.family import ResolvedFamily, resolve_family, resolve_model
from workers.models.merged_files import merged_config
from workers.models.remote import named

if TYPE_CHECKING:
    from workers.merging.bank import Bank

__all__ = ["MergePlan", "check_merge", "merge_file"]

logger = logging.getLogger(__name__)

# The dtype of a merge if neither the command nor the file states one.
DEFAULT_DTYPE = "bfloat16"

# Steps that take longer than this are announced.
PATIENCE_S = 3.0


@dataclass(frozen=True)
class PlannedModel:
    """Model that takes part in a planned merge.

    `alias` is the model's name in the merge, and `role` is "base" or "expert". `licence` is the licence that the model
    card states, or None if the card states no licence. `fingerprint` is a hash of the model's files.
    """

    alias: str
    role: str
    directory: str
    licence: str | None
    fingerprint: str


@dataclass(frozen=True)
class DiskBytes:
    """Disk space of a planned merge in bytes.

    `export` is the size of the merged model, `available` is the free space on its disk, and `download` is the size of
    the weights that must be downloaded.
    """

    export: int
    available: int
    download: int


@dataclass(frozen=True)
class MergePlan:
    """Plan of a merge: its models, the merges in each layer, and the size of the result.

    - `models`: the models that take part
    - `merges`: table rows with the columns layers, component, method, sources and coefficients
    - `num_layers`, `num_parameters`, `dtype`: layers, parameters and dtype of the merged model
    - `digest`: the hash of the recipe
    - `disk_bytes`: the disk space that the merge needs, and the free disk space
    - `is_done`: whether the complete merged model exists already
    - `warnings`: lines about keys of the file that have no effect
    """

    models: tuple[PlannedModel, ...]
    merges: tuple[tuple[str, ...], ...]
    num_layers: int
    num_parameters: int
    dtype: str
    digest: str
    disk_bytes: DiskBytes
    is_done: bool
    warnings: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def to_text(self) -> str:
        models = [
            f"{model.alias} ({model.role}): {model.directory}" + (f", {model.licence}" if model.licence else "")
            for model in self.models
        ]
        cells = [("layers", "component", "method", "sources", "coefficients"), *self.merges]
        widths = [max(len(row[column]) for row in cells) for column in range(4)]
        rows = [
            "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[4]]).rstrip()
            for row in cells
        ]
        return "\n".join(
            (
                f"recipe    {self.digest[:12]}: nothing is wrong with it",
                "models    " + "\n          ".join(models),
                "merges    " + "\n          ".join(rows),
                f"output    {self.num_parameters:,} parameters in {self.num_layers} layers, {self.dtype}, "
                f"{gib(self.disk_bytes.export)}" + (", there already" if self.is_done else ""),
                f"disk      {gib(self.disk_bytes.available)} free",
                *self._download(),
                *(f"warning   {warning}" for warning in self.warnings),
            )
        )

    def _download(self) -> tuple[str, ...]:
        """Line about weights that must be downloaded from the hub, as a tuple; empty if nothing must be downloaded."""
        num_bytes = self.disk_bytes.download
        if not num_bytes:
            return ()
        return (f"download  {gib(num_bytes)} of weights; they are checked for NaN and infinity then",)


def check_merge(
    file: Path,
    directories: Mapping[str, Path],
    out: Path,
    *,
    dtype: str | None = None,
    strict: bool = False,
    document: Any = None,
    note: Callable[[str], None] = logger.info,
) -> MergePlan:
    """Check a merge without writing or downloading anything, and return its plan: models, layers and sizes.

    `file` describes the merge. `directories` contains directories of models, keyed by name, and `out` is the directory
    in which the merged model would be written. `dtype` is the dtype of the merged model; None uses the dtype that the
    file states. `strict` treats warnings, which are about keys of the file without effect, as errors. `document` is the
    parsed content of `file`; None reads the file. `note` is called with messages about slow reads. Raises InvalidRecipe
    for problems of the file, InvalidModel for problems of the models or of `out`, and Conflict if `out` contains
    anything but this merged model, or if its disk has too little space.
    """
    import torch

    from workers.export.checkpoint import is_written

    prepared = _prepare(file, out, document, directories, dtype, strict, downloads=False, note=note)
    sources = prepared.bank.sources
    if lack := sources.lack_of_space:
        raise InvalidModel((lack,))
    num_bytes = model_bytes(
        prepared.recipe, prepared.bank, out, dtype=prepared.dtype, chat_template=prepared.chat_template
    )
    base, used = sources.family.base, prepared.recipe.canonical().models
    return MergePlan(
        models=tuple(
            PlannedModel(
                model.alias,
                "base" if model is base else "expert",
                named(model.directory),
                licence(Path(model.directory)),
                model.fingerprint,
            )
            for model in sources.family.models
            if model.alias in used
        ),
        merges=tuple(recipe_rows(prepared.recipe)),
        num_layers=len(prepared.recipe.layers),
        num_parameters=num_bytes // DTYPE_BYTES[prepared.dtype],
        dtype=prepared.dtype,
        digest=prepared.recipe.digest,
        disk_bytes=DiskBytes(num_bytes, free_bytes(out), sources.absent_bytes),
        is_done=is_written(prepared.recipe, out, getattr(torch, prepared.dtype), chat_template=prepared.chat_template),
        warnings=prepared.warnings,
    )


def merge_file(
    file: Path,
    directories: Mapping[str, Path],
    out: Path,
    *,
    dtype: str | None = None,
    strict: bool = False,
    document: Any = None,
    note: Callable[[str], None] = logger.info,
    **details: Any,
) -> Path:
    """Write the merged model that `file` describes to the directory `out`, and return `out`.

    Args:
        file: A recipe, or a mergekit configuration.
        directories: Directories of models, keyed by the alias (for a recipe) or by the name (for a mergekit
            configuration). Other names in a mergekit configuration are directories, relative to the file or to the
            current directory, or hub ids.
        out: Directory for the merged model.
        dtype: Dtype of the merged model; None uses the dtype that the file states.
        strict: Treat warnings about keys of the file that have no effect as errors.
        document: The document that describes the merge; None reads it from `file`.
        note: Called with messages about downloads and slow reads, and with warnings.
        **details: Passed on to the function that writes the checkpoint, such as `max_shard_bytes` or `progress`
            (`workers.export.checkpoint.export`).

    Raises:
        InvalidRecipe: The file has problems.
        InvalidModel: The models or `out` cannot be used.
        Conflict: `out` contains anything but this merged model, or its disk has too little space.
    """
    prepared = _prepare(file, out, document, directories, dtype, strict, note=note)
    for warning in prepared.warnings:
        note(f"warning: {warning}")
    return write_model(
        prepared.recipe, prepared.bank, out, dtype=prepared.dtype, chat_template=prepared.chat_template, **details
    )


@dataclass(frozen=True)
class _PreparedMerge:
    recipe: Recipe
    bank: Bank
    dtype: str
    chat_template: str | None = None
    warnings: tuple[str, ...] = ()


def _prepare(
    file: Path,
    out: Path,
    document: Any,
    directories: Mapping[str, Path],
    dtype: str | None,
    strict: bool,
    **fetching: Any,
) -> _PreparedMerge:
    """Read the file that describes a merge, and open and check its models.

    `document` is the parsed content of `file`; None reads the file. `directories` contains directories of models, keyed
    by name. `dtype` replaces the dtype that the file states; None keeps it. `strict` treats warnings as errors.
    `fetching` are the arguments `downloads` (whether weights may be downloaded) and `note` (a function for messages) of
    `_bank`. All problems of the file, the models and `out` are raised as one error.
    """
    warnings: list[str] = []
    document = document or read_document(file, warn=warnings.append)
    problems = Problems(file, warnings, strict=strict)
    prepared: _PreparedMerge | None = None
    with problems.collected():
        if isinstance(document, Mapping) and "merge_method" in document and "format" not in document:
            prepared = _of_configuration(document, file, directories, problems, **fetching)
        else:
            prepared = _of_recipe(document, directories, problems, **fetching)
    if problems:
        from workers.export.checkpoint import check_place

        with problems.collected():
            check_place(out)
    problems.raise_all()
    assert prepared is not None, "neither a merge nor a problem"
    prepared = replace(prepared, warnings=tuple(f"{file}: {line}" for line in dict.fromkeys(warnings)))
    return replace(prepared, dtype=dtype) if dtype else prepared


def _check(recipe: Recipe, bank: Bank) -> None:
    """Check that the opened models in `bank` can be merged by `recipe`.

    Raises:
        InvalidRecipe: The recipe does not fit the models, for example their number of layers.
        InvalidModel: The tokenizers of the models cannot be combined.
    """
    from workers.merging.plan import check_recipe

    check_recipe(recipe, bank)
    merged_config(recipe, bank.base, bank.views(recipe.models), dtype="float32")
    _ = bank.sources.result_dir


# A recipe


def _of_recipe(
    document: Any, directories: Mapping[str, Path], problems: Problems, **fetching: Any
) -> _PreparedMerge | None:
    """Open and check the models of a merge that a recipe describes.

    `document` is the recipe. `directories` contains the directories of the models, keyed by alias. Problems that are
    found are added to `problems`. The result is None if the problems prevent opening the models. `fetching` are the
    arguments `downloads` (whether weights may be downloaded) and `note` (a function for messages) of `_bank`.
    """
    recipe = Recipe.from_json(document)
    template = document.get("chat_template")
    if not isinstance(template, str | None):
        problems.add(f"chat_template: {shown(template)} is not a text")
    if (stated := document.get("dtype")) not in (*DTYPES, None):
        problems.add(f"dtype: {shown(stated)} is not supported; give {', '.join(DTYPES)}")
    if missing := sorted(set(recipe.models) - set(directories)):
        hint = " ".join(f"--model {alias}=DIR" for alias in missing)
        problems.add(f"no directory is given for {', '.join(missing)}; add {hint}")
    if unknown := sorted(set(directories) - set(recipe.models)):
        problems.add(f"has no model {', '.join(unknown)}; it names {', '.join(recipe.models)}")
    places: dict[str, str | Path] = {}
    adapted: dict[str, str | Path] = {}
    for alias, directory in directories.items():
        if alias not in recipe.models:
            continue
        whole, adapter = (None, None) if directory.exists() else split_adapter(str(directory))
        places[alias] = adapter or directory
        if adapter is not None and whole is not None:
            adapted[alias] = whole
    sources = _opened(recipe.base, places, recipe.tokenizer, adapted, recipe.vocabulary, problems)
    if problems or sources is None:
        return None
    bank = _bank(sources, **fetching)
    for alias, fingerprint in bank.sources.fingerprints.items():
        if recipe.models[alias] != fingerprint:
            problems.add(
                f"{directories[alias]} is not the recipe's {alias!r}: its content has fingerprint "
                f"{fingerprint[:12]}, the recipe's {recipe.models[alias][:12]}"
            )
    if not problems:
        _check(recipe, bank)
    return _PreparedMerge(recipe, bank, document.get("dtype") or DEFAULT_DTYPE, template)


# A mergekit configuration


def _of_configuration(
    document: Any, file: Path, directories: Mapping[str, Path], problems: Problems, **fetching: Any
) -> _PreparedMerge | None:
    """Open and check the models of a merge that a mergekit configuration describes.

    `document` is the configuration, and `file` is the file that it is from. `directories` contains directories of
    models, keyed by name. `fetching` are the arguments `downloads` (whether weights may be downloaded) and `note` (a
    function for messages) of `_bank`. The models are checked even if other parts of the configuration are wrong. All
    problems that are found are added to `problems`. If problems were found, the result is None.
    """
    warn = problems.warnings.append
    configuration = read_configuration(document, warn=warn, problems=problems.of_file)
    is_read = not problems
    named = {part for model in configuration.models for part in (model, *split_adapter(model)) if part}
    if is_read and (unknown := sorted(set(directories) - named)):
        problems.add(f"has no model {', '.join(unknown)}; it names {', '.join(configuration.models)}")
    aliases = aliases_of(configuration.models)
    places: dict[str, str | Path] = {}
    adapted: dict[str, str | Path] = {}
    for model, alias in aliases.items():
        whole, adapter = split_adapter(model)
        with problems.collected():
            place = directories.get(model) or place_of(adapter or whole, directories, file, warn)
            if adapter is not None and whole != configuration.base:
                adapted[alias] = place_of(whole, directories, file, warn)
            places[alias] = place
    base = aliases.get(configuration.base, "")
    tokenizer = tokenizer_of(configuration, aliases) if is_read else "base"
    vocabulary = vocabulary_of(configuration, aliases) if is_read else {}
    unmerged = {aliases[model]: place for model, place in configuration.unmerged.items()}
    sources = _opened(base, places, tokenizer, adapted, vocabulary, problems, unmerged)
    template: str | None = None
    if sources is not None or configuration.chat_template != "auto":
        with problems.collected():
            template = chat_template_of(configuration.chat_template, file, sources)
    if sources is None or not is_read:
        return None
    with problems.collected():
        check_own_tokens(configuration, aliases, sources, warn)
    kept = vocabulary_kept(configuration, aliases, sources, warn)
    if kept != tokenizer:
        tokenizer, vocabulary = kept, {**vocabulary, "by_id": True}
        sources = _resolved(base, places, tokenizer, adapted, vocabulary)
    unknown_contents = {alias: alias for alias in places}
    layouts = {alias: checkpoint.layout for alias, checkpoint in sources.checkpoints.items()}
    recipe = to_recipe(
        configuration, aliases, fingerprints=unknown_contents, layout=layouts[base], layouts=layouts, warn=warn
    )
    if problems:
        return None
    bank = _bank(sources, **fetching)
    recipe = replace(recipe, models=bank.family.fingerprints, tokenizer=tokenizer, vocabulary=vocabulary)
    _check(recipe, bank)
    return _PreparedMerge(recipe, bank, configuration.dtype or stored_dtype(sources), template)


# Models of recipes and configurations


def _opened(
    base: str,
    places: Mapping[str, str | Path],
    tokenizer: str,
    adapted: Mapping[str, str | Path],
    vocabulary: Mapping[str, Any],
    problems: Problems,
    unmerged: Mapping[str, str] | None = None,
) -> ResolvedFamily | None:
    """Locate the models of a merge, check their headers, and add all problems that are found to `problems`.

    `base` is the base model's alias. `places` contains the directory, hub id or URL of each model and adapter, keyed by
    alias. `tokenizer` and `vocabulary` say which vocabulary the merged model has. `adapted` contains the model that an
    adapter changes, keyed by the adapter's alias, if this model is not the base. `unmerged` contains the models that
    the configuration states but does not merge: their names in error messages, keyed by alias. The result is None if
    `problems` has any problem, from before or from this call. If the base is missing, nothing is checked, and the
    result is None too.
    """
    if base not in places:
        return None
    is_complete = not problems
    with problems.collected():
        if is_complete:
            return _resolved(base, places, tokenizer, adapted, vocabulary, unmerged)
        _resolved(base, places, "base", adapted, {}, unmerged)
    return None


def _resolved(
    base: str,
    directories: Mapping[str, str | Path],
    tokenizer: str,
    adapted: Mapping[str, str | Path],
    vocabulary: Mapping[str, Any],
    unmerged: Mapping[str, str] | None = None,
) -> ResolvedFamily:
    """Locate the models of a merge and check the headers of their safetensors files.

    Raises InvalidModel with every problem.

    Args:
        base: Alias of the base model, which may be the only model.
        directories: Directory or hub id of each model and adapter, keyed by alias.
        tokenizer: Vocabulary of the merged model: "base", "union" or an alias.
        adapted: Directory or hub id of the model that an adapter changes, keyed by the adapter's alias, if this model
            is not the base.
        vocabulary: Further options of the merged vocabulary.
        unmerged: For the models that the configuration names but does not merge, the names that messages use, keyed by
            alias; None if there are no such models.
    """
    others = {alias: directory for alias, directory in directories.items() if alias != base}
    if not others:
        return resolve_model(directories[base], alias=base, adapts=adapted.get(base), vocabulary=vocabulary)
    return resolve_family(
        directories[base],
        others,
        tokenizer=tokenizer,
        base_alias=base,
        adapted=adapted,
        any_depth=True,
        vocabulary=vocabulary,
        names=unmerged,
    )


def _bank(sources: ResolvedFamily, *, downloads: bool = True, note: Callable[[str], None] = logger.info) -> Bank:
    """Open the weights of models whose headers were checked, and return them as a `Bank`.

    `sources` are the checked models. If `downloads` is True, models that are not on this machine are downloaded first.
    `note` is called with messages about downloads and slow reads. Raises InvalidModel if weights cannot be used.
    """
    from workers.merging.bank import Bank

    here = sources.fetched(note=note) if downloads else sources
    with _patiently(note, "reading the models: fingerprints, NaN and infinity; needed once per model"):
        return Bank(here, keeps_statistics=False)


@contextmanager
def _patiently(note: Callable[[str], None], text: str) -> Iterator[None]:
    """Context manager that calls `note` with `text` if the code inside runs for more than 3 s."""
    timer = Timer(PATIENCE_S, note, (text,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()

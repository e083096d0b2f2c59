"""`mergesearch merge`: one merge that a file describes, without a search.

The file is one of our recipes or a configuration of mergekit's; what it holds says which. Everything is checked before
anything is written, and what headers tell before anything large is read.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from search_spaces.errors import InvalidRecipe
from search_spaces.recipe import Recipe
from service.disk import free_bytes, gib
from service.export import model_bytes, write_model
from service.preflight import DTYPE_BYTES
from workers.errors import InvalidModel
from workers.types import Family, ModelSource

if TYPE_CHECKING:
    from workers.bank import Bank
    from workers.mergekit_document import Configuration

__all__ = ["MergePlan", "check_merge", "merge_file"]

logger = logging.getLogger(__name__)

# In which a merge is written where neither the command nor the file says.
DEFAULT_DTYPE = "bfloat16"


@dataclass(frozen=True)
class MergePlan:
    """What a merge will do. `merges` are rows (layers, component, method, sources, coefficients)."""

    models: tuple[dict[str, str | None], ...]
    merges: tuple[tuple[str, ...], ...]
    num_layers: int
    num_parameters: int
    dtype: str
    digest: str
    disk_bytes: dict[str, int]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def to_text(self) -> str:
        models = [
            f"{model['alias']} ({model['role']}): {model['directory']}"
            + (f", {model['licence']}" if model["licence"] else "")
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
                f"{gib(self.disk_bytes['export'])}",
                f"disk      {gib(self.disk_bytes['available'])} free",
                *self._download(),
            )
        )

    def _download(self) -> tuple[str, ...]:
        """Of models whose weights are on the hub and not here."""
        num_bytes = self.disk_bytes["download"]
        if not num_bytes:
            return ()
        return (f"download  {gib(num_bytes)} of weights from the hub; NaN and infinity are looked for then",)


def check_merge(file: Path, directories: Mapping[str, Path], out: Path, *, dtype: str | None = None) -> MergePlan:
    """Check all that `merge_file` would, and say what it would do; nothing is written, and of hub models that are not
    here the weights are not looked at. Raises as `merge_file` does."""
    from workers.hub import absent_bytes, lack_of_space, named
    from workers.writer import licence, recipe_rows

    job = _prepared(file, directories, dtype, downloads=False)
    places = [Path(model.directory) for model in job.bank.family.models]
    if lack := lack_of_space(places):
        raise InvalidModel((lack,))
    num_bytes = model_bytes(job.recipe, job.bank, out, dtype=job.dtype)
    base, used = job.bank.family.base, job.recipe.canonical().models
    return MergePlan(
        models=tuple(
            {
                "alias": model.alias,
                "role": "base" if model is base else "expert",
                "directory": named(model.directory),
                "licence": licence(Path(model.directory)),
                "fingerprint": model.fingerprint,
            }
            for model in job.bank.family.models
            if model.alias in used
        ),
        merges=tuple(recipe_rows(job.recipe)),
        num_layers=len(job.recipe.layers),
        num_parameters=num_bytes // DTYPE_BYTES[job.dtype],
        dtype=job.dtype,
        digest=job.recipe.digest,
        disk_bytes={"export": num_bytes, "available": free_bytes(out), "download": absent_bytes(places)},
    )


def merge_file(
    file: Path,
    directories: Mapping[str, Path],
    out: Path,
    *,
    dtype: str | None = None,
    note: Callable[[str], None] = logger.info,
    **details: Any,
) -> Path:
    """Write the merge that `file` describes to `out` and return it; `details` are further arguments of `writer.export`,
    and `note` hears of downloads from the hub.

    `directories` says where models are, by their aliases in a recipe, by their names in mergekit's configuration, where
    those that are not named there are directories relative to the file, or hub ids. `dtype` None is the file's.
    Raises InvalidRecipe, InvalidModel, Conflict.
    """
    job = _prepared(file, directories, dtype, note=note)
    return write_model(job.recipe, job.bank, out, dtype=job.dtype, **details)


@dataclass(frozen=True)
class _Job:
    recipe: Recipe
    bank: Bank
    dtype: str


def _prepared(file: Path, directories: Mapping[str, Path], dtype: str | None, **fetching: Any) -> _Job:
    """`fetching`: whether there are downloads from the hub, and who hears of them, as `open_family` takes it."""
    document = _read(file)
    try:
        if isinstance(document, Mapping) and "merge_method" in document and "format" not in document:
            from workers.mergekit_document import read_configuration

            job = _of_configuration(read_configuration(document), file, directories, **fetching)
        else:
            job = _of_recipe(document, directories, **fetching)
    except InvalidRecipe as error:
        raise InvalidRecipe("\n".join(f"{file}: {line}" for line in str(error).splitlines())) from error
    from workers.merging import check_recipe
    from workers.result_files import result_dir

    check_recipe(job.recipe, job.bank)
    result_dir(job.bank.family)
    return replace(job, dtype=dtype) if dtype else job


# The file


def _read(file: Path) -> Any:
    """What the file holds, JSON or YAML."""
    import yaml

    try:
        text = file.read_text()
        is_json = file.suffix == ".json" or text.lstrip()[:1] in ("{", "[")
        document = json.loads(text) if is_json else yaml.safe_load(text)
    except OSError as error:
        raise InvalidRecipe(f"{file}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InvalidRecipe(
            f"{file}: is not UTF-8 text (byte {error.start}); give a recipe.json or a configuration of mergekit's"
        ) from error
    except json.JSONDecodeError as error:
        raise InvalidRecipe(f"{file}: line {error.lineno}: not JSON: {error.msg}") from error
    except yaml.YAMLError as error:
        raise InvalidRecipe(f"{file}: {_yaml_problem(error)}") from error
    except RecursionError as error:
        raise InvalidRecipe(f"{file}: is nested too deeply") from error
    except ValueError as error:  # a number too long for Python
        raise InvalidRecipe(f"{file}: {error}") from error
    if not is_json and not (isinstance(document, Mapping) and document.keys() & {"merge_method", "format"}):
        raise InvalidRecipe(
            f"{file}: is neither a configuration of mergekit's (it has no merge_method) nor a recipe (it has no format)"
        )
    return document


def _yaml_problem(error: Any) -> str:
    mark = getattr(error, "problem_mark", None)
    where = f"line {mark.line + 1}: " if mark else ""
    problem = getattr(error, "problem", None) or str(error)
    if "another document" in problem:
        return f"{where}holds several documents, as mergekit-multi reads; give a file with one"
    return f"{where}not YAML: {problem}"


# Our recipe


def _of_recipe(document: Any, directories: Mapping[str, Path], **fetching: Any) -> _Job:
    from workers.bank import Bank

    recipe = Recipe.from_json(document)
    if missing := sorted(set(recipe.models) - set(directories)):
        hint = " ".join(f"--model {alias}=DIR" for alias in missing)
        raise InvalidRecipe(f"where are {', '.join(missing)}? Add {hint}")
    if unknown := sorted(set(directories) - set(recipe.models)):
        raise InvalidRecipe(f"has no model {', '.join(unknown)}; it names {', '.join(recipe.models)}")
    family = _family(recipe.base, directories, recipe.tokenizer, **fetching)
    for alias, fingerprint in family.fingerprints.items():
        if recipe.models[alias] != fingerprint:
            raise InvalidRecipe(
                f"{directories[alias]} is not the recipe's {alias!r}: its content has fingerprint "
                f"{fingerprint[:12]}, the recipe's {recipe.models[alias][:12]}"
            )
    from workers.mergekit_document import DTYPES

    stated = document.get("dtype")
    return _Job(recipe, Bank(family, "mapped", keeps_statistics=False), stated if stated in DTYPES else DEFAULT_DTYPE)


# mergekit's configuration


def _of_configuration(
    configuration: Configuration, file: Path, directories: Mapping[str, Path], **fetching: Any
) -> _Job:
    from workers.bank import Bank
    from workers.checkpoints import check_family, open_checkpoint
    from workers.mergekit_input import to_recipe

    if unknown := sorted(set(directories) - set(configuration.models)):
        raise InvalidRecipe(f"has no model {', '.join(unknown)}; it names {', '.join(configuration.models)}")
    aliases = _aliases(configuration.models)
    places = {
        alias: directories.get(model) or _place(_adapter_or_model(model, configuration), file)
        for model, alias in aliases.items()
    }
    base, *others = aliases.values()
    # All that headers tell first: contents are hashed and read after that.
    tokenizer = _tokenizer(configuration, aliases)
    if others:
        checkpoints = check_family(places[base], {alias: places[alias] for alias in others}, tokenizer=tokenizer)
    else:
        checkpoints = (open_checkpoint(places[base]),)
    unknown_contents = {alias: alias for alias in places}
    recipe = to_recipe(configuration, aliases, fingerprints=unknown_contents, layout=checkpoints[0].layout)
    checked = {alias: checkpoint.directory for alias, checkpoint in zip((base, *others), checkpoints, strict=True)}
    family = _family(base, checked, tokenizer, **fetching)
    bank = Bank(family, "mapped", keeps_statistics=False)
    recipe = replace(recipe, models=family.fingerprints, tokenizer=tokenizer)
    return _Job(recipe, bank, configuration.dtype or _stored_dtype(family))


def _adapter_or_model(model: str, configuration: Configuration) -> str:
    """What an expert's files are: of MODEL+LORA the adapter's, for the model is the base."""
    from workers.mergekit_document import split_adapter

    whole, adapter = split_adapter(model)
    if adapter is not None and (model == configuration.base or whole != configuration.base):
        raise InvalidRecipe(
            f"{model}: an adapter is merged here as an expert of the model that it changes; give base_model: {whole}"
        )
    return model if adapter is None else adapter


def _place(model: str, file: Path) -> str | Path:
    """The directory of that name beside the file, else what may be a hub id."""
    directory = file.parent / model
    return directory if directory.exists() else model


def _aliases(models: tuple[str, ...]) -> dict[str, str]:
    """Short names: the last part of each path or hub id, numbered where several have the same."""
    aliases: dict[str, str] = {}
    for model in models:
        name = re.sub(r"[^\w.-]+", "-", Path(model).name) or "model"
        alias, number = name, 2
        while alias in aliases.values() or alias == "union" or (aliases and alias == "base"):
            alias, number = f"{name}-{number}", number + 1
        aliases[model] = alias
    return aliases


def _tokenizer(configuration: Configuration, aliases: Mapping[str, str]) -> str:
    """The vocabulary of the merged model: "base", "union", or an alias."""
    source = configuration.tokenizer_source
    if source is None or source in ("union", configuration.base):
        return source if source == "union" else "base"
    if source != "base" and source not in aliases:
        raise InvalidRecipe(
            f"tokenizer_source: {source} is none of the models; give base, union, or {', '.join(aliases)}"
        )
    return "base" if source == "base" else aliases[source]


def _stored_dtype(family: Family) -> str:
    """The dtype of all whole models, float32 where they have several."""
    from workers.checkpoints import open_sources

    names = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
    whole = [checkpoint for checkpoint in open_sources(family).values() if checkpoint.base is None]
    dtypes = {checkpoint.tensors[name].dtype for checkpoint in whole for name in checkpoint.layout.places}
    return names[dtypes.pop()] if len(dtypes) == 1 else "float32"


# Both


def _family(
    base: str,
    directories: Mapping[str, str | Path],
    tokenizer: str,
    *,
    downloads: bool = True,
    note: Callable[[str], None] = logger.info,
) -> Family:
    """The models of a recipe; it may name no other than its base."""
    from workers.checkpoints import fingerprint, open_family
    from workers.hub import fetched, locate

    experts = {alias: directory for alias, directory in directories.items() if alias != base}
    if experts:
        return open_family(
            directories[base], experts, tokenizer=tokenizer, base_alias=base, downloads=downloads, note=note
        )
    directory = locate(directories[base]).resolve()
    if downloads:
        (directory,) = fetched([directory], note=note)
    return Family(ModelSource(base, str(directory), fingerprint(directory)), experts=())

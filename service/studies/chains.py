"""Chains of jobs: merged models of one study, and experts of a fine-tuning, as sources of another study.

A source that is a trial of another study is exported to a checkpoint in the data directory, in the same way as by
`service.studies.export`. From then on the source is a directory like any other source. If artifacts are in an object
store, the checkpoint is stored there as an artifact of the other study. The source is then a model at a URL. The trial
and its recipe are fixed when the study is created. The checkpoint's fingerprint is checked like the fingerprint of
every source.

A source that is an expert of a fine-tuning is an artifact of the fine-tuning already. The expert is used at its URL or,
if artifacts are in a directory, copied to the directory of sources.

A study file with the option `path_of` names a trial of another study. Each model of the study then gets its own layers
in the order of this trial's layer path, and is written as a checkpoint. Searchers that search coefficients of whole
models, including the searchers that use gradients, can then improve the coefficients of merges along the layer path.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from search_spaces.errors import InvalidStudy, Problem
from search_spaces.recipe import COMPONENTS, Component, LayerRecipe, Merge, Recipe, Source
from search_spaces.study.file import Study
from search_spaces.study.models import AnotherStudy, FromFinetune, FromStudy
from service.disk import artifacts_dir
from service.errors import Conflict, NotFound
from service.resolved_study import ChainedSource, ResolvedStudy
from service.results.selection import best_trial
from service.store import Store
from service.store.artifacts import SOURCE_PREFIX, ArtifactStore
from service.studies.export import export_trial, write_model
from service.studies.preflight.dtype import DTYPE_BYTES, engine_dtype
from service.types import Account, ArtifactRecord, JobRecord
from workers.directories import turn
from workers.errors import InvalidModel
from workers.models.family import resolve_family
from workers.object_store import is_object_url

__all__ = [
    "COPY",
    "SOURCES",
    "OpenStudy",
    "keep_sources",
    "on_server",
    "place_of_expert",
    "with_exported_sources",
]

logger = logging.getLogger(__name__)

# The directory of exported sources, in the directory of a run or a server.
SOURCES = "sources"

# Beginning of the names of copied experts of fine-tunings, in the directory of exported sources.
COPY = "expert-"

# Kind of the jobs that train experts (`service.jobs.finetune.kind`).
FINETUNE = "finetune"

DIGEST_DIGITS = 16

BASE = "base"

OpenStudy: TypeAlias = Callable[[AnotherStudy], AbstractContextManager[tuple[Store, JobRecord]]]
"""Function that opens the study that a source or a policy comes from.

Raises NotFound if there is no such study, and Conflict if the study is named by a directory on a server, where studies
are named by ids.
"""


@dataclass(frozen=True)
class _Places:
    """Storage of exported sources: an object store, or a local directory.

    An exported source is a merge of another study that was written as a checkpoint, so that a study can merge it again.
    `artifacts_in` is the location of the artifacts (files that jobs store). If it is an object store, exported sources
    become artifacts there. Otherwise they are stored below `directory`.
    """

    directory: Path
    artifacts_in: str | Path

    def written(self, store: Store, job_id: str, name: str, write: Callable[[Path], object]) -> str:
        """Store a checkpoint here, unless it is stored already, and return its directory or URL.

        `write` is a function that writes the checkpoint to the directory that it gets. `name` identifies the content of
        the checkpoint. `job_id` is the id, in `store`, of the study whose trial is written.

        In an object store, the checkpoint becomes an artifact of this study. It is first written to a hidden directory
        below `directory`, where an interrupted write can continue. In a local directory, `write` itself must recognise
        a complete checkpoint, and then do nothing.
        """
        root = self.directory.resolve() / SOURCES
        if not is_object_url(str(self.artifacts_in)):
            write(root / name)
            return str(root / name)
        out = root / f".upload-{name}"
        artifacts, artifact = ArtifactStore(store, self.artifacts_in), f"{SOURCE_PREFIX}{name}"
        with turn(out):
            if artifact not in {record.name for record in artifacts.of(job_id)}:
                write(out)
                artifacts.put(job_id, artifact, out)
            shutil.rmtree(out, ignore_errors=True)
        return str(artifacts.url(artifacts.get(job_id, artifact)))


def with_exported_sources(
    study: Study,
    *,
    open_study: OpenStudy,
    directory: Path,
    artifacts_in: str | Path | None = None,
    before: ResolvedStudy | None = None,
    note: Callable[[str], None] = logger.info,
) -> tuple[Study, dict[str, ChainedSource]]:
    """Export those sources of a study that are merged models of other studies, and find experts of fine-tunings.

    Returns the study with directories or URLs in place of these sources, and a record of each source, keyed by alias.

    - `open_study`: opens the study that a source names
    - `directory`: the directory below which merges are written
    - `artifacts_in`: the location of the server's artifacts (files that jobs store); if it is an object store, the
      merges are stored there; None means a directory in `directory`
    - `before`: for a study that is resumed, the records that were stored when it was created; None for a new study
    - `note`: receives lines of progress

    A merge that was exported before is not written again. Raises InvalidStudy with every source that cannot be
    exported.
    """
    places = _Places(directory, artifacts_in or artifacts_dir(directory))
    found: dict[str, ChainedSource] = {}
    problems: list[Problem] = []
    for alias, source in study.models.chained.items():
        known = None if before is None else before.chained.get(alias)
        if known is not None and is_object_url(known.directory):
            found[alias] = known
            continue
        try:
            with open_study(source) as (store, record):
                note(f"Exporting the source {alias} from study {record.name!r} ...")
                found[alias] = _exported(store, record, source, known, places)
        except (NotFound, Conflict, InvalidModel, InvalidStudy) as error:
            problems.append(Problem(f"models.experts.{alias}.from_study", str(error)))
    for alias, expert in study.models.trained.items():
        try:
            stored = None if before is None else before.chained.get(alias)
            found[alias] = _trained(expert, expert.expert or alias, stored, open_study, places, note)
        except (NotFound, Conflict) as error:
            problems.append(Problem(f"models.experts.{alias}.from_finetune", str(error)))
    if study.models.path_of is not None:
        try:
            found |= _along_path(study, study.models.path_of, open_study, places, before, note)
        except (NotFound, Conflict, InvalidModel, InvalidStudy) as error:
            problems.append(Problem("models.path_of", str(error)))
    if problems:
        raise InvalidStudy(tuple(problems))
    return _with_directories(study, found), found


def place_of_expert(artifacts: ArtifactStore, record: ArtifactRecord, directory: Path) -> str:
    """Location of a trained expert, the artifact `record` of a fine-tuning: a URL or a directory.

    The result is the artifact's URL if artifacts are in an object store. Otherwise the expert is copied to the
    directory of sources below `directory`, the server's data directory, unless the copy exists. Other processes that
    need the same copy wait for it.
    """
    url = artifacts.url(record)
    if url is not None:
        return url
    out = directory / SOURCES / f"{COPY}{record.digest[:DIGEST_DIGITS]}"
    if not out.is_dir():
        with turn(out):
            if not out.is_dir():  # another process may have made it meanwhile
                artifacts.write_to(record, out)
    return str(out)


def _trained(
    source: FromFinetune,
    expert: str,
    known: ChainedSource | None,
    open_study: OpenStudy,
    places: _Places,
    note: Callable[[str], None],
) -> ChainedSource:
    """Find an expert that a fine-tuning has trained.

    `expert` is the expert's name in the fine-tuning that `source` names and `open_study` opens. If the study is
    resumed, `known` is the record that was stored when the study was created; an expert that still exists at the
    recorded place is used again. `note` receives lines of progress. Raises NotFound if there is no such fine-tuning or
    expert, and Conflict if the expert's files differ from the files that `known` names.
    """
    if known is not None and (is_object_url(known.directory) or Path(known.directory).is_dir()):
        return known
    with ExitStack() as opened:
        try:
            store, record = opened.enter_context(open_study(AnotherStudy(id=source.id)))
        except NotFound as error:
            raise NotFound(f"fine-tuning {source.id!r}: there is no such fine-tuning") from error
        if record.kind != FINETUNE:
            raise NotFound(f"job {source.id!r} is no fine-tuning; give the id of one")
        artifacts = ArtifactStore(store, places.artifacts_in)
        stored = {each.name: each for each in artifacts.of(record.id)}
        if expert not in stored:
            trained = ", ".join(stored) or "none yet"
            raise NotFound(f"fine-tuning {record.name!r}: has trained no expert {expert!r}; its experts: {trained}")
        digest = stored[expert].digest
        if known is not None and known.recipe_digest != digest:
            raise Conflict(f"fine-tuning {record.name!r}: {expert} is not the one that this study was created with")
        note(f"Using the expert {expert} of fine-tuning {record.name!r} ...")
        place = place_of_expert(artifacts, stored[expert], places.directory.resolve())
        return ChainedSource(record.id, record.name, 0, digest, place, expert=expert)


def keep_sources(artifacts: ArtifactStore, job_id: str, models: Iterable[str]) -> None:
    """Keep a study's source models that other jobs have stored as artifacts (files), in case these jobs are deleted.

    The artifacts become artifacts of the study `job_id` too. `models` are the directories, hub ids and URLs of the
    study's models; models that are not artifacts in the object store are skipped. Raises Conflict if the files of an
    artifact are gone.
    """
    for name, digest in artifacts.kept_names(models).items():
        artifacts.keep(job_id, name, digest)


def _with_directories(study: Study, found: Mapping[str, ChainedSource]) -> Study:
    directories = {alias: source.directory for alias, source in found.items()}
    models = study.models
    experts = {alias: directories.get(alias, expert) for alias, expert in models.experts.items()}
    base = directories.get(BASE, models.base)
    return study.model_copy(update={"models": models.model_copy(update={"base": base, "experts": experts})})


def _exported(
    store: Store, record: JobRecord, source: FromStudy, known: ChainedSource | None, places: _Places
) -> ChainedSource:
    number, recipe = _trial(store, record, source, known)
    if any(layer.alignment is not None for layer in recipe.layers):
        raise Conflict(
            f"study {record.name!r}: trial {number} has alignments between layers, which sources cannot have; give "
            "another trial"
        )
    if known is None:
        dtype = engine_dtype(Study.model_validate(record.document), ResolvedStudy.of(record))
    else:
        dtype = _dtype_in(known.directory)

    def write(out: Path) -> None:
        export_trial(store, record, str(number), out, dtype=dtype)

    place = places.written(store, record.id, _name(recipe, dtype), write)
    return ChainedSource(record.id, record.name, number, recipe.digest, place)


def _name(recipe: Recipe, dtype: str) -> str:
    return f"{recipe.digest[:DIGEST_DIGITS]}-{dtype}"


def _dtype_in(place: str) -> str:
    """Read the dtype of an exported source (a merge of another study) from the name of its directory or URL.

    This dtype may differ from the dtype of this machine's engines.
    """
    return place.rpartition("-")[2]


def _trial(store: Store, record: JobRecord, source: FromStudy, known: ChainedSource | None) -> tuple[int, Recipe]:
    """Find the trial that a study's source names; return the trial's number and recipe.

    A study can merge a trial of an earlier study again: `source` is an entry of a study file, and names the earlier
    study and the trial (a number, or "best"). `record` is the earlier study's job in `store`. `known` is None for a new
    study. For a stored study, `known` has the trial and recipe digest that the source had when this study was created;
    this trial is then used. Raises NotFound if there is no such trial, and Conflict if the trial's recipe differs from
    the recipe that `known` names.
    """
    trials = store.trials(record.id)
    if known is not None:
        number = known.trial
    elif source.trial == "best":
        best = best_trial(trials, ResolvedStudy.of(record).objectives)
        if best is None:
            raise NotFound(f"study {record.name!r}: no trial has reached the full budget yet, so there is no best one")
        number = best.number
    else:
        number = source.trial
    if number >= len(trials):
        raise NotFound(f"study {record.name!r}: has no trial {number}; its trials are 0 to {len(trials) - 1}")
    recipe = trials[number].read_recipe()
    if known is not None and recipe.digest != known.recipe_digest:
        raise Conflict(f"study {record.name!r}: trial {number} is not the one that this study was created with")
    return number, recipe


def _along_path(
    study: Study,
    source: FromStudy,
    open_study: OpenStudy,
    places: _Places,
    before: ResolvedStudy | None,
    note: Callable[[str], None],
) -> dict[str, ChainedSource]:
    """Export the base and the experts, each with its own layers rearranged in the order of a trial's layer path.

    A layer path is the sequence of the layers of the source models that a merge consists of. `source` names the trial,
    and `open_study` opens the trial's study. The models are written to `places`. If `study` is resumed, `before` has
    the records of the exported sources that were stored when the study was created; otherwise `before` is None. Models
    that were exported before are not written again. `note` receives lines of progress. Returns the exported models,
    keyed by alias. Experts that are merges of other studies are left out. Raises NotFound if the trial does not exist,
    Conflict if its path cannot be used, and InvalidModel or InvalidStudy if models cannot be read or merged.
    """
    experts = {alias: place for alias, place in study.models.experts.items() if isinstance(place, str)}
    written = {} if before is None else {alias: before.chained[alias] for alias in (BASE, *experts)}
    if written and all(is_object_url(own.directory) for own in written.values()):
        return written
    with open_study(source) as (store, record):
        number, recipe = _trial(store, record, source, written.get(BASE))
        path = _path(recipe, f"study {record.name!r}: trial {number}")
        if written and all((Path(own.directory) / "recipe.json").is_file() for own in written.values()):
            return written
        from workers.merging.bank import Bank

        sources = resolve_family(study.models.base, experts).fetched()
        if sources.layout.num_layers != (num_layers := ResolvedStudy.of(record).num_layers):
            raise Conflict(
                f"study {record.name!r}: its path is through models of {num_layers} layers; these have "
                f"{sources.layout.num_layers}"
            )
        bank = Bank(sources, keeps_statistics=False)
        found = {}
        for alias in (BASE, *experts):
            note(f"Writing {alias} with the layers of trial {number} of study {record.name!r} ...")
            own = _with_path(alias, path, sources.fingerprints)
            dtype = _dtype_of(bank.views(own.models)[alias].config)
            write = partial(write_model, own, bank, dtype=dtype)
            place = places.written(store, record.id, _name(own, dtype), write)
            found[alias] = ChainedSource(record.id, record.name, number, recipe.digest, place)
        return found


def _path(recipe: Recipe, where: str) -> tuple[dict[Component, int], ...]:
    """Layer path of the merge `recipe`: for each layer and component in order, the number of its source layer.

    The components of a layer are its attention, its MLP and its norms. `where` names the trial in error messages.
    Raises Conflict in three cases: a layer of the merge, or its MLP, has a scale (a factor on its output); an alignment
    (a learned map of the residual stream between two layers) follows a layer; or a component is merged from source
    layers with different numbers.
    """
    path: list[dict[Component, int]] = []
    for index, layer in enumerate(recipe.canonical().layers):
        if layer.alignment is not None or layer.scale != 1:
            what = "an alignment" if layer.alignment is not None else f"the scale {layer.scale:g}"
            raise Conflict(f"{where}: {what} follows layer {index}, which merges along this path cannot have")
        if layer.mlp_scale != 1:
            what = f"the MLP of layer {index} has the scale {layer.mlp_scale:g}"
            raise Conflict(f"{where}: {what}, which merges along this path cannot have")
        found: dict[Component, int] = {}
        for name in COMPONENTS:
            layers = {index if each.layer is None else each.layer for each in layer.component(name).sources}
            if len(layers) != 1:
                raise Conflict(f"{where}: layer {index} merges layers {sorted(layers)} of its sources; a path has one")
            found[name] = layers.pop()
        path.append(found)
    return tuple(path)


def _with_path(alias: str, path: tuple[dict[Component, int], ...], fingerprints: Mapping[str, str]) -> Recipe:
    """Recipe of a model with the layers of the model `alias`, rearranged in the order of a layer path.

    A layer path says from which layer of a source model each layer of a merge comes. `path` has an entry for each layer
    of the new model: for each component (attention, MLP and norms), the number of the layer of `alias` that the
    component is taken from. `fingerprints` contains the content fingerprint of each model, keyed by its name in the
    study file (alias).
    """
    whole = Merge("passthrough", (Source(alias),))
    merges = ({name: whole.at_layer(layer) for name, layer in each.items()} for each in path)
    layers = (LayerRecipe(attention=own["attention"], mlp=own["mlp"], norm=own["norm"]) for own in merges)
    return Recipe(fingerprints, BASE, tuple(layers), whole, whole).canonical()


def _dtype_of(config: Mapping[str, Any]) -> str:
    """Dtype that holds a checkpoint's weights without loss of precision.

    The result is the dtype that the checkpoint's configuration states. The result is float32 if the configuration
    states no dtype, or states a dtype that engines do not support.
    """
    stated = str(config.get("dtype") or config.get("torch_dtype")).removeprefix("torch.")
    return stated if stated in DTYPE_BYTES else "float32"


def on_server(store: Store, *, reader: Account | None) -> OpenStudy:
    """Return a function that opens a study of the server's store by its id.

    A study file can name other studies by id, for example to continue their search. `reader` has the rights of the user
    who submitted the file; None permits every study. The returned function raises NotFound, with the same text, if the
    study does not exist or the user may not read it.
    """

    @contextmanager
    def open_study(source: AnotherStudy) -> Iterator[tuple[Store, JobRecord]]:
        if source.id is None:
            raise Conflict(f"dir: {source.dir} names a run's directory; on a server, give the id of one of its studies")
        # The store's own error tells where the database is.
        unknown = NotFound(f"study {source.id!r}: there is no such study")
        try:
            record = store.job(source.id)
        except NotFound as error:
            raise unknown from error
        if reader is not None and not reader.may_read(record):
            raise unknown
        yield store, record

    return open_study

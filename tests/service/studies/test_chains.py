"""Merges of one study as sources of another: exported once, pinned, and then used like any other model."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from search_spaces.baselines import all_baselines
from search_spaces.errors import InvalidStudy
from search_spaces.recipe import COMPONENTS, LayerRecipe, Merge, Recipe, Source
from search_spaces.spaces import SPACES
from search_spaces.spaces.base import DifferentiableSpace
from search_spaces.spaces.layerwise import LayerwiseSection
from search_spaces.study.file import Study, parse_study
from search_spaces.study.models import AnotherStudy
from service.api.preflight_process import _engine_dtype
from service.cli.main import main
from service.disk import alignments_dir
from service.engine_machines import VARIABLE
from service.jobs.base import RequestContext
from service.jobs.finetune.study import collect_sources
from service.jobs.search.local_run import DATABASE, open_run
from service.jobs.search.request import read_study, studies_of
from service.resolved_study import ChainedSource, ResolvedStudy
from service.results.selection import best_trial
from service.store import Store, blobs
from service.store.artifacts import ArtifactStore
from service.studies.chains import SOURCES, keep_sources, on_server, place_of_expert, with_exported_sources
from service.studies.export import export_trial, write_model
from service.studies.mergekit import mergekit_file
from service.studies.preflight.models import searched_models, with_revisions
from service.types import ArtifactRecord, JobRecord, JobState, Origin
from tests.s3_server import S3, failing
from tests.service.resolved import resolved_study
from tests.service.tune.harness import InlineProposer, coordinator_of, drive
from tests.workers.recipes import aligned, random_alignment
from workers.alignments.files import write_alignment
from workers.cache import CACHE_VARIABLE
from workers.export.model_card import model_card
from workers.models.family import on_this_machine, open_sources, resolve_family
from workers.serving.fake import FakeScorer
from workers.types import Family


@dataclass(frozen=True)
class Finished:
    """A finished run, without engines, of the family in `models`."""

    directory: Path
    models: Family
    study: str

    @property
    def url(self) -> str:
        return f"sqlite:///{self.directory / DATABASE}"

    def next_study(self, directory: Path | str | None = None, **from_study: Any) -> Study:
        source = from_study or {"dir": str(directory or self.directory)}
        experts = {"text": self.models.experts[-1].directory, "merged": {"from_study": source}}
        return parse_study(document(self.models, experts))


def document(family: Family, experts: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": "first",
        "models": {"base": family.base.directory, "experts": experts},
        "search": {"max_trials": 4},
        "fidelity": {"scheduler": "none"},
        "objectives": [{"name": name, "task": {"file": f"/{name}.jsonl"}, "metric": "exact_match"} for name in "ab"],
        "engine": {"dtype": "float32"},
    }


@pytest.fixture(scope="module")
def finished(tied_family: Family, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return finished_in(tmp_path_factory.mktemp("first"), tied_family)


def finished_in(
    directory: Path, tied_family: Family, *, stated: str = "float32", checked: str | None = None
) -> Finished:
    """A finished run in `directory` whose file states the dtype `stated`, checked for engines of dtype `checked`."""
    directory.mkdir(exist_ok=True)
    sources = open_sources(tied_family)
    known = searched_models(sources, sources.fingerprints)
    space = LayerwiseSection(kind="layerwise", granularity="layer").build(known)
    experts = tuple(expert.alias for expert in tied_family.experts)
    baselines = all_baselines(
        base="base", experts=experts, fingerprints=sources.fingerprints, num_layers=known.num_layers
    )
    store = Store(f"sqlite:///{directory / DATABASE}")
    study = store.create_job(
        kind="search",
        name="first",
        document=parse_study(
            document(tied_family, {expert.alias: expert.directory for expert in tied_family.experts})
            | {"engine": {"dtype": stated}}
        ).canonical(),
        accepted=resolved_study(
            fingerprints=sources.fingerprints, num_layers=known.num_layers, dtype=checked
        ).to_json(),
    ).id
    coordinator = coordinator_of(
        store,
        study,
        space=space,
        proposer=InlineProposer(space, seed=1),
        scheduler="none",
        max_trials=4,
        baselines=tuple((Origin(origin), label, recipe) for origin, label, recipe in baselines),
    )
    drive(coordinator, FakeScorer())
    store.close()
    return Finished(directory, tied_family, study)


def test_a_merge_of_a_run_becomes_a_directory_that_is_a_source(finished: Finished, tmp_path: Path) -> None:
    started, chained = with_exported_sources(finished.next_study(), open_study=open_run, directory=tmp_path)
    source = chained["merged"]
    assert started.models.experts == {"text": finished.models.experts[-1].directory, "merged": source.directory}
    assert list(started.models.experts) == ["text", "merged"]
    assert Path(source.directory).parent == tmp_path / SOURCES
    store = Store(finished.url)
    best = best_trial(store.trials(finished.study), ResolvedStudy.of(store.job(finished.study)).objectives)
    assert best is not None
    assert (source.study, source.name, source.trial) == (finished.study, "first", best.number)
    assert json.loads((Path(source.directory) / "recipe.json").read_text())["digest"] == best.recipe.digest
    family = resolve_family(started.models.base, started.models.named).fetched()
    assert set(family.fingerprints) == {"base", "text", "merged"}


def test_merges_have_the_dtype_that_was_checked(
    tied_family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A head without GPUs writes the merges of a study as its GPU nodes have scored them, and the reverse."""
    monkeypatch.setattr(torch.version, "cuda", None)
    checked = finished_in(tmp_path / "gpus", tied_family, stated="auto", checked="bfloat16")
    assert dtypes_of(checked, tmp_path / "out", capsys) == {"bfloat16"}
    monkeypatch.setenv(VARIABLE, "gpus=8")
    on_cpu = finished_in(tmp_path / "cpu", tied_family, stated="auto", checked="float32")
    assert dtypes_of(on_cpu, tmp_path / "out", capsys) == {"float32"}
    stated = finished_in(tmp_path / "stated", tied_family, stated="float16", checked="float16")
    assert dtypes_of(stated, tmp_path / "out", capsys) == {"float16"}
    early = finished_in(tmp_path / "early", tied_family, stated="auto")  # of a version that did not store it
    assert dtypes_of(early, tmp_path / "out", capsys) == {"bfloat16"}


def dtypes_of(run: Finished, out: Path, capsys: pytest.CaptureFixture[str]) -> set[str]:
    """The dtypes of a run's merge: as source of a study, exported, in its recipe, for mergekit and for a download."""
    store = Store(run.url)
    record = store.job(run.study)
    export_trial(store, record, "2", out / run.directory.name / "export")
    _, chained = with_exported_sources(
        run.next_study(trial=2, dir=str(run.directory)), open_study=open_run, directory=out / run.directory.name
    )
    files = [out / run.directory.name / "export", Path(chained["merged"].directory)]
    tensors = [tensor for each in files for tensor in load_file(each / "model.safetensors").values()]
    assert main(["recipe", str(run.directory), "2"]) == 0
    written = {json.loads(capsys.readouterr().out)["dtype"]}
    written.add(yaml.safe_load(mergekit_file(record, store.trial(run.study, 2).read_recipe().to_json()))["out_dtype"])
    written.add(_engine_dtype(record))
    store.close()
    return written | {str(tensor.dtype).removeprefix("torch.") for tensor in tensors}


def test_lost_export_is_made_again(finished: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chained trial stays the same, and its lost export is made again, in its dtype whatever engines use now."""
    study = finished.next_study(dir=str(finished.directory), trial=2)
    _, chained = with_exported_sources(study, open_study=open_run, directory=tmp_path)
    before = ResolvedStudy.from_json(resolved_study(chained=chained).to_json())
    assert before.chained == chained
    first = resolve_family(study.models.base, {"merged": chained["merged"].directory}).fetched().fingerprints
    shutil.rmtree(tmp_path / SOURCES)
    monkeypatch.setenv(VARIABLE, "gpus=8")
    store = Store(finished.url)
    best = study.model_copy(update={"models": finished.next_study(id=finished.study).models})
    again, found = with_exported_sources(
        best, open_study=on_server(store, reader=None), directory=tmp_path, before=before
    )
    assert found == chained  # not the best trial
    assert resolve_family(again.models.base, {"merged": found["merged"].directory}).fetched().fingerprints == first
    other = replace(before, chained={"merged": replace(chained["merged"], recipe_digest="0" * 64)})
    with pytest.raises(InvalidStudy, match="trial 2 is not the one that this study was created with"):
        with_exported_sources(best, open_study=on_server(store, reader=None), directory=tmp_path, before=other)


def test_a_merge_is_a_source_by_url(
    finished: Finished, tmp_path: Path, s3: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an object store, a merge is written there once, and opened on machines that share no directory."""
    files, store = f"{s3.bucket()}/files", Store(finished.url)
    study = finished.next_study(id=finished.study, trial=2)

    def exported(machine: str, **options: Any) -> tuple[Study, dict[str, ChainedSource]]:
        monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / machine / "cache"))
        place = tmp_path / machine
        return with_exported_sources(
            study, open_study=on_server(store, reader=None), directory=place, artifacts_in=files, **options
        )

    with (
        failing(s3, lambda method, _: (403, "AccessDenied") if method == "PUT" else None),
        pytest.raises(OSError, match="cannot write it"),
    ):
        exported("server")
    _, chained = exported("server")
    url = chained["merged"].directory
    assert url.startswith(f"{files}/blobs/")
    assert not [path for path in (tmp_path / "server" / SOURCES).iterdir() if path.is_dir()]
    num_written = s3.num("PUT")
    assert exported("other server")[1] == chained
    assert not [path for path in (tmp_path / "other server" / SOURCES).iterdir() if path.is_dir()]
    before = ResolvedStudy.from_json(resolved_study(chained=chained).to_json())
    driven, found = exported("driver", before=before)
    assert found == chained
    assert s3.num("PUT") == num_written
    family = resolve_family(driven.models.base, driven.models.named).fetched().family
    assert family.experts[1].origin == url
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "engine" / "cache"))
    moved = replace(family.experts[1], directory="/not/here")
    assert on_this_machine(replace(family, experts=(family.experts[0], moved))).fingerprints == family.fingerprints

    artifacts = ArtifactStore(store, files)
    own = store.create_job(kind="search", name="second", document=study.canonical(), accepted=before.to_json())
    keep_sources(artifacts, own.id, driven.models.named.values())
    artifacts.remove(finished.study, artifacts.of(finished.study)[0].name)
    monkeypatch.setattr(blobs, "GRACE_S", -1.0)
    artifacts.collect()
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "export" / "cache"))
    assert (
        resolve_family(driven.models.base, {"merged": url}).fetched().fingerprints["merged"]
        == (family.fingerprints["merged"])
    )
    store.open_attempt(own.id).set_state(JobState.FAILED)
    store.delete_job(own.id)  # other tests share the store
    store.close()


def test_a_source_stays_when_a_server_gets_an_object_store(finished: Finished, tmp_path: Path, s3: S3) -> None:
    """The directory that earlier studies have as their source is kept when the same merge is stored for a new one."""
    study, store = finished.next_study(id=finished.study, trial=1), Store(finished.url)

    def source(**options: Any) -> str:
        found = with_exported_sources(study, open_study=on_server(store, reader=None), directory=tmp_path, **options)[1]
        return found["merged"].directory

    before = Path(source())
    files = {file.name: file.read_bytes() for file in before.iterdir()}
    url = source(artifacts_in=f"{s3.bucket()}/files")
    assert {file.name: file.read_bytes() for file in before.iterdir()} == files
    assert [path for path in (tmp_path / SOURCES).iterdir() if path.is_dir()] == [before]
    assert url.startswith("s3://")
    shutil.rmtree(before)
    store.close()


def test_stored_study_names_exports(finished: Finished, tmp_path: Path) -> None:
    """A stored study names the directories to which its sources were exported."""
    study = finished.next_study()
    _, chained = with_exported_sources(study, open_study=open_run, directory=tmp_path)
    stored = Study.model_validate(study.canonical())
    assert stored == study
    assert with_revisions(stored, resolved_study(chained=chained)).models.named == {
        "text": finished.models.experts[-1].directory,
        "merged": chained["merged"].directory,
    }


def test_studies_of_a_server_are_named_by_id(finished: Finished, tmp_path: Path) -> None:
    sent = finished.next_study(id=finished.study, trial=1).canonical()
    study = read_study(sent, RequestContext())
    server = studies_of(RequestContext(store_url=finished.url, data_dir=tmp_path))
    started, chained = with_exported_sources(study, open_study=server, directory=tmp_path)
    assert chained["merged"].trial == 1
    assert Path(started.models.named["merged"]).is_relative_to(tmp_path / SOURCES)
    with pytest.raises(InvalidStudy, match=r"models\.experts\.merged\.from_study: requests here cannot name"):
        with_exported_sources(study, open_study=studies_of(RequestContext()), directory=tmp_path)


@pytest.mark.parametrize(
    ("from_study", "message"),
    [
        ({"dir": "none"}, r"models\.experts\.merged\.from_study: .*none: no run here"),
        ({"id": "c0ffee"}, "id: c0ffee names a study on a server; give the `dir` of a run"),
        ({"dir": None, "trial": 99}, "study 'first': has no trial 99; its trials are 0 to"),
    ],
)
def test_a_merge_that_cannot_be_had_is_refused(
    finished: Finished, tmp_path: Path, from_study: dict[str, Any], message: str
) -> None:
    given = {key: value or str(finished.directory) if key == "dir" else value for key, value in from_study.items()}
    with pytest.raises(InvalidStudy, match=message):
        with_exported_sources(finished.next_study(**given), open_study=open_run, directory=tmp_path)


def test_server_refuses_run_directories(finished: Finished, tmp_path: Path) -> None:
    """A server refuses a run's directory and an unknown id."""
    server = studies_of(RequestContext(store_url=finished.url, data_dir=tmp_path))
    with pytest.raises(InvalidStudy, match="on a server, give the id of one of its studies"):
        with_exported_sources(finished.next_study(), open_study=server, directory=tmp_path)
    with pytest.raises(InvalidStudy, match="c0ffee"):
        with_exported_sources(finished.next_study(id="c0ffee"), open_study=server, directory=tmp_path)


def test_the_exported_recipe_has_that_of_its_sources(finished: Finished, tmp_path: Path) -> None:
    from workers.merging.bank import Bank

    started, chained = with_exported_sources(finished.next_study(), open_study=open_run, directory=tmp_path)
    sources = resolve_family(started.models.base, started.models.named).fetched()
    num_layers = sources.layout.num_layers
    layers = (Merge("linear", (Source("text", i), Source("merged", i)), {"weight": 0.5}) for i in range(num_layers))
    whole = Merge("passthrough", (Source("merged"),))
    recipe = Recipe(sources.fingerprints, "base", tuple(LayerRecipe(m, m, m) for m in layers), whole, whole)
    write_model(recipe, Bank(sources), tmp_path / "out", dtype="float32")
    written = json.loads((tmp_path / "out" / "recipe.json").read_text())
    assert list(written["lineage"]) == ["merged"]
    assert written["lineage"]["merged"]["digest"] == chained["merged"].recipe_digest
    assert Recipe.from_json(written) == recipe
    assert "lineage" not in written["lineage"]["merged"]


def test_the_model_card_says_which_merge_a_source_is(finished: Finished, tmp_path: Path) -> None:
    started, chained = with_exported_sources(finished.next_study(), open_study=open_run, directory=tmp_path)
    family = resolve_family(started.models.base, started.models.named).fetched().family
    merge = Merge("linear", (Source("text", 0), Source("merged", 0)), {"weight": 0.5})
    whole = Merge("passthrough", (Source("merged"),))
    recipe = Recipe(family.fingerprints, "base", (LayerRecipe(merge, merge, merge),), whole, whole)
    card = model_card(recipe, family, dtype="float32", scores={}, study="second", mergekit="none")
    digest = chained["merged"].recipe_digest[:12]
    assert f"| merged | expert | merge {digest} of base, " in card
    assert 'by the study "first" |' in card


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({}, "has neither dir nor id; give one of the two"),
        ({"dir": "a", "id": "b"}, "has dir and id; give one of the two"),
        ({"dir": "a", "trial": "worst"}, '"worst"'),
        ({"run": "a"}, "unknown key"),
    ],
)
def test_what_is_wrong_with_a_source_is_told(finished: Finished, source: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidStudy, match=message):
        parse_study(document(finished.models, {"merged": {"from_study": source}}))


@pytest.fixture(scope="module")
def path_study(tied_family: Family, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, tuple[Recipe, ...]]:
    """A run and its recipes: a plain path with layers 1, 0, 1 of two models, and four that are not plain paths."""
    directory = tmp_path_factory.mktemp("paths")
    sources = open_sources(tied_family)
    first, second = (expert.alias for expert in tied_family.experts)

    def recipe(layers: tuple[tuple[str, int], ...], **changes: Any) -> Recipe:
        merges = [Merge("passthrough", (Source(alias, layer),)) for alias, layer in layers]
        each = tuple(replace(LayerRecipe(m, m, m), **changes) for m in merges)
        whole = Merge("passthrough", (Source(first),))
        return Recipe(sources.fingerprints, "base", each, whole, whole)

    order = ((first, 1), (second, 0), (first, 1))
    merged = Merge("linear", (Source(first, 0), Source(second, 1)), {"weight": 0.5})
    mixed = replace(recipe(order), layers=(LayerRecipe(merged, merged, merged),))
    hidden = int(sources.base.config["hidden_size"])
    digest = write_alignment(alignments_dir(directory), random_alignment("moments", hidden))
    recipes = (
        recipe(order),
        recipe(order, scale=0.5),
        mixed,
        aligned(recipe(order), digest),
        recipe(order, mlp_scale=0.5),
    )
    store = Store(f"sqlite:///{directory / DATABASE}")
    study = store.create_job(
        kind="search",
        name="paths",
        document=parse_study(document(tied_family, {e.alias: e.directory for e in tied_family.experts})).canonical(),
        accepted=resolved_study(fingerprints=sources.fingerprints, num_layers=sources.layout.num_layers).to_json(),
    ).id
    space = SPACES["layerwise"](kind="layerwise").build(searched_models(sources, sources.fingerprints))
    coordinator = coordinator_of(
        store,
        study,
        proposer=InlineProposer(space, seed=1),
        space=space,
        scheduler="none",
        max_trials=1,
        baselines=tuple((Origin.PUBLISHED, f"path {number}", own) for number, own in enumerate(recipes)),
    )
    drive(coordinator, FakeScorer())
    store.close()
    return directory, recipes


def along(family: Family, directory: Path, trial: int, **models: Any) -> Study:
    experts = {expert.alias: expert.directory for expert in family.experts}
    source = {"dir": str(directory), "trial": trial}
    own = document(family, {**experts, "found": {"from_study": source}})
    own["models"] |= {"path_of": source, **models}
    return parse_study(own)


def test_models_along_a_path_have_their_own_layers_in_its_order(
    tied_family: Family, path_study: tuple[Path, tuple[Recipe, ...]], tmp_path: Path
) -> None:
    directory, (recipe, *_) = path_study
    study = along(tied_family, directory, 0)
    started, chained = with_exported_sources(study, open_study=open_run, directory=tmp_path)
    assert {*chained} == {"base", "found", *(expert.alias for expert in tied_family.experts)}
    assert {own.recipe_digest for own in chained.values()} == {recipe.digest}
    sources = open_sources(resolve_family(started.models.base, started.models.named).fetched().family)
    before = open_sources(tied_family)
    assert sources.layout.num_layers == 3
    for alias in ("base", *(expert.alias for expert in tied_family.experts)):
        for index, layer in enumerate((1, 0, 1)):
            for component in COMPONENTS:
                for suffix in sources.layout.suffixes(component, index):
                    new = sources.views[alias].read(sources.layout.name(suffix, index))
                    assert torch.equal(new, before.views[alias].read(before.layout.name(suffix, layer)))
    # Its coefficients have gradients, as those of any models.
    known = searched_models(sources, sources.fingerprints)
    assert isinstance(SPACES["layerwise"](kind="layerwise").build(known), DifferentiableSpace)
    # A study that goes on has the same.
    resolved = ResolvedStudy.from_json(resolved_study(chained=chained).to_json())
    assert with_revisions(study, resolved).models == started.models
    again, found = with_exported_sources(study, open_study=open_run, directory=tmp_path, before=resolved)
    assert (again.models, found) == (started.models, chained)


@pytest.mark.parametrize(
    ("trial", "message"),
    [
        (1, r"models\.path_of: study 'paths': trial 1: the scale 0\.5 follows layer 0"),
        (2, r"models\.path_of: study 'paths': trial 2: layer 0 merges layers \[0, 1\] of its sources; a path has one"),
        (3, r"models\.path_of: study 'paths': trial 3: an alignment follows layer 0"),
        (4, r"models\.path_of: study 'paths': trial 4: the MLP of layer 0 has the scale 0\.5, which merges along"),
        (99, r"models\.path_of: study 'paths': has no trial 99"),
    ],
)
def test_a_merge_without_a_path_is_refused(
    tied_family: Family, path_study: tuple[Path, tuple[Recipe, ...]], tmp_path: Path, trial: int, message: str
) -> None:
    study = along(tied_family, path_study[0], trial, experts={"a": tied_family.experts[0].directory})
    with pytest.raises(InvalidStudy, match=message):
        with_exported_sources(study, open_study=open_run, directory=tmp_path)


def test_aligned_trial_is_no_source(
    tied_family: Family, path_study: tuple[Path, tuple[Recipe, ...]], tmp_path: Path
) -> None:
    """A trial with alignments is exported with its model class and is no source."""
    directory, recipes = path_study
    assert main(["export", str(directory), "3", "--out", str(tmp_path / "model")]) == 0
    written = json.loads((tmp_path / "model" / "recipe.json").read_text())
    assert Recipe.from_json(written).digest == recipes[3].digest
    assert (tmp_path / "model" / "modeling_aligned.py").is_file()
    study = along(tied_family, directory, 3, path_of=None)
    with pytest.raises(InvalidStudy, match="trial 3 has alignments between layers, which sources cannot have"):
        with_exported_sources(study, open_study=open_run, directory=tmp_path)


def test_another_vocabulary_along_a_path_is_refused(tied_family: Family, tmp_path: Path) -> None:
    with pytest.raises(InvalidStudy, match=r"models\.path_of: needs tokenizer: base; the study has union"):
        along(tied_family, tmp_path, 0, tokenizer="union")


# Experts of fine-tunings.


def tuned(store: Store, artifacts: ArtifactStore, family: Family, *aliases: str) -> str:
    """Id of a fine-tuning that has trained the family's experts `aliases`."""
    job = store.create_job(kind="finetune", name="tuned", document={"base": family.base.directory}, accepted={})
    for expert in family.experts:
        if expert.alias in aliases:
            artifacts.put(job.id, expert.alias, Path(expert.directory))
    return job.id


def study_of_tuned(family: Family, job: str, **experts: Any) -> Study:
    trained = {alias: {"from_finetune": {"id": job, **own}} for alias, own in experts.items()}
    return parse_study(document(family, trained))


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[tuple[Store, ArtifactStore]]:
    store = Store(f"sqlite:///{tmp_path / DATABASE}")
    yield store, ArtifactStore(store, tmp_path / "artifacts")
    store.close()


def test_experts_of_a_fine_tuning_are_sources(
    tied_family: Family, trainer: tuple[Store, ArtifactStore], tmp_path: Path
) -> None:
    """Each expert is a directory with its files, under its own alias or another one, and is found again on resume."""
    store, artifacts = trainer
    first, second = (expert.alias for expert in tied_family.experts)
    job = tuned(store, artifacts, tied_family, first, second)
    study = study_of_tuned(tied_family, job, **{first: {}, "mine": {"expert": second}})
    options: dict[str, Any] = {"directory": tmp_path, "artifacts_in": artifacts.location}
    started, chained = with_exported_sources(study, open_study=on_server(store, reader=None), **options)
    assert set(started.models.named) == {first, "mine"}
    by_alias = {expert.alias: Path(expert.directory) for expert in tied_family.experts}
    for alias, expert in ((first, first), ("mine", second)):
        found, weights = Path(started.models.named[alias]), "model.safetensors"
        assert found.parent == tmp_path / SOURCES
        assert (found / weights).read_bytes() == (by_alias[expert] / weights).read_bytes()
        assert (chained[alias].study, chained[alias].expert) == (job, expert)
    resolved = replace(resolved_study(), chained=chained)
    assert ResolvedStudy.from_json(resolved.to_json()).chained == chained

    def closed(_: AnotherStudy) -> AbstractContextManager[tuple[Store, JobRecord]]:
        raise AssertionError("a source that is there is not looked for")

    assert with_exported_sources(study, open_study=closed, before=resolved, **options)[1] == chained
    shutil.rmtree(chained[first].directory)
    again = with_exported_sources(study, open_study=on_server(store, reader=None), before=resolved, **options)
    assert again[1] == chained
    assert (Path(chained[first].directory) / "config.json").is_file()


def test_a_trained_expert_that_is_missing_is_named(
    finished: Finished, tied_family: Family, trainer: tuple[Store, ArtifactStore], tmp_path: Path
) -> None:
    """An expert that is not trained yet, a job of another kind, and a job that is not there are each said."""
    store, artifacts = trainer
    first, second = (expert.alias for expert in tied_family.experts)
    job = tuned(store, artifacts, tied_family, first)
    other = store.create_job(kind="search", name="other", document={}, accepted={}).id
    for name, reason in (
        (job, f"has trained no expert '{second}'; its experts: {first}"),
        (other, "is no fine-tuning; give the id of one"),
        ("0" * 32, f"fine-tuning '{'0' * 32}': there is no such fine-tuning"),
    ):
        with pytest.raises(InvalidStudy) as refused:
            with_exported_sources(
                study_of_tuned(tied_family, name, **{second: {}}),
                open_study=on_server(store, reader=None),
                directory=tmp_path,
                artifacts_in=artifacts.location,
            )
        (problem,) = refused.value.problems
        assert problem.field == f"models.experts.{second}.from_finetune"
        assert reason in problem.message
        assert store.place not in problem.message


def test_an_expert_is_copied_once_for_two_studies(
    tied_family: Family, trainer: tuple[Store, ArtifactStore], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two studies that need the copy of an expert at the same time both get it; one of them writes it."""
    store, artifacts = trainer
    alias = tied_family.experts[0].alias
    (record,) = artifacts.of(tuned(store, artifacts, tied_family, alias))
    write, written = artifacts.write_to, []

    def slow(record: ArtifactRecord, out: Path) -> Path:
        written.append(out)
        time.sleep(0.3)  # the other study asks meanwhile
        return write(record, out)

    monkeypatch.setattr(artifacts, "write_to", slow)
    with ThreadPoolExecutor(2) as threads:
        places = set(threads.map(lambda _: place_of_expert(artifacts, record, tmp_path), range(2)))
    assert places == {str(out) for out in written}
    assert len(written) == 1
    assert (written[0] / "config.json").is_file()


def test_a_copy_of_an_expert_stays_while_a_study_merges_it(
    tied_family: Family, trainer: tuple[Store, ArtifactStore], tmp_path: Path
) -> None:
    """The copy is deleted with the last study that names its fine-tuning's expert, and not before."""
    store, artifacts = trainer
    alias = tied_family.experts[0].alias
    study = study_of_tuned(tied_family, tuned(store, artifacts, tied_family, alias), **{alias: {}})
    _, chained = with_exported_sources(
        study, open_study=on_server(store, reader=None), directory=tmp_path, artifacts_in=artifacts.location
    )
    job = store.create_job(
        kind="search",
        name="s",
        document=study.canonical(),
        accepted=replace(resolved_study(), chained=chained).to_json(),
    )
    collect_sources(store, tmp_path)
    assert Path(chained[alias].directory).is_dir()
    store.open_attempt(job.id).set_state(JobState.CANCELLED)
    store.delete_job(job.id)
    collect_sources(store, tmp_path)
    assert not Path(chained[alias].directory).exists()

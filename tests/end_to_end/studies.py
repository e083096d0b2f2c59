"""Studies for the end-to-end tests, and the trials of undisturbed runs of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from search_spaces.study.file import load_study
from service.jobs.search.local_run import DATABASE
from service.resolved_study import ResolvedStudy
from service.store import Store
from service.studies.preflight.examine import examine
from service.tune.coordinator import Coordinator
from tests.builders import tiny_family
from tests.conftest import write_choices
from tests.end_to_end.processes import query
from tests.service.tune.harness import InlineProposer, drive, trial_list
from tests.vision import CLASSES, image_folder, tiny_vit
from workers.serving.fake import FakeScorer
from workers.tiny_family import family_dir
from workers.types import Scorer

EXPERTS = ("math", "text")
NUM_HOLDOUT = 40
SHIPPED_SAMPLES = 150
METHODS = ("task_arithmetic", "ties", "slerp", "linear")

# Search spaces of small studies: groups of layers, paths of layers, and scales of one model.
LFS: Mapping[str, Any] = {"kind": "lfs", "layer_groups": 2}
DIS: Mapping[str, Any] = {"kind": "dis", "repeats": 2}
SFS: Mapping[str, Any] = {"kind": "sfs", "model": "math"}


def write_small_study(
    directory: Path, *, name: str, rungs: Sequence[int], max_trials: int, space: Mapping[str, Any] = LFS
) -> Path:
    """Write a study for the fake scorer, beside the models of a tiny family and the data; returns its file."""
    tiny_family(directory, experts=EXPERTS)
    first = rungs[-1]
    for split, numbers in (("search", range(first)), ("holdout", range(first, first + NUM_HOLDOUT))):
        lines = (json.dumps({"prompt": f"{i}+1=", "answer": str(i + 1)}) + "\n" for i in numbers)
        (directory / f"{split}.jsonl").write_text("".join(lines))

    def objective(split: str) -> dict[str, Any]:
        task = {"file": str(directory / f"{split}.jsonl"), "max_tokens": 6}
        return {"name": "sums", "task": task, "metric": "exact_match"}

    document = {
        "name": name,
        "models": {"base": str(directory / "base"), "experts": {a: str(directory / a) for a in EXPERTS}},
        "search_space": dict(space),
        "search": {"algorithm": "random", "max_trials": max_trials},
        "fidelity": {"scheduler": "hyperband", "rungs": list(rungs)},
        "objectives": [objective("search")],
        "holdout": [objective("holdout")],
        "engine": {"max_model_len": 64},
    }
    file = directory / "study.yaml"
    file.write_text(yaml.safe_dump(document))
    return file


# Tasks of small studies of image classifiers: the classes of each head, and images of a class.
HEADS: Mapping[str, tuple[Sequence[str], int]] = {"shape": (CLASSES, 12), "answer": (("no", "yes"), 18)}


def write_image_models(directory: Path) -> Path:
    """A base without a head, an expert with a head for each of two tasks, and 36 images of each task and split."""
    tiny_vit(directory / "base", 0, classes=None)
    for seed, (head, (classes, per_class)) in enumerate(HEADS.items(), start=1):
        tiny_vit(directory / head, seed, classes=classes)
        for split, of_split in (("search", 0), ("held", 1)):
            place = directory / split / f"{head}s"
            image_folder(place, per_class=per_class, classes=classes, seed=10 * (seed - 1) + of_split)
    return directory


def image_entries(data: Path) -> list[dict[str, Any]]:
    """Objectives, or held-out data: each task of `HEADS` on its folder of images in `data`."""
    tasks = {head: {"images": str(data / f"{head}s"), "head": head} for head in HEADS}
    return [{"name": head, "task": task, "metric": "acc"} for head, task in tasks.items()]


def image_study(directory: Path, space: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    """A study of the models and images that `write_image_models` has written; `changes` replace its sections."""
    return {
        "name": "images",
        "models": {"base": str(directory / "base"), "experts": {head: str(directory / head) for head in HEADS}},
        "search_space": dict(space),
        "search": {"algorithm": "random", "max_trials": 6, "seed": 3},
        "fidelity": {"scheduler": "hyperband", "rungs": [12, 36]},
        "objectives": image_entries(directory / "search"),
        "holdout": image_entries(directory / "held"),
        "engine": {"verify": {"trials": 2, "samples": 12}},
        **changes,
    }


def write_gradient_study(directory: Path, *, name: str, rungs: Sequence[int], max_trials: int) -> Path:
    """Write the small study, searched by gradients of its tiny models.

    The fake's scores do not depend on the models' losses. Therefore, in some studies (it depends on the seed), the
    search takes the sources' completions as references for its losses.
    """
    file = write_small_study(directory, name=name, rungs=rungs, max_trials=max_trials)
    lines = (json.dumps({"prompt": f"{i}+3=", "answer": str(i + 3)}) + "\n" for i in range(rungs[-1]))
    (directory / "search.jsonl").write_text("".join(lines))
    document = yaml.safe_load(file.read_text())
    document["search_space"] = {"kind": "layerwise"}
    document["search"] = {
        "algorithm": "gradient",
        "max_trials": max_trials,
        "gradient": {"steps": 6 * max_trials, "batch": 16, "points": max_trials - 2},
    }
    document["fidelity"]["scheduler"] = "racing"
    file.write_text(yaml.safe_dump(document))
    return file


def shipped_study(directory: Path, *, name: str, seed: int) -> dict[str, Any]:
    """Study of the shipped family: three searched trials besides the baselines, on 150 samples of each of three skills.

    It has six benchmarks: two of one group, one that is attacked, one whose completions are executed, one of options,
    and one for the best trial alone. `directory` gets twenty held-out samples of each skill: the study tests scoring,
    not selection.
    """
    document = load_study(family_dir() / "study.yaml").canonical()
    document["name"] = name
    document["search_space"] = {"kind": "lfs", "layer_groups": 4, "component_groups": 3, "methods": list(METHODS)}
    document["search"] = {"algorithm": "random", "max_trials": 3, "seed": seed}
    document["fidelity"] = {"scheduler": "none", "max_samples": SHIPPED_SAMPLES}
    document["engine"]["verify"] = {"trials": 1, "samples": 8}
    for spec in document["holdout"]:
        short = directory / f"{spec['name']}_holdout.jsonl"
        short.write_text("".join(Path(spec["task"]["file"]).read_text().splitlines(keepends=True)[:20]))
        spec["task"]["file"] = str(short)
    document["benchmarks"] = _benchmarks(directory)
    return document


def _benchmarks(directory: Path) -> list[dict[str, Any]]:
    """Benchmarks over the held-out samples of `shipped_study`, and over options that are written to `directory`."""

    def task(skill: str, **options: Any) -> dict[str, Any]:
        return {"file": str(directory / f"{skill}_holdout.jsonl"), "max_tokens": 8, **options}

    place = directory / "choices"
    place.mkdir(exist_ok=True)
    program = "assert int('{{completion}}') == {{answer}}"
    attack = {"kind": "deepwordbug", "labels": ["answer"], "max_queries": 4}
    every: list[dict[str, Any]] = [
        {"name": "sums", "task": task("math"), "metric": "exact_match", "group": "skills"},
        {"name": "words", "task": task("text"), "metric": "exact_match", "group": "skills"},
        {
            "name": "attacked",
            "task": task("lookup", prompt="find {{prompt}}"),
            "metric": "exact_match",
            "attack": attack,
        },
        {"name": "executed", "task": task("math", program=program), "metric": "pass@1"},
        {"name": "options", "task": str(write_choices(place)), "metric": "acc"},
        {"name": "lookups", "task": task("lookup"), "metric": "exact_match", "trials": ["best"]},
    ]
    return [{"trials": ["best", "sources"], **each} for each in every]


def write_shipped_gradient_study(directory: Path, *, name: str, rungs: Sequence[int], max_trials: int) -> Path:
    """Write a study for real engines: the shipped family, searched by gradients; the last trial is a mutant."""
    document = shipped_study(directory, name=name, seed=0)
    document["search_space"] = {"kind": "layerwise"}
    gradient = {"steps": 12 * (max_trials - 1), "batch": 24, "points": max_trials - 1}
    document["search"] = {"algorithm": "gradient", "max_trials": max_trials, "seed": 0, "gradient": gradient}
    document["fidelity"] = {"scheduler": "racing", "rungs": list(rungs)}
    file = directory / "study.yaml"
    file.write_text(yaml.safe_dump(document))
    return file


def undisturbed(
    study_file: Path,
    directory: Path,
    *,
    scorer: Scorer | None = None,
    resolved: ResolvedStudy | None = None,
    concurrency: int = 3,
) -> list[tuple[Any, ...]]:
    """Run a study without Tune, and return its trials. Its database is in `directory`.

    `scorer` is a fake unless given; `resolved` is what the compared run was created with, by default what is found
    now.
    """
    directory.mkdir()
    preflight = examine(load_study(study_file))
    store = Store(f"sqlite:///{directory / DATABASE}")
    resolved = resolved or preflight.resolved()
    study_id = store.create_job(kind="search", name="undisturbed", document={}, accepted=resolved.to_json()).id
    coordinator = Coordinator(
        preflight.plan(study_id, resolved),
        space=preflight.space,
        store=store,
        writer=store.open_attempt(study_id),
        proposer=InlineProposer(preflight.space, seed=preflight.study.search.seed),
    )
    scorer = scorer or FakeScorer(bank_fingerprint=preflight.models.family.fingerprint)
    drive(coordinator, scorer, concurrency=concurrency)
    trials = trial_list(store, study_id)
    store.close()
    return trials


def stored(directory: Path) -> list[Any]:
    """All chunks and samples that are stored in the directory, in a fixed order."""
    chunks = query(directory, "SELECT recipe_digest, prompts, num_samples FROM evidence ORDER BY 1, 2")
    columns = "recipe_digest, split, objective, position, value, response"
    return [chunks, query(directory, f"SELECT {columns} FROM samples ORDER BY 1, 2, 3, 4")]

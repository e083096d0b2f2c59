"""Preflight of studies of image classifiers: plans, and problems with models, heads and tasks."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from search_spaces.errors import InvalidStudy, Problem
from search_spaces.study.file import Study, parse_study
from service.cli.main import main
from service.engine_machines import EngineMachines
from service.studies.planning.schedule import study_lengths
from service.studies.preflight.dtype import engine_dtype
from service.studies.preflight.examine import examine
from service.studies.preflight.files import FilesRefused
from service.studies.preflight.gradients import GradientPlace
from service.studies.preflight.tasks import check_modality, task_spec
from tests.builders import tiny_llama
from tests.vision import image_folder, tiny_vit
from workers.engines.host_memory import total_host_bytes
from workers.file_access import FileAccess
from workers.models.family import resolve_family
from workers.models.modalities.image import CACHE_BYTES, PASS_BYTES

OTHERS = ("no", "yes")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory with the models and data of this module's studies."""
    place = tmp_path_factory.mktemp("images")
    tiny_vit(place / "base", 0, classes=None)
    tiny_vit(place / "shape", 1)
    tiny_vit(place / "answer", 2, classes=OTHERS)
    for split, seed in (("search", 0), ("held", 1)):
        image_folder(place / split / "shapes", per_class=8, seed=seed)
        image_folder(place / split / "answers", per_class=12, classes=OTHERS, seed=seed + 10)
    return place


def document(root: Path, **changes: Any) -> dict[str, Any]:
    def entries(split: str) -> list[dict[str, Any]]:
        return [
            {"name": f"{head}s", "task": {"images": str(root / split / f"{head}s"), "head": head}, "metric": "acc"}
            for head in ("shape", "answer")
        ]

    return {
        "name": "images",
        "models": {
            "base": str(root / "base"),
            "experts": {"shape": str(root / "shape"), "answer": str(root / "answer")},
        },
        "search": {"max_trials": 4},
        "fidelity": {"scheduler": "none", "max_samples": 20},
        "objectives": entries("search"),
        "holdout": entries("held"),
        **changes,
    }


def problems(root: Path, **changes: Any) -> dict[str, str]:
    with pytest.raises(InvalidStudy) as caught:
        examine(parse_study(document(root, **changes)))
    return {problem.field: problem.message for problem in caught.value.problems}


SPACES: list[dict[str, Any]] = [
    {"kind": "lfs", "layer_groups": 2},
    {"kind": "layerwise"},
    {"kind": "m3"},
    {"kind": "dis"},
    {"kind": "sfs", "model": "shape"},
    {"kind": "hm3", "max_path_length": 3, "min_path_length": 2},
]


@pytest.mark.parametrize("space", SPACES, ids=lambda space: space["kind"])
def test_all_spaces_are_planned(space: dict[str, Any], root: Path) -> None:
    """A study of classifiers is planned in every search space; auto descends where coefficients have gradients."""
    found = examine(parse_study(document(root, search_space=space)))
    assert found.models.num_layers == 2
    assert found.models.family.modality == "image"
    assert found.models.engine_note == ""
    assert {name: info.num_samples for name, info in found.tasks.search_infos.items()} == {"shapes": 24, "answers": 24}
    assert (found.algorithm.name == "gradient") == (space["kind"] in ("layerwise", "sfs"))
    assert found.memory.engine_bytes > CACHE_BYTES
    lengths = study_lengths(found, str(root / "base"))
    assert lengths.objectives["shapes"].read == 17  # 4 x 4 patches and the token of the class


def test_engines_of_images_compute_in_float32_without_a_gpu(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A build of PyTorch for GPUs decides about vLLM only; image engines run on the CPU where there is no GPU."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    study = parse_study(document(root))
    assert examine(study).resolved().dtype == "float32"
    assert examine(study, machines=[EngineMachines(1, 2**40)]).resolved().dtype == "bfloat16"
    # Earlier versions stored no dtype, and the backend of text; exports, recipes and mergekit files ask for the dtype.
    early = study.canonical()
    early["engine"]["backend"] = "vllm"
    stored = replace(examine(study).resolved(), dtype=None)
    assert engine_dtype(Study.model_validate(early), stored) == "float32"


def test_image_studies_are_planned_for_the_cpu_that_runs_them(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU, the memory of this machine is compared, and the CPU computes gradients, for that reason alone."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    found = examine(parse_study(document(root)))
    assert found.machines == (EngineMachines(0, total_host_bytes()),)
    assert found.memory.available_bytes == total_host_bytes()
    assert found.gradients == GradientPlace("cpu")
    assert "GPU" not in found.algorithm.reason


def test_auto_descends(root: Path) -> None:
    """Layerwise merges of classifiers have gradients, whose memory and time are planned."""
    found = examine(parse_study(document(root)))
    assert found.algorithm.name == "gradient"
    assert found.algorithm.reason == "merges in this space have gradients, and all objectives have reference answers"
    assert found.memory.gradient_bytes > CACHE_BYTES + PASS_BYTES, "activations of a pass are counted"
    inputs = found.gradient_inputs()
    assert inputs is not None
    assert (inputs.device, inputs.entropies) == ("cpu", ())
    setting = found.search_setting(num_baselines=0)
    assert (setting.experts, setting.has_completions) == (("shape", "answer"), False)
    in_other_space = examine(parse_study(document(root, search_space={"kind": "lfs", "layer_groups": 2})))
    assert "coefficients of a space of kind lfs have no gradients" in in_other_space.algorithm.reason
    wrong = problems(root, search_space={"kind": "lfs", "layer_groups": 2}, search={"algorithm": "gradient"})
    assert "gradient cannot be used" in wrong["search.algorithm"]


def test_gradient_steps_are_planned(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The plan of a study of classifiers has the phase of its gradient steps, and the memory of gradients."""
    (tmp_path / "study.yaml").write_text(json.dumps(document(root, search={"max_trials": 4, "gradient": {"steps": 7}})))
    assert main(["plan", str(tmp_path / "study.yaml"), "--profile", "h100x8"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^gradient step +7 ", printed, re.MULTILINE)
    assert re.search(r"^gradients +a GPU of their own ", printed, re.MULTILINE)


def test_the_entropy_of_predictions_may_be_asked_for(root: Path) -> None:
    found = examine(parse_study(document(root, search={"gradient": {"loss": "entropy"}})))
    assert "the entropy of predictions is the loss of shapes, answers" in found.algorithm.reason
    inputs = found.gradient_inputs()
    assert inputs is not None
    assert inputs.entropies == ("shapes", "answers")


def test_images_without_labels_are_searched_by_entropy(root: Path, tmp_path: Path) -> None:
    """A task without labels is scored, and descended on, by the entropy of predictions; other tasks by their labels."""
    (tmp_path / "plain").mkdir()
    for number, file in enumerate(sorted((root / "search" / "shapes").rglob("*.png"))):
        (tmp_path / "plain" / f"{number:03}.png").write_bytes(file.read_bytes())
    plain = {"name": "plain", "task": {"images": str(tmp_path / "plain"), "head": "shape"}, "metric": "entropy"}
    labelled = document(root)["objectives"][1]
    found = examine(parse_study(document(root, objectives=[plain, labelled], holdout=[])))
    assert found.algorithm.name == "gradient"
    assert found.entropies == ("plain",)
    assert found.algorithm.reason.endswith("the entropy of predictions is the loss of plain")
    direction = {each.name: each.direction for each in found.tasks.objectives}
    assert direction == {"plain": "minimize", "answers": "maximize"}
    stated = examine(parse_study(document(root, objectives=[{**plain, "direction": "minimize"}, labelled], holdout=[])))
    assert stated.tasks.objectives == found.tasks.objectives, "the task states the range"
    wrong = problems(root, objectives=[{**plain, "direction": "maximize"}, labelled], holdout=[])
    assert wrong == {"objectives.0.direction": "maximize: entropy is minimised; leave it out"}
    asked = {"algorithm": "gradient", "gradient": {"loss": "cross_entropy"}}
    wrong = problems(root, objectives=[plain, labelled], holdout=[], search=asked)
    assert "objective 'plain' has no reference answers: its images have no labels" in wrong["search.algorithm"]
    wrong = problems(root, objectives=[{**plain, "metric": "acc"}, labelled], holdout=[])
    assert "its images have no labels, which acc needs" in wrong["objectives.0.metric"]


def test_a_changed_image_changes_the_study(root: Path, tmp_path: Path) -> None:
    """The digest of a task, by which a resumed study is compared, depends on the images' contents."""
    folder = image_folder(tmp_path / "shapes", per_class=8)
    entry = {"name": "shapes", "task": {"images": str(folder), "head": "shape"}, "metric": "acc"}
    study = parse_study(document(root, objectives=[entry], holdout=[]))
    first = examine(study).resolved().tasks
    (folder / "line" / "000.png").write_bytes((folder / "line" / "001.png").read_bytes())
    assert examine(study).resolved().tasks != first


def test_wrong_heads_are_named(root: Path) -> None:
    shapes = str(root / "search" / "shapes")
    tasks = [{"images": shapes, "head": "answer"}, {"images": shapes, "head": "base"}, {"images": shapes, "head": "x"}]
    wrong = problems(
        root,
        objectives=[{"name": f"t{i}", "task": task, "metric": "acc"} for i, task in enumerate(tasks)],
        holdout=[],
    )
    assert "has 3 classes, the head of 'answer' has 2" in wrong["objectives.0.task.head"]
    assert "the model 'base' has no head; those with one are shape, answer" in wrong["objectives.1.task.head"]
    assert "head 'x' is no model; expected one of shape, answer" in wrong["objectives.2.task.head"]


def test_tasks_must_be_of_the_models_modality(root: Path, tmp_path: Path) -> None:
    """Prompts for classifiers, and images for language models, are refused at the task's place."""
    (tmp_path / "d.jsonl").write_text('{"prompt": "a", "answer": "b"}\n' * 30)
    text = {"name": "t", "task": {"file": str(tmp_path / "d.jsonl")}, "metric": "exact_match"}
    images = document(root)["objectives"][0]
    wrong = problems(root, objectives=[images, text], holdout=[])
    assert wrong == {"objectives.1.task": "is a task of the modality text; the models are of the modality image"}
    llamas = {name: tiny_llama(tmp_path / name, seed) for seed, name in enumerate(("base", "shape"))}
    sources = resolve_family(llamas["base"], {"shape": llamas["shape"]})
    found: list[Problem] = []
    study = parse_study(document(root, objectives=[images], holdout=[]))
    tasks = {"shapes": task_spec(study.scored_objectives[0], seed=0, access=None)}
    check_modality(study, {"objectives": tasks, "holdout": {}, "benchmarks": {}}, sources, found)
    assert found == [
        Problem("objectives.0.task", "is a task of the modality image; the models are of the modality text")
    ]
    mixed = {"base": str(root / "base"), "experts": {"shape": str(root / "shape"), "llama": str(llamas["shape"])}}
    assert "expected models of one modality" in problems(root, models=mixed)["models"]


def test_models_are_checked_with_their_processors(root: Path, tmp_path: Path) -> None:
    """Processors that differ from the base's, or do not fit the model, are refused before anything starts."""
    other = tiny_vit(tmp_path / "other", 3, processor={"resample": 3})
    models = {"base": str(root / "base"), "experts": {"shape": str(other)}}
    entries = document(root)["objectives"][:1]
    wrong = problems(root, models=models, objectives=entries, holdout=[])
    assert "its image processor has resample 3; the base's has 2" in wrong["models"]
    small = tiny_vit(tmp_path / "small", 3, processor={"size": {"height": 14, "width": 14}})
    models = {"base": str(small), "experts": {"shape": str(small)}}
    assert "gives images of 14 x 14" in problems(root, models=models, objectives=entries, holdout=[])["models"]


def test_broken_images_are_named(root: Path, tmp_path: Path) -> None:
    folder = image_folder(tmp_path / "shapes", per_class=8)
    file = folder / "square" / "003.png"
    file.write_bytes(file.read_bytes()[:70])
    entry = {"name": "shapes", "task": {"images": str(folder), "head": "shape"}, "metric": "acc"}
    assert str(file) in problems(root, objectives=[entry], holdout=[])["objectives.0.task.images"]


def test_what_only_text_has_is_refused(root: Path) -> None:
    """Options of text: a tokenizer, alignments that are learned from prompts, several GPUs for one engine."""
    models = {**document(root)["models"], "tokenizer": "union"}
    assert "models of the modality image have none" in problems(root, models=models)["models"]
    space = {"kind": "hm3", "max_path_length": 3, "alignment": "mlp"}
    assert "is learned from prompts" in problems(root, search_space=space)["search_space.alignment"]
    wrong = problems(root, engine={"tensor_parallel_size": 2})
    assert "engines of the modality image use one GPU; use 1" in wrong["engine.tensor_parallel_size"]


def test_options_of_text_tasks_are_refused(root: Path) -> None:
    entry = {**document(root)["objectives"][0], "num_fewshot": 1, "max_tokens": 5}
    with pytest.raises(InvalidStudy) as caught:
        parse_study(document(root, objectives=[entry], holdout=[]))
    found = {problem.field: problem.message for problem in caught.value.problems}
    assert found["objectives.0.num_fewshot"] == "is for lm-eval tasks; an image task has none; leave it out"
    assert found["objectives.0.max_tokens"] == "is for lm-eval tasks; an image task has none; leave it out"


def test_servers_read_images_of_allowed_folders(root: Path, tmp_path: Path) -> None:
    """The folder of a task must be in a directory that studies may read."""
    models = FileAccess(readable=(str(root / "base"), str(root / "shape"), str(root / "answer"), str(root / "search")))
    with pytest.raises(FilesRefused) as caught:
        examine(parse_study(document(root)), access=models)
    assert {problem.field for problem in caught.value.problems} == {"holdout.0.task.images", "holdout.1.task.images"}


def test_relative_folders_begin_at_the_study(root: Path) -> None:
    entry = {"name": "shapes", "task": {"images": "search/shapes", "head": "shape"}, "metric": "acc"}
    study = parse_study(document(root, objectives=[entry], holdout=[]), root)
    (spec,) = study.scored_objectives.values()
    assert json.loads(spec.model_dump_json())["task"]["images"] == str(root / "search" / "shapes")

"""A worker for CLIP models: zero-shot heads, merges of vision towers, exports as whole models, verification."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CLIPModel

from search_spaces.baselines import all_baselines
from search_spaces.recipe import Recipe
from search_spaces.study.engine import EngineOptions
from tests.vision import CLASSES, clip_tokenizer, image_folder, image_lines, tiny_clip
from workers.engines.images.verification import verify_images
from workers.errors import InvalidTask
from workers.export.checkpoint import export
from workers.models.checkpoints import open_checkpoint
from workers.models.family import open_family
from workers.models.task_heads import logits_of
from workers.models.zero_shot import class_embeddings
from workers.serving.image_worker import ImageWorker
from workers.types import Family, ScoreRequest, Span, TaskSpec

TEMPLATES = ("a photo of a {}.", "the {}.")
COUNT = 18


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("clip")


@pytest.fixture(scope="module")
def family(place: Path) -> Family:
    """A whole model as base, and experts that are towers, one in each of the forms that transformers stores."""
    experts = {"bare": tiny_clip(place / "bare", 1, kind="CLIPVisionModel"), "whole": tiny_clip(place / "whole", 2)}
    return open_family(tiny_clip(place / "base"), experts)


@pytest.fixture(scope="module")
def worker(family: Family) -> ImageWorker:
    return ImageWorker(family, EngineOptions(max_layers=4), device="cpu")


@pytest.fixture(scope="module")
def merges(family: Family) -> dict[str, Recipe]:
    found = all_baselines(
        base="base", experts=["bare", "whole"], fingerprints=family.fingerprints, num_layers=2, chosen="all"
    )
    return {label: recipe for _, label, recipe in found}


@pytest.fixture(scope="module")
def folder(place: Path) -> Path:
    return image_folder(place / "images", per_class=COUNT // len(CLASSES))


def task(folder: Path, **options: object) -> TaskSpec:
    return TaskSpec({"images": str(folder), "head": "base", "templates": list(TEMPLATES), **options}, "acc")


def span(spec: TaskSpec) -> Span:
    return Span("shapes", spec, 0, COUNT)


def test_samples_are_those_of_the_export(
    worker: ImageWorker, merges: dict[str, Recipe], folder: Path, tmp_path: Path
) -> None:
    """Each sample's class is that of CLIPModel on the export, with texts embedded by the export's own text tower."""
    spec = task(folder)
    for number, label in enumerate(("uniform average", "expert:bare", "base")):
        found = worker.score(ScoreRequest("s", merges[label], (span(spec),)))
        out = export(merges[label], worker.engine.bank, tmp_path / str(number))
        model = CLIPModel.from_pretrained(out)
        classes = class_embeddings(out, CLASSES, TEMPLATES)
        prepared = worker.evaluator.task(spec)
        with torch.inference_mode():
            seen = model.get_image_features(worker.pixels.of(prepared.task, range(COUNT))).pooler_output
            best = ((seen / seen.norm(dim=-1, keepdim=True)) @ classes.T).argmax(-1).tolist()
        right = [float(output == own) for output, own in zip(best, prepared.outputs, strict=True)]
        assert [sample.value for sample in found.samples] == right
        assert found.evidence.prompts.keys() == {"shapes"}
    assert 0 < sum(right) < COUNT, "some samples are right, and some wrong"


def test_an_export_is_a_whole_model(
    worker: ImageWorker, merges: dict[str, Recipe], family: Family, tmp_path: Path
) -> None:
    """An export has the merged tower and, bit for bit, the base's other tensors; transformers finds all it needs."""
    out = export(merges["uniform average"], worker.engine.bank, tmp_path / "out")
    model, report = CLIPModel.from_pretrained(out, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    base = CLIPModel.from_pretrained(family.base.directory).state_dict()
    own = model.state_dict()
    towers = [name for name in own if name.startswith("vision_model.")]
    assert len(own) > len(towers) > 20
    for name in own.keys() - set(towers):
        assert torch.equal(own[name], base[name]), name
    assert any(not torch.equal(own[name], base[name]) for name in towers)


def test_paths_of_another_depth_are_exported(worker: ImageWorker, merges: dict[str, Recipe], folder: Path) -> None:
    """A layer path of three layers is scored, and its export is a model of three layers, equal sample by sample."""
    recipe = merges["expert:bare"]
    longer = replace(recipe, layers=tuple(recipe.layers[index] for index in (0, 1, 1))).canonical()
    spans = (span(task(folder)),)
    samples = worker.score(ScoreRequest("s", longer, spans)).samples
    report = worker.verify(longer, samples, spans)
    assert (report.num_samples, report.num_equal) == (COUNT, COUNT)


@pytest.mark.parametrize("head", ["base", "whole"])
def test_verification_agrees_and_notices_another_text_tower(
    worker: ImageWorker, merges: dict[str, Recipe], folder: Path, tmp_path: Path, head: str
) -> None:
    """Samples with the head of the base and of an expert are equal; with another text tower in the export, not."""
    spec = task(folder, head=head)
    recipe, spans = merges["uniform average"], (span(spec),)
    samples = worker.score(ScoreRequest("s", recipe, spans)).samples
    report = worker.verify(recipe, samples, spans)
    assert (report.num_samples, report.num_equal) == (COUNT, COUNT)
    out = export(recipe, worker.engine.bank, tmp_path / "out")
    tensors = load_file(out / "model.safetensors")
    tensors["visual_projection.weight"] = -tensors["visual_projection.weight"]
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    broken = verify_images(
        recipe.digest, out, samples=samples, spans=spans, dtype="float32", evaluator=worker.evaluator
    )
    assert broken.num_equal == (0 if head == "base" else COUNT), "an expert's head is not in the export"


def test_tasks_that_have_no_zero_shot_head(worker: ImageWorker, folder: Path, tmp_path: Path) -> None:
    """Classes without names, a tower without texts, and templates without a place for the class are refused."""
    numbers = image_lines(folder.parent / "numbers.jsonl", folder, indices=True)
    cases = {
        "labels are numbers, and a zero-shot head needs the classes' names": task(numbers),
        "the model 'bare' has no head": task(folder, head="bare", templates=None),
        "templates are for heads of whole CLIP models, which 'bare' is not": task(folder, head="bare"),
        "has {} 0 times": task(folder, templates=["a photo"]),
    }
    for message, spec in cases.items():
        with pytest.raises(InvalidTask, match=message.replace("{", r"\{")):
            worker.describe((spec,))
    named = task(numbers, classes=list(CLASSES))
    assert worker.evaluator.task(named).names == CLASSES


def test_one_template_classifies_as_transformers_does(
    worker: ImageWorker, merges: dict[str, Recipe], folder: Path, family: Family
) -> None:
    """With one template, the worker's log-probabilities for the base are those of CLIPModel's forward pass."""
    spec = task(folder, templates=["the {}."])
    worker.score(ScoreRequest("s", merges["base"], (span(spec),)))
    found = worker.evaluator.logits(spec, range(COUNT))
    model = CLIPModel.from_pretrained(family.base.directory)
    prepared = worker.evaluator.task(spec)
    texts = clip_tokenizer()([f"the {name}." for name in CLASSES], padding=True, return_tensors="pt")
    with torch.inference_mode():
        wanted = model(**texts, pixel_values=worker.pixels.of(prepared.task, range(COUNT))).logits_per_image
    torch.testing.assert_close(found, wanted)


def test_a_bfloat16_engine_scores_what_it_exports(
    family: Family, merges: dict[str, Recipe], folder: Path, tmp_path: Path
) -> None:
    """Heads are rounded like the export: its logits, in float32, are those of heads from the export's files."""
    worker = ImageWorker(family, EngineOptions(dtype="bfloat16"), device="cpu")
    spec, recipe = task(folder), merges["expert:whole"]
    samples = worker.score(ScoreRequest("s", recipe, (span(spec),))).samples
    assert worker.verify(recipe, samples, (span(spec),)).num_samples == COUNT
    out = export(recipe, worker.engine.bank, tmp_path / "out", dtype=torch.bfloat16)
    head = worker.evaluator.task(spec).head
    checkpoint = worker.engine.sources.checkpoints["base"]
    ours = logits_of(head, checkpoint, dtype="bfloat16")(torch.eye(32))
    exported = open_checkpoint(out)
    torch.testing.assert_close(ours, logits_of(head, exported, dtype="float32")(torch.eye(32)))
    plain = logits_of(head, checkpoint, dtype="float32")(torch.eye(32))
    assert float((ours - plain).abs().max()) > 0.01, "rounding matters"


def test_a_vision_tower_is_no_base_of_zero_shot_tasks(family: Family, place: Path, folder: Path) -> None:
    """An export of such a base would have no text tower, so the task is refused before anything is scored."""
    towers = open_family(place / "bare", {"whole": place / "whole"})
    worker = ImageWorker(towers, EngineOptions(), device="cpu")
    with pytest.raises(InvalidTask, match="the base is a vision tower alone"):
        worker.describe((task(folder, head="whole"),))

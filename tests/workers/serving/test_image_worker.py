"""The worker of image classifiers: scores, evidence, exports with heads, and verification that finds errors."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from search_spaces.recipe import Merge, Recipe, Source
from search_spaces.study.engine import EngineOptions
from tests.vision import CLASSES, image_folder, tiny_vit
from workers.engines.images import verification
from workers.engines.images.pixels import Pixels
from workers.engines.source_recipes import source_recipe
from workers.errors import InvalidPrompt, InvalidTask, TrialFailed
from workers.evaluation.image_pictures import pictures_of
from workers.evaluation.image_responses import Response
from workers.evaluation.image_tasks import ImageTask, load_image_task
from workers.export.checkpoint import export, is_written
from workers.merging.materialize import merged_tensors
from workers.models.checkpoints import open_checkpoint
from workers.models.family import open_family
from workers.serving.completions import CompletionBatch, CompletionRequest, LiveCompletion
from workers.serving.image_worker import ImageWorker
from workers.types import Family, SampleResult, ScoreRequest, Span, TaskSpec

OTHERS = ("no", "yes")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("classifiers")
    image_folder(place / "shapes", per_class=10)
    image_folder(place / "answers", per_class=10, classes=OTHERS, seed=5)
    return place


@pytest.fixture(scope="module")
def family(place: Path) -> Family:
    tiny_vit(place / "base", 0, classes=None)
    tiny_vit(place / "shape", 1, classes=("square", "circle", "line"))
    tiny_vit(place / "answer", 2, classes=OTHERS)
    return open_family(place / "base", {"shape": place / "shape", "answer": place / "answer"})


@pytest.fixture(scope="module")
def worker(family: Family) -> ImageWorker:
    return ImageWorker(family, EngineOptions(), device="cpu")


@pytest.fixture
def spans(place: Path) -> tuple[Span, ...]:
    shapes = TaskSpec({"images": str(place / "shapes"), "head": "shape"}, "acc")
    answers = TaskSpec({"images": str(place / "answers"), "head": "answer"}, "acc")
    return Span("shapes", shapes, 0, 30), Span("answers", answers, 0, 20)


def average(family: Family) -> Recipe:
    base = source_recipe(family, "base", num_layers=2)

    def merge(layer: int | None) -> Merge:
        sources = (Source("shape", layer), Source("answer", layer))
        return Merge("linear", sources, coefficients={"weight": (0.5, 0.5)})

    layers = tuple(
        replace(each, attention=merge(index), mlp=merge(index), norm=merge(index))
        for index, each in enumerate(base.layers)
    )
    return replace(base, layers=layers, embedding=merge(None), head=merge(None)).canonical()


def top1_of(directory: Path, span: Span, head: str) -> list[float]:
    """Whether plain transformers is right, for each sample, on a checkpoint with one of the heads beside it."""
    from PIL import Image
    from transformers import AutoImageProcessor, AutoModelForImageClassification

    tensors = load_file(directory / "heads" / f"{head}.safetensors")
    labels = json.loads((directory / "heads" / "heads.json").read_text())["heads"][head]["classes"]
    model = AutoModelForImageClassification.from_pretrained(directory).eval()
    model.classifier = torch.nn.Linear(*reversed(tensors["classifier.weight"].shape))
    model.load_state_dict(tensors, strict=False)
    processor = AutoImageProcessor.from_pretrained(directory)
    task = load_image_task(span.task)
    found = []
    for index in task.order[span.start : span.stop]:
        sample = task.images.samples[index]
        inputs = processor(Image.open(sample.file).convert("RGB"), return_tensors="pt")
        with torch.inference_mode():
            output = int(model(**inputs).logits.argmax())
        found.append(float(labels[output] == task.images.class_of(sample)))
    return found


def score(worker: ImageWorker, recipe: Recipe, spans: tuple[Span, ...]) -> tuple[SampleResult, ...]:
    return worker.score(ScoreRequest("study", recipe, spans)).samples


def test_scores_are_those_of_transformers_on_the_export(
    worker: ImageWorker, family: Family, spans: tuple[Span, ...], tmp_path: Path
) -> None:
    """Of every sample, top-1 equals that of plain transformers on the exported checkpoint with the task's head."""
    recipe = average(family)
    result = worker.score(ScoreRequest("study", recipe, spans))
    out = export(recipe, worker.engine.bank, tmp_path / "out")
    for span, head in zip(spans, ("shape", "answer"), strict=True):
        ours = [sample.value for sample in result.samples if sample.objective == span.objective]
        assert ours == top1_of(out, span, head)
        assert 0 < sum(ours) < len(ours), "scores tell samples apart"
    assert [sample.position for sample in result.samples] == [*range(30), *range(20)]
    evidence = result.evidence
    assert (evidence.recipe_digest, evidence.bank_fingerprint) == (recipe.digest, family.fingerprint)
    assert evidence.prompts.keys() == {"shapes", "answers"}
    assert evidence.engine == "torch, cpu, float32, 0.00 GB of sources in mapped files"


def test_an_export_is_a_checkpoint_with_heads(worker: ImageWorker, family: Family, place: Path, tmp_path: Path) -> None:
    """The encoder is the merge, heads are the sources' bit for bit, and the checkpoint has one of them."""
    recipe = average(family)
    out = export(recipe, worker.engine.bank, tmp_path / "out")
    written = load_file(out / "model.safetensors")
    heads = {alias: load_file(out / "heads" / f"{alias}.safetensors") for alias in ("shape", "answer")}
    for alias, tensors in heads.items():
        source = load_file(place / alias / "model.safetensors")
        assert all(torch.equal(tensor, source[name]) for name, tensor in tensors.items())
    for name, tensor in merged_tensors(recipe, worker.engine.bank, torch.float32):
        assert torch.equal(written.pop(name), tensor), name
    assert written.keys() == heads["shape"].keys()
    assert all(torch.equal(tensor, heads["shape"][name]) for name, tensor in written.items())
    assert json.loads((out / "heads" / "heads.json").read_text()) == {
        "loaded": "shape",
        "heads": {
            "shape": {"num_classes": 3, "classes": ["square", "circle", "line"]},
            "answer": {"num_classes": 2, "classes": ["no", "yes"]},
        },
    }
    card = (out / "README.md").read_text()
    assert "The checkpoint\nitself has the head of `shape`" in card
    assert (out / "preprocessor_config.json").read_bytes() == (place / "base" / "preprocessor_config.json").read_bytes()
    assert is_written(recipe, out, torch.float32)
    assert open_checkpoint(out).modality.name == "image"
    # The export is a source for further merges.
    again = open_family(place / "base", {"merge": out, "answer": place / "answer"})
    assert len(again.models) == 3


def test_prompts_are_hashes_of_the_images(worker: ImageWorker, family: Family, spans: tuple[Span, ...]) -> None:
    """The evidence has one hash for the same images, another for others, and does not depend on the batches."""
    recipe = average(family)

    def hashes(*chosen: Span) -> list[str]:
        return [*worker.score(ScoreRequest("study", recipe, chosen)).evidence.prompts.values()]

    shapes, answers = spans
    assert hashes(shapes) == hashes(shapes)
    assert hashes(replace(shapes, stop=29)) != hashes(shapes)
    assert hashes(shapes, answers)[0] == hashes(shapes)[0] != hashes(answers)[0]


def test_parts_have_the_results_of_the_whole(worker: ImageWorker, family: Family, spans: tuple[Span, ...]) -> None:
    recipe, (shapes, _) = average(family), spans
    whole = score(worker, recipe, (shapes,))
    parts = [score(worker, recipe, (replace(shapes, start=a, stop=b),)) for a, b in ((0, 7), (7, 8), (8, 30))]
    found = [sample for part in parts for sample in part]
    assert [(s.position, s.document, s.value) for s in found] == [(s.position, s.document, s.value) for s in whole]
    with pytest.raises(InvalidTask, match="samples 0-31 requested of a task with 30 samples"):
        score(worker, recipe, (replace(shapes, stop=31),))


def test_top5_counts_the_five_largest(place: Path, tmp_path: Path) -> None:
    """acc_top5 is one where the class is among the five largest logits, and never below acc."""
    names = tuple("abcdefgh")
    tiny_vit(tmp_path / "base", 0, classes=None)
    tiny_vit(tmp_path / "many", 1, classes=names)
    images = image_folder(tmp_path / "images", classes=names, per_class=4)
    worker = ImageWorker(open_family(tmp_path / "base", {"many": tmp_path / "many"}), EngineOptions(), device="cpu")
    task = {"images": str(images), "head": "many"}
    recipe = worker.base_recipe()
    tops = {m: score(worker, recipe, (Span("x", TaskSpec(task, m), 0, 32),)) for m in ("acc", "acc_top5")}
    order = load_image_task(TaskSpec(task, "acc")).images
    for one, five in zip(tops["acc"], tops["acc_top5"], strict=True):
        assert one.response == five.response
        shown = [name for name, _ in Response.from_json(one.response).top]
        right = one.document.split("/")[0]
        assert (one.value, five.value) == (float(shown[0] == right), float(right in shown))
    assert sum(s.value for s in tops["acc"]) < sum(s.value for s in tops["acc_top5"]) < len(order.samples)


def test_entropies_need_no_labels(family: Family, worker: ImageWorker, spans: tuple[Span, ...], tmp_path: Path) -> None:
    """The entropy of predictions is that of the stored log-probabilities; verification finds another one."""
    shapes, _ = spans
    assert isinstance(shapes.task.task, dict)
    (tmp_path / "plain").mkdir()
    files = sorted(Path(shapes.task.task["images"]).rglob("*.png"))
    for number, file in enumerate(files):
        (tmp_path / "plain" / f"{number:03}.png").write_bytes(file.read_bytes())
    spec = TaskSpec({"images": str(tmp_path / "plain"), "head": "shape"}, "entropy")
    whole = (Span("plain", spec, 0, len(files)),)
    recipe = average(family)
    samples = score(worker, recipe, whole)
    for sample in samples:
        logprobs = [value for _, value in Response.from_json(sample.response).top]
        assert len(logprobs) == 3
        expected = -sum(math.exp(each) * each for each in logprobs) / math.log(3)
        assert sample.value == pytest.approx(expected, abs=1e-5)
    assert len({round(sample.value, 6) for sample in samples}) > len(files) // 2
    assert worker.verify(recipe, samples, whole).num_equal == len(files)
    wrong = (replace(samples[0], value=samples[0].value + 0.1), *samples[1:])
    report = worker.verify(recipe, wrong, whole)
    assert [(each.position, each.what, each.is_beyond) for each in report.differences] == [(0, "value", True)]


def test_logits_that_are_not_finite_fail_the_trial(
    worker: ImageWorker, family: Family, spans: tuple[Span, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker.evaluator, "_features", lambda pixels: torch.full((len(pixels), 32), torch.nan))
    with pytest.raises(TrialFailed, match="objective shapes: the merge gives logits that are NaN or infinite"):
        score(worker, average(family), spans)


def test_tasks_are_described(worker: ImageWorker, spans: tuple[Span, ...], place: Path) -> None:
    shapes, answers = (span.task for span in spans)
    assert [info.num_samples for info in worker.describe((shapes, answers))] == [30, 20]
    (path, answer), *_ = worker.sample_texts(shapes, 3, 5)
    assert Path(path).parent.name == answer
    assert answer in CLASSES
    assert worker.sample_pictures(shapes, 3, 5) == pictures_of(load_image_task(shapes), 3, 5)
    assert all(worker.sample_pictures(shapes, 0, 30))
    with pytest.raises(InvalidTask, match="has 3 classes, the head of 'answer' has 2"):
        worker.describe((TaskSpec({"images": str(place / "shapes"), "head": "answer"}, "acc"),))
    assert worker.statistics()["starts"] == 1


def test_classifiers_complete_no_prompts(worker: ImageWorker, family: Family) -> None:
    """A request for a completion ends with the reason, as it would for a prompt that is too long."""

    async def completed() -> None:
        live = LiveCompletion(CompletionRequest(average(family), "a prompt"))
        batch = CompletionBatch(average(family))
        assert batch.join(live)
        await asyncio.to_thread(worker.complete, batch, lambda: None)
        async for _ in live.parts():
            raise AssertionError("a part")

    with pytest.raises(InvalidPrompt, match="image classifiers complete no prompts"):
        asyncio.run(completed())


# Verification.


def test_verification_finds_equal_samples(worker: ImageWorker, family: Family, spans: tuple[Span, ...]) -> None:
    recipe = average(family)
    report = worker.verify(recipe, score(worker, recipe, spans), spans)
    assert (report.num_samples, report.num_equal, report.num_beyond) == (50, 50, 0)
    assert report.is_equal
    assert report.num_logprobs == 30 * 3 + 20 * 2
    assert report.max_logprob_difference < 1e-5


def test_verification_sees_another_merge(worker: ImageWorker, family: Family, spans: tuple[Span, ...]) -> None:
    """Samples of another merge than the exported one differ beyond rounding."""
    others = score(worker, source_recipe(family, "shape", num_layers=2), spans)
    report = worker.verify(average(family), others, spans)
    assert report.num_beyond > 10
    assert not report.is_equal


@pytest.mark.parametrize("change", ["class", "value", "log-probabilities", "missing"])
def test_verification_sees_one_wrong_sample(
    change: str, worker: ImageWorker, family: Family, spans: tuple[Span, ...]
) -> None:
    """A single stored sample with another class, value or log-probability is named; a lacking one is an error."""
    recipe = average(family)
    samples = list(score(worker, recipe, spans))
    first = samples[4]
    top = Response.from_json(first.response).top
    if change == "class":
        samples[4] = replace(first, response=Response((top[1], top[0], *top[2:])).to_json())
    elif change == "value":
        samples[4] = replace(first, value=1 - first.value)
    elif change == "log-probabilities":
        samples[4] = replace(first, response=Response(((top[0][0], top[0][1] - 0.01), *top[1:])).to_json())
    else:
        del samples[4]
        with pytest.raises(InvalidTask, match="verify: no stored sample of shapes at position 4"):
            worker.verify(recipe, tuple(samples), spans)
        return
    report = worker.verify(recipe, tuple(samples), spans)
    assert (report.num_equal, report.num_beyond) == (49, 1)
    (difference,) = report.differences
    assert (difference.objective, difference.position, difference.what) == ("shapes", 4, change)


def test_verification_sees_another_preprocessing(
    worker: ImageWorker, family: Family, spans: tuple[Span, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Images that the engine read in another way than the exported processor reads them are found."""
    recipe = average(family)
    samples = score(worker, recipe, spans)

    class Darker(Pixels):
        def of(self, task: ImageTask, positions: Sequence[int]) -> torch.Tensor:
            return 0.5 * super().of(task, positions)

    monkeypatch.setattr(verification, "Pixels", Darker)
    assert worker.verify(recipe, samples, spans).num_beyond > 10

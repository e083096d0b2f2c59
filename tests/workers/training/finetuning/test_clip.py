"""Fine-tuning of whole CLIP models: the vision tower is trained with a zero-shot head, and nothing else changes."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import PeftModel
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import AutoImageProcessor, CLIPModel, CLIPVisionModelWithProjection
from transformers.models.clip.modeling_clip import CLIPMLP

from search_spaces.baselines import all_baselines
from search_spaces.errors import InvalidStudy
from search_spaces.recipe import Merge, Source
from search_spaces.study.engine import EngineOptions
from search_spaces.study.image_suites import IMAGE_SUITES
from service.jobs.finetune.request import artifact_bytes, check_finetune_files, check_server_paths
from tests.vision import CLASSES, clip_tokenizer, image_folder, image_lines, tiny_clip, tiny_vit
from workers.errors import InvalidModel, InvalidTask
from workers.evaluation.image_tasks import load_image_task
from workers.file_access import FileAccess
from workers.models.checkpoints import open_checkpoint, read_expert
from workers.models.family import open_family
from workers.serving.image_worker import ImageWorker
from workers.training.finetuning import checkpoints
from workers.training.finetuning.fleet import parse_pipeline
from workers.training.finetuning.history import CHECKPOINTS, EXPERT, METRICS, read_history
from workers.training.finetuning.images import IMAGE_TRAINING
from workers.training.finetuning.methods import make_optimizer, read_task_vectors
from workers.training.finetuning.models import load_model
from workers.training.finetuning.spec import FinetuneSpec, parse_spec
from workers.training.finetuning.trainer import check, train
from workers.training.mergopt.optimizer import MergOPT
from workers.types import ScoreRequest, Span, TaskSpec

pytestmark = pytest.mark.slow  # models are trained

TEMPLATES = ("a photo of a {}.", "the {}.")
TOWER = "vision_model."
PROJECTION = "visual_projection.weight"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole CLIP model, and images as a folder and as a JSONL file with numbers as labels."""
    directory = tmp_path_factory.mktemp("clip")
    tiny_clip(directory / "base")
    image_folder(directory / "folder", per_class=8)
    image_lines(directory / "indices.jsonl", directory / "folder", indices=True)
    return directory


def spec_of(place: Path, **changes: Any) -> FinetuneSpec:
    document: dict[str, Any] = {
        "name": "shapes",
        "base": "base",
        "data": {"images": "folder", "templates": list(TEMPLATES)},
        "method": {"kind": "adamw"},
        "training": {"steps": 3, "batch": 6, "micro_batch": 4, "learning_rate": 0.003},
        "dtype": "float32",
    }
    for key, value in changes.items():
        document[key] = {**document.get(key, {}), **value} if isinstance(value, dict) else value
    return parse_spec(document, place)


def run(place: Path, out: Path, **changes: Any) -> dict[str, Any]:
    out.mkdir(exist_ok=True)
    return train(spec_of(place, **changes), out)


def stored(model: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = load_file(model / "model.safetensors")
    return {name: each for name, each in tensors.items() if not name.endswith("position_ids")}


def objective(**changes: Any) -> Mapping[str, Any]:
    task = {"images": "folder", "head": "shapes", "templates": list(TEMPLATES), **changes}
    return {"name": "shapes", "task": task, "metric": "acc"}


def files_of(place: Path) -> list[Path]:
    return sorted((place / "folder").rglob("*.png"))


@torch.inference_mode()
def plain_logits(
    place: Path, model: Any, templates: tuple[str, ...], classes: tuple[str, ...] = CLASSES
) -> torch.Tensor:
    """Logits [images, classes] of the images in order of name, as published, by a CLIPModel alone."""
    model.eval()
    heads = []
    for name in classes:
        tokens = clip_tokenizer()([each.format(name) for each in templates], padding=True, return_tensors="pt")
        each = model.get_text_features(**tokens).pooler_output
        mean = (each / each.norm(dim=-1, keepdim=True)).mean(0)
        heads.append(mean / mean.norm())
    processor = AutoImageProcessor.from_pretrained(place / "base", backend="pil")
    pixels = processor([Image.open(file).convert("RGB") for file in files_of(place)], return_tensors="pt")
    seen = model.get_image_features(**pixels).pooler_output
    logits: torch.Tensor = (seen / seen.norm(dim=-1, keepdim=True)) @ torch.stack(heads).T * model.logit_scale.exp()
    return logits


def right(place: Path, logits: torch.Tensor) -> float:
    found = [CLASSES[int(row.argmax())] == file.parent.name for row, file in zip(logits, files_of(place), strict=True)]
    return sum(found) / len(found)


@pytest.mark.parametrize("kind", ["adamw", "sgd", "sam", "asam", "mergopt", "tangent"])
def test_every_method_trains_the_vision_tower_alone(place: Path, tmp_path: Path, kind: str) -> None:
    """The expert is a whole CLIPModel: each tensor of the vision tower is trained, all others have the base's bits."""
    run(place, tmp_path / "out", method={"kind": kind}, training={"learning_rate": 0.03 if kind == "sgd" else 0.003})
    model, report = CLIPModel.from_pretrained(tmp_path / "out" / EXPERT, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    base, expert = stored(place / "base"), model.state_dict()
    assert base.keys() == expert.keys()
    changed = {name for name, tensor in base.items() if not torch.equal(tensor, expert[name])}
    # Attention does not depend on what is added to all keys, so the gradients of keys' biases are rounding alone.
    keys = {name for name in base if name.endswith("k_proj.bias")}
    assert changed - keys == {name for name in base if name.startswith(TOWER)} - keys


def test_the_first_loss_is_that_of_the_published_head(place: Path, tmp_path: Path) -> None:
    """The loss before the first update is the cross-entropy of the published construction, by transformers alone."""
    run(place, tmp_path / "out", training={"steps": 1, "batch": 24, "micro_batch": 24})
    logits = plain_logits(place, CLIPModel.from_pretrained(place / "base"), TEMPLATES)
    labels = torch.tensor([CLASSES.index(file.parent.name) for file in files_of(place)])
    wanted = float(torch.nn.functional.cross_entropy(logits, labels))
    assert read_history(tmp_path / "out" / METRICS)[0]["loss"] == pytest.approx(wanted, rel=1e-4)


def test_evaluations_are_those_of_plain_transformers(place: Path, tmp_path: Path) -> None:
    """Tasks have classes and templates of their own, and may name the base's head, which is the expert's."""
    other = {"images": "indices.jsonl", "classes": ["cat", "ice", "dog"], "templates": ["the {}."], "head": "base"}
    objectives = [objective(), {**objective(**other), "name": "other"}]
    evaluation = {"every": 5, "samples": 24, "objectives": objectives}
    facts = run(place, tmp_path / "out", training={"steps": 10}, evaluation=evaluation)
    model = CLIPModel.from_pretrained(tmp_path / "out" / EXPERT)
    found = {
        "shapes": right(place, plain_logits(place, model, TEMPLATES)),
        "other": right(place, plain_logits(place, model, ("the {}.",), ("cat", "ice", "dog"))),
    }
    assert facts["values"] == found
    assert found["shapes"] > 0.5 > found["other"]
    with pytest.raises(InvalidTask, match=r"its head is that of 'other'; .* give head: shapes"):
        run(place, tmp_path / "b", evaluation={"objectives": [objective(head="other")]})


def test_a_study_scores_the_expert_as_training_did(place: Path, tmp_path: Path) -> None:
    """A whole expert and an adapter are experts of a family, whose own zero-shot heads score as in training."""
    evaluation = {"every": 10, "samples": 24, "objectives": [objective()]}
    training = {"steps": 10, "learning_rate": 0.01}
    values = {
        alias: run(place, tmp_path / alias, adapter=adapter, training=training, evaluation=evaluation)["values"]
        for alias, adapter in {"whole": None, "lora": {"rank": 4}}.items()
    }
    family = open_family(place / "base", {alias: tmp_path / alias / EXPERT for alias in values})
    worker = ImageWorker(family, EngineOptions(dtype="float32"), device="cpu")
    recipes = all_baselines(
        base="base", experts=list(values), fingerprints=family.fingerprints, num_layers=2, chosen="all"
    )
    found = {}
    for _, label, recipe in recipes:
        alias = label.partition(":")[2]
        if alias in values:
            task = {"images": str(place / "folder"), "head": alias, "templates": list(TEMPLATES)}
            spans = (Span("shapes", TaskSpec(task, "acc"), 0, 24),)
            samples = worker.score(ScoreRequest("s", recipe, spans)).samples
            found[alias] = {"shapes": sum(sample.value for sample in samples) / 24}
    assert found == values
    assert found["whole"]["shapes"] > 0.5


def test_a_resumed_training_has_the_same_bits(place: Path, tmp_path: Path) -> None:
    training = {"steps": 6, "checkpoint_every": 3}
    run(place, tmp_path / "whole", method={"kind": "mergopt"}, training=training)
    run(place, tmp_path / "part", method={"kind": "mergopt"}, training=training)
    shutil.rmtree(tmp_path / "part" / EXPERT)
    newest = checkpoints.latest(tmp_path / "part" / CHECKPOINTS)
    assert newest is not None
    assert not any("text_model" in name or "projection" in name for name in _names_in(newest))
    shutil.rmtree(newest)
    assert checkpoints.step_of(checkpoints.latest(tmp_path / "part" / CHECKPOINTS)) == 3
    run(place, tmp_path / "part", method={"kind": "mergopt"}, training=training)
    one, other = stored(tmp_path / "whole" / EXPERT), stored(tmp_path / "part" / EXPERT)
    assert all(torch.equal(one[name], other[name]) for name in one)


def _names_in(checkpoint: Path) -> list[str]:
    return [name for file in checkpoint.glob("*.safetensors") for name in load_file(file)]


@pytest.mark.parametrize("layers", [None, [1]])
def test_noise_is_on_what_merges_move(place: Path, layers: list[int] | None) -> None:
    """MergOPT's offset is on what merges change, and on nothing else, also where only some layers are trained."""
    spec = spec_of(place, method={"kind": "mergopt", "scale": 0.01}, training={"layers": layers})
    model = load_model(spec, place / "base", torch.device("cpu"))
    optimizer = make_optimizer(
        spec.method, model.trained.values(), learning_rate=0.1, seed=3, model=model.module, moved=model.moved
    )
    assert isinstance(optimizer, MergOPT)
    before = {name: p.detach().clone() for name, p in model.module.named_parameters()}
    with optimizer.offset():
        changed = {name for name, p in model.module.named_parameters() if not torch.equal(p, before[name])}
    places = open_checkpoint(place / "base").layout.places
    assert changed == set(places)
    assert set(model.trained) == {name for name, each in places.items() if layers is None or each.layer in layers}
    assert set(before) == changed | {PROJECTION}


def test_layers_of_the_vision_tower_alone_are_trained(place: Path, tmp_path: Path) -> None:
    """`training.layers` are those of the vision tower, although the text tower has layers of the same numbers."""
    run(place, tmp_path / "out", method={"kind": "mergopt"}, training={"layers": [1]})
    expert, base = stored(tmp_path / "out" / EXPERT), stored(place / "base")
    changed = {name for name, tensor in base.items() if not torch.equal(expert[name], tensor)}
    assert changed == {name for name in base if name.startswith(f"{TOWER}encoder.layers.1.")}


def test_adapters_change_the_vision_tower_alone(place: Path, tmp_path: Path) -> None:
    """An adapter to all linear layers leaves out the projection; peft loads it into transformers' vision tower."""
    run(place, tmp_path / "out", adapter={"rank": 2}, training={"learning_rate": 0.03})
    names = load_file(tmp_path / "out" / EXPERT / "adapter_model.safetensors").keys()
    assert len(names) == 2 * 2 * 6, "two layers of six matrices, with two factors each"
    base = open_checkpoint(place / "base")
    expert = read_expert(tmp_path / "out" / EXPERT, base)
    assert expert is not None
    tower = CLIPVisionModelWithProjection.from_pretrained(place / "base")
    merged = dict(PeftModel.from_pretrained(tower, tmp_path / "out" / EXPERT).merge_and_unload().named_parameters())
    for name in base.layout.places:
        torch.testing.assert_close(expert.read(name), merged[name].data)
        is_adapted = name.endswith(".weight") and expert.read(name).dim() == 2 and ".layers." in name
        assert torch.equal(expert.read(name), base.read(name)) != is_adapted


def test_the_linearization_is_of_the_image_encoder(place: Path, tmp_path: Path) -> None:
    """The method tangent linearizes the embeddings of images; the head normalises them, as published."""
    spec = spec_of(place, method={"kind": "tangent"})
    model = load_model(spec, place / "base", torch.device("cpu"))
    assert model.tangent is not None
    pixels = torch.randn(2, 3, 28, 28, generator=torch.Generator().manual_seed(0))
    at_origin = model.tangent(pixel_values=pixels).detach()
    assert at_origin.shape == (2, 16)
    steps = []
    with torch.no_grad():
        for _ in range(2):
            for parameter in model.trained.values():
                parameter.add_(0.01)
            steps.append(model.tangent(pixel_values=pixels) - at_origin)
    torch.testing.assert_close(steps[1], 2 * steps[0], rtol=1e-3, atol=1e-4)
    facts = run(
        place,
        tmp_path / "out",
        method={"kind": "tangent"},
        training={"steps": 4, "learning_rate": 0.03},
        evaluation={"samples": 24, "objectives": [objective()]},
    )
    plain = plain_logits(place, CLIPModel.from_pretrained(tmp_path / "out" / EXPERT), TEMPLATES)
    assert facts["values"] == {"shapes": right(place, plain)}
    assert facts["linearized_values"] != facts["values"]


def test_an_expert_in_16_bits_is_rounded_as_an_export_is(place: Path, tmp_path: Path) -> None:
    run(place, tmp_path / "out", dtype="bfloat16")
    expert, base = stored(tmp_path / "out" / EXPERT), stored(place / "base")
    assert {tensor.dtype for tensor in expert.values()} == {torch.bfloat16}
    for name in base:
        if not name.startswith(TOWER):
            assert torch.equal(expert[name], base[name].to(torch.bfloat16))


def test_logits_are_in_float32_where_activations_are_not(place: Path) -> None:
    """The loss with activations in bfloat16 differs from that in float32 by their rounding, not by that of logits."""
    losses = []
    inputs = IMAGE_TRAINING.examples(spec_of(place), place / "base", None).inputs(range(24))
    for dtype in (torch.float32, torch.bfloat16):
        model = load_model(spec_of(place), place / "base", torch.device("cpu"))
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.bfloat16):
            seen = model.module(pixel_values=inputs["pixel_values"]).image_embeds
            loss = model.loss(**inputs).detach()
        assert loss.dtype is torch.float32
        heads = model.module.class_embeddings
        logits = torch.nn.functional.normalize(seen.float(), dim=-1) @ heads.T
        wanted = torch.nn.functional.cross_entropy(logits, inputs["labels"], reduction="sum").detach()
        assert float(loss) == pytest.approx(float(wanted), rel=1e-6)
        losses.append(float(loss))
    assert losses[0] != losses[1]


def test_a_named_task_is_training_data(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name of a task of the papers stands for its data set on the hub, with its classes and templates."""
    from datasets import ClassLabel, Dataset, Features
    from datasets import Image as ImageFeature

    suite = IMAGE_SUITES["clip_mnist"]
    assert suite.classes is not None
    files = files_of(place)
    rows = {
        "image": [{"bytes": file.read_bytes(), "path": None} for file in files],
        "label": [number % 10 for number in range(len(files))],
    }
    features = Features({"image": ImageFeature(), "label": ClassLabel(names=list(suite.classes))})
    data = tmp_path / "data" / suite.data
    data.mkdir(parents=True)
    for split in ("train", "test"):
        Dataset.from_dict(rows, features=features).to_parquet(data / f"{split}.parquet")
    monkeypatch.setenv("MERGESEARCH_DATA", str(tmp_path / "data"))
    spec = spec_of(
        place,
        data={"images": "clip_mnist", "templates": ["the {}"], "split": "train[:20]"},
        evaluation={"objectives": [{"name": "mnist", "task": "clip_mnist", "metric": "acc"}]},
        training={"steps": 1},
    )
    assert spec.data.images == f"hub:{suite.data}"
    assert spec.data.classes == suite.classes
    assert spec.data.templates == ("the {}",), "what the specification states is kept"
    assert parse_spec(spec.canonical()) == spec
    access = FileAccess((str(place),))
    pipeline = parse_pipeline(spec.canonical())
    check_server_paths(pipeline)
    check_finetune_files(pipeline, access)
    check(spec, access=access)
    facts = train(spec, tmp_path)
    assert facts["rows"] == 20
    assert facts["values"].keys() == {"mnist"}


def test_an_experts_bytes_are_counted_with_its_text_tower(place: Path, tmp_path: Path) -> None:
    run(place, tmp_path / "out")
    written = sum(tensor.numel() for tensor in stored(tmp_path / "out" / EXPERT).values())
    planned = artifact_bytes(parse_pipeline(spec_of(place).canonical()))
    assert planned == 4 * written


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"base": "tower"}, InvalidModel, r"base: .*tower is a vision tower alone; expected a whole CLIP model"),
        ({"base": "projected"}, InvalidModel, r"base: .*projected is a vision tower alone"),
        ({"base": "textless"}, InvalidModel, r"textless: has no text tower, .* take a whole CLIP model"),
        ({"base": "wordless"}, InvalidTask, r"wordless: has no tokenizer, which zero-shot heads need"),
        ({"data": {"head": "new"}}, InvalidModel, r"data.head: new; .*base is a CLIP model, .* expected base"),
        ({"data": {"head": "vit"}}, InvalidModel, r"data.head: .*vit; .*base is a CLIP model"),
        ({"data": {"images": "indices.jsonl"}}, InvalidTask, r"labels are numbers, and a zero-shot head needs .*names"),
        ({"data": {"images": "nameless.jsonl"}}, InvalidTask, r"nameless.jsonl: class 0 has the name ''; expected wo"),
        ({"data": {"templates": ["a photo"]}}, InvalidTask, r"the template 'a photo' has {} 0 times; expected once"),
        ({"data": {"templates": ["{} of a {}"]}}, InvalidTask, r"has {} 2 times; expected once"),
        ({"data": {"templates": ["a a a a a a a a a a a {}"]}}, InvalidTask, r"reads at most 12 tokens, and a .* 14"),
        ({"data": {"images": "wide"}, "base": "exact"}, InvalidTask, r"wide/circle/000.png: has 28 x 30 pixels; expec"),
        ({"base": "vit"}, InvalidModel, r"data.templates: are for zero-shot heads of whole CLIP models, which .*vit"),
    ],
)
def test_what_cannot_be_trained_is_refused(
    place: Path, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    if not (place / "vit").exists():
        _make_refused(place)
    with pytest.raises(error, match=message.replace("{", r"\{")):
        check(spec_of(place, **changes))


def _make_refused(place: Path) -> None:
    tiny_vit(place / "vit")
    tiny_clip(place / "tower", kind="CLIPVisionModel")
    tiny_clip(place / "projected", kind="CLIPVisionModelWithProjection")
    for name in ("textless", "wordless", "exact"):
        shutil.copytree(place / "base", place / name)
    tensors = load_file(place / "textless" / "model.safetensors")
    kept = {name: each for name, each in tensors.items() if not name.startswith("text_model.")}
    save_file(kept, place / "textless" / "model.safetensors", metadata={"format": "pt"})
    for file in (place / "wordless").glob("tokenizer*"):
        file.unlink()
    transformers.CLIPImageProcessorPil(do_resize=False, do_center_crop=False).save_pretrained(place / "exact")
    image_folder(place / "wide", per_class=1)
    Image.new("RGB", (30, 28)).save(place / "wide" / "circle" / "000.png")
    lines = (place / "indices.jsonl").read_text().replace('"label": 0', '"label": ""')
    lines = lines.replace('"label": 1', '"label": "line"').replace('"label": 2', '"label": "square"')
    (place / "nameless.jsonl").write_text(lines)


def test_templates_are_for_images(place: Path) -> None:
    with pytest.raises(InvalidStudy, match=r"data.templates: is for images; leave it out"):
        spec_of(place, data={"images": None, "file": "a.jsonl"})


def test_templates_of_a_classifiers_evaluation_are_refused(place: Path, tmp_path: Path) -> None:
    tiny_vit(tmp_path / "vit")
    evaluation = {"objectives": [objective()]}
    data = {"images": str(place / "folder"), "templates": None}
    with pytest.raises(InvalidTask, match=r"objective 'shapes': templates are for zero-shot heads"):
        run(place, tmp_path / "out", base=str(tmp_path / "vit"), data=data, evaluation=evaluation)


def test_noise_of_experts_is_of_their_vision_towers(place: Path, tmp_path: Path) -> None:
    """MergOPT with real task vectors adds a multiple of the expert's change to each weight of the vision tower."""
    tiny_clip(tmp_path / "other", 5)
    method = {"kind": "mergopt", "noise": "task_vectors", "fit_to": [str(tmp_path / "other")]}
    spec = spec_of(place, method=method)
    model = load_model(spec, place / "base", torch.device("cpu"))
    vectors = read_task_vectors(spec.method, place / "base", model.module, model.moved)
    optimizer = make_optimizer(
        spec.method,
        model.trained.values(),
        learning_rate=0.1,
        seed=3,
        model=model.module,
        moved=model.moved,
        vectors=vectors,
    )
    assert isinstance(optimizer, MergOPT)
    base, other = stored(place / "base"), stored(tmp_path / "other")
    with optimizer.offset():
        factor = optimizer.draw.alpha * optimizer.draw.num_models - 1
        for name, parameter in model.trained.items():
            wanted = base[name] + factor * (other[name] - base[name])
            torch.testing.assert_close(parameter.detach(), wanted, rtol=1e-4, atol=1e-5)


def test_losses_of_merges_are_those_of_plain_transformers(place: Path, tmp_path: Path) -> None:
    """An analysis measures merges of vision towers with the zero-shot heads of the experts' own text towers."""
    directories = {alias: tiny_clip(tmp_path / alias, seed) for alias, seed in {"left": 6, "right": 7}.items()}
    experts = {alias: spec_of(place, name=alias) for alias in directories}
    tasks = {
        alias: [TaskSpec({"images": str(place / "folder"), "head": alias, "templates": list(TEMPLATES)}, "acc")]
        for alias in directories
    }
    assert IMAGE_TRAINING.lack_of_losses(experts["left"], tasks["left"][0]) is None
    measured = IMAGE_TRAINING.merge_losses(experts, directories, tasks, samples=12, is_linearized=False)
    merge = Merge("task_arithmetic", (Source("left"), Source("right")), {"lambda": (0.5, 0.25)})
    found = measured.report(merge)
    base = stored(place / "base")
    vectors = {alias: stored(directory) for alias, directory in directories.items()}
    for alias, directory in directories.items():
        model = CLIPModel.from_pretrained(directory)
        tower = {
            name: each + 0.5 * (vectors["left"][name] - each) + 0.25 * (vectors["right"][name] - each)
            for name, each in base.items()
            if name.startswith(TOWER)
        }
        model.load_state_dict(tower, strict=False)
        task = load_image_task(tasks[alias][0])
        chosen = list(task.order[12:])
        labels = torch.tensor([task.images.samples[index].label for index in chosen])
        logits = plain_logits(place, model, TEMPLATES)[chosen]
        wanted = float(torch.nn.functional.cross_entropy(logits, labels))
        assert found.losses[alias] == pytest.approx(wanted, rel=1e-3)
        assert found.values[alias] == int((logits.argmax(1) == labels).sum()) / len(labels)


def test_checkpointing_changes_no_result(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Activations that are computed twice give the same expert and the same adapter."""
    calls: list[int] = []
    forward = CLIPMLP.forward
    monkeypatch.setattr(CLIPMLP, "forward", lambda *inputs: calls.append(1) or forward(*inputs))
    for adapter in (None, {"rank": 2}):
        counts, weights = [], []
        for recomputes in (False, True):
            calls.clear()
            out = tmp_path / f"{adapter is None}{recomputes}"
            run(place, out, adapter=adapter, training={"gradient_checkpointing": recomputes})
            counts.append(len(calls))
            (file,) = (out / EXPERT).glob("*.safetensors")
            weights.append(load_file(file))
        assert counts[1] > counts[0]
        assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())

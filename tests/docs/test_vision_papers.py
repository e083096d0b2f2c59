"""The vision files of docs/papers: a CLIP ViT-B/32 with eight tasks is planned, and ten trainings are checked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from search_spaces.study.file import parse_study
from search_spaces.study.image_suites import IMAGE_SUITES
from service.engine_machines import VARIABLE
from service.jobs.search.dry_run import check
from tests.docs.test_papers import PAPERS
from tests.vision import clip_tokenizer, tiny_clip
from tests.workers.evaluation.test_image_data_sets import png
from workers.training.finetuning.fleet import parse_pipeline
from workers.training.finetuning.trainer import check as check_training

FILE = PAPERS / "hm3_clip_b32.yaml"
EXPERTS = PAPERS / "mergopt_clip_experts.yaml"
NUM_IMAGES = 200
SPLITS = ("train", "test")
# The settings of the image processor of ViT-B/32, in the form in which early versions of transformers wrote them.
PROCESSOR = {
    "crop_size": 224,
    "do_center_crop": True,
    "do_normalize": True,
    "do_resize": True,
    "feature_extractor_type": "CLIPFeatureExtractor",
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "resample": 3,
    "size": 224,
}
# Parameters of the vision tower of ViT-B/32 with its projection, as transformers counts CLIPVisionModelWithProjection.
PARAMETERS = 87_849_216


def b32() -> dict[str, Any]:
    tower = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
    text = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 8}
    labels = {"id2label": {"0": "LABEL_0", "1": "LABEL_1"}, "label2id": {"LABEL_0": 0, "LABEL_1": 1}}
    both = {"hidden_act": "quick_gelu", "dropout": 0.0, "torch_dtype": None, **labels}
    return {
        "architectures": ["CLIPModel"],
        "model_type": "clip",
        "projection_dim": 512,
        "logit_scale_init_value": 2.6592,
        "vision_config": {**both, **tower, "model_type": "clip_vision_model", "image_size": 224, "patch_size": 32},
        "vision_config_dict": None,
        "text_config": {**both, **text, "model_type": "clip_text_model", "vocab_size": 49408, "bos_token_id": 0},
        "text_config_dict": None,
    }


def model(place: Path, *, is_whole: bool) -> str:
    """A directory with configuration and processor as published, and a small tokenizer, without weights.

    An expert that is a vision tower has no processor.
    """
    config = b32()
    place.mkdir()
    if is_whole:
        clip_tokenizer().save_pretrained(place)
        (place / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    else:
        config = {**config["vision_config"], "architectures": ["CLIPVisionModel"]}
    (place / "config.json").write_text(json.dumps(config))
    return str(place)


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For each data set of the ten tasks, two splits of 200 images in the user's own directory."""
    from datasets import ClassLabel, Dataset, Features, Image

    root = tmp_path / "data"
    for suite in IMAGE_SUITES.values():
        names = suite.classes or tuple(f"class_{number}" for number in range(40))
        rows = {
            "image": [{"bytes": png(number), "path": None} for number in range(NUM_IMAGES)],
            "label": [number % len(names) for number in range(NUM_IMAGES)],
        }
        made = Dataset.from_dict(rows, features=Features({"image": Image(), "label": ClassLabel(names=list(names))}))
        place = root / suite.data
        (place / "data").mkdir(parents=True)
        for split in SPLITS:
            made.to_parquet(place / "data" / f"{split}.parquet")
        if suite.config is not None:  # as the hub's data sets name their configurations
            files = [{"split": split, "path": f"data/{split}.parquet"} for split in SPLITS]
            front = {"configs": [{"config_name": suite.config, "data_files": files}]}
            (place / "README.md").write_text(f"---\n{yaml.safe_dump(front)}---\n")
    monkeypatch.setenv("MERGESEARCH_DATA", str(root))


@pytest.mark.slow
def test_the_eight_tasks_are_planned_without_weights(
    data: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`run --check --metadata-only` accepts the file, and states the tower's size and the number of trials."""
    document = yaml.safe_load(FILE.read_text())
    experts = {alias: model(tmp_path / alias, is_whole=False) for alias in document["models"]["experts"]}
    document["models"] = {"base": model(tmp_path / "base", is_whole=True), "experts": experts}
    monkeypatch.setenv(VARIABLE, "gpus=1,memory=100GiB,gpu_memory=80GB")
    plan = check(parse_study(document, PAPERS), tmp_path / "run", metadata_only=True)
    assert plan.num_parameters == PARAMETERS
    assert plan.trials["search"] == document["search"]["max_trials"]
    assert "weights   not read: sizes are those of the models' configurations" in plan.to_text()


@pytest.mark.slow
def test_the_ten_experts_are_checked(data: None, tmp_path: Path) -> None:
    """Each of MergOPT's ten experts has the data, classes and templates of its task, and passes the check."""
    document = yaml.safe_load(EXPERTS.read_text())
    document["base"] = str(tiny_clip(tmp_path / "base", max_tokens=77))
    pipeline = parse_pipeline(document, PAPERS)
    assert [f"clip_{alias}" for alias in pipeline.experts] == list(IMAGE_SUITES)
    for alias, spec in pipeline.experts.items():
        suite = IMAGE_SUITES[f"clip_{alias}"]
        assert spec.data.images == f"hub:{suite.data}"
        assert (spec.data.split, spec.data.configuration) == ("train", suite.config)
        assert (spec.data.templates, spec.data.classes) == (suite.templates, suite.classes)
        check_training(spec)

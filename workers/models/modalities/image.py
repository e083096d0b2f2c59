"""Images: classifiers with an encoder of layers (ViT, CLIP), an image processor, and a head for each task.

The tensors of the encoder are merged. Heads are not merged: a head maps features to the classes of one task, and a
merge is scored on a task with the head that the task names. Names of tensors are those that transformers stores for a
classifier (`ViTForImageClassification`). An encoder that was stored alone (`ViTModel`) has the same names without a
prefix; the prefix is added.

In a whole CLIP model, the vision tower is merged. A zero-shot head needs three more parts of the model that a task
names as its head: the projection of images, the text tower and the tokenizer. These parts are not merged.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from search_spaces.recipe import Component
from workers.errors import InvalidModel
from workers.models.components import NORM, Layout, TensorPlace, first_few
from workers.models.image_processors import PROCESSOR_FILES, check_processor, processor_differences
from workers.models.modalities.base import Modality
from workers.models.tokenizers import TOKENIZER_FILES

if TYPE_CHECKING:
    from workers.models.computed_tensors import SourceTensor

__all__ = ["CACHE_BYTES", "HEAD", "IMAGE", "PASS_BYTES", "PREFIXES"]

# The name of the encoder within a classifier, by model type.
PREFIXES = {"vit": "vit.", "clip": "vision_model.", "clip_vision_model": "vision_model."}
# Bytes of preprocessed images that an engine keeps: 3,500 images of 224 x 224 in float32.
CACHE_BYTES = 2 * 2**30
# Bytes of activations in a pass of gradients on the CPU; passes on a GPU are as large as its memory allows.
PASS_BYTES = 2 * 2**30
# A classifier's head, and the projection of CLIP to the space of images and texts, which its zero-shot heads use.
HEAD = re.compile(r"^(?:classifier\.(?:weight|bias)|visual_projection\.weight)$")
LAYER = re.compile(r"^(?P<prefix>(?:\w+\.)*?(?:layers?|blocks)\.)(?P<layer>\d+)\.(?P<suffix>.+)$")
# The pooler of an encoder is not read by its classifier, and masked image modelling has a token of its own.
# The text tower of CLIP makes zero-shot heads (`workers.models.zero_shot`) and is not merged.
UNUSED = re.compile(
    r"^(?:\w+\.)?pooler\.|\.mask_token$|(?:^|\.)position_ids$|^(?:text_model|text_projection)\.|^logit_scale$"
)
ATTENTION = re.compile(r"^(?:self_)?attn$|^attention$")
MLP = re.compile(r"^(?:mlp|intermediate|output)$")


# Modules of a layer as transformers names them since version 5, and as files name them; adapters have the former names.
LOADED_LAYER = re.compile(r"^(?P<prefix>vit\.)layers\.(?P<layer>\d+)\.(?P<module>.+)\.(?P<kind>weight|bias)$")
STORED_MODULES = {
    "attention.q_proj": "attention.attention.query",
    "attention.k_proj": "attention.attention.key",
    "attention.v_proj": "attention.attention.value",
    "attention.o_proj": "attention.output.dense",
    "mlp.fc1": "intermediate.dense",
    "mlp.fc2": "output.dense",
}


def _canonical(config: Mapping[str, Any], name: str) -> str | None:
    prefix = PREFIXES[config["model_type"]]
    if UNUSED.search(name):
        return None
    if loaded := LOADED_LAYER.match(name):
        module = STORED_MODULES.get(loaded["module"], loaded["module"])
        return f"{loaded['prefix']}encoder.layer.{loaded['layer']}.{module}.{loaded['kind']}"
    return name if name.startswith(prefix) or HEAD.match(name) else prefix + name


def _layout(config: Mapping[str, Any], names: Iterable[str]) -> Layout:
    """Assign every tensor of an image classifier to a layer and component, to the embedding, or to the task head.

    Raises InvalidModel, which names the tensors that cannot be assigned.
    """
    places: dict[str, TensorPlace] = {}
    heads: list[str] = []
    unknown: list[str] = []
    prefixes: set[str] = set()
    for name in names:
        if HEAD.match(name):
            heads.append(name)
            continue
        place = None
        if match := LAYER.match(name):
            prefixes.add(match["prefix"])
            component = _component(match["suffix"])
            place = TensorPlace(component, int(match["layer"]), match["suffix"]) if component else None
        elif "embeddings." in name:
            place = TensorPlace("embedding", None, name)
        elif any(NORM.search(module) for module in name.split(".")):
            # CLIP has a norm between its embeddings and the first layer.
            place = TensorPlace("embedding" if ".pre_" in name else "head", None, name)
        if place is None:
            unknown.append(name)
        else:
            places[name] = place
    if unknown:
        raise InvalidModel((f"layout: not a known part of an image encoder: {first_few(unknown)}",))
    layers = {place.layer for place in places.values() if place.layer is not None}
    if len(prefixes) != 1 or layers != set(range(len(layers))):
        found = f"{sorted(prefixes)} with layers {sorted(layers)}"
        raise InvalidModel((f"layout: expected encoder layers 0..n-1 under one module, found {found}",))
    return Layout(places, len(layers), prefixes.pop(), task_heads=tuple(sorted(heads)))


def _component(suffix: str) -> Component | None:
    """Component (attention, MLP, norm) of a tensor of an encoder layer, by module names; None if no name indicates it.

    `suffix` is the tensor's name within its layer.
    """
    modules = suffix.split(".")[:-1]
    if any(NORM.search(module) for module in modules):
        return "norm"
    if any(ATTENTION.search(module) for module in modules):
        return "attention"
    return "mlp" if any(MLP.search(module) for module in modules) else None


def _problems(settings: Mapping[str, Any], found: Layout, tensors: Mapping[str, SourceTensor]) -> Iterator[str]:
    size, patch = settings.get("image_size"), settings.get("patch_size")
    if not (isinstance(size, int) and isinstance(patch, int) and patch > 0):
        yield f"image_size is {size!r} and patch_size {patch!r}; expected two numbers, for square images and patches"
    elif size % patch:
        yield f"image_size {size} is not divisible by patch_size {patch}; expected a multiple of {patch}"
    if (channels := settings.get("num_channels", 3)) != 3:
        yield f"num_channels is {channels!r}; expected 3, because images are read in color (RGB)"
    weight = tensors.get("classifier.weight")
    if weight is not None and settings["model_type"] == "clip_vision_model":
        yield "a CLIP model with a classifier; expected a whole CLIP model, or a vision tower, for zero-shot heads"
    labels = settings.get("id2label")
    if weight is not None and isinstance(labels, Mapping) and labels and weight.shape[:1] != (len(labels),):
        number = weight.shape[0] if weight.shape else "no"
        yield f"its head has {number} classes, id2label in config.json names {len(labels)}"
    bias = tensors.get("classifier.bias")
    if (weight is None) != (bias is None):
        there, lacking = ("weight", "bias") if bias is None else ("bias", "weight")
        yield f"its head has classifier.{there} and no classifier.{lacking}; expected both"
    width = settings.get("hidden_size")
    if weight is not None and (len(weight.shape) != 2 or weight.shape[1] != width):
        yield f"its head has weights of shape {list(weight.shape)}; expected [classes, {width}]"
    if weight is not None and bias is not None and bias.shape != weight.shape[:1]:
        yield f"its head has a bias of shape {list(bias.shape)}; expected {list(weight.shape[:1])}"


IMAGE = Modality(
    name="image",
    model_types=frozenset(PREFIXES),
    auto_class="AutoModelForImageClassification",
    files=(*PROCESSOR_FILES, *TOKENIZER_FILES),
    structure=("image_size", "patch_size", "num_channels", "qkv_bias", "layer_norm_eps"),
    has_vocabulary=False,
    runs_on_vllm=False,
    layout=_layout,
    canonical=_canonical,
    problems=_problems,
    differences=processor_differences,
    check_files=check_processor,
    task_key="images",
    tasks="workers.evaluation.image_tasks:IMAGE_TASKS",
    worker="workers.serving.image_worker:ImageWorker",
    training="workers.training.finetuning.images:IMAGE_TRAINING",
    losses="workers.training.image_losses:ImageLosses",
    cache_bytes=CACHE_BYTES,
    pass_bytes=PASS_BYTES,
    has_pictures=True,
    heads=frozenset({"classifier.weight", "classifier.bias"}),
)

"""Unmerged parts of an exported image model: its classification heads, or all parts of CLIP except the vision tower.

The checkpoint of a classifier has the head of one task, which transformers loads; a folder beside it has the heads of
all tasks. The checkpoint of a whole CLIP model has the text tower, the projections and the logit scale of the base.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import save_file

from workers.merging.bank import Bank
from workers.models.checkpoints import Checkpoint
from workers.models.task_heads import (
    BIAS,
    HEADS_DIR,
    WEIGHT,
    TaskHead,
    has_zero_shot_heads,
    head_tensors,
    task_heads,
)

__all__ = ["ExportedHeads", "UnmergedParts", "UnmergedTowers", "unmerged_parts"]

# The keys of a configuration that belong to a head.
OF_HEAD = ("architectures", "id2label", "label2id", "num_labels", "problem_type")

LOADING = """The encoder is merged; heads are those of the sources, unchanged, and each is for one task. The checkpoint
itself has the head of `{main}`, so that `AutoModelForImageClassification.from_pretrained(DIR)` classifies its task. The
heads are in `{folder}/`, with the names of their classes in `{folder}/heads.json`:

    from safetensors.torch import load_file
    head = load_file("DIR/{folder}/NAME.safetensors")
    model.classifier = torch.nn.Linear(*reversed(head["classifier.weight"].shape))
    model.load_state_dict(head, strict=False)
"""


CLIP_LOADING = """The vision tower is merged; the text tower, the projections and the logit scale are those of the
base, so that `CLIPModel.from_pretrained(DIR)` classifies by texts as the base does.
"""


class UnmergedParts(Protocol):
    """Interface of the unmerged parts of an exported image model: tensors, fields of config.json, and further files.

    - `added`: unmerged tensors of the checkpoint itself, keyed by name, in the dtype of the export
    - `config`: the fields of config.json that describe these tensors
    - `loading`: instructions for loading the parts, for the model card
    """

    @property
    def added(self) -> Mapping[str, torch.Tensor]: ...

    @property
    def config(self) -> Mapping[str, Any]: ...

    @property
    def loading(self) -> str: ...

    def write(self, directory: Path) -> None:
        """Write the unmerged parts that are not in the checkpoint itself to files of the export in `directory`."""
        ...


@dataclass(frozen=True)
class UnmergedTowers:
    """The unmerged parts of a whole CLIP model: all tensors except the tensors of the vision tower."""

    added: Mapping[str, torch.Tensor]
    config: Mapping[str, Any] = field(default_factory=dict)
    loading: str = CLIP_LOADING

    def write(self, directory: Path) -> None:
        """Do nothing: all unmerged tensors are in the checkpoint itself."""


@dataclass(frozen=True)
class ExportedHeads:
    """Classification heads of the source models, for an export; the checkpoint itself has the head `main`.

    `main` is the alias of the model with this head. `heads` has the description of each model's head, and `tensors` has
    each head's weight and bias in the dtype of the export, both keyed by alias. `config` has the fields of config.json
    that describe the main head.
    """

    main: str
    heads: Mapping[str, TaskHead]
    tensors: Mapping[str, Mapping[str, torch.Tensor]]
    config: Mapping[str, Any]

    @property
    def added(self) -> Mapping[str, torch.Tensor]:
        return self.tensors[self.main]

    def write(self, directory: Path) -> None:
        """Write each task's classification head to a file of its own in the export `directory`, and a list of them."""
        place = directory / HEADS_DIR
        place.mkdir(exist_ok=True)
        for alias, tensors in self.tensors.items():
            save_file(dict(tensors), place / f"{alias}.safetensors", metadata={"format": "pt"})
        listed = {
            alias: {"num_classes": head.num_classes, "classes": None if head.labels is None else list(head.labels)}
            for alias, head in self.heads.items()
        }
        (place / "heads.json").write_text(json.dumps({"loaded": self.main, "heads": listed}, indent=2) + "\n")

    @property
    def loading(self) -> str:
        """Instructions for loading the heads, for the model card."""
        return LOADING.format(main=self.main, folder=HEADS_DIR)


def unmerged_parts(bank: Bank, dtype: torch.dtype) -> UnmergedParts | None:
    """Unmerged parts of an export, such as classification heads; None for language models and encoders without heads.

    If the base is a whole CLIP model, the parts are all its tensors outside the vision tower. Otherwise the parts are
    the heads of the models in `bank`. The checkpoint itself gets one of them (the main head): the base's or, if the
    base has no head, that of the first expert with a head. Tensors have the dtype `dtype`.
    """
    checkpoints = bank.sources.checkpoints
    base = checkpoints[bank.sources.base_alias]
    if has_zero_shot_heads(base):
        return UnmergedTowers({name: _in(tensor, dtype) for name, tensor in base.unmerged()})
    heads = task_heads(checkpoints)
    if not heads:
        return None
    main = next(iter(heads))
    tensors = {}
    for alias in heads:
        found = head_tensors(checkpoints[alias])
        tensors[alias] = {WEIGHT: _in(found.weight, dtype), BIAS: _in(found.bias, dtype)}
    return ExportedHeads(main, heads, tensors, _of_head(heads[main], checkpoints[main]))


def _of_head(head: TaskHead, checkpoint: Checkpoint) -> dict[str, Any]:
    """The fields of config.json that describe a classification head, in place of those of the base.

    `checkpoint` is the model that the head is from. Fields that its configuration does not state are made from the
    head: an adapter has only its base's configuration, and classes may have no names.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES

    own = checkpoint.config
    names = head.labels or tuple(f"LABEL_{index}" for index in range(head.num_classes))
    fields: dict[str, Any] = {
        "architectures": [MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES[own["model_type"]]],
        "id2label": {str(index): name for index, name in enumerate(names)},
        "label2id": {name: index for index, name in enumerate(names)},
    }
    # An adapter has the configuration of its base, whose class may have no head.
    stated = OF_HEAD if checkpoint.base is None else OF_HEAD[1:]
    return fields | {key: own[key] for key in stated if key in own}


def _in(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return (tensor.to(dtype) if tensor.is_floating_point() else tensor).contiguous()

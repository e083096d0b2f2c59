"""Heads of an exported image classifier: one in the checkpoint itself, and all of them beside it, one for each task."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from workers.merging.bank import Bank
from workers.models.task_heads import BIAS, HEADS_DIR, WEIGHT, TaskHead, head_tensors, task_heads

__all__ = ["ExportedHeads", "exported_heads"]

# What of the configuration belongs to a head.
OF_HEAD = ("architectures", "id2label", "label2id", "num_labels", "problem_type")

LOADING = """The encoder is merged; heads are those of the sources, unchanged, and each is for one task. The checkpoint
itself has the head of `{main}`, so that `AutoModelForImageClassification.from_pretrained(DIR)` classifies its task. The
heads are in `{folder}/`, with the names of their classes in `{folder}/heads.json`:

    from safetensors.torch import load_file
    head = load_file("DIR/{folder}/NAME.safetensors")
    model.classifier = torch.nn.Linear(*reversed(head["classifier.weight"].shape))
    model.load_state_dict(head, strict=False)
"""


@dataclass(frozen=True)
class ExportedHeads:
    """The heads of the models of a bank, for an export; `main` is the alias of the one in the checkpoint itself.

    `tensors` are weight and bias of each head by alias, in the dtype of the export, and `config` has the fields of the
    main head's model that describe the head.
    """

    main: str
    heads: Mapping[str, TaskHead]
    tensors: Mapping[str, Mapping[str, torch.Tensor]]
    config: Mapping[str, Any]

    def write(self, directory: Path) -> None:
        """Write a file for each head, and a list of the heads, to the export in `directory`."""
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
        """How the heads are loaded, for the model card."""
        return LOADING.format(main=self.main, folder=HEADS_DIR)


def exported_heads(bank: Bank, dtype: torch.dtype) -> ExportedHeads | None:
    """The heads of the models in `bank`; None if no model has one, as language models.

    The main head is the base's or, if the base has none, that of the first expert with one. Tensors are in `dtype`.
    """
    checkpoints = bank.sources.checkpoints
    heads = task_heads(checkpoints)
    if not heads:
        return None
    main = next(iter(heads))
    tensors = {}
    for alias in heads:
        found = head_tensors(checkpoints[alias])
        tensors[alias] = {WEIGHT: found.weight.to(dtype).contiguous(), BIAS: found.bias.to(dtype).contiguous()}
    own = checkpoints[main].config
    return ExportedHeads(main, heads, tensors, {key: own[key] for key in OF_HEAD if key in own})

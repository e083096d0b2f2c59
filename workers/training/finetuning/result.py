"""Writing of the trained expert as a model directory: safetensors, tokenizer, model card, training record."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import yaml

from workers.directories import appearing
from workers.models.checkpoints import open_checkpoint
from workers.models.fingerprints import fingerprint
from workers.models.merged_files import GENERATION_CONFIG
from workers.models.remote import commit_of, id_of, locate
from workers.training.finetuning.history import LINEARIZED
from workers.training.finetuning.modality import training_of
from workers.training.finetuning.spec import BASE_HEAD, NEW_HEAD, FinetuneSpec

__all__ = ["DATA", "TRAINING_FILE", "changed_source", "save_model", "sources_of", "write_expert"]

# The file, beside the weights, that records how the expert was trained.
TRAINING_FILE = "finetune.json"

# Keys of the hashes of a training's inputs.
BASE, DATA, HEAD = "base", "data", "head"

# Size of the files into which large models are divided, each of which is in memory as a whole while it is written.
MAX_FILE = "5GB"


def write_expert(
    spec: FinetuneSpec,
    base: Path,
    model: Any,
    out: Path,
    *,
    sources: Mapping[str, str],
    facts: Mapping[str, Any],
    values: Mapping[str, float],
    weights: Mapping[str, torch.Tensor] | None = None,
) -> Path:
    """Write a trained model, or its adapter, to the new directory `out`, and return `out`.

    `spec` is the specification of the training, and `base` is the directory of the base model. An existing directory is
    not changed. `sources` are the hashes of the training's inputs (function `sources_of`). `facts` are stored in
    TRAINING_FILE and shown in the model card; `values` are the values of the last evaluation. `weights` are the weights
    to write, keyed by the names of the parameters in `model`. If `weights` is None, the weights of `model` are rounded
    to the expert's dtype in place and written.
    """
    if out.exists():
        return out
    with appearing(out, "expert") as place:
        dtype = getattr(torch, spec.dtype)
        if spec.adapter is None:
            training_of(base).save(base, model, place, dtype=dtype, weights=weights)
            for name in (*open_checkpoint(base).modality.files, GENERATION_CONFIG):
                if (base / name).is_file():
                    shutil.copyfile(base / name, place / name)
        else:
            model.save_pretrained(place, state_dict=None if weights is None else dict(weights))
        document = {
            "specification": spec.canonical(),
            "sources": dict(sources),
            **facts,
            "version": version("mergesearch"),
        }
        (place / TRAINING_FILE).write_text(json.dumps(document, indent=2) + "\n")
        (place / "README.md").write_text(_card(spec, base, facts=facts, values=values))
    return out


def save_model(
    model: Any, place: Path, *, dtype: torch.dtype, weights: Mapping[str, torch.Tensor] | None = None
) -> None:
    """Write the transformers model `model` to the directory `place`, in `dtype`, without a generation configuration.

    `weights` are the weights to write, keyed by the names of `model`. If `weights` is None, the weights of `model` are
    rounded to `dtype` in place and written. The generation configuration of `model` is replaced by transformers'
    defaults, because transformers loads generation configurations that it refuses to write.
    """
    from transformers import GenerationConfig

    written = model.to(dtype) if weights is None else _without_weights(model, dtype)
    if written.can_generate():
        written.generation_config = GenerationConfig()
    if weights is None:
        written.save_pretrained(place)
    else:
        written.save_pretrained(place, state_dict=dict(weights), max_shard_size=MAX_FILE)
    (place / GENERATION_CONFIG).unlink(missing_ok=True)


def _without_weights(model: Any, dtype: torch.dtype) -> Any:
    """Make a transformers model with the configuration of `model`, in `dtype`, whose weights take no memory."""
    from accelerate import init_empty_weights

    with init_empty_weights():
        empty = type(model)._from_config(model.config, dtype=dtype)
    empty.tie_weights()
    return empty


def sources_of(spec: FinetuneSpec, base: Path) -> dict[str, str]:
    """Hashes of the inputs of the training `spec`, each under one of three keys.

    - BASE: the fingerprint (hash of the files) of the base model in the directory `base`, as studies compute it
    - DATA: the digest (hex) of the training data; missing if the data are not in a file or folder
    - HEAD: the fingerprint of the model whose head an image classifier was trained with; missing if that is the base,
      or if the head is new
    """
    sources = {BASE: fingerprint(open_checkpoint(base))}
    if (digest := training_of(base).data_digest(spec)) is not None:
        sources[DATA] = digest
    if spec.data.head not in (BASE_HEAD, NEW_HEAD):
        sources[HEAD] = fingerprint(open_checkpoint(locate(spec.data.head)))
    return sources


def changed_source(spec: FinetuneSpec, *, before: Mapping[str, str], now: Mapping[str, str]) -> str | None:
    """Message about an input of the training `spec` whose hash has changed; None if no input has changed.

    `before` are the hashes at the start of the training, and `now` are the present ones (function `sources_of`). Hashes
    that only one of the two has are not compared: checkpoints of earlier versions have none.
    """
    inputs = {BASE: ("base", spec.base), DATA: ("data", spec.data.file or spec.data.images)}
    inputs[HEAD] = ("data.head", spec.data.head)
    for name, (option, place) in inputs.items():
        if name in before and name in now and before[name] != now[name]:
            return (
                f"{option}: {place} has changed since the training began; restore it to continue the training, or give "
                "another directory to begin anew"
            )
    return None


def _card(spec: FinetuneSpec, base: Path, *, facts: Mapping[str, Any], values: Mapping[str, float]) -> str:
    name = id_of(base)
    front: dict[str, Any] = {"library_name": "transformers", "tags": ["mergesearch", spec.method.kind]}
    if name:
        front["base_model"] = name
    origin = f"{name}@{commit_of(base)}" if name else base.name
    place = spec.data.file or spec.data.images
    data = (place and Path(place).name) or spec.data.dataset
    kind = "LoRA adapter" if spec.adapter is not None else "model"
    lines = [
        f"---\n{yaml.safe_dump(front, sort_keys=False)}---",
        f"# {spec.name}",
        f"A {kind} fine-tuned from {origin} on {data} by mergesearch, with the optimizer {spec.method.kind}: "
        f"{facts['steps']} updates of {spec.training.batch} rows, learning rate {spec.training.learning_rate:g}, seed "
        f"{spec.seed}. The last loss was {facts.get('weights_loss', facts['loss']):.4f}.",
    ]
    if values and spec.evaluation is not None:
        rows = "\n".join(f"| {objective} | {value:.4f} |" for objective, value in values.items())
        lines.append(
            f"## Evaluation\n\nOn up to {spec.evaluation.samples} samples each, in the course of training.\n\n"
            f"| objective | value |\n| --- | --- |\n{rows}"
        )
    if linearized := facts.get(LINEARIZED):
        lines.append(
            "What was trained is the linearization of the base, not the model with the exported weights: the former "
            f"has {', '.join(f'{objective} {value:.4f}' for objective, value in linearized.items())}."
        )
    lines.append(f"`{TRAINING_FILE}` has the whole specification; `mergesearch finetune` repeats it.")
    return "\n\n".join(lines) + "\n"

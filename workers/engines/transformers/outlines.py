"""Outlines of models: the names and shapes of their tensors, computed from their configurations without weights.

An outline is a metadata-only snapshot (module `remote.snapshots`), so that every check of sizes works on it. The
weights of an outline cannot be downloaded.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from pathlib import Path
from typing import Any

from workers.errors import InvalidModel
from workers.models.adapters import is_adapter
from workers.models.config import MERGED_TOWERS
from workers.models.headers import DTYPE_BYTES
from workers.models.modalities import modality_of
from workers.models.remote import HUB_ID, is_metadata_only
from workers.models.remote.errors import reason_of
from workers.models.remote.model_files import SMALL_FILES
from workers.models.remote.snapshots import SnapshotRecord, make_snapshot
from workers.object_store import is_object_url

__all__ = ["NUMBERS_OF_EXPERTS", "linear_layers", "outline"]

CONFIG, WEIGHTS = "config.json", "model.safetensors"

# The keys of configurations under which mixtures have their number of experts.
NUMBERS_OF_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")

# The dtypes of weights, by the name that configurations have for them.
DTYPES = {"torch.float32": "F32", "torch.float16": "F16", "torch.bfloat16": "BF16"}


def outline(model: str) -> str:
    """Make a directory that describes a model without its weights: small files, and names and shapes of tensors.

    `model` is a directory or a hub id. The names and shapes follow from the model's configuration, and are stored as
    the header of a safetensors file. For a hub model, only small files are downloaded, or taken from the hub client's
    cache. For adapters, models in object stores, and models whose weights are on this machine, no directory is made and
    `model` itself is returned. Raises InvalidModel if the configuration is missing, or is not the configuration of a
    causal language model or image model that transformers knows.
    """
    if is_object_url(model):
        return model
    directory = Path(model) if os.path.isdir(model) else _small_files_of(model)
    if is_adapter(directory) or is_metadata_only(directory) or any(directory.glob("*.safetensors")):
        return model
    if not (directory / CONFIG).is_file():
        raise InvalidModel((f"{model}: no {CONFIG}, which determines its size",))
    header = json.dumps(_tensors(directory, model)).encode()
    header = len(header).to_bytes(8, "little") + header
    size = len(header) + max(end for _, end in (each["data_offsets"] for each in json.loads(header[8:]).values()))
    content = hashlib.sha256(header + (directory / CONFIG).read_bytes() + str(model).encode()).hexdigest()
    record = SnapshotRecord(
        name=f"outlines/{directory.name if os.path.isdir(model) else model.replace('/', '--')}",
        revision="main",
        commit=content[:40],
        small_files=tuple(file for file in SMALL_FILES if (directory / file).is_file() and "index" not in file),
        sizes={WEIGHTS: size},
        hashes={WEIGHTS: content},
        is_outline=True,
    )
    return str(make_snapshot(record, directory, (), lambda _, begin, end: header[begin:end]))


def linear_layers(checkpoint: str | Path) -> dict[str, tuple[int, int]]:
    """Shapes (outputs, inputs) of the weights of a model's linear layers, keyed by the name of the module.

    `checkpoint` is the model's directory, of which only the configuration is read. The output head is left out. Raises
    InvalidModel if the model has no linear layers, or if the model is a mixture of experts, whose experts are not
    linear layers.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(checkpoint, trust_remote_code=False)
    if max(int(getattr(config, name, None) or 0) for name in NUMBERS_OF_EXPERTS):
        raise InvalidModel((f"{checkpoint}: a mixture of experts; only models without experts are quantised",))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    head = model.get_output_embeddings()
    found = {
        name: (module.out_features, module.in_features)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and module is not head
    }
    if not found:
        raise InvalidModel((f"{checkpoint}: models of type {config.model_type!r} have no linear layers",))
    return found


def _small_files_of(model: str) -> Path:
    from huggingface_hub import snapshot_download

    parts = HUB_ID.fullmatch(model)
    if parts is None:
        raise InvalidModel((f"{model}: is neither a directory nor a hub id",))
    name, revision = parts[1], parts[2] or "main"
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=[*SMALL_FILES]))
    except Exception as error:  # raised by the hub's client, by its HTTP library, or by the system
        raise InvalidModel(
            (f"{model}: its configuration cannot be loaded here: {reason_of(error, name, revision)}",)
        ) from error


def _tensors(directory: Path, model: str) -> dict[str, Any]:
    """Build a safetensors header (dtype, shape and offsets of each tensor) from a model's configuration alone.

    `directory` has the model's config.json. `model` names the model in messages.
    """
    import torch
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(directory)
        is_tower = config.model_type in (*MERGED_TOWERS, *(tower for _, tower in MERGED_TOWERS.values()))
        loader = "AutoModel" if is_tower else modality_of(config.to_dict()).auto_class
        with torch.device("meta"):
            found = getattr(transformers, loader).from_config(config)
    except Exception as error:  # transformers raises many kinds for configurations that it does not know
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise InvalidModel((f"{model}: its size does not follow from {CONFIG}: {reason}",)) from error
    tied = {"lm_head.weight"} if getattr(config, "tie_word_embeddings", False) else set()
    dtype = DTYPES.get(str(config.dtype), "BF16")
    header, offset = {}, 0
    for name, tensor in found.state_dict().items():
        if name not in tied:
            end = offset + math.prod(tensor.shape) * DTYPE_BYTES[dtype]
            header[name] = {"dtype": dtype, "shape": [*tensor.shape], "data_offsets": [offset, end]}
            offset = end
    return header

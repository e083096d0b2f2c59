"""A Hugging Face checkpoint on disk: its configuration, and its tensors by name.

This module checks the configuration and the safetensors headers before it reads anything large. Tensors are mapped into
memory one at a time, when they are requested. Pickles are never loaded, and no code of a model is ever run.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workers.errors import InvalidModel
from workers.models.adapters import AdaptedBase, is_adapter, read_adapter
from workers.models.components import Layout
from workers.models.computed_tensors import SourceTensor, Stacked
from workers.models.config import MERGED_TOWERS, in_common_names
from workers.models.headers import DTYPE_BYTES, TensorInfo, read_headers
from workers.models.modalities import MODALITIES, Modality, modality_of
from workers.models.modalities.text import BY_CONFIG
from workers.models.remote import is_metadata_only, locate, named
from workers.models.tokenizers import TOKENIZER_FILES
from workers.models.vocabulary import NO_OPTIONS, TokenAlignment, Vocabulary, VocabularyOptions, align, token_ids

if TYPE_CHECKING:
    import torch

__all__ = ["BY_CONFIG", "Checkpoint", "aligned", "open_checkpoint", "read_checkpoint", "read_expert", "stored_bytes"]

# Configuration fields that describe the classes of a head.
OF_CLASSES = ("id2label", "label2id", "num_labels")
# Configuration fields that hold ids of tokens.
SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk whose configuration and safetensors headers were read.

    If the checkpoint is an adapter, `base` is the model that it changes, and `tensors` are the base's tensors after the
    change. `files` are the checkpoint's own safetensors files, in order of name. Tensors that the method `read` returns
    must not be written to; stored tensors are mapped into memory and keep their dtype.
    """

    directory: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, SourceTensor]
    files: tuple[Path, ...]
    base: Checkpoint | None = None
    _open: dict[Path, Any] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def settings(self) -> Mapping[str, Any]:
        """Configuration with the same key names for every model type, and with defaults filled in."""
        return in_common_names(self.config)

    @cached_property
    def modality(self) -> Modality:
        """The kind of data that the model reads, such as text."""
        return modality_of(self.config)

    @cached_property
    def layout(self) -> Layout:
        return self.modality.layout(self.settings, self.tensors)

    @property
    def tokenizer_dir(self) -> Path:
        """Directory of the checkpoint's tokenizer; an adapter without a tokenizer has the tokenizer of its base."""
        has_own = any((self.directory / name).is_file() for name in TOKENIZER_FILES)
        return self.directory if has_own or self.base is None else self.base.directory

    def tensor(self, name: str) -> SourceTensor | None:
        """Tensor of the checkpoint, or stacked MoE tensor, with the given name; None if there is no such tensor.

        A stacked MoE tensor joins one matrix of each expert of a layer's mixture of experts (property `Layout.stacks`).
        """
        stack = None if name in self.tensors else self.layout.stacks.get(name)
        if stack is None:
            return self.tensors.get(name)
        return Stacked(tuple(tuple(self.tensors[part] for part in parts) for parts in stack))

    def read(self, name: str) -> torch.Tensor:
        """Values of the tensor `name`. Raises InvalidModel if the checkpoint has no such tensor."""
        tensor = self.tensors.get(name)
        if tensor is None:
            raise InvalidModel((f"{self.directory}: no tensor {name!r}; it has {len(self.tensors)} others",))
        return tensor.value(self.read_stored)

    def read_stored(self, info: TensorInfo) -> torch.Tensor:
        """Map the stored tensor `info` from its file into memory, in its own dtype.

        Raises InvalidModel if the model's weights are not on this machine.
        """
        from safetensors import safe_open

        if info.file not in self._open:
            if is_metadata_only(info.file.parent):
                raise InvalidModel((f"{named(str(info.file))}: its weights are not on this machine",))
            self._open[info.file] = safe_open(info.file, framework="pt")
        tensor: torch.Tensor = self._open[info.file].get_tensor(info.name)
        return tensor

    def unmerged(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor) for the stored tensors that are not merged, such as those of CLIP's text tower.

        Tensors of task heads are included. Buffers of whole numbers, which models compute themselves, are left out.
        Raises InvalidModel if the model's weights are not on this machine.
        """
        for name, info in self.unmerged_tensors().items():
            yield name, self.read_stored(info)

    def unmerged_tensors(self) -> dict[str, TensorInfo]:
        """Description of each stored tensor that is not merged, keyed by its name; `unmerged` reads their values."""
        found = {}
        for name, info in read_headers(self.directory, [], is_needed=lambda _: False).items():
            is_merged = self.modality.canonical(self.config, name) in self.layout.places
            if info.dtype in DTYPE_BYTES and not is_merged:
                found[name] = info
        return found

    @cached_property
    def is_here(self) -> bool:
        """Whether all weights of the checkpoint (and of an adapter's base) are on this machine.

        The result is False if the directory is a metadata-only snapshot, which has a remote model's files without the
        contents of the weights.
        """
        return not is_metadata_only(self.directory) and (self.base is None or self.base.is_here)

    @cached_property
    def stored(self) -> frozenset[TensorInfo]:
        """All stored tensors from which the checkpoint's tensors are computed.

        Some of the files may belong to other models: to the base of an adapter, or to models whose embedding rows are
        used.
        """
        return frozenset(info for tensor in self.tensors.values() for info in tensor.stored())

    @property
    def own(self) -> frozenset[TensorInfo]:
        """Stored tensors that are in the checkpoint's own directory.

        The values of the checkpoint's tensors may also depend on stored tensors elsewhere: in the model that an adapter
        changes, or in models of which embedding rows are used.
        """
        return frozenset(info for info in self.stored if info.file.parent == self.directory)


def open_checkpoint(directory: str | Path) -> Checkpoint:
    """Open a checkpoint by reading its configuration and every safetensors header.

    `directory` may also be a hub id or the URL of a folder in an object store. Raises InvalidModel with all problems.
    """
    return read_checkpoint(locate(directory))


def read_checkpoint(directory: Path) -> Checkpoint:
    """Open the whole model in a directory that the function `remote.locations.locate` returned.

    Raises InvalidModel with all problems.
    """
    problems: list[str] = []
    config = _read_config(directory, problems)
    canonical = modality_of(config).canonical
    stored = read_headers(directory, problems, is_needed=lambda name: canonical(config, name) is not None)
    tensors = {name: info for key, info in stored.items() if (name := canonical(config, key)) is not None}
    # Tensors that are not merged, such as a text tower's, decide scores too.
    files = tuple(sorted({info.file for info in stored.values()}))
    checkpoint = Checkpoint(directory, config, tensors, files)
    if not problems:
        problems += _checkpoint_problems(checkpoint)
    if problems:
        raise InvalidModel(tuple(map(named, problems)))
    return checkpoint


def read_expert(directory: Path, base: Checkpoint | None) -> Checkpoint | None:
    """Open the expert in `directory`: a whole model, or an adapter that changes `base`.

    `base` is None if the base could not be opened. In this case the files of an adapter are checked, and None is
    returned. Raises InvalidModel with all problems.
    """
    if not is_adapter(directory):
        return read_checkpoint(directory)
    problems: list[str] = []
    adapted = AdaptedBase(base.directory, base.settings, base.tensors, base.layout) if base else None
    adapter = read_adapter(directory, adapted, problems)
    if problems:
        raise InvalidModel(tuple(problems))
    if base is None or adapter is None:
        return None
    # The base's names of classes are not those of another head.
    config = {key: value for key, value in base.config.items() if not adapter.has_head or key not in OF_CLASSES}
    checkpoint = Checkpoint(directory, config, adapter.tensors, tuple(sorted(adapter.files)), base)
    if adapter.has_head and (problems := [*_checkpoint_problems(checkpoint)]):
        raise InvalidModel(tuple(problems))
    return checkpoint


def aligned(
    checkpoints: Mapping[str, Checkpoint], tokenizer: str, options: VocabularyOptions = NO_OPTIONS
) -> tuple[dict[str, Checkpoint], TokenAlignment]:
    """Give all checkpoints one common vocabulary in their embeddings and output heads.

    `checkpoints` are keyed by alias, the base first. `tokenizer` selects the vocabulary. BASE selects the base's
    vocabulary, UNION selects the base's vocabulary with the tokens that other models added, and an alias selects the
    vocabulary of the model with this alias. `options` are further options, such as the rows of single tokens. Raises
    InvalidModel if the vocabularies cannot be aligned.

    Returns the aligned checkpoints, and the tensors that the alignment changes. The docstring of the function
    `vocabulary.align` describes how rows are aligned. The configuration of the aligned base has the size of the common
    vocabulary. If `tokenizer` is the alias of an expert, this configuration also has the expert's special tokens.
    """
    if not next(iter(checkpoints.values())).modality.has_vocabulary:
        return dict(checkpoints), TokenAlignment(0, {})
    models = {
        alias: Vocabulary(
            checkpoint.directory,
            {name: checkpoint.tensors[name] for name in checkpoint.layout.places},
            token_ids(checkpoint.tokenizer_dir),
        )
        for alias, checkpoint in checkpoints.items()
    }
    alignment = align(models, tokenizer, options)
    views = dict(checkpoints)
    for alias, view in checkpoints.items() if alignment.tensors else ():
        config = {**view.config, "vocab_size": alignment.num_rows}
        tensors = {**models[alias].tensors, **alignment.tensors.get(alias, {})}
        views[alias] = replace(view, config=config, tensors=tensors)
    base = next(iter(views))
    if tokenizer in checkpoints and tokenizer != base:
        owner = checkpoints[tokenizer].config
        special = {name: owner[name] for name in SPECIAL_TOKENS if name in owner}
        views[base] = replace(views[base], config={**views[base].config, **special})
    return views, alignment


def stored_bytes(checkpoints: Iterable[Checkpoint]) -> int:
    """Total bytes of the stored tensors of `checkpoints`; a tensor that several checkpoints share is included once."""
    return sum(info.num_bytes for info in frozenset().union(*(checkpoint.stored for checkpoint in checkpoints)))


def _read_config(path: Path, problems: list[str]) -> dict[str, Any]:
    file = path / "config.json"
    try:
        config = json.loads(file.read_bytes())
    except FileNotFoundError:
        problems.append(f"{path}: no config.json; expected a Hugging Face model directory")
        return {}
    except RecursionError:
        problems.append(f"{file}: is nested too deeply")
        return {}
    except (OSError, ValueError) as error:
        problems.append(f"{file}: cannot be read as JSON: {error}")
        return {}
    if not isinstance(config, dict):
        problems.append(f"{file}: holds a {type(config).__name__}; expected an object")
        return {}
    if quantised := config.get("quantization_config"):
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
        problems.append(f"{file}: the model is quantised ({method}); merge the float32, float16 or bfloat16 original")
    has_towers = config.get("vision_config") is not None and config.get("model_type") not in MERGED_TOWERS
    if config.get("is_encoder_decoder") or has_towers:
        kind = "an encoder-decoder" if config.get("is_encoder_decoder") else "a vision-language"
        problems.append(f"{file}: {kind} model ({config.get('model_type')}); {_merged_types()}")
    elif (modality := _other_modality(config)) is not None:
        message = f"{file}: a model of the modality {modality.name} of type {config.get('model_type')!r}"
        problems.append(f"{message}; {_merged_types()}")
    else:
        try:
            in_common_names(config)
        except InvalidModel as error:
            problems += [f"{path}: {problem}" for problem in error.problems]
    return config


def _other_modality(config: Mapping[str, Any]) -> Modality | None:
    """The modality of a model whose class belongs to a modality that does not have its type; None for other models."""
    stated, classes = modality_of(config), config.get("architectures")
    for modality in MODALITIES.values():
        ending = modality.auto_class.removeprefix("AutoModel")
        is_class = isinstance(classes, list) and any(str(name).endswith(ending) for name in classes)
        if is_class and modality.model_types and modality is not stated:
            return modality
    return None


def _merged_types() -> str:
    """End of a message that says which models are merged."""
    types = (
        f"those of the modality {modality.name} of the types {', '.join(sorted(modality.model_types))}"
        for modality in MODALITIES.values()
        if modality.model_types
    )
    return f"decoder-only text models are merged, and {', '.join(types)}"


def _checkpoint_problems(checkpoint: Checkpoint) -> Iterator[str]:
    path, settings = checkpoint.directory, checkpoint.settings
    try:
        found = checkpoint.layout
    except InvalidModel as error:
        yield from (f"{path}: {problem}" for problem in error.problems)
        return
    stated = settings.get("num_hidden_layers", found.num_layers)
    if stated != found.num_layers:
        yield f"{path}: num_hidden_layers is {stated} {BY_CONFIG}, its tensors are of {found.num_layers} layers"
    yield from (f"{path}: {problem}" for problem in checkpoint.modality.problems(settings, found, checkpoint.tensors))

"""Hugging Face checkpoints on disk: what they hold, whether a family of them can be merged, and who they are.

Everything that configurations and safetensors headers tell is checked here, before anything large is read; tensors
are mapped, one at a time, only when asked for. Pickles are never loaded and no code of a model is ever run. What to do
with the tensors is not known here.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workers.errors import InvalidModel
from workers.findings import remembered
from workers.headers import TensorInfo, read_headers
from workers.layout import Layout, is_output_head, layout, some_of
from workers.types import Family, ModelSource

if TYPE_CHECKING:
    import torch

__all__ = [
    "TOKENIZER_FILES",
    "Checkpoint",
    "check_family",
    "check_tokenizer",
    "content_problems",
    "fingerprint",
    "locate",
    "open_checkpoint",
    "open_family",
]

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)

EMBEDDING_NAMES = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight")

# Configuration fields that must agree for layers of two models to be interchangeable.
STRUCTURE = (
    "architectures",
    "model_type",
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "vocab_size",
)

# A report lists this many shapes of one model that differ, then counts the rest.
MAX_SHAPES = 5

DIRECTORY = "a directory with config.json, tokenizer files and *.safetensors"

HUB_ID = re.compile(r"\w[\w.-]*(?:/\w[\w.-]*)?")

# What is fetched of a hub model: never pickles, never code.
HUB_FILES = ("*.safetensors", "*.safetensors.index.json", "config.json", "generation_config.json", *TOKENIZER_FILES)

# What tokenizers are likely to differ in.
PROBES = (
    "Hello world",
    " two  spaces and a tab\t.",
    "line one\nline two\n\n",
    "12+34=46",
    "caf\u00e9 \u4f60\u597d \U0001f642",
)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose headers were read. `read` maps a tensor; it is read-only and keeps its stored dtype."""

    directory: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    _open: dict[Path, Any] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def layout(self) -> Layout:
        return layout(self.config, self.tensors)

    def read(self, name: str) -> torch.Tensor:
        """The tensor `name`, mapped from its file. Raises InvalidModel if there is none."""
        from safetensors import safe_open

        info = self.tensors.get(name)
        if info is None:
            raise InvalidModel((f"{self.directory}: no tensor {name!r}; it has {len(self.tensors)} others",))
        if info.file not in self._open:
            self._open[info.file] = safe_open(info.file, framework="pt")
        tensor: torch.Tensor = self._open[info.file].get_tensor(name)
        return tensor

    @property
    def files(self) -> tuple[Path, ...]:
        """The safetensors files in use, in order of name."""
        return tuple(sorted({info.file for info in self.tensors.values()}))


def locate(model: str | Path) -> Path:
    """The directory of `model`: itself, or where the Hugging Face hub's cache has the model of that id.

    A hub model that is not in the cache, or is there in part, is fetched where the hub can be reached: configuration,
    tokenizer and safetensors only. Raises InvalidModel.
    """
    path = Path(model)
    if path.is_dir():
        return path
    if path.exists():
        raise InvalidModel((f"{path}: is a file; expected {DIRECTORY}",))
    if not HUB_ID.fullmatch(str(model)):
        raise InvalidModel((f"{path}: does not exist; expected {DIRECTORY}",))
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(str(model), allow_patterns=[*HUB_FILES]))
    except Exception as error:  # of the hub's client, of its HTTP library, and of the system
        if isinstance(error, LocalEntryNotFoundError):
            reason = "it is not wholly in the hub's cache, and the hub cannot be reached"
        elif isinstance(error, RepositoryNotFoundError):
            reason = "the hub has none of this name, or not for you"
        else:
            reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise InvalidModel(
            (
                f"{model}: neither a directory nor a hub model that can be had here: {reason}; expected {DIRECTORY}, "
                "or the id of a hub model that is in the hub's cache or can be fetched",
            )
        ) from error


def open_checkpoint(directory: str | Path) -> Checkpoint:
    """Read the configuration and every safetensors header of `directory`, which may be a hub id as for `locate`.

    Raises InvalidModel with all problems."""
    path = locate(directory)
    problems: list[str] = []
    config = _read_config(path, problems)
    tensors = read_headers(path, problems)
    if not problems:
        problems += _checkpoint_problems(path, config, tensors)
    if problems:
        raise InvalidModel(tuple(problems))
    return Checkpoint(path, config, tensors)


def check_family(base_dir: str | Path, experts: Mapping[str, str | Path]) -> tuple[Checkpoint, ...]:
    """The base's checkpoint and those of all `experts`, which can be merged with it.

    Reads configurations and headers only. Raises InvalidModel with every problem of every model.
    """
    problems: list[str] = []
    opened: list[Checkpoint] = []
    if not experts:
        problems.append("models.experts: there are none; name at least one model fine-tuned from the base")
    base: Checkpoint | None = None
    try:
        base = open_checkpoint(base_dir)
        opened.append(base)
    except InvalidModel as error:
        problems += [f"base model: {problem}" for problem in error.problems]
    for alias, directory in experts.items():
        try:
            expert = open_checkpoint(directory)
        except InvalidModel as error:
            problems += [f"expert {alias!r}: {problem}" for problem in error.problems]
        else:
            opened.append(expert)
            problems += [f"expert {alias!r}: {problem}" for problem in _differences(base, expert)] if base else []
    if problems:
        raise InvalidModel(tuple(problems))
    return tuple(opened)


def open_family(
    base_dir: str | Path,
    experts: Mapping[str, str | Path],
    *,
    base_alias: str = "base",
    cache: str | Path | None = None,
) -> Family:
    """The checked family with absolute directories and content fingerprints. Raises InvalidModel."""
    checkpoints = check_family(base_dir, experts)
    base, *others = (
        ModelSource(alias, str(directory := checkpoint.directory.resolve()), fingerprint(directory, cache=cache))
        for alias, checkpoint in zip((base_alias, *experts), checkpoints, strict=True)
    )
    return Family(base=base, experts=tuple(others))


def fingerprint(directory: str | Path, *, cache: str | Path | None = None) -> str:
    """sha256 (hex) of the names and contents of what makes the model: its safetensors files, config.json,
    generation_config.json and tokenizer files; not of where it lies, nor of other files beside them.

    Hashing a large model takes minutes, so each file's hash is remembered under `cache` (see `findings.cache_dir`) by
    path, size and modification time. Raises InvalidModel.
    """
    checkpoint = open_checkpoint(directory)
    others = ("config.json", "generation_config.json", *TOKENIZER_FILES)
    files = [*checkpoint.files, *(checkpoint.directory / name for name in others)]
    hashes = sorted((file.name, _file_hash(file, cache)) for file in files if file.is_file())
    return hashlib.sha256(json.dumps(hashes).encode()).hexdigest()


def content_problems(checkpoint: Checkpoint, content: str, *, cache: str | Path | None = None) -> tuple[str, ...]:
    """What only the weights tell: tensors with NaN or infinity, a tied head that is not the embedding.

    Reads all of them, once for each `content`, the model's fingerprint (`cache` as in `findings.cache_dir`).
    """
    key = f"content/1 {content}"
    found = remembered(key, cache=cache)
    if found is None:
        found = "\n".join(_bad_tensors(checkpoint))
        remembered(key, found, cache=cache)
    return tuple(f"{checkpoint.directory}: {line}" for line in found.splitlines())


def check_tokenizer(directory: str | Path) -> None:
    """Raise InvalidModel unless transformers' tokenizer of `directory` encodes and decodes as its tokenizer.json says.

    For some architectures transformers builds its own class, whatever the folder says, and a tokenizer of another
    kind silently loses characters. Folders without tokenizer.json are only loaded.
    """
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    path = Path(directory)
    if not any((path / name).is_file() for name in TOKENIZER_FILES):
        raise InvalidModel((f"{path}: no tokenizer; expected one of {', '.join(TOKENIZER_FILES)}",))
    try:
        loaded = AutoTokenizer.from_pretrained(str(path), trust_remote_code=False)
    except Exception as error:  # bare ones too: the tokenizers library raises them for files it cannot read
        raise InvalidModel((f"{path}: its tokenizer cannot be loaded: {error}",)) from error
    file = path / "tokenizer.json"
    if not file.is_file():
        return
    stated = Tokenizer.from_file(str(file))
    who, advice = f"transformers ({type(loaded).__name__})", "set model_type or the tokenizer files so that they agree"
    for probe in PROBES:
        got = loaded(probe, add_special_tokens=False)["input_ids"]
        ids = stated.encode(probe, add_special_tokens=False).ids
        if got != ids:
            raise InvalidModel(
                (f"{path}: {who} encodes {probe!r} as {got}, tokenizer.json as {ids}; expected the same ids: {advice}",)
            )
        told = loaded.decode(ids, clean_up_tokenization_spaces=False)
        text = stated.decode(ids, skip_special_tokens=False)
        if told != text:
            raise InvalidModel(
                (
                    f"{path}: {who} decodes {ids} as {told!r}, tokenizer.json as {text!r}; expected the same text: "
                    f"{advice}",
                )
            )


def _bad_tensors(checkpoint: Checkpoint) -> Iterator[str]:
    import torch

    for name in checkpoint.tensors:
        tensor = checkpoint.read(name)
        if tensor.numel() and not all(torch.isfinite(end) for end in torch.aminmax(tensor)):
            num_bad = tensor.numel() - int(torch.isfinite(tensor).sum())
            yield f"tensor {name!r} holds {num_bad} values that are NaN or infinite; expected finite weights"
    head = checkpoint.layout.tied_head
    embeddings = [name for name in checkpoint.tensors if name.endswith(EMBEDDING_NAMES)]
    if head and embeddings and not torch.equal(checkpoint.read(head), checkpoint.read(embeddings[0])):
        yield (
            f"tensor {head!r} differs from {embeddings[0]!r}, though config.json ties them; remove it or set "
            "tie_word_embeddings to false"
        )


def _file_hash(file: Path, cache: str | Path | None) -> str:
    status = file.stat()
    key = f"sha256/1 {file.resolve()} {status.st_size} {status.st_mtime_ns}"
    known = remembered(key, cache=cache)
    if known is not None and re.fullmatch("[0-9a-f]{64}", known):
        return known
    with file.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    remembered(key, found, cache=cache)
    return found


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
    if config.get("is_encoder_decoder") or config.get("vision_config") is not None:
        kind = "an encoder-decoder" if config.get("is_encoder_decoder") else "a vision-language"
        problems.append(f"{file}: {kind} model ({config.get('model_type')}); only decoder-only text models are merged")
    return config


def _checkpoint_problems(path: Path, config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> Iterator[str]:
    try:
        found = layout(config, tensors)
    except InvalidModel as error:
        yield from (f"{path}: {problem}" for problem in error.problems)
        return
    stated = config.get("num_hidden_layers", found.num_layers)
    if stated != found.num_layers:
        yield f"{path}: config.json says num_hidden_layers={stated}, its tensors are of {found.num_layers} layers"
    if found.is_tied and config.get("tie_word_embeddings") is False:
        yield f"{path}: config.json says tie_word_embeddings=false, but no output head (lm_head) is stored"


def _differences(base: Checkpoint, expert: Checkpoint) -> Iterator[str]:
    """Why layers of `expert` cannot be exchanged with those of `base`."""
    where = str(expert.directory)
    stated, wanted = _structure(expert.config), _structure(base.config)
    for name in wanted:
        if name in stated and stated[name] != wanted[name]:
            yield f"{where}: {name} is {stated[name]!r}; the base has {wanted[name]!r}"
    if base.layout.is_tied != expert.layout.is_tied:
        names = {True: "tied to the embedding", False: "a tensor of its own"}
        yield (
            f"{where}: its output head is {names[expert.layout.is_tied]}, the base's is {names[base.layout.is_tied]}; "
            "both must be the same (tie_word_embeddings, lm_head.weight)"
        )
    base_names, names_ = _comparable(base.layout), _comparable(expert.layout)
    if missing := base_names - names_:
        yield f"{where}: lacks {len(missing)} tensors of the base: {some_of(missing)}"
    if extra := names_ - base_names:
        yield f"{where}: has {len(extra)} tensors that the base lacks: {some_of(extra)}"
    shapes = [
        f"tensor {name!r} has shape {list(theirs)}; the base has {list(ours)}"
        for name in sorted(base_names & names_)
        if (theirs := expert.tensors[name].shape) != (ours := base.tensors[name].shape)
    ]
    yield from (f"{where}: {shape}" for shape in shapes[:MAX_SHAPES])
    if len(shapes) > MAX_SHAPES:
        yield f"{where}: {len(shapes) - MAX_SHAPES} more tensors differ in shape from the base's"


def _structure(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that two models must share, as far as `config` states them, rotary embeddings included: every merge,
    an expert alone among them, computes with the base's."""
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    rope = rope if isinstance(rope, Mapping) else {}
    fields = {name: config.get(name) for name in (*STRUCTURE, "rope_theta")}
    fields |= {"rope_type": rope.get("type"), **rope}
    return {name: value for name, value in fields.items() if value is not None}


def _comparable(found: Layout) -> set[str]:
    """The tensors to compare between models: all but output heads, whose difference is reported by itself."""
    return {name for name in found.places if not is_output_head(name)}

"""Hugging Face checkpoints on disk: what they hold, whether a family of them can be merged, and who they are.

Everything that configurations and safetensors headers tell is checked here, before anything large is read; tensors
are mapped, one at a time, only when asked for. Pickles are never loaded and no code of a model is ever run. What to do
with the tensors is not known here.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import struct
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from search_spaces.recipe import Component
from workers.errors import InvalidModel
from workers.types import Family, ModelSource

if TYPE_CHECKING:
    import torch

__all__ = [
    "CACHE_VARIABLE",
    "Checkpoint",
    "Layout",
    "Place",
    "TensorInfo",
    "cache_dir",
    "check_family",
    "check_tokenizer",
    "fingerprint",
    "layout",
    "open_checkpoint",
    "open_family",
    "remembered",
]

# Bytes per element of what can be merged, by the name that safetensors uses.
DTYPE_BYTES = {"F32": 4, "F16": 2, "BF16": 2}

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

# A header larger than this is no header (safetensors itself refuses it too).
MAX_HEADER_BYTES = 100_000_000

# A report names this many tensors of one kind of problem, then counts the rest.
MAX_NAMED = 5

CACHE_VARIABLE = "MERGESEARCH_CACHE"

PROBES = (
    "Hello world",
    " two  spaces and a tab\t.",
    "line one\nline two\n\n",
    "12+34=46",
    "caf\u00e9 \u4f60\u597d \U0001f642",
)


@dataclass(frozen=True)
class TensorInfo:
    """One stored tensor: safetensors' name of its dtype, its shape, and the file that holds it."""

    dtype: str
    shape: tuple[int, ...]
    file: Path

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_elements * DTYPE_BYTES.get(self.dtype, 1)


@dataclass(frozen=True)
class Place:
    """Where a tensor belongs: a component of decoder layer `layer` (0-based), or the embedding or head (None).

    `suffix` is the tensor's name within its layer ("self_attn.q_proj.weight"); outside layers it is the whole name.
    """

    component: Component | Literal["embedding", "head"]
    layer: int | None
    suffix: str


@dataclass(frozen=True)
class Layout:
    """How a model's tensors form layers and components.

    A tied output head is not among `places`: it is the embedding. `tied_head` is its name where a file holds it all
    the same.
    """

    places: Mapping[str, Place]
    num_layers: int
    layer_prefix: str
    tied_head: str | None = None

    @property
    def is_tied(self) -> bool:
        """The output head is the embedding."""
        return not any(_is_output_head(name) for name in self.places)

    @cached_property
    def _groups(self) -> dict[tuple[str, int | None], tuple[str, ...]]:
        groups: dict[tuple[str, int | None], list[str]] = {}
        for place in self.places.values():
            groups.setdefault((place.component, place.layer), []).append(place.suffix)
        return {key: tuple(sorted(suffixes)) for key, suffixes in groups.items()}

    def suffixes(self, component: str, layer: int | None = None) -> tuple[str, ...]:
        """The tensors of one component, as names within the layer, sorted."""
        return self._groups.get((component, layer), ())

    def name(self, suffix: str, layer: int | None) -> str:
        """The full name of `suffix` in `layer`."""
        return suffix if layer is None else f"{self.layer_prefix}{layer}.{suffix}"


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


def open_checkpoint(directory: str | Path) -> Checkpoint:
    """Read the configuration and every safetensors header of `directory`. Raises InvalidModel with all problems."""
    path = Path(directory)
    if not path.is_dir():
        found = "is a file" if path.exists() else "does not exist"
        raise InvalidModel(
            (f"{path}: {found}; expected a directory with config.json, tokenizer files and *.safetensors",)
        )
    problems: list[str] = []
    config = _read_config(path, problems)
    tensors = _read_headers(path, problems)
    if not problems:
        problems += _checkpoint_problems(path, config, tensors)
    if problems:
        raise InvalidModel(tuple(problems))
    return Checkpoint(path, config, tensors)


def check_family(base_dir: str | Path, experts: Mapping[str, str | Path]) -> None:
    """Raise InvalidModel, with every problem of every model, unless all `experts` can be merged with the base.

    Reads configurations and headers only.
    """
    problems: list[str] = []
    if not experts:
        problems.append("models.experts: there are none; name at least one model fine-tuned from the base")
    base: Checkpoint | None = None
    try:
        base = open_checkpoint(base_dir)
    except InvalidModel as error:
        problems += [f"base model: {problem}" for problem in error.problems]
    for alias, directory in experts.items():
        try:
            expert = open_checkpoint(directory)
        except InvalidModel as error:
            problems += [f"expert {alias!r}: {problem}" for problem in error.problems]
        else:
            problems += [f"expert {alias!r}: {problem}" for problem in _differences(base, expert)] if base else []
    if problems:
        raise InvalidModel(tuple(problems))


def open_family(
    base_dir: str | Path,
    experts: Mapping[str, str | Path],
    *,
    base_alias: str = "base",
    cache: str | Path | None = None,
) -> Family:
    """The checked family with absolute directories and content fingerprints. Raises InvalidModel."""
    check_family(base_dir, experts)

    def source(alias: str, directory: str | Path) -> ModelSource:
        absolute = Path(directory).expanduser().resolve()
        return ModelSource(alias, str(absolute), fingerprint(absolute, cache=cache))

    return Family(
        base=source(base_alias, base_dir),
        experts=tuple(source(alias, directory) for alias, directory in experts.items()),
    )


def fingerprint(directory: str | Path, *, cache: str | Path | None = None) -> str:
    """sha256 (hex) of the names and contents of what makes the model: its safetensors files, config.json,
    generation_config.json and tokenizer files; not of where it lies, nor of other files beside them.

    Hashing a large model takes minutes, so each file's hash is remembered under `cache` (see `cache_dir`) by path,
    size and modification time. Raises InvalidModel.
    """
    checkpoint = open_checkpoint(directory)
    others = ("config.json", "generation_config.json", *TOKENIZER_FILES)
    files = [*checkpoint.files, *(checkpoint.directory / name for name in others)]
    hashes = sorted((file.name, _file_hash(file, cache)) for file in files if file.is_file())
    return hashlib.sha256(json.dumps(hashes).encode()).hexdigest()


def cache_dir(cache: str | Path | None = None) -> Path:
    """Where small findings about models are kept: `cache`, else $MERGESEARCH_CACHE, else the user's cache folder."""
    if cache is not None:
        return Path(cache)
    if chosen := os.environ.get(CACHE_VARIABLE):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mergesearch"


def remembered(key: str, finding: str | None = None, *, cache: str | Path | None = None) -> str | None:
    """Look up what is known under `key`, or store `finding` there. An unwritable cache is no error."""
    file = cache_dir(cache) / "findings" / hashlib.sha256(key.encode()).hexdigest()
    if finding is None:
        try:
            return file.read_text()
        except (OSError, UnicodeDecodeError):
            return None
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as temporary:
            temporary.write(finding)
        os.replace(temporary.name, file)
    except OSError:
        return finding
    return finding


def layout(config: Mapping[str, Any], names: Iterable[str]) -> Layout:
    """Assign every tensor to a layer and component, by the names of the modules that hold it.

    Norms are norms wherever they sit, biases go with their module, the final norm and the output head form the head.
    Raises InvalidModel naming the tensors that fit nowhere.
    """
    names = [name for name in names if not IGNORED.search(name)]
    places: dict[str, Place] = {}
    unknown: list[str] = []
    prefixes: set[str] = set()
    for name in names:
        if match := LAYER.match(name):
            prefix, layer, suffix = match["prefix"], int(match["layer"]), match["suffix"]
            component = _component(suffix)
            prefixes.add(prefix)
            place = Place(component, layer, suffix) if component else None
        else:
            part = _part_outside_layers(name)
            place = Place(part, None, name) if part else None
        if place is None:
            unknown.append(name)
        else:
            places[name] = place
    if unknown:
        raise InvalidModel((f"layout: not a known part of a decoder-only model: {_some(unknown)}",))
    layers = {place.layer for place in places.values() if place.layer is not None}
    if len(prefixes) != 1 or layers != set(range(len(layers))):
        raise InvalidModel(
            (
                f"layout: expected decoder layers 0..n-1 under one module, found {sorted(prefixes)} "
                f"with layers {sorted(layers)}",
            )
        )
    heads = [name for name, place in places.items() if place.component == "head" and _is_output_head(name)]
    tied_head = None
    if config.get("tie_word_embeddings", not heads):
        for tied_head in heads:
            del places[tied_head]
    return Layout(places, len(layers), prefixes.pop(), tied_head)


def check_tokenizer(directory: str | Path) -> None:
    """Raise InvalidModel unless transformers' tokenizer of `directory` gives the ids that its tokenizer.json says.

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
    for probe in PROBES:
        got = loaded(probe, add_special_tokens=False)["input_ids"]
        expected = stated.encode(probe, add_special_tokens=False).ids
        if got != expected:
            raise InvalidModel(
                (
                    f"{path}: transformers ({type(loaded).__name__}) encodes {probe!r} as {got}, tokenizer.json as "
                    f"{expected}; expected the same ids: set model_type or the tokenizer files so that they agree",
                )
            )


LAYER = re.compile(r"^(?P<prefix>(?:\w+\.)*?(?:layers|h|blocks)\.)(?P<layer>\d+)\.(?P<suffix>.+)$")
NORM = re.compile(r"norm|(?:^|[._])ln(?:$|[._])")
ATTENTION = re.compile(r"attn|attention")
MLP = re.compile(r"mlp|feed_forward|ffn|moe|(?:^|\.)fc[12]\.")
EMBEDDING = re.compile(r"embed|(?:^|\.)w[tp]e\.")
OUTPUT_HEAD = re.compile(r"(?:^|\.)(?:lm_head|embed_out|output)\.")
# Buffers that old checkpoints carry; models compute them anew.
IGNORED = re.compile(r"rotary_emb\.inv_freq$")


def _component(suffix: str) -> Component | None:
    if NORM.search(suffix):
        return "norm"
    if ATTENTION.search(suffix):
        return "attention"
    return "mlp" if MLP.search(suffix) else None


def _is_output_head(name: str) -> bool:
    return OUTPUT_HEAD.search(name) is not None


def _part_outside_layers(name: str) -> Literal["embedding", "head"] | None:
    if _is_output_head(name):
        return "head"
    if EMBEDDING.search(name):
        return "embedding"
    return "head" if NORM.search(name) else None


def _some(names: Iterable[str]) -> str:
    names = sorted(names)
    rest = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(names[:MAX_NAMED]) + rest


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
        config = json.loads(file.read_text())
    except FileNotFoundError:
        problems.append(f"{path}: no config.json; expected a Hugging Face model directory")
        return {}
    except (OSError, ValueError) as error:
        problems.append(f"{file}: cannot be read as JSON: {error}")
        return {}
    if not isinstance(config, dict):
        problems.append(f"{file}: holds a {type(config).__name__}; expected an object")
        return {}
    if "quantization_config" in config:
        method = config["quantization_config"].get("quant_method", "unknown method")
        problems.append(f"{file}: the model is quantised ({method}); merge the float32, float16 or bfloat16 original")
    if config.get("is_encoder_decoder") or "vision_config" in config:
        kind = "an encoder-decoder" if config.get("is_encoder_decoder") else "a vision-language"
        problems.append(f"{file}: {kind} model ({config.get('model_type')}); only decoder-only text models are merged")
    return config


def _read_headers(path: Path, problems: list[str]) -> dict[str, TensorInfo]:
    shards, expected = _shards(path, problems)
    tensors: dict[str, TensorInfo] = {}
    for shard in shards:
        for name, info in _read_header(shard, problems).items():
            if name in tensors:
                problems.append(f"{shard}: tensor {name!r} is also in {tensors[name].file.name}")
            tensors[name] = info
    if not problems and expected is not None and (missing := [name for name in expected if name not in tensors]):
        problems.append(f"{path}: the index names tensors that no shard holds: {_some(missing)}")
    return tensors


def _shards(path: Path, problems: list[str]) -> tuple[list[Path], Mapping[str, str] | None]:
    """The safetensors files, and the index's map from tensor to file where there is one."""
    single, index = path / "model.safetensors", path / "model.safetensors.index.json"
    if single.is_file():
        return [single], None
    if index.is_file():
        try:
            weight_map: dict[str, str] = json.loads(index.read_text())["weight_map"]
            files = sorted(set(weight_map.values()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            problems.append(f"{index}: not a safetensors index ({type(error).__name__}: {error})")
            return [], None
        if outside := [file for file in files if Path(file).name != file]:
            problems.append(f"{index}: shards must lie beside the index, found {_some(outside)}")
            return [], None
        if missing := [file for file in files if not (path / file).is_file()]:
            problems.append(f"{path}: {len(missing)} of {len(files)} shards are missing: {_some(missing)}")
        return [path / file for file in files if (path / file).is_file()], weight_map
    pickles = sorted(file.name for suffix in ("*.bin", "*.pt", "*.pth", "*.ckpt") for file in path.glob(suffix))
    if (path / "adapter_config.json").is_file():
        problems.append(f"{path}: a PEFT adapter; expected a whole model: merge the adapter into its base first")
    elif pickles:
        problems.append(
            f"{path}: only pickles ({_some(pickles)}), which are never loaded; convert the model to safetensors"
        )
    else:
        problems.append(f"{path}: no model.safetensors and no model.safetensors.index.json")
    return [], None


def _read_header(file: Path, problems: list[str]) -> dict[str, TensorInfo]:
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(8)
        if start.startswith(b"version "):
            problems.append(f"{file}: a Git LFS pointer of {size} bytes, not the weights; fetch them with git lfs pull")
            return {}
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else None
        if length is None or 8 + length > size or length > MAX_HEADER_BYTES:
            problems.append(
                f"{file}: not a complete safetensors file: it has {size} bytes and declares a header of {length} bytes"
            )
            return {}
        try:
            header = json.loads(stream.read(length))
            header.pop("__metadata__", None)
            tensors = {
                name: TensorInfo(str(entry["dtype"]), tuple(map(int, entry["shape"])), file)
                for name, entry in header.items()
            }
            ends = {
                name: (int(entry["data_offsets"][0]), int(entry["data_offsets"][1])) for name, entry in header.items()
            }
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            problems.append(f"{file}: its safetensors header cannot be read ({type(error).__name__}: {error})")
            return {}
    declared = 8 + length + max((end for _, end in ends.values()), default=0)
    if declared != size:
        problem = "is truncated" if size < declared else "has bytes that belong to no tensor"
        problems.append(f"{file}: {problem}: its header declares {declared} bytes, the file has {size}")
    for name, info in tensors.items():
        start_offset, end = ends[name]
        if info.dtype in DTYPE_BYTES and (start_offset < 0 or end - start_offset != info.num_bytes):
            problems.append(
                f"{file}: tensor {name!r} of shape {list(info.shape)} in {info.dtype} needs {info.num_bytes} bytes; "
                f"its offsets {start_offset}..{end} hold {end - start_offset}"
            )
    return tensors


def _checkpoint_problems(path: Path, config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> Iterator[str]:
    by_dtype: dict[str, list[str]] = {}
    for name, info in tensors.items():
        if info.dtype not in DTYPE_BYTES and not IGNORED.search(name):
            by_dtype.setdefault(info.dtype, []).append(name)
    for dtype, names in by_dtype.items():
        yield f"{path}: dtype {dtype} of {_some(names)} cannot be merged; expected one of {', '.join(DTYPE_BYTES)}"
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
    for name in STRUCTURE:
        ours, theirs = base.config.get(name), expert.config.get(name)
        if ours is not None and theirs is not None and ours != theirs:
            yield f"{where}: {name} is {theirs!r}; the base has {ours!r}"
    if base.layout.is_tied != expert.layout.is_tied:
        names = {True: "tied to the embedding", False: "a tensor of its own"}
        yield (
            f"{where}: its output head is {names[expert.layout.is_tied]}, the base's is {names[base.layout.is_tied]}; "
            "both must be the same (tie_word_embeddings, lm_head.weight)"
        )
    base_names, names_ = _comparable(base.layout), _comparable(expert.layout)
    if missing := base_names - names_:
        yield f"{where}: lacks {len(missing)} tensors of the base: {_some(missing)}"
    if extra := names_ - base_names:
        yield f"{where}: has {len(extra)} tensors that the base lacks: {_some(extra)}"
    shapes = [
        f"tensor {name!r} has shape {list(theirs)}; the base has {list(ours)}"
        for name in sorted(base_names & names_)
        if (theirs := expert.tensors[name].shape) != (ours := base.tensors[name].shape)
    ]
    yield from (f"{where}: {shape}" for shape in shapes[:MAX_NAMED])
    if len(shapes) > MAX_NAMED:
        yield f"{where}: {len(shapes) - MAX_NAMED} more tensors differ in shape from the base's"


def _comparable(found: Layout) -> set[str]:
    """The tensors to compare between models: all but output heads, whose difference is reported by itself."""
    return {name for name in found.places if not _is_output_head(name)}

"""PEFT's LoRA adapters as models: which tensors of its base an adapter changes, and how.

Read from adapter_config.json and the headers of adapter_model.safetensors; what peft decides by the types of modules
is derived from the base's tensors. The product of an adapter's matrices is not computed here.
"""

from __future__ import annotations

import json
import logging
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from workers.models.components import EMBEDDING, Layout, is_output_head, some_of
from workers.models.computed_tensors import Dora, LowRank, ReplacedRows, Shifted, SourceTensor
from workers.models.headers import TensorInfo, read_headers

__all__ = ["ADAPTER_CONFIG", "AdaptedBase", "Adapter", "is_adapter", "read_adapter", "stated_base"]

log = logging.getLogger(__name__)

ADAPTER_CONFIG = "adapter_config.json"

# peft wraps the model in two modules of these names.
PREFIX = "base_model.model."

# Settings that change the weights in another way than B A does, and how.
UNSUPPORTED = {
    "layer_replication": "it repeats layers",
    "target_parameters": "it changes parameters that are no module's weight",
    "alora_invocation_tokens": "it acts on some tokens only",
    "use_qalora": "QA-LoRA pools its inputs",
    "use_bdlora": "its matrices are block-diagonal",
    "arrow_config": "Arrow routes between adapters",
    "kasa_config": "KaSA scales its ranks",
    "monteclora_config": "MonteCLoRA samples its weights",
}

# Initialisations that leave the base unchanged; others subtract the initial adapter from it.
PLAIN_BEGINNINGS = (True, False, None, "gaussian", "eva", "orthogonal")

# Models whose layers hold transformers' Conv1D, which stores [inputs, outputs].
CONV1D_MODELS = ("gpt2",)


@dataclass(frozen=True)
class AdaptedBase:
    """The base that an adapter changes: its directory, configuration, tensors and layout."""

    directory: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, SourceTensor]
    layout: Layout

    def name(self, parameter: str) -> str | None:
        """The tensor that `parameter` of the adapted model is; stored models may lack or have the outermost module."""
        names = self.layout.places
        if parameter in names:
            return parameter
        inner = parameter.partition(".")[2]
        if inner in names:
            return inner
        outer = [name for name in names if name.partition(".")[2] == parameter]
        return outer[0] if len(outer) == 1 else None

    def is_transposed(self, name: str) -> bool:
        place = self.layout.places.get(name)
        return self.config.get("model_type") in CONV1D_MODELS and place is not None and place.layer is not None


@dataclass(frozen=True)
class Adapter:
    """Every tensor of a base as an adapter leaves it, and the adapter's own safetensors files."""

    tensors: Mapping[str, SourceTensor]
    files: frozenset[Path]


def is_adapter(path: Path) -> bool:
    """The directory holds an adapter and no whole model."""
    models = ("model.safetensors", "model.safetensors.index.json")
    return (path / ADAPTER_CONFIG).is_file() and not any((path / name).is_file() for name in models)


def stated_base(path: Path) -> str:
    """The model that the adapter in `path` says it was trained on: its trainer's path or hub id; "" if none."""
    settings = _read_settings(path, [])
    return settings.stated_base if settings else ""


def read_adapter(path: Path, base: AdaptedBase | None, problems: list[str]) -> Adapter | None:
    """The adapter in `path` applied to `base`; what is wrong is appended to `problems`.

    Without a base only the adapter's own files are checked, and None is returned.
    """
    settings = _read_settings(path, problems)
    before = len(problems)
    stored = read_headers(path, problems, stem="adapter_model")
    parts = _parts(stored)
    if settings is not None:
        parts.unknown += _unexpected(parts, settings)
    where = path / "adapter_model.safetensors"
    if parts.unknown:
        problems.append(f"{where}: holds {some_of(parts.unknown)}; expected A and B of LoRA layers and whole tensors")
    if len(problems) == before and not parts.matrices and not parts.whole and not parts.rows:
        problems.append(f"{where}: holds no tensors; expected A and B of LoRA layers and whole tensors")
    if settings is None or base is None:
        return None
    if settings.stated_base and Path(settings.stated_base).name not in str(base.directory.resolve()):
        _warn(f"{path}: says that it was trained on {settings.stated_base}; it is merged with {base.directory}")
    tensors = {name: base.tensors[name] for name in base.layout.places}
    unknown: list[str] = []
    for parameter, info in parts.whole.items():
        name = base.name(parameter)
        if name is not None:
            tensors[name] = info
        elif not (is_output_head(parameter) and base.layout.is_tied):
            unknown.append(parameter)
    for module, matrices in parts.matrices.items():
        name = base.name(f"{module}.weight")
        if is_output_head(f"{module}.weight") and base.layout.is_tied:
            continue  # the embedding's matrices again, or a problem that `_tied_problems` reports
        if name is None:
            unknown.append(f"{module}.weight")
            continue
        is_transposed = matrices.is_embedding or base.is_transposed(name)
        found = _matrix_problems(module, matrices, tensors[name].shape, settings.rank(module), is_transposed)
        if found:
            problems += [f"{where}: {problem}" for problem in found]
        else:
            a, b = matrices.sides["A"], matrices.sides["B"]
            changed = LowRank(tensors[name], a, b, settings.scaling(module), is_transposed)
            tensors[name] = changed if matrices.magnitude is None else Dora(changed, matrices.magnitude)
            bias = base.name(f"{module}.bias")
            if matrices.bias is not None and bias is not None:
                tensors[bias] = Shifted(tensors[bias], matrices.bias, settings.scaling(module))
            elif matrices.bias is not None:
                problems.append(f"{where}: {module}: lora_bias has a bias, and the base has none there to change")
    for module, rows in parts.rows.items():
        name = base.name(f"{module}.weight")
        numbers = settings.token_numbers(module)
        if name is None or len(rows.shape) != 2 or rows.shape[1:] != tensors[name].shape[1:]:
            problems.append(f"{where}: {module}: rows of single tokens that are not the base's")
        elif rows.shape[0] != len(numbers) or not all(0 <= n < tensors[name].shape[0] for n in numbers):
            problems.append(
                f"{where}: {module}: has {rows.shape[0]} rows for the tokens {list(numbers)!r:.80} of "
                f"trainable_token_indices, the base {tensors[name].shape[0]} rows; expected one for each, by number"
            )
        else:
            tensors[name] = ReplacedRows(tensors[name], rows, numbers)
    if unknown:
        problems.append(
            f"{where}: an adapter of another model: it changes {some_of(unknown)}, which the base {base.directory} "
            "does not have"
        )
    if base.layout.is_tied:
        problems += [f"{path}: {problem}" for problem in _tied_problems(parts, settings)]
    return Adapter(tensors, frozenset(info.file for info in stored.values()))


@lru_cache
def _warn(message: str) -> None:
    """Log a warning once per process. Only shapes decide whether an adapter fits: directories and names may differ."""
    log.warning("%s", message)


@dataclass(frozen=True)
class _Settings:
    """The settings in adapter_config.json that merging needs."""

    r: int
    alpha: float
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    is_rank_stabilized: bool
    whole_modules: tuple[str, ...]
    ties_weights: bool
    stated_base: str
    tokens: Mapping[str, tuple[int, ...]]
    is_dora: bool
    has_biases: bool

    def token_numbers(self, module: str) -> tuple[int, ...]:
        """The rows of the embedding `module` that are trained one by one."""
        fitting = (numbers for name, numbers in self.tokens.items() if f".{module}".endswith(f".{name}"))
        return next(fitting, ())

    def rank(self, module: str) -> int:
        return self.ranks.get(_pattern(self.ranks, module), self.r)

    def scaling(self, module: str) -> float:
        """alpha / r, or alpha / sqrt(r) if rank-stabilised (arXiv:2312.03732)."""
        rank = self.rank(module)
        return self.alphas.get(_pattern(self.alphas, module), self.alpha) / (
            math.sqrt(rank) if self.is_rank_stabilized else rank
        )


def _pattern(patterns: Mapping[str, Any], module: str) -> str:
    """The first pattern that matches the end of the module's name, as peft does it."""
    return next((pattern for pattern in patterns if re.match(rf"(.*\.)?({pattern})$", module)), "")


def _read_settings(path: Path, problems: list[str]) -> _Settings | None:
    """None if the settings cannot be read or are not those of a plain LoRA adapter."""
    file = path / ADAPTER_CONFIG
    try:
        config = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        problems.append(f"{file}: cannot be read as JSON: {error}")
        return None
    if not isinstance(config, dict):
        problems.append(f"{file}: holds a {type(config).__name__}; expected an object")
        return None
    if (kind := config.get("peft_type")) != "LORA":
        problems.append(f"{file}: an adapter of peft_type {kind!r}; only LORA is merged")
        return None
    plain = "only plain LoRA adapters are merged"
    wrong = [f"{key} is set: {meaning}; {plain}" for key, meaning in UNSUPPORTED.items() if config.get(key)]
    beginning = config.get("init_lora_weights")
    if beginning not in PLAIN_BEGINNINGS:
        wrong.append(f"init_lora_weights is {beginning!r:.80}, which changes the base; {plain}: convert it with peft")
    ranks, alphas = config.get("rank_pattern") or {}, config.get("alpha_pattern") or {}
    modules = config.get("modules_to_save") or []
    r, alpha = config.get("r", 8), config.get("lora_alpha", 8)
    if not _is_rank(r):
        wrong.append(f"r is {r!r:.80}; expected a whole number from 1")
    if not _is_number(alpha):
        wrong.append(f"lora_alpha is {alpha!r:.80}; expected a number")
    if not _are_patterns(ranks, _is_rank):
        wrong.append(f"rank_pattern is {ranks!r:.80}; expected ranks by regular expressions")
    if not _are_patterns(alphas, _is_number):
        wrong.append(f"alpha_pattern is {alphas!r:.80}; expected numbers by regular expressions")
    if not isinstance(modules, list) or not all(isinstance(module, str) for module in modules):
        wrong.append(f"modules_to_save is {modules!r:.80}; expected a list of names")
    tokens = config.get("trainable_token_indices") or {}
    # PEFT finds the embedding by itself where only numbers are given.
    of_modules = tokens if isinstance(tokens, dict) else dict.fromkeys(EMBEDDING_MODULES, tokens)
    if not all(isinstance(numbers, list) and all(type(n) is int for n in numbers) for numbers in of_modules.values()):
        wrong.append(f"trainable_token_indices is {tokens!r:.80}; expected numbers of tokens, by module or alone")
    problems += [f"{file}: {problem}" for problem in wrong]
    if wrong:
        return None
    return _Settings(
        r=r,
        alpha=float(alpha),
        ranks=ranks,
        alphas=alphas,
        is_rank_stabilized=bool(config.get("use_rslora")),
        whole_modules=tuple(modules),
        ties_weights=bool(config.get("ensure_weight_tying")),
        stated_base=str(config.get("base_model_name_or_path") or ""),
        tokens={str(module): tuple(numbers or ()) for module, numbers in of_modules.items()},
        is_dora=bool(config.get("use_dora")),
        has_biases=bool(config.get("lora_bias")),
    )


def _is_rank(value: Any) -> bool:
    return type(value) is int and value > 0


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def _are_patterns(value: Any, is_right: Callable[[Any], bool]) -> bool:
    try:
        return isinstance(value, dict) and all(re.compile(key) and is_right(entry) for key, entry in value.items())
    except re.error:
        return False


# What is stored


@dataclass
class _Matrices:
    """A and B of one module, as far as they are stored; those of an embedding change the transposed weight. `magnitude`
    is DoRA's, `bias` that of B."""

    is_embedding: bool
    sides: dict[str, TensorInfo] = field(default_factory=dict)
    magnitude: TensorInfo | None = None
    bias: TensorInfo | None = None


@dataclass
class _Parts:
    matrices: dict[str, _Matrices] = field(default_factory=dict)
    whole: dict[str, TensorInfo] = field(default_factory=dict)
    rows: dict[str, TensorInfo] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)


LORA = re.compile(r"(?P<module>.+)\.lora_(?P<embedding>embedding_)?(?P<side>[AB])(?P<weight>\.weight)?")
# Where peft keeps a module that it wraps.
WRAPPERS = re.compile(r"\.(?:base_layer|modules_to_save)(?=\.)")


# What belongs to matrices, and rows of single tokens.
MAGNITUDE, BIAS, TOKENS = ".lora_magnitude_vector", ".lora_B.bias", ".token_adapter.trainable_tokens_delta"
EMBEDDING_MODULES = ("embed_tokens", "wte", "embed_in", "word_embeddings", "tok_embeddings")


def _parts(stored: Mapping[str, TensorInfo]) -> _Parts:
    parts = _Parts()
    more: dict[str, TensorInfo] = {}
    for key, info in stored.items():
        name = key.removeprefix(PREFIX)
        lora = LORA.fullmatch(name)
        if name == key:
            parts.unknown.append(key)
        elif lora and bool(lora["embedding"]) != bool(lora["weight"]):
            matrices = parts.matrices.setdefault(lora["module"], _Matrices(bool(lora["embedding"])))
            matrices.sides[lora["side"]] = info
        elif name.endswith((MAGNITUDE, BIAS)):
            more[name] = info
        elif name.endswith(TOKENS):
            parts.rows[name.removesuffix(TOKENS)] = info
        elif "lora_" in name or "trainable_tokens" in name:
            parts.unknown.append(key)
        else:
            parts.whole[WRAPPERS.sub("", name)] = info
    for name, info in more.items():
        kind = MAGNITUDE if name.endswith(MAGNITUDE) else BIAS
        of_module = parts.matrices.get(name.removesuffix(kind))
        if of_module is None:
            parts.unknown.append(f"{PREFIX}{name}")
        elif kind == MAGNITUDE:
            of_module.magnitude = info
        else:
            of_module.bias = info
    return parts


def _unexpected(parts: _Parts, settings: _Settings) -> Iterator[str]:
    """What is stored, though the settings do not say so."""
    for module, matrices in parts.matrices.items():
        if matrices.magnitude is not None and not settings.is_dora:
            yield f"{PREFIX}{module}{MAGNITUDE}"
        if matrices.bias is not None and not settings.has_biases:
            yield f"{PREFIX}{module}{BIAS}"
    yield from (f"{PREFIX}{module}{TOKENS}" for module in parts.rows if not settings.token_numbers(module))


def _matrix_problems(
    module: str, matrices: _Matrices, shape: tuple[int, ...], rank: int, is_transposed: bool
) -> list[str]:
    missing = {"A", "B"} - matrices.sides.keys()
    if missing:
        return [f"{module}: its LoRA matrix {missing.pop()} is missing"]
    a, b = matrices.sides["A"], matrices.sides["B"]
    flat = [matrix for matrix in (a, b) if len(matrix.shape) != 2]
    if flat or len(shape) != 2:
        shapes = f"A {list(a.shape)}, B {list(b.shape)}, the base's weight {list(shape)}"
        return [f"{module}: matrices were expected, found {shapes}"]
    problems = []
    if (found := {a.shape[0], b.shape[1]}) != {rank}:
        ranks = " and ".join(map(str, sorted(found)))
        problems.append(f"{module}: its matrices are of rank {ranks}, {ADAPTER_CONFIG} says {rank}")
    if matrices.magnitude is not None and matrices.magnitude.shape != b.shape[:1]:
        found_shape = list(matrices.magnitude.shape)
        problems.append(f"{module}: DoRA's magnitude has shape {found_shape}; expected {list(b.shape[:1])}")
    if matrices.bias is not None and matrices.bias.shape != b.shape[:1]:
        problems.append(f"{module}: B's bias has shape {list(matrices.bias.shape)}; expected {list(b.shape[:1])}")
    change = (a.shape[1], b.shape[0]) if is_transposed else (b.shape[0], a.shape[1])
    if change != shape:
        problems.append(
            f"an adapter of another model: {module}: its change has shape {list(change)}, "
            f"the base's weight {list(shape)}"
        )
    return problems


def _tied_problems(parts: _Parts, settings: _Settings) -> Iterator[str]:
    """Embedding and head of a tied model that an adapter trained as two tensors, so that the result is not tied.

    peft trains the two as one where `ensure_weight_tying` asks for it, and stores the matrices of both. The model is
    then the tied one with their product added once; peft 0.21's own merge adds it twice."""
    heads = [module for module in parts.matrices if is_output_head(f"{module}.weight")]
    embeddings = [module for module, matrices in parts.matrices.items() if matrices.is_embedding]
    if settings.ties_weights:
        trained = [] if embeddings else heads
    else:
        whole = [name for name in parts.whole if any(f".{module}." in f".{name}" for module in settings.whole_modules)]
        trained = [*embeddings, *heads, *(name for name in whole if is_output_head(name) or EMBEDDING.search(name))]
    for name in trained:
        yield (
            f"changes {name} alone, but in the base embedding and output head are one tensor; merge the adapter into "
            "its base first, and untie the two in all models"
        )

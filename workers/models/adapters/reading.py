"""Reader of LoRA adapters, which applies an adapter to a base model, or reports all of the adapter's problems."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from workers.models.adapters.adapted_base import AdaptedBase
from workers.models.adapters.experts import changed_stack, stack_at, stack_problems
from workers.models.adapters.settings import ADAPTER_CONFIG, Settings, read_settings
from workers.models.adapters.stored import Matrices, Parts, parts_of, unexpected
from workers.models.components import EMBEDDING, first_few, is_output_head
from workers.models.computed_tensors import Dora, LowRank, ReplacedRows, Shifted, SourceTensor
from workers.models.headers import read_headers

__all__ = ["Adapter", "is_adapter", "read_adapter", "stated_base"]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Adapter:
    """A base model's tensors after a LoRA adapter's changes, and the adapter's own safetensors files.

    Tensors that the adapter does not change are included, but no head of the base. `has_head` says whether the adapter
    has a head for a task of its own (`modules_to_save`), whose tensors are included.
    """

    tensors: Mapping[str, SourceTensor]
    files: frozenset[Path]
    has_head: bool = False


def is_adapter(path: Path) -> bool:
    """Whether the directory `path` contains a LoRA adapter and no whole model.

    The result is True if the directory has adapter_config.json, but neither model.safetensors nor an index of several
    files of weights.
    """
    models = ("model.safetensors", "model.safetensors.index.json")
    return (path / ADAPTER_CONFIG).is_file() and not any((path / name).is_file() for name in models)


def stated_base(path: Path) -> str:
    """Base model that an adapter's configuration states: a path or a hub id.

    A path refers to the machine on which the adapter was trained. The result is "" if the configuration states no model
    or cannot be read.
    """
    settings = read_settings(path, [])
    return settings.stated_base if settings else ""


def read_adapter(path: Path, base: AdaptedBase | None, problems: list[str]) -> Adapter | None:
    """Read the LoRA adapter in `path`, and apply it to `base`; all problems are appended to `problems`.

    If `base` is None, or the adapter's configuration cannot be used, only the adapter's own files are checked, and None
    is returned.
    """
    settings = read_settings(path, problems)
    before = len(problems)
    stored = read_headers(path, problems, stem="adapter_model")
    parts = parts_of(stored)
    if settings is not None:
        parts.unknown += unexpected(parts, settings)
    where = path / "adapter_model.safetensors"
    if parts.unknown:
        problems.append(f"{where}: holds {first_few(parts.unknown)}; expected A and B of LoRA layers and whole tensors")
    if len(problems) == before and not parts.matrices and not parts.whole and not parts.rows:
        problems.append(f"{where}: holds no tensors; expected A and B of LoRA layers and whole tensors")
    if settings is None or base is None:
        return None
    if settings.stated_base and Path(settings.stated_base).name not in str(base.directory.resolve()):
        _warn(f"{path}: says that it was trained on {settings.stated_base}; it is merged with {base.directory}")
    tensors = {name: base.tensors[name] for name in base.layout.places}
    unknown: list[str] = []
    heads: dict[str, SourceTensor] = {}
    for parameter, info in parts.whole.items():
        name = base.name(parameter)
        if name is not None:
            tensors[name] = info
        elif (head := base.head(parameter)) is not None:
            heads[head] = info
        elif not (is_output_head(parameter) and base.layout.is_tied):
            unknown.append(parameter)
    for module, matrices in parts.matrices.items():
        if targets := stack_at(module, base, settings):
            found = stack_problems(module, matrices, targets, base, settings)
            problems += [f"{where}: {problem}" for problem in found]
            tensors |= {} if found else changed_stack(matrices, targets, base, settings)
            continue
        name = base.name(f"{module}.weight")
        if is_output_head(f"{module}.weight") and base.layout.is_tied:
            continue  # either the embedding's matrices again, or reported by `_tied_problems`
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
            of_base = "has no such tensor" if name is None else f"has {list(tensors[name].shape)}"
            problems.append(f"{where}: {module}: its rows of single tokens are {list(rows.shape)}; the base {of_base}")
        elif rows.shape[0] != len(numbers) or not all(0 <= n < tensors[name].shape[0] for n in numbers):
            problems.append(
                f"{where}: {module}: has {rows.shape[0]} rows for the tokens {list(numbers)!r:.80} of "
                f"trainable_token_indices, the base {tensors[name].shape[0]} rows; expected one for each, by number"
            )
        else:
            tensors[name] = ReplacedRows(tensors[name], rows, numbers)
    unmerged = [parameter for parameter in unknown if base.is_unmerged(parameter)]
    if unmerged:
        problems.append(
            f"{where}: changes {first_few(unmerged)}, which are not merged; expected an adapter that changes merged "
            "parts, and may have a whole head (modules_to_save)"
        )
    if unknown := [parameter for parameter in unknown if parameter not in unmerged]:
        problems.append(
            f"{where}: an adapter of another model: it changes {first_few(unknown)}, which the base {base.directory} "
            "does not have"
        )
    if base.layout.is_tied:
        problems += [f"{path}: {problem}" for problem in _tied_problems(parts, settings)]
    return Adapter(tensors | heads, frozenset(info.file for info in stored.values()), bool(heads))


@lru_cache
def _warn(message: str) -> None:
    """Log a warning, but each `message` only once in this process."""
    log.warning("%s", message)


def _matrix_problems(
    module: str, matrices: Matrices, shape: tuple[int, ...], rank: int, is_transposed: bool
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


def _tied_problems(parts: Parts, settings: Settings) -> Iterator[str]:
    """Yield problems of an adapter that trained the embedding or the output head alone although the base ties them.

    In the base, embedding and output head are one tensor; in the adapted model they would differ. `parts` are the
    adapter's matrices, keyed by module, and `settings` are the adapter's settings. With the setting
    `ensure_weight_tying`, peft has trained both as one tensor; an adapter with this setting has no problem if it has
    matrices of the embedding. Their product is added once to the tied tensor, although the merge function of peft 0.21
    adds it twice.
    """
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

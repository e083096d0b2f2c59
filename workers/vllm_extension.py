"""What runs inside vLLM's worker: the merge is computed where the weights are, and written over them.

Everything that knows vLLM's insides is here. Only recipes and small records cross the process boundary.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Hashable, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from search_spaces.recipe import Recipe
from workers.types import Family, ModelSource

if TYPE_CHECKING:
    from workers.bank import Bank

__all__ = ["MergeExtension", "checksum", "family_from_json", "family_to_json", "open_bank"]

# Values per piece of a checksum: bounds its temporary memory to 3 x 8 bytes each.
CHECKSUM_CHUNK = 1 << 22
# The odd weight of word i is i times this, with the last bit set: 2^64 / golden ratio.
WEIGHT = 0x9E3779B97F4A7C15


class MergeExtension:
    """Mixed into vLLM's worker (`worker_extension_cls`); called through `collective_rpc` by name."""

    # vLLM's worker brings these.
    model_runner: Any
    # How each tensor held was computed, and the sum of each parameter; empty where that is not known.
    _mergesearch_computations: dict[str, Hashable]
    _mergesearch_sums: dict[str, int]

    def mergesearch_open(self, family: str) -> str:
        """Open the bank of source weights and watch for NaN logits. Returns the bank's fingerprint."""
        from workers.merging import Scratch

        self._mergesearch_bank = open_bank(family)
        self._mergesearch_scratch = Scratch(self._mergesearch_bank, self.model_runner.model_config.dtype)
        self._mergesearch_digest: str | None = None
        self._mergesearch_swaps = 0
        self._mergesearch_forget()
        model = self.model_runner.get_model()
        device = next(model.parameters()).device
        self._mergesearch_nan = torch.zeros((), dtype=torch.int64, device=device)
        compute_logits, nan_rows = model.compute_logits, self._mergesearch_nan

        def watched(*args: Any, **kwargs: Any) -> Any:
            logits = compute_logits(*args, **kwargs)
            if logits is not None:
                # The sum of a row is NaN if any of its values is; the count stays on the device, nothing waits for it.
                nan_rows.add_(logits.sum(dim=-1, dtype=torch.float32).isnan().sum())
            return logits

        model.compute_logits = watched
        return str(self._mergesearch_bank.fingerprint)

    def mergesearch_apply(self, recipe_json: str) -> dict[str, Any]:
        """Write the merge over the engine's weights, in place: addresses stay, so captured graphs stay valid.

        Tensors that are computed as in the merge held are not written again. Returns {digest, swaps, checksum,
        tensors_written, materialise_s, repack_s, swap_s (packing included)}. While it writes, and if it fails, no
        digest is held.
        """
        from workers.merging import computations, merged_tensors

        recipe = Recipe.from_json(json.loads(recipe_json))
        model = self.model_runner.get_model()
        started = time.perf_counter()
        bank, held, sums = self._mergesearch_bank, self._mergesearch_computations, self._mergesearch_sums
        self._mergesearch_digest = None
        wanted = computations(recipe, bank)
        self._mergesearch_forget()
        changed = {name for name, computation in wanted.items() if held.get(name) != computation}
        dtype = self.model_runner.model_config.dtype
        tensors = _Timed(merged_tensors(recipe, bank, dtype, names=changed, into=self._mergesearch_scratch.tensor))
        with torch.inference_mode():
            # vLLM's own loader knows which rows of which fused parameter a tensor is, what a rank's shard of it is,
            # how the vocabulary is padded and which head is tied.
            written = set(model.load_weights(iter(tensors)))
            parameters = dict(model.named_parameters())
            if missing := sorted(set(parameters) - written - sums.keys()):
                raise RuntimeError(f"the merge left {len(missing)} parameters unwritten, {missing[0]} for one")
            rewritten = {name: parameter for name, parameter in parameters.items() if name in written}
            repack_s = _repack(model, rewritten.values())
            sums |= {name: _sum(parameter) for name, parameter in rewritten.items()}
            total = _checksum(parameters, sums)
        self._mergesearch_computations, self._mergesearch_sums = wanted, sums
        self._mergesearch_swaps += 1
        self._mergesearch_digest = recipe.digest
        self._mergesearch_checksum = total
        return {
            **self.mergesearch_held(),
            "tensors_written": len(changed),
            "materialise_s": tensors.seconds,
            "repack_s": repack_s,
            "swap_s": time.perf_counter() - started - tensors.seconds,
        }

    def _mergesearch_forget(self) -> None:
        self._mergesearch_computations = {}
        self._mergesearch_sums = {}

    def mergesearch_held(self) -> dict[str, Any]:
        """What the weights are: {digest (None if unknown), swaps, checksum (as of the last swap)}."""
        return {
            "digest": self._mergesearch_digest,
            "swaps": self._mergesearch_swaps,
            "checksum": getattr(self, "_mergesearch_checksum", ""),
        }

    def mergesearch_checksum(self) -> str:
        """The checksum of the parameters as they are now."""
        with torch.inference_mode():
            return checksum(dict(self.model_runner.get_model().named_parameters()))

    def mergesearch_nan_rows(self) -> int:
        """How many rows of logits held NaN since the last call.

        Keys and values left by such rows would make NaN of whatever reuses their blocks, masked or not: they go.
        """
        count = int(self._mergesearch_nan.item())
        self._mergesearch_nan.zero_()
        if count:
            for cache in self.model_runner.kv_caches:
                cache.zero_()
        return count


class _Timed:
    """Passes (name, tensor) on and adds up the time spent waiting for them."""

    def __init__(self, source: Iterator[tuple[str, torch.Tensor]]) -> None:
        self.source = source
        self.seconds = 0.0

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        while True:
            started = time.perf_counter()
            item = next(self.source, None)
            self.seconds += time.perf_counter() - started
            if item is None:
                return
            yield item


def _repack(model: torch.nn.Module, changed: Iterable[torch.nn.Parameter]) -> float:
    """On CPU, pack again what holds a changed parameter; the old packed copy is dropped. Elsewhere nothing.

    Returns the seconds it took.
    """
    started = time.perf_counter()
    ids = set(map(id, changed))
    packed = [module for module in model.modules() if hasattr(module, "cpu_linear")]
    layers = [module for module in packed if any(id(held) in ids for held in module.parameters(recurse=False))]
    if layers:
        from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

        for layer in layers:
            dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
    return time.perf_counter() - started


def checksum(parameters: Mapping[str, torch.Tensor]) -> str:
    """sha256 (hex) over names, types, shapes and one 64-bit sum per parameter, by content alone.

    Each sum weights every 64-bit word with an odd number of its own, modulo 2^64: an odd weight can be inverted, so a
    change of any single word always changes the sum, and moving words changes it too.
    """
    return _checksum(parameters, {name: _sum(parameter) for name, parameter in parameters.items()})


def _checksum(parameters: Mapping[str, torch.Tensor], sums: Mapping[str, int]) -> str:
    total = hashlib.sha256()
    for name, parameter in sorted(parameters.items()):
        total.update(f"{name}:{parameter.dtype}:{tuple(parameter.shape)}:{sums[name]}\n".encode())
    return total.hexdigest()


def _sum(parameter: torch.Tensor) -> int:
    words = _words(parameter)
    if words.device.type == "cpu":
        from workers.kernels.cpu import weighted_words

        return weighted_words(words, WEIGHT)
    number = 0
    for start in range(0, words.numel(), CHECKSUM_CHUNK):
        piece = words[start : start + CHECKSUM_CHUNK]
        index = torch.arange(start, start + piece.numel(), dtype=torch.int64, device=piece.device)
        weights = index.mul_(WEIGHT - 2**64).bitwise_or_(1)  # as a signed number
        number = (number + int((piece * weights).sum().item())) % 2**64
    return number


def _words(parameter: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor as int64, without a copy where their number allows it."""
    flat = parameter.detach().contiguous().view(-1)
    num_bytes = flat.numel() * flat.element_size()
    for dtype in (torch.int64, torch.int32, torch.int16):
        if num_bytes % dtype.itemsize == 0 and flat.data_ptr() % dtype.itemsize == 0:
            return flat.view(dtype).to(torch.int64)
    return flat.view(torch.uint8).to(torch.int64)


@lru_cache(maxsize=1)
def open_bank(family: str) -> Bank:
    """The bank of a family (as `family_to_json` writes it); one per process, whoever asks."""
    from workers.bank import Bank

    return Bank(family_from_json(family))


def family_to_json(family: Family) -> str:
    return json.dumps([[model.alias, model.directory, model.fingerprint] for model in family.models])


def family_from_json(text: str) -> Family:
    base, *experts = (ModelSource(*fields) for fields in json.loads(text))
    return Family(base, tuple(experts))

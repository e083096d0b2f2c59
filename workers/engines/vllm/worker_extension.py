"""What runs inside vLLM's worker: the merge is computed where the weights are, and written over them.

Everything that knows vLLM's insides is here. Only recipes and small records cross the process boundary.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from search_spaces.errors import InvalidRecipe
from search_spaces.recipe import Recipe
from workers.engines.vllm.plugin import PACK
from workers.types import Family, ModelSource

if TYPE_CHECKING:
    from workers.merging.bank import Bank

__all__ = ["MergeExtension", "checksum", "family_from_json", "family_to_json", "open_bank"]

log = logging.getLogger(__name__)

PLACES = {"mapped": "in mapped files", "host": "in host memory", "gpu": "in GPU memory"}
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
    # Where a merge of each tensor may be written at once; None where only vLLM's loader knows.
    _mergesearch_places: dict[str, _Place | None]

    def mergesearch_open(
        self,
        family: str,
        places: Sequence[str] = ("mapped",),
        scratch_bytes: int = 0,
        reason: str = "",
        keeps_ranks: bool = False,
    ) -> str:
        """Open the bank of source weights, in the first of `places` (`bank.Bank`) that has room for it and, on the GPU,
        for as many bytes to merge in; and watch for NaN logits. `reason` says why that place comes first. With
        `keeps_ranks` it keeps them (`bank.Bank.keep_ranks`).

        Returns the bank's fingerprint."""
        device = next(self.model_runner.get_model().parameters()).device
        self._mergesearch_bank = open_bank(family, places, device, scratch_bytes)
        if keeps_ranks:
            self._mergesearch_bank.keep_ranks()
        if self._mergesearch_bank.placement != places[0]:
            reason += f"; {PLACES[places[0]]} there was too little left once the engine ran"
        self._mergesearch_reason = reason
        self._mergesearch_merge_on(device)
        self._mergesearch_digest: str | None = None
        self._mergesearch_swaps = 0
        self._mergesearch_places = {}
        self._mergesearch_forget()
        model = self.model_runner.get_model()
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

    def _mergesearch_merge_on(self, device: torch.device) -> None:
        from workers.merging.materialize import Scratch

        self._mergesearch_bank.merge_on(device)
        self._mergesearch_scratch = Scratch(self._mergesearch_bank, self.model_runner.model_config.dtype)

    def mergesearch_sources(self) -> str:
        """How large the bank's sources are and where they are, for people to read."""
        bank = self._mergesearch_bank
        return f"{bank.num_bytes / 1e9:.2f} GB of sources {PLACES[bank.placement]}"

    def mergesearch_apply(self, recipe_json: str) -> dict[str, Any]:
        """Write the merge over the engine's weights, in place: addresses stay, so captured graphs stay valid.

        Tensors that are computed as in the merge held are not written again. Returns {digest, swaps, checksum,
        tensors_written, materialise_s, repack_s, swap_s (packing included), bank (its summary)}. While it writes, and
        if it fails, no digest is held. A recipe that cannot be merged is answered with the reason, {refused}: an error
        loses its class on the way from a rank of several.
        """
        try:
            recipe = Recipe.from_json(json.loads(recipe_json))
            try:
                return self._mergesearch_write(recipe)
            except torch.OutOfMemoryError as error:
                if self._mergesearch_bank.device.type == "cpu":
                    raise
                log.warning("the GPU has too little memory left to merge in; from now on the CPU merges: %s", error)
            self._mergesearch_merge_on(torch.device("cpu"))
            torch.cuda.empty_cache()
            return self._mergesearch_write(recipe)
        except InvalidRecipe as error:
            return {**self.mergesearch_held(), "refused": str(error)}

    def _mergesearch_write(self, recipe: Recipe) -> dict[str, Any]:
        from workers.merging.materialize import computations, merge_into, merged_tensors, plan_tensors

        model = self.model_runner.get_model()
        started = time.perf_counter()
        bank, held, sums = self._mergesearch_bank, self._mergesearch_computations, self._mergesearch_sums
        self._mergesearch_digest = None
        plan = plan_tensors(recipe, bank)
        wanted = computations(plan, bank)
        self._mergesearch_forget()
        changed = {name for name, computation in wanted.items() if held.get(name) != computation}
        dtype = self.model_runner.model_config.dtype
        parameters = dict(model.named_parameters())
        places = {
            name: place
            for name in changed
            if (place := self._mergesearch_places.get(name))
            and place.memory.device == bank.device
            and place.is_in(parameters)
        }
        with torch.inference_mode():
            merging = time.perf_counter()
            merge_into(plan, bank, {name: place.memory for name, place in places.items()})
            materialise_s = time.perf_counter() - merging
            written = {place.parameter for place in places.values()}
            if others := changed - places.keys():
                # vLLM's own loader knows which rows of which fused parameter a tensor is, what a rank's shard of it
                # is, how the vocabulary is padded and which head is tied.
                tensors = merged_tensors(plan, bank, dtype, names=others, into=self._mergesearch_scratch.tensor)
                watch = _Watch(tensors, parameters)
                with watch:
                    written |= set(model.load_weights(iter(watch)))
                self._mergesearch_places |= watch.places
                materialise_s += watch.seconds
            if missing := sorted(set(parameters) - written - sums.keys()):
                raise RuntimeError(f"the merge left {len(missing)} parameters unwritten, {missing[0]} for one")
            rewritten = {name: parameter for name, parameter in parameters.items() if name in written}
            repack_s = _repack(model, rewritten.values())
            _derive(model, dtype)
            sums |= {name: _sum(parameter) for name, parameter in rewritten.items()}
            total = _checksum(parameters, sums)
        self._mergesearch_computations, self._mergesearch_sums = wanted, sums
        self._mergesearch_swaps += 1
        self._mergesearch_digest = recipe.digest
        self._mergesearch_checksum = total
        return {
            **self.mergesearch_held(),
            "tensors_written": len(changed),
            "materialise_s": materialise_s,
            "repack_s": repack_s,
            "swap_s": time.perf_counter() - started - materialise_s,
            "bank": {**bank.summary(), "reason": self._mergesearch_reason},
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
            with torch.inference_mode():
                for cache in self.model_runner.kv_caches:
                    # A layer with a state has several tensors.
                    for part in cache if isinstance(cache, list | tuple) else (cache,):
                        part.zero_()
        return count


@dataclass(frozen=True)
class _Place:
    """The part of a parameter that one tensor of the merged model makes up."""

    parameter: str
    memory: torch.Tensor

    def overlaps(self, other: torch.Tensor) -> bool:
        if _storage(other) != _storage(self.memory) or other.numel() == 0:
            return False
        (begin, end), (first, last) = _extent(self.memory), _extent(other)
        return first < end and begin < last

    def is_in(self, parameters: Mapping[str, torch.Tensor]) -> bool:
        """It still is: vLLM has not given the parameter other memory."""
        return _storage(parameters[self.parameter]) == _storage(self.memory)


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Passes (name, tensor) on to vLLM's loader, adds up the time spent waiting for them, and sees where each goes.

    Where the loader did nothing but copy the whole tensor to one part of a parameter, and nothing else changed that
    part before the end, that is its place: `places`.
    """

    def __init__(self, source: Iterator[tuple[str, torch.Tensor]], parameters: Mapping[str, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.source = source
        self.seconds = 0.0
        self._places: dict[str, _Place | None] = {}
        self._owners = {_storage(parameter): name for name, parameter in parameters.items()}
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._changed: list[torch.Tensor] = []

    @property
    def places(self) -> dict[str, _Place | None]:
        """By tensor; None where only the loader knows."""
        return {
            name: None if place is None or any(map(place.overlaps, self._changed)) else place
            for name, place in self._places.items()
        }

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        while True:
            started = time.perf_counter()
            with _disable_current_modes():
                item = next(self.source, None)
            self.seconds += time.perf_counter() - started
            if item is None:
                return
            self._copies.clear()
            yield item
            self._places[item[0]] = self._place(item[1])

    def _place(self, tensor: torch.Tensor) -> _Place | None:
        if len(self._copies) != 1:
            return None
        memory, copied = self._copies[0]
        is_whole = copied.data_ptr() == tensor.data_ptr() and copied.shape == memory.shape == tensor.shape
        is_whole &= copied.stride() == tensor.stride()  # GPT-2's square weights are transposed on the way
        is_plain = memory.is_contiguous() and memory.dtype == tensor.dtype and memory.device == tensor.device
        owner = self._owners.get(_storage(memory))
        return _Place(owner, memory.detach()) if is_whole and is_plain and owner is not None else None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self._copies.append(args[:2])
        elif func._schema.is_mutable and isinstance(args[0], torch.Tensor):
            self._changed.append(args[0])
        return func(*args, **(kwargs or {}))


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte, and the one behind the last, that a tensor may reach, in memory."""
    length = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + length * tensor.element_size()


def _repack(model: torch.nn.Module, changed: Iterable[torch.nn.Parameter]) -> float:
    """On CPU, pack again what holds a changed parameter; the old packed copy is dropped. Elsewhere nothing.

    Returns the seconds it took.
    """
    started = time.perf_counter()
    ids = set(map(id, changed))
    for module in model.modules():
        pack = getattr(module, PACK, None)
        if pack is not None and any(id(held) in ids for held in module.parameters(recurse=False)):
            pack()
    return time.perf_counter() - started


def _derive(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Let attention make again, at the same addresses, what some of its kernels keep of weights in another dtype."""
    for module in model.modules():
        derive = getattr(getattr(module, "impl", None), "process_weights_after_loading", None)
        if callable(derive):
            derive(dtype)


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
        from workers.merging.kernels.reductions import weighted_words

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


_opened: dict[str, Bank] = {}  # the last one


def open_bank(
    family: str,
    places: Sequence[str] = ("mapped",),
    device: torch.device | str = "cpu",
    scratch_bytes: int = 0,
) -> Bank:
    """The bank of a family (as `family_to_json` writes it), opened as `MergeExtension.mergesearch_open` says.

    There is one per process, whoever asks: an engine's where the engine computes in this process, else one of mapped
    files that merges on the CPU. Raises InvalidModel.
    """
    if family not in _opened:
        _opened.clear()
        _opened[family] = _first_with_room(family_from_json(family), places, torch.device(device), scratch_bytes)
    return _opened[family]


def _first_with_room(family: Family, places: Sequence[str], device: torch.device, scratch_bytes: int) -> Bank:
    from workers.merging.bank import Bank

    for place in places[:-1]:
        bank: Bank | None = None
        try:
            bank = Bank(family, place, device=device)
        except (torch.OutOfMemoryError, torch.AcceleratorError) as error:  # the latter for with_revisions memory
            log.warning("no room for the sources %s: %s", PLACES[place], error)
        if bank is not None and (place != "gpu" or torch.cuda.mem_get_info(device)[0] >= scratch_bytes):
            return bank
        del bank
        torch.cuda.empty_cache()
    return Bank(family, places[-1], device=device)


def family_to_json(family: Family) -> str:
    models = [[model.alias, model.directory, model.fingerprint] for model in family.models]
    return json.dumps({"models": models, "tokenizer": family.tokenizer})


def family_from_json(text: str) -> Family:
    document = json.loads(text)
    base, *experts = (ModelSource(*fields) for fields in document["models"])
    return Family(base, tuple(experts), document["tokenizer"])

"""What runs inside vLLM's worker: it computes the merge where the weights are, and writes it over them.

Only recipes and small records cross the process boundary.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Collection, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from search_spaces.errors import InvalidRecipe
from search_spaces.recipe import Recipe
from workers.engines.logits import bad_rows
from workers.engines.vllm.checksum import checksum, combined, word_sum
from workers.engines.vllm.loading import LoadObserver, Place
from workers.engines.vllm.plugin import IS_PACKED, PACK
from workers.errors import EvidenceMismatch
from workers.types import Family, ModelSource, Placement

if TYPE_CHECKING:
    from workers.merging.bank import Bank

__all__ = ["MergeExtension", "family_from_json", "family_to_json", "open_bank"]

log = logging.getLogger(__name__)

IN_WORDS = {
    Placement.MAPPED: "in mapped files",
    Placement.HOST: "in host memory",
    Placement.GPU: "in GPU memory",
}


class MergeExtension:
    """Mixed into vLLM's worker (`worker_extension_cls`); called through `collective_rpc` by name."""

    # An attribute of vLLM's worker.
    model_runner: Any
    # How each tensor that the engine holds was computed, and the sum of each parameter; empty if not known.
    _mergesearch_computations: dict[str, Hashable]
    _mergesearch_sums: dict[str, int]
    # Where a merge of each tensor can be written directly; None if only vLLM's loader can write it.
    _mergesearch_places: dict[str, Place | None]
    # Names of the modules whose packed copies can be compared with their weights.
    _mergesearch_comparable: frozenset[str]

    def mergesearch_open(
        self,
        family: str,
        placements: Sequence[Placement] = (Placement.MAPPED,),
        scratch_bytes: int = 0,
        reason: str = "",
        keeps_ranks: bool = False,
    ) -> str:
        """Open the bank of source weights, and start to count rows of logits that are NaN or infinite.

        The bank goes to the first of `placements` that has room for it and, on the GPU, for `scratch_bytes` to merge
        in. `reason` says why that placement comes first. With `keeps_ranks` the bank keeps DELLA's ranks
        (`bank.Bank.keep_ranks`). Returns the bank's fingerprint."""
        device = next(self.model_runner.get_model().parameters()).device
        self._mergesearch_bank = open_bank(family, placements, device, scratch_bytes)
        if keeps_ranks:
            self._mergesearch_bank.keep_ranks()
        if self._mergesearch_bank.placement != placements[0]:
            reason += f"; {IN_WORDS[placements[0]]} there was too little left once the engine ran"
        self._mergesearch_reason = reason
        self._mergesearch_merge_on(device)
        self._mergesearch_digest: str | None = None
        self._mergesearch_swaps = 0
        self._mergesearch_places = {}
        self._mergesearch_forget()
        model = self.model_runner.get_model()
        self._mergesearch_comparable = _comparable(model)
        self._mergesearch_bad_rows = torch.zeros(2, dtype=torch.int64, device=device)
        compute_logits, total = model.compute_logits, self._mergesearch_bad_rows

        def watched(*args: Any, **kwargs: Any) -> Any:
            logits = compute_logits(*args, **kwargs)
            if logits is not None:
                total.add_(bad_rows(logits))  # it stays on the device: nothing waits for it
            return logits

        model.compute_logits = watched
        return str(self._mergesearch_bank.fingerprint)

    def _mergesearch_merge_on(self, device: torch.device) -> None:
        from workers.merging.materialize import Scratch

        self._mergesearch_bank.merge_on(device)
        self._mergesearch_scratch = Scratch(self._mergesearch_bank, self.model_runner.model_config.dtype)

    def mergesearch_sources(self) -> str:
        """The size of the bank's sources and their placement, in words."""
        bank = self._mergesearch_bank
        return f"{bank.num_bytes / 1e9:.2f} GB of sources {IN_WORDS[bank.placement]}"

    def mergesearch_apply(self, recipe_json: str) -> dict[str, Any]:
        """Write the merge over the engine's weights, in place: addresses stay, so captured graphs stay valid.

        Tensors that the held merge computes in the same way are not written again. Returns {digest, swaps, checksum,
        tensors_written, materialise_s, repack_s, swap_s (packing included), bank (its summary)}. During the writing,
        and if it fails, no digest is held. For a recipe that cannot be merged the result has the reason, {refused}, and
        where files of the sources have changed, {changed}, and for packed copies that do not hold the merge,
        {mismatch}: with several ranks an exception would lose its class on the way.
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
        except EvidenceMismatch as error:
            return {**self.mergesearch_held(), "changed": str(error)}

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
                # vLLM's loader knows which rows of which fused parameter a tensor fills, which part of it a rank holds,
                # how the vocabulary is padded and which head is tied.
                tensors = merged_tensors(plan, bank, dtype, names=others, into=self._mergesearch_scratch.tensor)
                observer = LoadObserver(tensors, parameters)
                with observer:
                    written |= set(model.load_weights(iter(observer)))
                self._mergesearch_places |= observer.places
                materialise_s += observer.seconds
            if missing := sorted(set(parameters) - written - sums.keys()):
                raise RuntimeError(f"the merge left {len(missing)} parameters unwritten, for example {missing[0]}")
            rewritten = {name: parameter for name, parameter in parameters.items() if name in written}
            packing = time.perf_counter()
            stale = _repack(model, rewritten.values(), self._mergesearch_comparable)
            repack_s = time.perf_counter() - packing
            if stale:
                return {
                    **self.mergesearch_held(),
                    "mismatch": f"the packed weights of {', '.join(stale)} are not the merge",
                }
            _derive(model, dtype)
            sums |= {name: word_sum(parameter) for name, parameter in rewritten.items()}
            total = combined(parameters, sums)
        bank.sources.check_unchanged()  # a file may have changed while it was read
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
        """What the engine holds: {digest (None if unknown), swaps, checksum (at the last swap)}."""
        return {
            "digest": self._mergesearch_digest,
            "swaps": self._mergesearch_swaps,
            "checksum": getattr(self, "_mergesearch_checksum", ""),
        }

    def mergesearch_checksum(self) -> str:
        """The checksum of the parameters now."""
        with torch.inference_mode():
            return checksum(dict(self.model_runner.get_model().named_parameters()))

    def mergesearch_bad_rows(self) -> list[int]:
        """How many rows of logits were NaN, and how many infinite, since the last call (`workers.engines.logits`).

        If there were any, all cached keys and values are zeroed: NaN in a block spreads to the texts that reuse the
        block, even where it is masked.
        """
        counts: list[int] = self._mergesearch_bad_rows.tolist()
        self._mergesearch_bad_rows.zero_()
        if any(counts):
            with torch.inference_mode():
                for cache in self.model_runner.kv_caches:
                    # A layer with a state has several tensors.
                    for part in cache if isinstance(cache, list | tuple) else (cache,):
                        part.zero_()
        return counts


def _repack(
    model: torch.nn.Module, changed: Iterable[torch.nn.Parameter], comparable: Collection[str]
) -> tuple[str, ...]:
    """On CPU, pack each module with a changed parameter again, in place of its old packed copy; elsewhere do nothing.

    Returns the names of those, of the `comparable` ones, whose packed copy does not hold their weights afterwards.
    """
    ids = set(map(id, changed))
    stale = []
    for name, module in model.named_modules():
        pack = getattr(module, PACK, None)
        if pack is not None and any(id(held) in ids for held in module.parameters(recurse=False)):
            pack()
            if name in comparable and not getattr(module, IS_PACKED)():
                stale.append(name)
    return tuple(stale)


def _comparable(model: torch.nn.Module) -> frozenset[str]:
    """The modules that vLLM has just packed whose packed copies are seen to hold their weights.

    A kernel that rounds its operands does not show it; then the canary alone would find a copy that is stale.
    """
    packed = {name: module for name, module in model.named_modules() if hasattr(module, IS_PACKED)}
    with torch.inference_mode():
        comparable = frozenset(name for name, module in packed.items() if getattr(module, IS_PACKED)())
    if hidden := sorted(packed.keys() - comparable):
        log.warning("%d packed layers cannot be compared with their weights, for example %s", len(hidden), hidden[0])
    return comparable


def _derive(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Update, at the same addresses, the copies of weights in another dtype that some attention kernels keep."""
    for module in model.modules():
        derive = getattr(getattr(module, "impl", None), "process_weights_after_loading", None)
        if callable(derive):
            derive(dtype)


_opened: dict[str, Bank] = {}  # the last one only


def open_bank(
    family: str,
    placements: Sequence[Placement] = (Placement.MAPPED,),
    device: torch.device | str = "cpu",
    scratch_bytes: int = 0,
) -> Bank:
    """The bank of a family (as `family_to_json` writes it), opened as `MergeExtension.mergesearch_open` describes.

    A process has one bank of a family: the engine's if the engine computes in this process, else one of mapped files
    that merges on the CPU. Raises InvalidModel.
    """
    if family not in _opened:
        _opened.clear()
        _opened[family] = _first_with_room(family_from_json(family), placements, torch.device(device), scratch_bytes)
    return _opened[family]


def _first_with_room(family: Family, placements: Sequence[Placement], device: torch.device, scratch_bytes: int) -> Bank:
    from workers.merging.bank import Bank

    for placement in placements[:-1]:
        bank: Bank | None = None
        try:
            bank = Bank(family, placement, device=device)
        except (torch.OutOfMemoryError, torch.AcceleratorError) as error:  # the latter for pinned memory
            log.warning("no room for the sources %s: %s", IN_WORDS[placement], error)
        if bank is not None and (placement != Placement.GPU or torch.cuda.mem_get_info(device)[0] >= scratch_bytes):
            return bank
        del bank
        torch.cuda.empty_cache()
    return Bank(family, placements[-1], device=device)


def family_to_json(family: Family) -> str:
    models = [[model.alias, model.directory, model.fingerprint, model.adapts] for model in family.models]
    return json.dumps({"models": models, "tokenizer": family.tokenizer, "vocabulary": dict(family.vocabulary)})


def family_from_json(text: str) -> Family:
    document = json.loads(text)
    base, *experts = (ModelSource(*fields) for fields in document["models"])
    return Family(base, tuple(experts), document["tokenizer"], document["vocabulary"])

"""Code inside vLLM's worker process that computes a merge and writes it over the model's weights.

Only recipes and small records cross the process boundary.
"""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from search_spaces.errors import InvalidRecipe
from search_spaces.recipe import Recipe
from workers.engines.logits import bad_rows
from workers.engines.vllm.held import HeldWeights, Into, NotPacked
from workers.errors import EvidenceMismatch
from workers.types import Family, ModelSource, Placement

if TYPE_CHECKING:
    from workers.merging.bank import Bank
    from workers.merging.materialize import Scratch

__all__ = ["MergeExtension", "close_bank", "family_from_json", "family_to_json", "open_bank"]

log = logging.getLogger(__name__)
T = TypeVar("T")

# A GPU whose memory was full merges again once it has this share of the room that it had when the engine had started.
MOST_OF_ROOM = 0.9
# Id of the memory pool of all allocations outside CUDA graphs, in torch's snapshots.
DEFAULT_POOL = (0, 0)

IN_WORDS = {
    Placement.MAPPED: "in mapped files",
    Placement.HOST: "in host memory",
    Placement.GPU: "in GPU memory",
}


class MergeExtension:
    """Methods added to vLLM's worker class (`worker_extension_cls`) and called by name through `collective_rpc`."""

    # Attributes of vLLM's worker.
    model_runner: Any
    rank: int
    _mergesearch_bank: Bank
    _mergesearch_weights: HeldWeights
    _mergesearch_digest: str | None
    _mergesearch_scratch: dict[torch.device, Scratch]
    # The reason why the GPU has too little memory for merging; "" if it has enough, or if the engine has no GPU.
    _mergesearch_lack: str

    def mergesearch_open(
        self,
        family: str,
        placements: Sequence[Placement] = (Placement.MAPPED,),
        scratch_bytes: int = 0,
        reason: str = "",
        keeps_ranks: bool = False,
        ranks: int = 1,
        is_shared: bool = False,
        max_recent_bytes: int | None = None,
    ) -> str:
        """Open the source weights (the bank), and start to count logit rows that contain NaN or infinite values.

        - `family`: the base and the experts, as JSON in the form of the function `family_to_json`
        - `placements`: the possible placements of the weights; the first placement with enough memory is used
        - `scratch_bytes`: the memory for merging a tensor, which a GPU must have in addition
        - `reason`: a text that says why the first placement was chosen
        - `keeps_ranks`: whether the bank caches the ranks of magnitudes that the method DELLA needs (method
          `bank.Bank.keep_ranks`)
        - `ranks`: the number of processes of the engine
        - `is_shared`: whether the processes of this node share statistics and host memory of the sources (class
          `bank.Bank`)
        - `max_recent_bytes`: the host memory for statistics of several sources; None is the bank's own limit

        Returns the bank's fingerprint, a digest of the contents of all source models.
        """
        device = next(self.model_runner.get_model().parameters()).device
        opened = open_bank(
            family, placements, device, scratch_bytes, is_shared=is_shared, max_recent_bytes=max_recent_bytes
        )
        self._mergesearch_bank = opened.on(device)
        if keeps_ranks:
            self._mergesearch_bank.keep_ranks()
        if self._mergesearch_bank.placement != placements[0]:
            reason += f"; {IN_WORDS[placements[0]]} there was too little left once the engine ran"
        self._mergesearch_reason = reason
        self._mergesearch_scratch_bytes = scratch_bytes
        if device.type == "cuda":
            self._mergesearch_bank.room_bytes = _room(device)
        self._mergesearch_scratch = {}
        self._mergesearch_lack = ""
        self._mergesearch_ranks = ranks
        self._mergesearch_digest = None
        self._mergesearch_swaps = 0
        model = self.model_runner.get_model()
        # The model of path engines names its class of held weights.
        held = getattr(model, "held_by", HeldWeights)
        self._mergesearch_weights = held(
            model, self.model_runner.model_config.dtype, rank=self.rank, ranks=self._mergesearch_ranks
        )
        self._mergesearch_weights.mark_unwritten()
        self._mergesearch_merged(self._mergesearch_weights.fill)
        self._mergesearch_bad_rows = torch.zeros(2, dtype=torch.int64, device=device)
        compute_logits, total = model.compute_logits, self._mergesearch_bad_rows

        def watched(*args: Any, **kwargs: Any) -> Any:
            logits = compute_logits(*args, **kwargs)
            if logits is not None:
                total.add_(bad_rows(logits))  # on the device, so that nothing waits for it
            return logits

        model.compute_logits = watched
        return str(self._mergesearch_bank.fingerprint)

    def _mergesearch_merged(self, write: Callable[[Bank, Into], T]) -> T:
        """Call `write(bank, into)` and return its result; compute on the CPU if the GPU has too little memory.

        `bank` has the source weights, and computes merges on the engine's device or on the CPU. `into` returns memory
        for computing a tensor. After a lack of memory, later merges are computed on the CPU as well, until the GPU
        memory that was planned for merging, or most of the memory that the engine's start left, is free again.
        """
        bank = self._mergesearch_bank
        planned = self._mergesearch_scratch_bytes
        if bank.room_bytes is not None:  # as the engine left it; on a small GPU this is less than was planned
            planned = min(planned, int(MOST_OF_ROOM * bank.room_bytes))
        if self._mergesearch_lack and _room(bank.device) >= planned:
            self._mergesearch_lack = ""
        if not self._mergesearch_lack:
            try:
                return write(bank, self._mergesearch_into(bank))
            except torch.OutOfMemoryError as error:
                if bank.device.type == "cpu":
                    raise
                self._mergesearch_lack = str(error)
            self._mergesearch_scratch.clear()
            torch.cuda.empty_cache()
        log.warning("the GPU has too little memory left to merge in, so the CPU merges: %s", self._mergesearch_lack)
        return write(bank.on("cpu"), self._mergesearch_into(bank.on("cpu")))

    def _mergesearch_into(self, bank: Bank) -> Into:
        from workers.merging.materialize import Scratch

        if bank.device not in self._mergesearch_scratch:
            self._mergesearch_scratch[bank.device] = Scratch(bank, self.model_runner.model_config.dtype)
        return self._mergesearch_scratch[bank.device].tensor

    def mergesearch_sources(self) -> str:
        """Describe the size of the source weights and where they are kept, as a text for people."""
        bank = self._mergesearch_bank
        return f"{bank.num_bytes / 1e9:.2f} GB of sources {IN_WORDS[bank.placement]}"

    def mergesearch_apply(self, recipe_json: str) -> dict[str, Any]:
        """Write the merge of a recipe over the engine's weights in place; addresses and CUDA graphs stay valid.

        `recipe_json` is the recipe as JSON. A tensor that is equal in the merge that the engine already holds is not
        written again. If a GPU has too little memory for merging, the merge is computed on the CPU. From the beginning
        of the write until it has succeeded, the engine reports no digest.

        Returns a dict with the keys of the result of the method `mergesearch_held`, and these keys:

        - tensors_written: the number of tensors that were written
        - materialise_s, swap_s: the seconds for computing the merge, and for everything else
        - repack_s: the seconds of `swap_s` for packing weights (copying them to the layout of vLLM's CPU kernels)
        - off_device: text that says which part of the merge was not computed on the engine's device, or ""
        - whole: text that says how many tensors this rank computed as a whole instead of only the elements that it
          holds, and why, or ""
        - elements_read: the number of elements of the sources that this rank read
        - bank: the summary of the source weights (method `bank.Bank.summary`), with the reason for their placement

        If the merge could not be written, the dict has the keys of the result of the method `mergesearch_held`, and one
        of the following keys, whose value is the reason. No exception is raised, because with several ranks it would
        lose its class.

        - refused: the recipe cannot be merged
        - changed: files of the sources have changed
        - mismatch: copies of weights for vLLM's CPU kernels differ from the merge
        """
        try:
            return self._mergesearch_write(Recipe.from_json(json.loads(recipe_json)))
        except InvalidRecipe as error:
            return {**self.mergesearch_held(), "refused": str(error)}
        except EvidenceMismatch as error:
            return {**self.mergesearch_held(), "changed": str(error)}

    def _mergesearch_write(self, recipe: Recipe) -> dict[str, Any]:
        started = time.perf_counter()
        before = self._mergesearch_bank.elements_read
        self._mergesearch_digest = None
        weights = self._mergesearch_weights
        try:
            done = self._mergesearch_merged(partial(weights.hold, recipe))
        except NotPacked as error:
            return {**self.mergesearch_held(), "mismatch": str(error)}
        if done.tensors_written and (whole := self._mergesearch_whole()):
            log.info("of this merge, each of %d ranks computed more than it holds: %s", self._mergesearch_ranks, whole)
        self._mergesearch_checksum = weights.checksum()
        self._mergesearch_swaps += 1
        self._mergesearch_digest = recipe.digest
        return {
            **self.mergesearch_held(),
            "tensors_written": done.tensors_written,
            "materialise_s": done.materialise_s,
            "repack_s": done.repack_s,
            "swap_s": time.perf_counter() - started - done.materialise_s,
            "off_device": self._mergesearch_off_device(),
            "whole": self._mergesearch_whole(),
            "elements_read": self._mergesearch_bank.elements_read - before,
            "bank": {**self._mergesearch_bank.summary(), "reason": self._mergesearch_reason},
        }

    def _mergesearch_off_device(self) -> str:
        own, on = self._mergesearch_bank.device.type, self._mergesearch_weights.computed_on
        others = [device for device in on.values() if device != own]
        if not others:
            return ""
        return f"the CPU merged {len(others)} of {len(on)} tensors, for which the GPU had too little memory"

    def _mergesearch_whole(self) -> str:
        if self._mergesearch_ranks == 1:
            return ""
        counts = Counter(self._mergesearch_weights.whole_because.values())
        return "; ".join(f"{count} tensors merged whole: {reason}" for reason, count in sorted(counts.items()))

    def mergesearch_forget(self) -> None:
        """Make the next swap (writing of a merge into the engine) write every tensor, even unchanged ones."""
        self._mergesearch_weights.forget()

    def mergesearch_held(self) -> dict[str, Any]:
        """Report the merge that the engine holds, as a dict with three keys.

        - digest: the digest of the recipe, or None if unknown
        - swaps: the number of merges that were written so far
        - checksum: the parameters' checksum after the last write of a merge
        """
        is_held = self._mergesearch_weights.is_as_written
        return {
            "digest": self._mergesearch_digest if is_held else None,
            "swaps": self._mergesearch_swaps,
            "checksum": getattr(self, "_mergesearch_checksum", ""),
        }

    def mergesearch_checksum(self) -> str:
        """Compute the checksum of the model's current parameters."""
        return self._mergesearch_weights.checksum_now()

    def mergesearch_bad_rows(self) -> list[int]:
        """Numbers of logit rows since the last call: (rows with NaN, infinite rows), as a list.

        If the numbers are not both 0, all cached keys and values are set to zero. Otherwise NaN in a block of the cache
        would spread to other texts that reuse the block, even where the block is masked.
        """
        counts: list[int] = self._mergesearch_bad_rows.tolist()
        self._mergesearch_bad_rows.zero_()
        if any(counts):
            with torch.inference_mode():
                for cache in self.model_runner.kv_caches:
                    # State-space layers have several tensors.
                    for part in cache if isinstance(cache, list | tuple) else (cache,):
                        part.zero_()
        return counts


def _room(device: torch.device) -> int:
    """Bytes of memory that this process can allocate now on the GPU `device`, for tensors of any size.

    The result is the sum of the GPU's free memory and the segments that torch has reserved for its default pool and
    uses no part of. Torch returns such segments to the GPU before an allocation fails. Unused memory of CUDA graphs is
    not counted, because torch keeps it for them. Unused parts of segments are not counted either: each serves only a
    tensor that fits into it.
    """
    free, _ = torch.cuda.mem_get_info(device)
    # Figures by pool are in the snapshot only; those of `torch.cuda.memory_stats` are sums over all pools.
    segments: list[dict[str, Any]] = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
    return free + sum(
        int(segment["total_size"])
        for segment in segments
        if segment["device"] == device.index
        and tuple(segment["segment_pool_id"]) == DEFAULT_POOL
        and segment["active_size"] == 0
    )


_opened: dict[str, Bank] = {}  # only the latest


def open_bank(
    family: str,
    placements: Sequence[Placement] = (Placement.MAPPED,),
    device: torch.device | str = "cpu",
    scratch_bytes: int = 0,
    *,
    is_shared: bool = False,
    max_recent_bytes: int | None = None,
) -> Bank:
    """Open the source weights of a base model and its experts (a family); return the bank, the object that holds them.

    `family` describes these models, as JSON in the form of the function `family_to_json`. A process has one bank at a
    time. If the family is open already, its bank is returned, and the other arguments are ignored. Otherwise the
    previous bank is dropped, and a new one is made.

    `device` is the device that computes merges. The weights are kept in the first of `placements` that has enough
    memory for them; a GPU must also have `scratch_bytes` for merging a tensor. With `is_shared`, the bank is shared
    with other processes of the node. `max_recent_bytes` limits the memory for statistics of several sources. Raises
    InvalidModel if the models cannot be opened.
    """
    if family not in _opened:
        _opened.clear()
        _opened[family] = _first_with_room(
            family_from_json(family),
            placements,
            torch.device(device),
            scratch_bytes,
            is_shared=is_shared,
            max_recent_bytes=max_recent_bytes,
        )
    return _opened[family]


def close_bank(family: str) -> None:
    """Close the bank that `open_bank` opened in this process for `family`, if it is the latest.

    The process then uses no shared memory of the node for these sources any more. The next call of `open_bank` opens a
    new bank.
    """
    if (bank := _opened.pop(family, None)) is not None:
        bank.close()


def _first_with_room(
    family: Family,
    placements: Sequence[Placement],
    device: torch.device,
    scratch_bytes: int,
    *,
    is_shared: bool,
    max_recent_bytes: int | None,
) -> Bank:
    from workers.merging.bank import Bank

    options: dict[str, Any] = {"device": device, "is_shared": is_shared, "max_recent_bytes": max_recent_bytes}

    for placement in placements[:-1]:
        bank: Bank | None = None
        try:
            bank = Bank(family, placement, **options)
        except (torch.OutOfMemoryError, torch.AcceleratorError) as error:  # the latter for pinned memory
            log.warning("no room for the sources %s: %s", IN_WORDS[placement], error)
        if bank is not None and (placement != Placement.GPU or torch.cuda.mem_get_info(device)[0] >= scratch_bytes):
            return bank
        del bank
        torch.cuda.empty_cache()
    return Bank(family, placements[-1], **options)


def family_to_json(family: Family) -> str:
    models = [[model.alias, model.directory, model.fingerprint, model.adapts, model.origin] for model in family.models]
    document = {"models": models, "tokenizer": family.tokenizer, "vocabulary": dict(family.vocabulary)}
    return json.dumps({**document, "alignments_dir": family.alignments_dir})


def family_from_json(text: str) -> Family:
    document = json.loads(text)
    base, *experts = (ModelSource(*fields) for fields in document["models"])
    return Family(base, tuple(experts), document["tokenizer"], document["vocabulary"], document["alignments_dir"])

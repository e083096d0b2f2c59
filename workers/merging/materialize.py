"""Computation of a recipe's merged tensors one after another, for running engines and for exports.

Tensors have their names in the merged model in Hugging Face's format.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Self

import torch

from search_spaces.methods import METHODS
from search_spaces.recipe import Recipe, Source
from workers.merging import kernels
from workers.merging.bank import Bank, Key, Mask
from workers.merging.devices import bank_for
from workers.merging.kernels import FUSED, ON_CUDA, can_fuse, exact_rule, for_each, is_fused, merge_shard, merge_stored
from workers.merging.kernels.rules import Rule
from workers.merging.masks import mask_key
from workers.merging.merged_tensor import MergedTensor
from workers.merging.methods.arithmetic import Products
from workers.merging.methods.fusions import Importance
from workers.merging.methods.plain import PLAIN, Operands
from workers.merging.methods.trimming import trim_ranks
from workers.merging.order_statistics import Ranked, TieOrder
from workers.merging.plan import TensorPlan, computation, named_sources, plan_tensors
from workers.merging.shards import Shard

__all__ = ["Scratch", "in_order_of_rank", "is_small", "merge_into", "merged_tensors", "operands_of", "sources_of"]


# A merge with at most this many elements in all operands is small: importing Numba and loading its kernels takes longer
# than the merge. Weighted sums may be larger: in torch, too, they are one pass over each operand, so kernels gain
# little.
SMALL = 1 << 23
SUMS, SMALL_SUM = frozenset({"linear", "weighted_sum"}), 1 << 29

# Methods that use no statistic of `Operands`, but whose kernel rule is made by counting elements of whole tensors.
READ_BY_RULE = frozenset({"ramplus_tl"})


class Scratch:
    """Memory that is reused for one merged tensor after another, to save allocations.

    Pass the method `tensor` as the argument `into` to the function `merged_tensors`. Then each tensor must be copied
    before the next tensor is computed. The memory is on the device of `bank`, the source weights.
    """

    def __init__(self, bank: Bank, dtype: torch.dtype) -> None:
        self._memory = torch.empty(0, dtype=dtype, device=bank.device)

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Memory for a tensor of the shape `shape`; it is valid until the next call of this method.

        All tensors share this memory, so the tensor's `name` is not used. The parameter exists because merges ask for
        memory by name and shape.
        """
        size = math.prod(shape)
        if size > self._memory.numel():
            self._memory = self._memory.new_empty(size)
        return self._memory[:size].view(shape)


def merged_tensors(
    recipe: Recipe | TensorPlan,
    bank: Bank,
    dtype: torch.dtype,
    *,
    names: Container[str] | None = None,
    into: Callable[[str, tuple[int, ...]], torch.Tensor] | None = None,
    compiles: bool = True,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Compute a recipe's merged model tensor by tensor; yield (name, tensor) for embedding, layers in order, and head.

    `recipe` may also be a plan, the checked recipe with the list of tensors to compute. `bank` has the source weights.
    An output head that is tied to the embedding is left out. With `names`, only the tensors of these names are
    computed.

    Each tensor is computed in float32 and rounded once, to `dtype`. Recipes with equal digests give equal bits. A
    tensor may share memory with the bank and must not be written to. Each tensor is on the bank's device, or on the CPU
    if that device has too little memory for it (module `devices`).

    `into` may be a function that returns the memory for a tensor of a given name and shape. The memory must be
    contiguous, of `dtype`, and on the bank's device. Reusing memory saves time, because allocating memory takes longer
    than filling it. If the memory for all tensors exists already, the function `merge_into` is faster.

    With `compiles=False` all methods are computed by plain torch functions. These give the same bits and are slower,
    but do not load Numba, so that small merges take less time (function `is_small`). Raises InvalidRecipe, InvalidModel
    or EvidenceMismatch, before the first tensor, if the recipe cannot be merged from these sources (function
    `plan_tensors`).
    """
    plan = plan_tensors(recipe, bank)

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for tensor in plan.tensors:
            if names is None or any(name in names for name in tensor.shapes()):
                own = bank_for(tensor, plan, bank, dtype)
                computation = _Computation.of(tensor, plan, own, compiles=compiles)
                merged = computation.result(own, dtype, None if tensor.pieces or own is not bank else into)
                yield from ((name, part) for name, part in tensor.split(merged) if names is None or name in names)

    return tensors()


def is_small(recipe: Recipe | TensorPlan, bank: Bank) -> bool:
    """Whether a merge is so small that a process should compute it with plain torch instead of compiled kernels.

    A process that computes only this merge needs more time to load the kernels than they save. A merge is small if it
    is computed on the CPU, and all operands together have few elements: at most the constant SMALL, or the constant
    SMALL_SUM if the method is a weighted sum. `recipe` is the recipe of the merge, or a plan made from it; `bank` has
    the weights of its models. Raises InvalidRecipe, InvalidModel or EvidenceMismatch if the recipe cannot be merged
    from these models.
    """
    share = 0.0
    for tensor in plan_tensors(recipe, bank).tensors:
        num_elements = math.prod(tensor.shape) * (len(named_sources(tensor.merge)) + 1)
        share += num_elements / (SMALL_SUM if tensor.merge.method in SUMS else SMALL)
    return bank.device.type == "cpu" and share <= 1


def merge_into(
    recipe: Recipe | TensorPlan,
    bank: Bank,
    destinations: Mapping[str, torch.Tensor],
    shards: Mapping[str, Shard] | None = None,
) -> dict[str, str]:
    """Compute the merged tensors named in `destinations`, and write them to the memory given there.

    `recipe` is the recipe of the merge, or a plan (checked recipe with the list of tensors). This function is the
    fastest way to merge, because several tensors are computed at a time. The memory is contiguous, of one dtype, and on
    the device of `bank`. A tensor for which this device has too little memory is computed on the CPU and copied (module
    `devices`). Raises InvalidRecipe, InvalidModel or EvidenceMismatch if the recipe cannot be merged from the sources
    in `bank`.

    `shards` has, for some tensors, the part of the elements to write, for example the part that one rank of an engine
    holds. Then only these elements are computed, with the bits that they have in the whole tensor. If this is not
    possible for a tensor, the whole tensor is computed. The result maps the names of tensors that were computed whole
    for this reason to the cause, as text.
    """
    plan, parts = plan_tensors(recipe, bank), shards or {}
    together: dict[Bank, list[tuple[int, _Computation | _ShardComputation]]] = {}
    why: dict[str, str] = {}

    def write(bank: Bank, computation: _Computation | _ShardComputation) -> None:
        if isinstance(computation, _ShardComputation):
            computation.write(bank, destinations[computation.tensor.name])
            return
        if computation.tensor.pieces:
            merged = computation.result(bank, next(iter(destinations.values())).dtype, None)
            for name, part in computation.tensor.split(merged):
                if name in destinations:
                    _copy(part, destinations[name], parts.get(name))
            return
        name = computation.tensor.name
        destination, shard = destinations[name], parts.get(name)
        is_there = destination.device == bank.device and shard is None
        merged = computation.result(bank, destination.dtype, (lambda name, shape: destination) if is_there else None)
        if merged is not destination:
            _copy(merged, destination, shard)

    for tensor in plan.tensors:
        if written := destinations.keys() & tensor.shapes():
            dtype = next(iter(destinations.values())).dtype
            if written & parts.keys():
                reason = _whole_because(tensor, plan, bank, dtype)
                if not reason:
                    shard = parts[tensor.name]
                    own = bank_for(tensor, plan, bank, dtype, shard.num_elements)
                    together.setdefault(own, []).append((shard.num_elements, _ShardComputation(tensor, plan, shard)))
                    continue
                why |= dict.fromkeys(written & parts.keys(), reason)
            own = bank_for(tensor, plan, bank, dtype)
            computation = _Computation.of(tensor, plan, own)
            if tensor.merge.method in FUSED:
                together.setdefault(own, []).append((math.prod(tensor.shape), computation))
            else:  # in torch, which has threads of its own
                write(own, computation)
    for own, computations in together.items():
        for_each(partial(write, own), computations, own.device)
    return why


def in_order_of_rank(plan: TensorPlan, names: Container[str], *, rank: int, ranks: int) -> TensorPlan:
    """The plan of the tensors named in `names`, in the order in which one rank of an engine should merge them.

    The ranks of an engine merge at the same time, and the first rank that needs a statistic of the sources computes it
    for all ranks. If all ranks merged the tensors in one order, one of them would compute and the others would wait.
    Therefore rank r of R ranks begins after the first r / R of the tensors, and merges these last. Without statistics
    all ranks keep the order of `plan`, so that they read the same part of the sources' files at a time. `rank` is less
    than `ranks`.
    """
    tensors = [tensor for tensor in plan.tensors if any(name in names for name in tensor.shapes())]
    if any(_uses_statistics(tensor.merge.method) for tensor in tensors):
        first = rank * len(tensors) // ranks
        tensors = tensors[first:] + tensors[:first]
    return replace(plan, tensors=tuple(tensors))


def _uses_statistics(method: str) -> bool:
    """Whether a merge by the method `method` reads whole tensors of the sources, for statistics or for its rule."""
    return bool(PLAIN[method].uses) or method in READ_BY_RULE


def _copy(merged: torch.Tensor, destination: torch.Tensor, shard: Shard | None) -> None:
    if shard is None:
        destination.copy_(merged)
    else:
        part = shard.view(merged.contiguous())
        destination.view(part.shape).copy_(part)


def _whole_because(tensor: MergedTensor, plan: TensorPlan, bank: Bank, dtype: torch.dtype) -> str:
    """Reason why parts (shards) of a merged tensor cannot be computed alone, as text; "" if they can be.

    `plan` lists the tensors of the merge, among them `tensor`; `bank` has the weights of its sources. `dtype` is the
    dtype of the result.
    """
    method = tensor.merge.method
    if tensor.pieces:
        return "the experts of the layer are merged as one tensor"
    if method not in FUSED:
        return f"{method} has no kernel"
    if kernels.backend(bank.device) == "cuda" and method not in ON_CUDA:
        return f"{method} has no kernel for CUDA"
    if plan.recipe.keeps_equal:
        return "the recipe has format 1, which has no kernels"
    if plan.recipe.trim == "model" and METHODS[method].trims:
        return "trim is model: its thresholds are those of whole models"
    if not can_fuse((dtype,), math.prod(tensor.shape)):
        return f"no kernel writes {dtype} or a tensor of {math.prod(tensor.shape)} elements"
    return ""


def sources_of(
    tensor: MergedTensor, plan: TensorPlan, bank: Bank, shard: Shard | None = None
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor | None]:
    """Stored operands of a merged tensor: (tensors of the sources, tensor of the base).

    `tensor` is one of the merged tensors that `plan` lists. The base's tensor is None if the method needs no base. The
    results are always whole tensors. `bank` has the weights of the source models, and counts the elements that are read
    from them. `shard` says which elements the caller will read, so that only these elements are counted; None counts
    all elements.
    """
    sources, base = _keys_of(tensor, plan, bank)
    return tuple(bank.get(*key, shard) for key in sources), None if base is None else bank.get(*base, shard)


def _keys_of(tensor: MergedTensor, plan: TensorPlan, bank: Bank) -> tuple[tuple[Key, ...], Key | None]:
    """Names of the tensors that a merged tensor is computed from, as the pair (names of the sources, name of the base).

    A name is (alias of the model in `bank`, name of the tensor). The name of the base is None if the method needs no
    base.
    """

    def key(source: Source) -> Key:
        return plan.aliases[source.model], bank.layout.name(tensor.suffix, source.layer)

    needs_base = METHODS[tensor.merge.method].needs_base
    return tuple(map(key, tensor.merge.sources)), key(tensor.merge.base_in(plan.recipe.base)) if needs_base else None


def operands_of(tensor: MergedTensor, plan: TensorPlan, bank: Bank) -> Operands:
    """Operands of a merged tensor in their stored dtypes, with the statistics that its method uses.

    `tensor` is one of the merged tensors that `plan` lists, and `bank` has the weights and statistics of the source
    models.
    """
    return _Computation.of(tensor, plan, bank).operands(bank)


@dataclass(frozen=True)
class _Computation:
    """A merged tensor to compute, with the names and statistics of its source tensors.

    `sources` and `base` are names of source tensors as (model's alias, tensor's name); `base` is None if the method
    needs no base. `keys` are the keys of random masks, one per source; None if the method draws no masks. The fields
    from `cosine` to `variances` are statistics of the sources, as in the class `Operands`; a statistic that the method
    does not use is None. If `keeps_equal` is True, elements of equal magnitude have the same rank, as in recipes of
    format 1. `compiles` says whether a compiled kernel may compute the tensor.
    """

    tensor: MergedTensor
    sources: tuple[Key, ...]
    base: Key | None
    keys: tuple[int, ...] | None
    cosine: float | None
    magnitudes: tuple[Ranked | None, ...] | None
    norms: tuple[float, ...] | None
    majority: int | None
    products: Products | None
    importance: Importance | None
    variances: Ranked | None
    keeps_equal: bool
    compiles: bool

    @classmethod
    def of(cls, tensor: MergedTensor, plan: TensorPlan, bank: Bank, *, compiles: bool = True) -> Self:
        """Prepare the computation of a merged tensor: look up its source tensors and their statistics in the bank.

        `tensor` is one of the merged tensors that `plan` lists, and `bank` has the weights of the source models. With
        `compiles=False` the plain torch function of the method computes the tensor. Statistics of single tensors are
        then not looked up, because the torch function computes them itself.
        """
        recipe, aliases = plan.recipe, plan.aliases
        merge, declared = tensor.merge, METHODS[tensor.merge.method]
        uses = PLAIN[merge.method].uses if compiles else frozenset()

        def key(source: Source) -> Key:
            return aliases[source.model], bank.layout.name(tensor.suffix, source.layer)

        sources = tuple(key(source) for source in merge.sources)
        base = key(merge.base_in(recipe.base))
        masks = None
        if declared.takes_seed:
            assert merge.seed is not None, f"{merge.method} without a seed passed the check"
            masks = tuple(
                mask_key(merge.seed, recipe.models[source.model], name)
                for source, (_, name) in zip(merge.sources, sources, strict=True)
            )
        magnitudes: tuple[Ranked | None, ...] | None = None
        majority = None
        if declared.trims and recipe.trim == "model":
            magnitudes, majority = _of_whole_models(tensor, recipe, bank, sources, base, compiles=compiles)
        elif "magnitudes" in uses and not declared.takes_seed:  # a mask changes the magnitudes
            magnitudes = bank.magnitudes(sources, base)
        return cls(
            tensor,
            sources,
            base if declared.needs_base else None,
            masks,
            bank.cosine(*sources) if "cosine" in uses else None,
            magnitudes,
            bank.norms(sources, base) if "norms" in uses and merge.number("rescale") else None,
            majority,
            bank.products(sources, base if declared.needs_base else None) if "products" in uses else None,
            bank.importance(*sources) if "importance" in uses else None,
            bank.variances(sources, base) if "variances" in uses else None,
            recipe.keeps_equal,
            compiles,
        )

    def result(
        self, bank: Bank, dtype: torch.dtype, into: Callable[[str, tuple[int, ...]], torch.Tensor] | None
    ) -> torch.Tensor:
        """Compute the merged tensor, rounded to `dtype`.

        `bank` has the weights of the source models. `into` is a function that returns memory for a tensor from its name
        and shape, or None. The result is in memory from `into` only if a kernel writes the result directly. Otherwise
        it is in newly allocated memory or, for a copy of a source, in the bank's memory.
        """
        merge, shape = self.tensor.merge, self.tensor.shape
        if _is_copy(self.tensor):
            return bank.get(*self.sources[0]).to(dtype)
        operands, factor = self.operands(bank), self.tensor.factor
        if factor == 1 and self._is_fused(operands, dtype):
            merged = into(self.tensor.name, shape) if into else torch.empty(shape, dtype=dtype, device=bank.device)
            merge_stored(merge, operands, merged)
            return merged
        if self._is_fused(operands, torch.float32):
            merged = torch.empty(shape, device=bank.device)
            merge_stored(merge, operands, merged)
        else:
            merged = PLAIN[merge.method].merge(operands.in_float32(), merge)
        return (merged if factor == 1 else merged * factor).to(dtype)

    def _is_fused(self, operands: Operands, dtype: torch.dtype) -> bool:
        # The kernels order equal elements as recipes of format 2 do.
        return self.compiles and is_fused(self.tensor.merge, operands, dtype) and not self.keeps_equal

    def operands(self, bank: Bank) -> Operands:
        """The merge's whole operands in their stored dtypes, on the device of `bank`, with the method's statistics.

        `bank` has the weights of the source models.
        """
        return self._operands(bank, lambda key: bank.get(*key))

    def operands_on_cpu(self, bank: Bank) -> Operands:
        """The same as the result of the method `operands`, with all tensors on the CPU."""
        return self._operands(bank, bank.on_cpu)

    def statistics(self, bank: Bank) -> Operands:
        """Operands of the merge that have only the method's statistics, for callers that read no weights.

        The tensors of the sources and the base have the right shape, but no contents (PyTorch's device "meta").
        """
        return self._operands(bank, lambda _: torch.empty(self.tensor.shape, device="meta"))

    def _operands(self, bank: Bank, read: Callable[[Key], torch.Tensor]) -> Operands:
        # Ranks are half as large as a source, so they are read for one tensor at a time.
        uses_ranks = "ranks" in PLAIN[self.tensor.merge.method].uses
        has_ranks = self.base is not None and uses_ranks and math.prod(self.tensor.shape) > 0
        return Operands(
            tensors=tuple(map(read, self.sources)),
            base=None if self.base is None else read(self.base),
            cosine=self.cosine,
            magnitudes=self.magnitudes,
            norms=self.norms,
            majority=self.majority,
            keys=self.keys,
            products=self.products,
            importance=self.importance,
            variances=self.variances,
            ranks=self._ranks(bank) if has_ranks else None,
            orders=tuple(self._order(bank, source) for source in self.sources),
            order=None if self.base is None else self._order(bank, self.base),
            name=self.tensor.name,
        )

    def _ranks(self, bank: Bank) -> tuple[torch.Tensor, ...] | None:
        if self.base is None or self.keeps_equal or not self.compiles:  # the bank's ranks are for format 2
            return None
        return bank.ranks(self.sources, self.base)

    def _order(self, bank: Bank, key: Key) -> TieOrder:
        order = bank.order(key)
        return replace(order, keeps_equal=True) if self.keeps_equal else order


def _is_copy(tensor: MergedTensor) -> bool:
    return tensor.merge.method == "passthrough" and tensor.merge.number("scale") == 1 and tensor.factor == 1


@dataclass(frozen=True)
class _ShardComputation:
    """Computation of those elements of a merged tensor that belong to one shard.

    `tensor` is one of the merged tensors that `plan` lists. `shard` says which of its elements are computed.
    """

    tensor: MergedTensor
    plan: TensorPlan
    shard: Shard

    def write(self, bank: Bank, destination: torch.Tensor) -> None:
        """Compute the shard's elements, and write them to the contiguous memory `destination`.

        `bank` has the weights of the source models, and computes the elements on its device. The elements are rounded
        once, to the dtype of `destination`.
        """
        shard, factor = self.shard, self.tensor.factor
        if _is_copy(self.tensor):
            ((source,), _) = self._operands(bank)
            part = source if source.numel() == shard.num_elements else shard.view(source)
            destination.view(part.shape).copy_(part)
            return
        rule = self._rule(bank)
        sources, base = self._operands(bank)
        if factor == 1 and destination.device == bank.device:
            merge_shard(rule, sources, base, destination, shard)
            return
        dtype = destination.dtype if factor == 1 else torch.float32
        merged = torch.empty(destination.shape, dtype=dtype, device=bank.device)
        merge_shard(rule, sources, base, merged, shard)
        destination.copy_(merged if factor == 1 else merged * factor)

    def _operands(self, bank: Bank) -> tuple[tuple[torch.Tensor, ...], torch.Tensor | None]:
        """Tensors for computing the shard: (tensors of the sources, tensor of the base or None).

        On the CPU these are whole tensors. On a GPU they may have only the elements of the shard (method `Bank.parts`).
        `bank` has the weights of the source models.
        """
        if kernels.backend(bank.device) == "cpu":
            return sources_of(self.tensor, self.plan, bank, self.shard)
        sources, base = _keys_of(self.tensor, self.plan, bank)
        parts = bank.parts(sources if base is None else (*sources, base), self.shard)
        return parts[: len(sources)], parts[len(sources)] if base is not None else None

    def _rule(self, bank: Bank) -> Rule:
        """The kernel rule of the merge: the numbers of its formula, with exact thresholds.

        The whole tensors of the sources are read if a number, such as a threshold, depends on elements outside the
        shard. `bank` has the weights of the source models. One process of a node computes such a rule and shares it
        with the other processes, except for methods that use ranks.
        """
        merge = self.tensor.merge
        uses = PLAIN[merge.method].uses

        def made() -> Rule:
            whole = _Computation.of(self.tensor, self.plan, bank)
            is_known = not _uses_statistics(merge.method)
            # The rules of kernels for CUDA depend on no elements but those at thresholds.
            if is_known or (merge.method in ON_CUDA and "magnitudes" not in uses):
                return exact_rule(merge, whole.statistics(bank))
            return exact_rule(merge, whole.operands_on_cpu(bank))

        # Rules without statistics take no time, and ranks take as much memory as the sources.
        if "ranks" in uses or not _uses_statistics(merge.method):
            return made()
        return bank.node.value(("rule", *computation(self.tensor, self.plan)), made)


def _of_whole_models(
    tensor: MergedTensor, recipe: Recipe, bank: Bank, sources: Sequence[Key], base: Key, *, compiles: bool
) -> tuple[tuple[Ranked, ...], int | None]:
    """Thresholds and majority sign for one tensor of a merge that trims whole models (`trim: model`).

    Such a merge keeps a share of the task vector of the whole model, not of each tensor. `tensor` is a merged tensor of
    `recipe`; `sources` and `base` are its operands, as (alias of the model, name of the tensor) in `bank`, which has
    the weights. The first result has an object for each source, which gives the source's magnitude thresholds. The
    second result is a number whose sign is the majority sign (method `Bank.majority`), or None if the method uses no
    majority sign. `compiles` says whether compiled kernels may be used.
    """
    merge = tensor.merge
    masks: list[Mask | None] = [None] * len(sources)
    if merge.seed is not None:
        masks = [(density, merge.seed) for density in merge.per_source("density")]
    stacks, count = recipe.stacks_experts, bank.num_elements(stacks_experts=recipe.stacks_experts)
    ranks = trim_ranks(merge, count)
    magnitudes = bank.whole_magnitudes(sources, base, ranks, masks=masks, stacks_experts=stacks, compiles=compiles)
    if "majority" not in PLAIN[merge.method].uses:
        return magnitudes, None
    shares = merge.per_source("k")
    return magnitudes, bank.majority(sources, base, shares, masks=masks, stacks_experts=stacks, compiles=compiles)

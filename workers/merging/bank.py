"""The bank: the source weights of one family of models, held once per engine in their stored dtype.

The bank maps names to tensors, and caches statistics that depend only on the sources (module `statistics`). It computes
no merges.
"""

from __future__ import annotations

import copy
import hashlib
import logging
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from workers.errors import InvalidModel
from workers.merging.masks import mask_key
from workers.merging.methods.arithmetic import Products, cosine_of, num_kept
from workers.merging.methods.fusions import Importance
from workers.merging.node import Node, NoRoom, SharedDirectory
from workers.merging.order_statistics import MagnitudeTable, Ranked, TieOrder
from workers.merging.recent import Recent, recent_bytes
from workers.merging.shards import Shard
from workers.merging.statistics import (
    importance_of,
    inner_products,
    magnitude_selection,
    magnitude_table,
    norm_of,
    row_ranks,
    variance_selection,
    variance_table,
)
from workers.merging.whole_models import ModelMagnitudes, ModelTensor, WholeTaskVector, balance_of
from workers.models.checkpoints import Checkpoint
from workers.models.components import Layout
from workers.models.computed_tensors import SourceTensor
from workers.models.family import ResolvedFamily, open_sources
from workers.models.headers import TensorInfo
from workers.models.remote import is_metadata_only
from workers.models.vocabulary import TokenAlignment
from workers.types import Family, Placement

__all__ = ["Bank", "Key", "Mask", "content_name"]

log = logging.getLogger(__name__)

Key = tuple[str, str]  # alias and tensor name
Mask = tuple[float, int]  # density and seed of a random mask

# The most task vectors whose thresholds over the whole model are cached, each with 512 KiB. There is one for each
# expert and, where random masks are drawn first, for each density.
MOST_WHOLE = 64

# Host memory is allocated in pieces of this size, because torch rounds pinned allocations up to a power of two.
CHUNK_BYTES = 1 << 30
ALIGNMENT = 64  # bytes
# Part of the names of shared memory; increased when tensors are placed in it in another way.
LAYOUT = 2
TORCH_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# The seed of the keys that order equal elements; seeds of a recipe's masks are never negative.
ORDER_SEED = -1


class Bank:
    """Source weights of a family of models, keyed by model alias and tensor name, in their stored dtype.

    A family is a base model and its experts. The tensors are read-only and safe to read from several threads. For an
    adapter, the bank holds the low-rank matrices; the tensors that are computed from these matrices and the base are
    float32.

    `placement` is "mapped" (memory-mapped files, whose pages all processes on the machine share), "host" (a copy in
    this process's memory, pinned for a GPU) or "gpu" (a copy in the memory of `device`). Merges are computed on
    `device`. For an engine's bank this is the engine's device. For other banks it is the CPU, because an engine leaves
    no GPU memory to other processes.

    Statistics of the sources, such as tables of magnitudes, are cached once computed. Statistics of several sources
    together are cached only within a share of memory (module `recent`). With `keeps_statistics=False` nothing is
    cached. This saves memory for a single merge, which needs each statistic once. `max_recent_bytes` limits the memory
    of the statistics of several sources further; None is no further limit.

    With `is_shared`, the processes of this node that open the same sources share statistics. With the placement "host"
    they also share the memory of the sources, which one of the processes fills (module `node`). If the node's shared
    memory has too little room, nothing is shared, and the attribute `private_because` is the reason, as text.

    `room_bytes` is the available memory of `device` for merging one tensor, or None for no limit. A tensor that needs
    more memory is merged on the CPU (module `workers.merging.devices`).

    `sources` are models that are already opened, or a description of models. Described models are opened here and must
    have the fingerprints that the description states. Weights are searched for NaN and infinity once for each content;
    the results of this search are cached in the directory `cache`, or in the default directory if `cache` is None.
    Raises InvalidModel if models cannot be opened, have changed, or contain NaN or infinity.
    """

    def __init__(
        self,
        sources: ResolvedFamily | Family,
        placement: Placement | str = Placement.MAPPED,
        *,
        device: torch.device | str = "cpu",
        keeps_statistics: bool = True,
        cache: str | Path | None = None,
        is_shared: bool = False,
        max_recent_bytes: int | None = None,
    ) -> None:
        self.device = torch.device(device)
        self.room_bytes: int | None = None
        accepted = [each for each in Placement if each is not Placement.GPU or self.device.type != "cpu"]
        if placement not in accepted:
            raise ValueError(f"bank: placement {placement!r}; expected one of {', '.join(accepted)}")
        stated = sources if isinstance(sources, Family) else sources.family
        self.sources = open_sources(stated, cache=cache) if isinstance(sources, Family) else sources
        self.alignments_dir = stated.alignments_dir
        if problems := _content_problems(self.sources, stated):
            raise InvalidModel(problems)
        self._checkpoints = self.sources.views
        self._aliases = {model.fingerprint: model.alias for model in reversed(self.family.models)}
        self._keeps_statistics = keeps_statistics
        self._keeps_ranks = False
        self._magnitudes: dict[tuple[Key, Key], MagnitudeTable] = {}
        self._products: dict[tuple[frozenset[Key], Key | None], float] = {}  # of one or two sources
        self._norms: dict[tuple[Key, Key], float] = {}
        self._ranks: dict[tuple[Key, Key], torch.Tensor] = {}
        self._at_hand: dict[Key, torch.Tensor] = {}  # stored tensors that are on `device`
        self._orders: dict[Key, TieOrder] = {}
        self._whole: OrderedDict[Hashable, WholeTaskVector] = OrderedDict()
        self._majorities: dict[Hashable, int] = {}
        self._of_model: dict[bool, tuple[list[str], int]] = {}
        self._on: dict[torch.device, Bank] = {}  # the same sources for merges on another device
        most_recent = recent_bytes(self.sources) if keeps_statistics else 0
        self._recent = Recent(most_recent if max_recent_bytes is None else min(most_recent, max_recent_bytes))
        self.num_bytes = self.sources.stored_bytes
        self.placement = Placement(placement)
        self._reads = _Reads()
        self.private_because = ""
        self.node = Node()
        infos = _stored_tensors(self._checkpoints)
        if is_shared:
            try:
                self.node = Node(SharedDirectory(content_name(self.family, self.device.type)))
                if self.placement is Placement.HOST:
                    self._stored = _shared(infos, self.node.shared, is_pinned=self.device.type == "cuda")
                    return
            except NoRoom as error:
                self.node, self.private_because = Node(), str(error)
                log.warning("processes of this node share no memory for the sources: %s", error)
        place = _placing(self.placement, self.device, self.num_bytes)
        self._stored = {info: place(checkpoint.read_stored(info)) for info, checkpoint in infos}

    @property
    def family(self) -> Family:
        """Description of the models whose weights the bank holds.

        The description names the base and the experts, and selects the vocabulary of merges.
        """
        return self.sources.family

    @property
    def token_alignment(self) -> TokenAlignment:
        return self.sources.token_alignment

    @property
    def fingerprint(self) -> str:
        return self.family.fingerprint

    @cached_property
    def base(self) -> Checkpoint:
        """The base model, with the rows of its embedding and output head converted to the vocabulary of merges.

        Merged models have the configuration, tensor shapes and layout of this model.
        """
        return self.sources.base

    def view(self, alias: str) -> Checkpoint:
        """The model `alias`, with the rows of its embedding and output head converted to the vocabulary of merges.

        Merges require this form, in which a row of embedding or head stands for the same token in all models.
        """
        return self._checkpoints[alias]

    def views(self, models: Mapping[str, str]) -> dict[str, Checkpoint]:
        """Look up the models of a recipe in this bank (source weights), keyed by the recipe's aliases.

        `models` maps the recipe's aliases to content fingerprints; models that the bank does not have are left out of
        the result. In the result, the rows of each model's embedding and output head are converted to the vocabulary of
        merges.
        """
        return {name: self._checkpoints[held] for name, print_ in models.items() if (held := self.alias(print_))}

    @cached_property
    def layout(self) -> Layout:
        return self.base.layout

    def alias(self, fingerprint: str) -> str | None:
        """Alias (name) of a model in this bank (source weights); None if the bank does not hold the model.

        `fingerprint` is the hash of the model's content.
        """
        return self._aliases.get(fingerprint)

    @property
    def elements_read(self) -> int:
        """Number of elements of the sources that this process has read so far for merges and statistics."""
        return self._reads.total

    def get(self, alias: str, name: str, shard: Shard | None = None) -> torch.Tensor:
        """Return the tensor `name` of the model `alias`, on the bank's device.

        The result is always the whole tensor. `shard` says which elements the caller will read, so that only these
        elements are counted (property `elements_read`); None counts all elements. The result may share memory with the
        bank and must not be written to. A tensor of an adapter is computed at every call. Raises InvalidModel if the
        bank has no tensor of this name.
        """
        found = self._at_hand.get((alias, name))
        if found is None:
            source = self._source(alias, name)
            found = source.value(self._read)
            if isinstance(source, TensorInfo) and found is self._stored[source]:
                self._at_hand[alias, name] = found
        self._reads.add(found.numel() if shard is None else shard.num_elements)
        return found

    def parts(self, keys: Sequence[Key], shard: Shard) -> tuple[torch.Tensor, ...]:
        """Read several tensors of one shape, on the bank's device, for a caller that uses only the elements of `shard`.

        `keys` are the tensors as (alias of the model, name). If the sources are in the memory of a GPU, the results are
        the whole tensors there, and nothing is copied. Otherwise only the elements of the shard are copied to the
        device, and each result has only these elements, in one dimension.
        """
        if self.placement is Placement.GPU:
            return tuple(self.get(alias, name, shard) for alias, name in keys)
        return tuple(self._part(alias, name, shard) for alias, name in keys)

    def _part(self, alias: str, name: str, shard: Shard) -> torch.Tensor:
        source = self._source(alias, name)
        if not isinstance(source, TensorInfo):  # computed from matrices, as a whole
            return shard.view(self.get(alias, name).contiguous()).reshape(-1)
        self._reads.add(shard.num_elements)
        part = shard.view(self._stored[source])
        if self.device.type == "cuda" and not part.is_contiguous():  # gathered in pinned memory, which copies faster
            part = torch.empty(part.shape, dtype=part.dtype, pin_memory=True).copy_(part)
        return part.reshape(-1).to(self.device, non_blocking=self.device.type != "cpu")

    def cosine(self, first: Key, second: Key) -> float:
        """The cosine of the angle between the tensors `first` and `second`, for the merge method SLERP.

        Each tensor is given as (alias of its model, name). The cosine is computed once and then cached.
        """
        return cosine_of(self.products((first, second), None), 0, 1)

    def products(self, sources: Sequence[Key], base: Key | None) -> Products:
        """The inner products of all pairs of the N tensors `sources`, as a matrix [N, N].

        With `base`, each tensor is replaced by its difference from the base. Each product is computed once and then
        cached. Tensors are given as (alias of the model, name).
        """
        keys = [[(frozenset((first, second)), base) for second in sources] for first in sources]
        known = [[self._products.get(key) for key in row] for row in keys]
        found = [[product for product in row if product is not None] for row in known]
        if found == known:
            return found

        def made() -> Products:
            tensors = [self.get(*source) for source in sources]
            return inner_products(tensors, None if base is None else self.get(*base))

        products = self.node.value(("products", tuple(sources), base), made)
        if self._keeps_statistics:
            for row, of_row in zip(keys, products, strict=True):
                self._products.update(zip(row, of_row, strict=True))
        return products

    def importance(self, first: Key, second: Key) -> Importance | None:
        """The rule by which the method Arcee Fusion selects elements of `second`: row factors and a threshold.

        The importance of an element is |second - first|, times the factor of its row. Elements whose importance is at
        least the threshold are taken from `second`, all others from `first`. Tensors are given as (alias of the model,
        name). Returns None for empty tensors. The most recently used results are cached.
        """

        def made() -> Importance:
            found = self.node.value(
                ("importance", first, second), lambda: importance_of(self.on_cpu(first), self.on_cpu(second))
            )
            return Importance(found.rows.to(self.device), found.threshold)

        if 0 in self._source(*first).shape:
            return None
        return self._recent.value(("importance", first, second), made, lambda known: known.rows.nbytes)

    def variances(self, sources: Sequence[Key], base: Key) -> Ranked | None:
        """Return an object that finds the n-th largest of the elements' variances across task vectors, for any n.

        The n-th largest variance is the threshold by which the merge method SCE selects elements. The variance of an
        element is computed over its values in the task vectors, the differences of `sources` from `base`. Tensors are
        given as (alias of the model, name). With `keeps_statistics=True` in the bank, the object is a table of the
        variances, and the bank caches recently used tables. Otherwise the object searches all variances at each call.
        Returns None for empty tensors.
        """

        def made() -> MagnitudeTable:
            return self.node.value(
                ("variances", tuple(sources), base),
                lambda: variance_table([self.on_cpu(each) for each in sources], self.on_cpu(base), self.order(base)),
                most_bytes=self._recent.max_bytes,
            )

        if 0 in self._source(*base).shape:
            return None
        if not self._keeps_statistics:
            return variance_selection([self.on_cpu(source) for source in sources], self.on_cpu(base), self.order(base))
        return self._recent.value(("variances", *sources, base), made, lambda table: table.num_bytes)

    def magnitudes(self, sources: Sequence[Key], base: Key) -> tuple[Ranked | None, ...]:
        """Return objects, one for each source, that find the n-th largest magnitude |source - base| for any n.

        The n-th largest magnitude is the threshold of merge methods that keep the n largest elements. Tensors are given
        as (alias of the model, name). The objects are tables, each computed once and then cached. If the bank has
        `keeps_statistics=False`, the objects have no tables and search all magnitudes at each call. For empty tensors
        the result has None for each source.
        """
        if 0 in self._source(*base).shape:
            return (None,) * len(sources)
        if not self._keeps_statistics:
            of_base = self.on_cpu(base)
            return tuple(magnitude_selection(self.on_cpu(source), of_base, self.order(source)) for source in sources)
        tables = {source: self._magnitudes.get((source, base)) for source in sources}
        unknown = [source for source, table in tables.items() if table is None]
        if unknown:
            with ThreadPoolExecutor(torch.get_num_threads()) as threads:
                made = threads.map(lambda source: self._magnitudes_of(source, base), unknown)
                tables |= dict(zip(unknown, made, strict=True))
            self._magnitudes |= {(source, base): table for source, table in tables.items() if table is not None}
        return tuple(tables[source] for source in sources)

    def _magnitudes_of(self, source: Key, base: Key) -> MagnitudeTable:
        return self.node.value(
            ("magnitudes", source, base),
            lambda: magnitude_table(self.on_cpu(source), self.on_cpu(base), self.order(source)),
        )

    def num_elements(self, *, stacks_experts: bool = False) -> int:
        """The number of elements of all merged tensors of a model together.

        `stacks_experts` says whether the merge joins the matrices of all experts of a mixture-of-experts layer in one
        tensor. The number does not depend on `stacks_experts`. The parameter exists because the number is computed and
        cached together with the list of merged tensors, which depends on `stacks_experts`.
        """
        return self._merged_names(stacks_experts)[1]

    def whole_magnitudes(
        self,
        sources: Sequence[Key],
        base: Key,
        ranks: Sequence[Collection[int]],
        *,
        masks: Sequence[Mask | None],
        stacks_experts: bool = False,
        compiles: bool = True,
    ) -> tuple[ModelMagnitudes, ...]:
        """Thresholds by which one tensor of each source is trimmed in merges that trim whole models (`trim: model`).

        Such a merge keeps the largest elements of the task vector over all tensors of a model, so a threshold follows
        from all tensors of the model. `sources` and `base` name the tensor to trim in each model, as (alias of the
        model, name of the tensor). The result contains an object for each source, with a threshold for each number in
        `ranks`.

        - `ranks`: for each source, numbers n; the threshold of n keeps the n largest elements of the whole model
        - `masks`: for each source, the (density, seed) of a random mask of the task vector, or None for no mask
        - `stacks_experts`: whether all experts of a layer's mixture are one tensor
        - `compiles`: whether compiled kernels may be used; the result is the same with and without them

        A threshold is found once, in a few passes over the model and its base, and then cached.
        """
        found = []
        for source, of_source, mask in zip(sources, ranks, masks, strict=True):
            whole = self._whole_task_vector(source[0], base[0], mask, stacks_experts, compiles)
            found.append(whole.of_tensor(source[1], self.order(source), of_source))
        return tuple(found)

    def majority(
        self,
        sources: Sequence[Key],
        base: Key,
        shares: Sequence[float],
        *,
        masks: Sequence[Mask | None],
        stacks_experts: bool = False,
        compiles: bool = True,
    ) -> int:
        """Number of elements of a whole model with a positive elected sign, minus the number with a negative sign.

        The sign of the result is the majority sign, which some methods use for elements whose task vectors sum to zero.
        `sources` and `base` name the models; a model is given as (alias, name of any of its tensors). First the task
        vector of each whole model is trimmed: its largest elements, the share in `shares`, are kept. Then the sign of
        each element is elected among the trimmed task vectors: it is the sign of their sum. All tensors of the models
        are counted as if they were merged in the same way.

        - `masks`: for each source, the (density, seed) of a random mask that its task vector gets first, or None for no
          mask
        - `stacks_experts`: whether all experts of a layer's mixture are one tensor
        - `compiles`: whether compiled kernels may be used; the result is the same with and without them

        The result is computed tensor by tensor on the bank's device, once for each combination of arguments, and then
        cached.
        """
        aliases = tuple(alias for alias, _ in sources)
        key = aliases, base[0], tuple(shares), tuple(masks), stacks_experts
        if key not in self._majorities:
            ranks = [(num_kept(share, self.num_elements(stacks_experts=stacks_experts)),) for share in shares]
            balance = 0
            for name in self._merged_names(stacks_experts)[0]:
                keys = [(alias, name) for alias in aliases]
                known = self.whole_magnitudes(
                    keys, (base[0], name), ranks, masks=masks, stacks_experts=stacks_experts, compiles=compiles
                )
                of_base = self.get(base[0], name)
                tensors = [
                    ModelTensor(self.get(*each), of_base, self.order(each), self._mask_of(each, mask))
                    for each, mask in zip(keys, masks, strict=True)
                ]
                balance += balance_of(tensors, shares, known)
            self._majorities[key] = balance
        return self._majorities[key]

    def _whole_task_vector(
        self, alias: str, base: str, mask: Mask | None, stacks_experts: bool, compiles: bool
    ) -> WholeTaskVector:
        key = alias, base, mask, stacks_experts
        known = self._whole.get(key)
        if known is None:

            def read(name: str) -> ModelTensor:
                at, of_base = (alias, name), self.on_cpu((base, name))
                return ModelTensor(self.on_cpu(at), of_base, self.order(at), self._mask_of(at, mask))

            names, count = self._merged_names(stacks_experts)
            known = self._whole[key] = WholeTaskVector(names, count, read, compiles=compiles)
            if len(self._whole) > MOST_WHOLE:
                self._whole.popitem(last=False)
        self._whole.move_to_end(key)
        return known

    def _merged_names(self, stacks_experts: bool) -> tuple[list[str], int]:
        """The sorted names of all merged tensors, and the number of all their elements together.

        With `stacks_experts`, the matrices of all experts of a mixture-of-experts layer are one tensor; otherwise each
        matrix is a tensor of its own.
        """
        if stacks_experts not in self._of_model:
            names = sorted((self.layout.stacked if stacks_experts else self.layout).places)
            alias = self.family.base.alias
            count = sum(math.prod(self._source(alias, name).shape) for name in names)
            self._of_model[stacks_experts] = names, count
        return self._of_model[stacks_experts]

    def _mask_of(self, key: Key, mask: Mask | None) -> tuple[float, int] | None:
        """Convert a random mask, given as (density, seed), to (density, 64-bit key) for one tensor; None stays None.

        The key follows from the seed and from `key`, the tensor's (alias of the model, name).
        """
        return None if mask is None else (mask[0], mask_key(mask[1], self.sources.fingerprints[key[0]], key[1]))

    def norms(self, sources: Sequence[Key], base: Key) -> tuple[float, ...]:
        """The L1 norm of each task vector: the sum of |source - base| over the tensor.

        The result contains a norm for each of `sources`. Tensors are given as (alias of the model, name). Norms are
        computed once and then cached.
        """
        norms = {source: self._norms[source, base] for source in sources if (source, base) in self._norms}
        for source in sources:
            if source not in norms:
                norms[source] = self._norm_of(source, base)
        if self._keeps_statistics:
            self._norms |= {(source, base): norm for source, norm in norms.items()}
        return tuple(norms[source] for source in sources)

    def _norm_of(self, source: Key, base: Key) -> float:
        return self.node.value(("norm", source, base), lambda: norm_of(self.get(*source), self.get(*base)))

    def order(self, key: Key) -> TieOrder:
        """Rule that breaks ties between elements of equal magnitude in the task vector of a tensor.

        `key` is (alias of the tensor's model, name of the tensor). With the base's alias, the rule is for the merge
        method SCE: it breaks ties between elements whose variance across the task vectors is equal. The rule depends on
        the model's content and the tensor's name.
        """
        order = self._orders.get(key)
        if order is None:
            alias, name = key
            order = self._orders[key] = TieOrder(mask_key(ORDER_SEED, self.sources.fingerprints[alias], name))
        return order

    def on(self, device: torch.device | str) -> Bank:
        """Bank that has the same source weights in the same memory, and computes merges on `device`.

        If `device` is this bank's own device, the result is this bank. For any other device, a second bank is created
        at the first call and returned again at later calls.

        The two banks share the cached statistics that are in host memory, because these do not depend on the device
        that computed them. Statistics of models with low-rank adapters are an exception, and are not shared: the
        tensors of an adapter are products of matrices, and the last bits of a product depend on the device.
        """
        target = torch.device(device)
        if target == self.device:
            return self
        found = self._on.get(target)
        if found is None:
            found = self._on[target] = copy.copy(self)
            found.device, found._on, found.room_bytes = target, {self.device: self}, None
            found._at_hand, found._majorities = {}, {}
            found._recent = Recent(self._recent.max_bytes)
            if any(view.base is not None for view in self._checkpoints.values()):
                found._magnitudes, found._products, found._norms, found._ranks = {}, {}, {}, {}
                found._whole = OrderedDict()
        return found

    def summary(self) -> dict[str, Any]:
        """Placement and size of the source weights, as a JSON document for the statistics of engines.

        The keys are placement, bytes (size of the sources), statistics_bytes (size of cached statistics), models
        (number of models) and fingerprint (a digest of the contents of all models).
        """
        return {
            "placement": self.placement.value,
            "bytes": self.num_bytes,
            "statistics_bytes": self._statistics_bytes(),
            "models": len(self._checkpoints),
            "fingerprint": self.fingerprint,
        }

    def ranks(self, sources: Sequence[Key], base: Key) -> tuple[torch.Tensor, ...]:
        """The rank of each magnitude |source - base| within its row of the tensor, as a tensor for each of `sources`.

        The smallest magnitude has rank 0. Tensors are given as (alias of the model, name). Ranks are computed at every
        call unless the method `keep_ranks` was called before.
        """
        known = []
        for source in sources:
            ranks = self._ranks.get((source, base))
            if ranks is None:
                ranks = row_ranks(self.on_cpu(source), self.on_cpu(base), self.order(source))
                if self._keeps_ranks:
                    self._ranks[source, base] = ranks
            # torch has few operations on unsigned tensors for CUDA.
            known.append(ranks if self.device.type == "cpu" else ranks.int().to(self.device))
        return tuple(known)

    def keep_ranks(self) -> None:
        """Enable caching, in host memory, of the magnitude ranks that the method `ranks` computes.

        The method DELLA needs these ranks, which say where each magnitude is in its row. A rank takes two bytes, or
        four bytes in rows longer than 65536.
        """
        self._keeps_ranks = True

    def close(self) -> None:
        """End this process's use of the memory that the node's processes share; the last process removes it.

        The bank can still be used: its source weights stay in memory as long as the bank exists. It shares no more
        statistics. The method may be called twice, and does nothing if nothing is shared.
        """
        self.node.close()

    def _statistics_bytes(self) -> int:
        banks = (self, *self._on.values())
        tables = {id(table): table.num_bytes for bank in banks for table in bank._magnitudes.values()}
        ranks = {id(tensor): tensor.nbytes for bank in banks for tensor in bank._ranks.values()}
        whole = {id(vector): vector.num_bytes for bank in banks for vector in bank._whole.values()}
        of_one_source = sum(tables.values()) + sum(ranks.values()) + sum(whole.values())
        return of_one_source + sum(bank._recent.num_bytes for bank in banks)

    def _source(self, alias: str, name: str) -> SourceTensor:
        checkpoint = self._checkpoints.get(alias)
        tensor = checkpoint.tensor(name) if checkpoint else None
        if tensor is None:
            held = ", ".join(self._checkpoints)
            raise InvalidModel((f"bank: no tensor {name!r} of model {alias!r}; it holds the tensors of {held}",))
        return tensor

    def _read(self, info: TensorInfo) -> torch.Tensor:
        stored = self._stored[info]
        if stored.device == self.device:
            return stored
        # Work that is queued on a GPU waits for a copy to it. The CPU does not wait for a copy from a GPU.
        return stored.to(self.device, non_blocking=self.device.type != "cpu")

    def on_cpu(self, key: Key) -> torch.Tensor:
        """Copy a source tensor to the CPU, where it is sorted for statistics and thresholds.

        `key` is (alias of the model, name of the tensor). A tensor that is in host memory or in a mapped file is not
        copied. Sorting on a GPU takes many times the tensor's memory, which an engine does not leave free.
        """
        source = self._source(*key)
        # An adapter's tensor is computed on `device`, as for merging: a product of matrices has other bits on CPU.
        if not isinstance(source, TensorInfo):
            return self.get(*key).cpu()
        self._reads.add(source.num_elements)
        return self._stored[source].cpu()


def content_name(family: Family, device_type: str) -> str:
    """Name of a node's shared memory with the source weights of the models in `family`.

    The name depends on the fingerprints of these models (a base and its experts), and on their aliases, by which
    statistics in shared memory are named. `device_type` is the type of the device that computes merges, such as "cuda";
    processes with another type use another name.
    """
    models = sorted((model.alias, model.fingerprint) for model in family.models)
    content = repr((LAYOUT, models, family.tokenizer, sorted(family.vocabulary.items()), device_type))
    return hashlib.sha256(content.encode()).hexdigest()[:32]


def _content_problems(sources: ResolvedFamily, stated: Family) -> tuple[str, ...]:
    """Problems with the content of the models, one line each: changed files, or values that are NaN or infinite.

    `stated` is the description of the models when they were chosen. A model has changed if its fingerprint in `sources`
    differs from its fingerprint in `stated`.
    """
    changed = {
        model.alias: (
            f"{model.directory} has changed: its fingerprint is {sources.fingerprints[model.alias][:12]}, "
            f"expected {model.fingerprint[:12]}; restore it or start a new study",
        )
        for model in stated.models
        if sources.fingerprints[model.alias] != model.fingerprint
    }
    problems = {**sources.content_problems(exclude=changed.keys()), **changed}
    return tuple(f"model {alias!r}: {problem}" for alias in sources.checkpoints for problem in problems[alias])


def _placing(placement: Placement, device: torch.device, num_bytes: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Make the function that copies a stored tensor to its placement (mapped file, host memory or GPU).

    A tensor in a mapped file is not copied. For the GPU, tensors are copied to `device`. For host memory, `num_bytes`
    is the size of all tensors that the function will be called with, and the memory is pinned if `device` is a GPU.
    """
    if placement is Placement.MAPPED:
        return lambda tensor: tensor
    if placement is Placement.GPU:
        return lambda tensor: tensor.to(device)
    return _HostMemory(num_bytes, is_pinned=device.type == "cuda").place


class _Reads:
    """Thread-safe counter of the elements of source tensors that were read."""

    def __init__(self) -> None:
        self.total = 0
        self._lock = threading.Lock()

    def add(self, num_elements: int) -> None:
        with self._lock:
            self.total += num_elements


def _stored_tensors(views: Mapping[str, Checkpoint]) -> list[tuple[TensorInfo, Checkpoint]]:
    """Each stored tensor of the models in `views`, keyed by alias, once, with a checkpoint that can read it.

    Models without weights on this machine are left out. The order is that of aliases, files and names, so that it is
    the same in all processes: sets of tensors are in another order in each process.
    """
    models = [model for alias in sorted(views) for model in (views[alias].base, views[alias]) if model is not None]
    return [
        *{
            info: model
            for model in models
            if not is_metadata_only(model.directory)
            for info in sorted(model.own, key=lambda info: (info.file.name, info.name))
        }.items()
    ]


def _shared(
    infos: Sequence[tuple[TensorInfo, Checkpoint]], shared: SharedDirectory | None, *, is_pinned: bool
) -> dict[TensorInfo, torch.Tensor]:
    """Put the stored tensors into memory that processes of this node share; one of the processes reads the files.

    `infos` has each tensor with the checkpoint that contains it, and `shared` is the directory of the shared memory.
    With `is_pinned`, each process pins the memory for its GPU. Returns the tensors in shared memory. Raises NoRoom if
    there is too little shared memory.
    """
    assert shared is not None
    starts, end = [], 0
    for info, _ in infos:
        starts.append(end)
        end += -(-info.num_bytes // ALIGNMENT) * ALIGNMENT

    def part(memory: torch.Tensor, info: TensorInfo, start: int) -> torch.Tensor:
        return memory[start : start + info.num_bytes].view(TORCH_DTYPES[info.dtype]).view(info.shape)

    def write(memory: torch.Tensor) -> None:
        for (info, checkpoint), start in zip(infos, starts, strict=True):
            part(memory, info, start).copy_(checkpoint.read_stored(info))

    places = [
        (info.file.name, info.name, info.dtype, info.shape, start)
        for (info, _), start in zip(infos, starts, strict=True)
    ]
    memory = shared.fill(end, write, layout=hashlib.sha256(repr(places).encode()).hexdigest())
    if is_pinned:
        _pin(memory)
    return {info: part(memory, info, start) for (info, _), start in zip(infos, starts, strict=True)}


def _pin(memory: torch.Tensor) -> None:
    """Pin host memory (uint8) that was not allocated by PyTorch; if CUDA refuses, it stays as it is, with a warning.

    CUDA keeps the error of a refused call, and PyTorch would raise the error after the next kernel, which was computed
    correctly. Therefore a kernel is computed here, after which PyTorch raises the error and CUDA forgets it.
    """
    cuda: Any = torch.cuda
    error = int(cuda.cudart().cudaHostRegister(memory.data_ptr(), max(1, memory.numel()), 0))
    if error:
        log.warning("the shared sources are not pinned (CUDA error %d): copies to the GPU take longer", error)
        with suppress(RuntimeError):
            torch.ones(1, device="cuda")


class _HostMemory:
    """Host memory for tensors of `num_bytes` in total, allocated in large chunks.

    The method `place` copies a tensor into this memory, and returns the copy.
    """

    def __init__(self, num_bytes: int, *, is_pinned: bool) -> None:
        self._missing = num_bytes
        self._is_pinned = is_pinned
        self._free = torch.empty(0, dtype=torch.uint8)

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        size = -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        if size > self._free.numel():
            chunk = max(size, min(self._missing, CHUNK_BYTES))
            self._free = torch.empty(chunk, dtype=torch.uint8, pin_memory=self._is_pinned)
        taken, self._free = self._free[: tensor.nbytes], self._free[size:]
        self._missing -= tensor.nbytes
        return taken.view(tensor.dtype).view(tensor.shape).copy_(tensor)

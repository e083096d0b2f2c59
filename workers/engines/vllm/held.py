"""Writing of merges over the weights of the model in vLLM's worker, in place.

The class `HeldWeights` writes merges with the layers of the base model. The class `paths.held.HeldPath` writes layer
paths, whose layers come in any order from a pool of layers.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from search_spaces.recipe import Recipe
from workers.engines.vllm.checksum import checksum, combined, word_sum
from workers.engines.vllm.loading import Destination, LoadObserver
from workers.engines.vllm.plugin import IS_PACKED, PACK

if TYPE_CHECKING:
    from workers.merging.bank import Bank
    from workers.merging.plan import TensorPlan

__all__ = ["HeldWeights", "Into", "NotPacked", "Writing"]

log = logging.getLogger(__name__)

# The largest magnitude of vLLM's random weights (`load_format: dummy`).
RANDOM = 1e-3
CHECKED = 1 << 24  # elements that are searched for NaN at a time

Into = Callable[[str, tuple[int, ...]], torch.Tensor]


class NotPacked(Exception):
    """Raised if packed weights differ from the plain weights after they were packed again.

    Packed weights are the copies of weights in the layout that vLLM's CPU kernels compute with. The message names the
    modules whose weights differ.
    """


@dataclass(frozen=True)
class Writing:
    """Result of writing one merge: the number of written tensors, and the time of each part of the work.

    `tensors_written` is the number of tensors that were written. `materialise_s` is the time for computing the merge,
    in seconds. `repack_s` is the time for packing weights, that is, copying them to the layout of vLLM's CPU kernels.
    """

    tensors_written: int = 0
    materialise_s: float = 0.0
    repack_s: float = 0.0


class HeldWeights:
    """The parameters of the model in vLLM's worker, with methods that write merges over them in place.

    A write leaves out tensors that the previous merge computed in the same way. After a failed write, the next write
    covers every tensor. `model` is vLLM's model, and `dtype` is the dtype of its weights. The worker is number `rank`
    of the engine's `ranks` workers, counted from 0.
    """

    def __init__(self, model: Any, dtype: torch.dtype, *, rank: int = 0, ranks: int = 1) -> None:
        self.model = model
        self.dtype = dtype
        self._rank, self._ranks = rank, ranks
        # The way in which each tensor was computed, and the sum of each parameter; empty if not known.
        self._computations: dict[str, Hashable] = {}
        self._sums: dict[str, int] = {}
        self._devices: dict[str, str] = {}  # the type of device that each tensor was computed on
        # The place to which a merge of each tensor can be written directly; None if only vLLM's loader can write it.
        self.destinations: dict[str, Destination | None] = {}
        # By tensor name, the reason why a tensor was merged as a whole although this rank holds only a shard of it.
        self.whole_because: dict[str, str] = {}
        self._unwritten: dict[str, torch.Tensor] = {}  # filled with NaN, and not written since
        self._random_buffers: frozenset[str] = frozenset()  # of these
        self._packed = _packed_modules(model)
        self._comparable = _comparable(self._packed)
        self._derived = [module for module in model.modules() if callable(_derive_of(module))]

    @property
    def is_as_written(self) -> bool:
        """Whether the parameters are still the weights that were written last, as far as a cheap check can tell.

        This class has no such check, so the result is always True; subclasses may have one.
        """
        return True

    @property
    def computed_on(self) -> Mapping[str, str]:
        """The type of the device, such as "cuda", that computed each tensor of the held merge, keyed by tensor name."""
        return self._devices

    def mark_unwritten(self) -> None:
        """Fill all weights with NaN, so that a check can find weights that the first merge did not write.

        An engine starts with random weights. vLLM also gives random values to buffers, and then computes some of the
        buffers. Buffers that still have values in vLLM's range of random numbers are also filled with NaN.
        """
        parameters = self._parameters()
        buffers = {name: each for name, each in self.model.state_dict().items() if name not in parameters}
        random = {name: each for name, each in buffers.items() if each.is_floating_point() and _is_random(each)}
        with torch.inference_mode():
            self._unwritten = {name: each for name, each in parameters.items() if each.is_floating_point()} | random
            for tensor in self._unwritten.values():
                tensor.fill_(torch.nan)
        self._random_buffers = frozenset(random)

    def _check_written(self, parameters: Collection[str]) -> None:
        """Raise RuntimeError if some elements of `parameters`, or of the model's buffers, have never been written.

        The method `mark_unwritten` has set elements to NaN, so an element that is still NaN was not written. Buffers
        that `mark_unwritten` did not fill are not checked.
        """
        for name in self._unwritten.keys() & (set(parameters) | self._random_buffers):
            flat = self._unwritten[name].view(-1)
            missing = sum(int(part.isnan().sum()) for part in torch.split(flat, CHECKED))
            if missing:
                raise RuntimeError(f"the merge left {missing} of {flat.numel()} elements of {name} unwritten")
            del self._unwritten[name]

    def forget(self) -> None:
        """Make the next write of a merge cover every tensor, even tensors that are equal in the held merge."""
        self._computations = {}
        self._sums = {}
        self._devices = {}

    def fill(self, bank: Bank, into: Into) -> None:
        """Write weights into the engine before the first merge is known, so that later swaps have less to write.

        This class writes nothing. A subclass for layer paths (merges whose layers come in any order) writes layers of
        the sources. `bank` has the weights of the source models, and `into(name, shape)` returns memory for computing a
        tensor.
        """

    def hold(self, recipe: Recipe, bank: Bank, into: Into) -> Writing:
        """Write the merge of `recipe` over the model's parameters; return the number of written tensors and the times.

        `bank` has the weights of the source models, and `into(name, shape)` returns memory for computing a tensor.

        Raises:
            InvalidRecipe: The recipe does not fit the source models; nothing was written.
            NotPacked: The packed copies of weights, which vLLM's CPU kernels use, differ from the weights.
            EvidenceMismatch: Files of the sources have changed.
        """
        from workers.merging.plan import plan_tensors

        return self._write(plan_tensors(recipe, bank), bank, into)

    def checksum(self) -> str:
        """Checksum of the model's parameters, as it was computed after the last write."""
        return combined(self._parameters(), self._sums)

    def checksum_now(self) -> str:
        """Compute the checksum of the model's current parameters."""
        with torch.inference_mode():
            return checksum(self._parameters())

    def _parameters(self) -> dict[str, torch.nn.Parameter]:
        return dict(self.model.named_parameters())

    def _needed(self, parameters: Iterable[str]) -> Collection[str]:
        """Select the names of parameters that must have been written before the model can be used.

        Writing a merge fails if one of them was written neither by this swap nor by an earlier one. `parameters` are
        the names of all parameters. Here all are selected; in an engine for layer paths, only those that the path uses.
        """
        return set(parameters)

    def _write(self, plan: TensorPlan, bank: Bank, into: Into) -> Writing:
        from workers.merging.devices import devices_of
        from workers.merging.plan import computations

        wanted = computations(plan, bank)
        held, sums, devices = self._computations, self._sums, self._devices
        changed = {name for name, computation in wanted.items() if held.get(name) != computation}
        if not changed:
            bank.sources.check_unchanged()
            return Writing()
        self._computations, self._sums, self._devices = {}, {}, {}
        parameters = self._parameters()
        with torch.inference_mode():
            written, materialise_s = self._merge(changed, parameters, plan, bank, into)
            if missing := sorted(set(self._needed(parameters)) - written - sums.keys()):
                raise RuntimeError(f"the merge left {len(missing)} parameters unwritten, for example {missing[0]}")
            self._check_written(written)
            rewritten = {name: parameters[name] for name in written & parameters.keys()}
            packing = time.perf_counter()
            stale = _repack(self._packed, rewritten.values(), self._comparable)
            repack_s = time.perf_counter() - packing
            if stale:
                raise NotPacked(f"the packed weights of {', '.join(stale)} differ from the merge")
            for module in self._derived:
                _derive_of(module)(self.dtype)
            sums |= {name: word_sum(parameter) for name, parameter in rewritten.items()}
        bank.sources.check_unchanged()  # a file may have changed while it was read
        self._computations, self._sums = held | wanted, sums
        computed_on = devices_of(plan, bank, self.dtype, self._num_of_shards(changed))
        self._devices = devices | {name: computed_on[name] for name in changed}
        return Writing(len(changed), materialise_s, repack_s)

    def _num_of_shards(self, names: Collection[str]) -> dict[str, int]:
        """The number of elements of each tensor in `names` that this rank computes, keyed by name.

        Only tensors of which the rank computes a shard are in the result, not tensors that it computes as a whole.
        """
        return {
            name: place.shard.num_elements
            for name in names
            if name not in self.whole_because and (place := self.destinations.get(name)) and place.shard is not None
        }

    def _merge(
        self,
        changed: Collection[str],
        parameters: Mapping[str, torch.nn.Parameter],
        plan: TensorPlan,
        bank: Bank,
        into: Into,
    ) -> tuple[set[str], float]:
        """Compute the merged tensors with the names `changed`, and write them into the model's parameters.

        - `parameters`: the model's parameters, keyed by name
        - `plan`: the list of all tensors of the merge, each with the sources from which it is computed
        - `bank`: the source weights
        - `into`: a function (name, shape) that returns memory for computing a tensor

        If vLLM's weight loader would only copy a tensor, this method writes it directly to the memory that the loader
        would use, and computes only the shard that this rank holds. vLLM's loader writes all other tensors. Returns the
        names of the written parameters, and the seconds for computing the tensors.
        """
        from workers.merging.materialize import in_order_of_rank, merge_into, merged_tensors
        from workers.merging.plan import merged_names

        unknown = {
            name
            for name in changed
            if name not in self.destinations
            or ((known := self.destinations[name]) is not None and not known.is_in(parameters))
        }
        if unknown:
            shapes = merged_names(plan, bank)
            device = next(iter(parameters.values())).device
            blank = (
                (name, torch.empty(shape, dtype=self.dtype, device=device))
                for name, shape in shapes.items()
                if name in unknown
            )
            observed = LoadObserver(blank, parameters, copies=False)
            with observed:
                self.model.load_weights(iter(observed))
            self.destinations |= dict.fromkeys(unknown) | observed.destinations
        destinations = {
            name: destination
            for name in changed
            if (destination := self.destinations[name]) and destination.memory.device == bank.device
        }
        merging = time.perf_counter()
        shards = {name: place.shard for name, place in destinations.items() if place.shard is not None}
        memory = {name: place.memory for name, place in destinations.items()}
        ordered = in_order_of_rank(plan, memory, rank=self._rank, ranks=self._ranks)
        whole = merge_into(ordered, bank, memory, shards) if memory else {}
        _wait_for(bank.device)
        seconds = time.perf_counter() - merging
        written = {destination.parameter for destination in destinations.values()}
        if others := set(changed) - destinations.keys():
            # vLLM's loader knows which rows of which fused parameter a tensor fills, which part of it a rank holds,
            # how the vocabulary is padded and which head is tied.
            merged = merged_tensors(plan, bank, self.dtype, names=others, into=into)
            observer = LoadObserver(merged, parameters, wait=partial(_wait_for, bank.device))
            with observer:
                written |= set(self.model.load_weights(iter(observer)))
            seconds += observer.seconds
            whole |= dict.fromkeys(others, "only vLLM's loader can write it")
        self.whole_because = {name: why for name, why in self.whole_because.items() if name not in changed} | whole
        return written, seconds


def _is_random(buffer: torch.Tensor) -> bool:
    """Whether a buffer may have vLLM's random initial values, so that nothing was computed into it yet.

    The result is True if all values are in the range of these random numbers, and not all are zero.
    """
    largest = float(buffer.abs().max()) if buffer.numel() else 0.0
    return 0 < largest <= RANDOM


def _wait_for(device: torch.device) -> None:
    """Wait until a GPU has finished its queued work, so that measured durations include it; do nothing for a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _packed_modules(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Modules of vLLM's `model` whose weights vLLM has packed, keyed by name; none on a GPU.

    Packed weights are copies in the layout that vLLM's CPU kernels compute with.
    """
    return {name: module for name, module in model.named_modules() if hasattr(module, PACK)}


def _repack(
    packed: Mapping[str, torch.nn.Module], changed: Iterable[torch.nn.Parameter], comparable: Collection[str]
) -> tuple[str, ...]:
    """Pack the weights again in those modules whose parameters have changed.

    Packed weights are copies in the layout that vLLM's CPU kernels compute with. `packed` has the modules with packed
    weights, keyed by name, and `changed` has the changed parameters. Returns the names of the modules whose new copy
    differs from the weights. Only the modules named in `comparable` can be checked for this.
    """
    ids = set(map(id, changed))
    stale = []
    for name, module in packed.items():
        if any(id(held) in ids for held in module._parameters.values()):
            getattr(module, PACK)()
            if name in comparable and not getattr(module, IS_PACKED)():
                stale.append(name)
    return tuple(stale)


def _comparable(packed: Mapping[str, torch.nn.Module]) -> frozenset[str]:
    """Names of the modules in `packed` whose packed weights can be compared with the plain weights.

    Packed weights are copies in the layout that vLLM's CPU kernels compute with. Some kernels round the numbers that
    they multiply, and then the comparison fails even for a correct copy. Therefore the comparison is tried on copies
    that vLLM has just made, and a module is comparable if the comparison succeeds. For all other modules only the
    canary, a comparison with transformers, detects an outdated copy.
    """
    with torch.inference_mode():
        comparable = frozenset(
            name
            for name, module in packed.items()
            if (is_packed := getattr(module, IS_PACKED, None)) is not None and is_packed()
        )
    if hidden := sorted(packed.keys() - comparable):
        log.warning("%d packed layers cannot be compared with their weights, for example %s", len(hidden), hidden[0])
    return comparable


def _derive_of(module: torch.nn.Module) -> Any:
    """Find the method of an attention module that updates its kernel's copies of weights.

    Some attention kernels compute with a copy of weights in another dtype; the copy must be updated when the weights
    change. The method takes the dtype, and updates the copies in place. Returns None for a module without this method.
    """
    return getattr(getattr(module, "impl", None), "process_weights_after_loading", None)

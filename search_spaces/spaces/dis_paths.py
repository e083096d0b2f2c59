"""Layer paths of the search space DIS as configurations: their encoding, random paths, and the limit of layers.

A block may use D adjacent layers of each of M models, each layer up to R times. These D * M layers are the block's
candidates, numbered by layer, then by model. Each candidate has R copies, so there are n = D * M * R copies. A block's
path is the sequence of the candidates that the block uses. A configuration describes this path with a bit for each copy
and an order of all copies. The copies of a candidate are equal, so there are P = n! / R!^(M D) orders. If P is at most
MAX_ORDERS, the order is given by one whole number, its place in the lexicographic list of all orders. Otherwise the
order is given by a sort key for each copy. The r-th bit of a candidate is for its r-th copy in the order.

Many configurations describe the same path. The class `DisPaths` stores one of these configurations: the path uses the
first copies of each candidate, and the order is the first order that gives the path with these bits.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from search_spaces.parameters import Categorical, Configuration, Float, Integer, Parameter
from search_spaces.recipe import COEFFICIENT_DECIMALS
from search_spaces.spaces.layers import ScaleOf

__all__ = ["MAX_ORDERS", "SCALES", "Block", "DisPaths", "first_order", "num_orders", "order_at", "place_of"]

# The largest number of orders of a block's candidates that are searched as one whole number.
MAX_ORDERS = 1_000_000

# The lowest and highest scale of a block by default. The published code has 0 to 2; the 280 scales of the published
# merges, which are scales of MLPs, are between 0.73 and 1.32 (Tables 12 to 14).
SCALES = (0.5, 1.5)

# In Tables 12 to 14, a third of the scales differs from 1, with a standard deviation of 0.11. Scales of changed blocks
# are drawn in the same way.
SCALED_SHARE = 1 / 3
SCALE_DEVIATION = 0.11


@dataclass(frozen=True)
class Block:
    """The part of a merge that stands for one block, a group of adjacent layers at the same depth of all models.

    `path` is the sequence of layers that the merge uses in place of the group; each is given as the number of a
    candidate, a layer that the block may use. `scale` is a factor at the last layer of `path`: on the residual stream
    or on the MLP's output, as the field `DisPaths.scale_of` says.
    """

    path: tuple[int, ...]
    scale: float = 1.0


@dataclass(frozen=True)
class DisPaths:
    """The layer paths of one DIS search space, and their conversion to configurations and back.

    A layer path is the sequence of a merge's layers; the layers may be from several models. The layers of each model
    are divided into blocks of adjacent layers. For each block, a path uses a sequence of layers of this block, from any
    of the models. The class implements the interface `Structure`, the rules for drawing and storing configurations.

    - `base`: the alias of the base model
    - `models`: the models whose layers blocks use, in order
    - `num_layers`, `max_layers`: the number of layers of each model, and the largest number of layers of a merge
    - `depth_granularity`: the number of adjacent layers of each model in a block. The layers of all models in a block
      are the block's candidates.
    - `repeats`: the number of times that a block may use the same layer
    - `retains`: whether a block that uses no candidate has the base's layers; otherwise it has no layers
    - `has_scales`: whether a block has a scale, a number within `scale_range`. The scale multiplies the residual stream
      or the MLP's output (field `scale_of`) at the block's last layer.
    - `permutes`: whether a block may have its candidates in any order; otherwise they are in the order of their numbers
    - `draws_uniformly`: whether each parameter of a random configuration is drawn independently; otherwise a random
      path is a source model with a few changed blocks
    """

    base: str
    models: tuple[str, ...]
    num_layers: int
    max_layers: int
    depth_granularity: int = 1
    repeats: int = 1
    retains: bool = True
    has_scales: bool = True
    permutes: bool = True
    scale_of: ScaleOf = "stream"
    scale_range: tuple[float, float] = SCALES
    draws_uniformly: bool = False

    # Candidates of a block.

    @property
    def num_blocks(self) -> int:
        """The number of blocks (groups of adjacent layers) into which the layers of each model are divided."""
        return self.num_layers // self.depth_granularity

    @property
    def num_candidates(self) -> int:
        """The number of layers that one block may use (candidates): its adjacent layers in each of the models."""
        return self.depth_granularity * len(self.models)

    @property
    def num_copies(self) -> int:
        """The number of layers that one block may use (candidates), each counted as often as it may be used."""
        return self.num_candidates * self.repeats

    @property
    def num_orders(self) -> int:
        """Number of different orders in which one block may use its candidate layers.

        A block is a group of adjacent layers, and a candidate is a layer that may be used there. An order contains each
        candidate as often as the block may use it. If the field `permutes` is False, there is 1 order, because
        candidates are then always in the order of their numbers.
        """
        return num_orders(self.num_candidates, self.repeats) if self.permutes else 1

    def model_of(self, candidate: int) -> str:
        """The alias of the model that has the layer `candidate`.

        A candidate is a layer that a block (group of adjacent layers) may use, given as a number.
        """
        return self.models[candidate % len(self.models)]

    def layer_of(self, candidate: int, block: int) -> int:
        """The number, in its model, of the layer that `candidate` stands for.

        A candidate is a number that stands for a layer that a block may use. A block is a group of adjacent layers, and
        `block` is its index.
        """
        return block * self.depth_granularity + candidate // len(self.models)

    def own(self, model: str) -> tuple[int, ...]:
        """The layers of `model` in one block (group of adjacent layers), in their original order, as a path.

        A path is a sequence of candidates: numbers that stand for the layers that the merge may use in this block.
        """
        first = self.models.index(model)
        return tuple(range(first, self.num_candidates, len(self.models)))

    # Parameters.

    def parameters(self) -> Iterator[Parameter]:
        """The search parameters that describe the layer paths of the space.

        A layer path is the sequence of a merge's layers. It consists of blocks. A block may use each of its candidate
        layers up to `repeats` times (a field of the class), so each of them has `repeats` copies. A block has these
        parameters:

        - a bit for each copy, which says whether the path has this copy
        - the order of all copies: one number or, if there are too many orders, a sort key for each copy
        - the scale of the block, if the field `has_scales` is True
        """
        for block in range(self.num_blocks):
            names = self._names[block]
            yield from (Categorical(name, (False, True)) for name in names.bits)
            if names.order is not None:
                yield Integer(names.order, 0, self.num_orders - 1, default=0)
            yield from (
                Float(name, 0.0, 1.0, default=(place + 0.5) / self.num_copies) for place, name in enumerate(names.keys)
            )
            if names.scale is not None:
                yield Float(names.scale, *self.scale_range, default=1.0)

    @cached_property
    def _names(self) -> tuple[_Names, ...]:
        return tuple(self._names_of(block) for block in range(self.num_blocks))

    def _names_of(self, block: int) -> _Names:
        prefix = f"b{block + 1}"
        copies = [
            f"{self.layer_of(candidate, block)}{f'.{copy + 1}' if self.repeats > 1 else ''}.{self.model_of(candidate)}"
            for candidate in range(self.num_candidates)
            for copy in range(self.repeats)
        ]
        has_keys = self.num_orders > MAX_ORDERS
        # The final norm would cancel a scale of the stream after the last block.
        is_scaled = self.has_scales and (self.scale_of == "mlp" or block + 1 < self.num_blocks)
        return _Names(
            bits=tuple(f"{prefix}.use.{copy}" for copy in copies),
            order=f"{prefix}.order" if not has_keys and self.num_orders > 1 else None,
            keys=tuple(f"{prefix}.key.{copy}" for copy in copies) if has_keys else (),
            scale=f"{prefix}.scale" if is_scaled else None,
        )

    # From configurations to blocks and back.

    def blocks(self, configuration: Configuration) -> tuple[Block, ...]:
        """The blocks of the merge that a configuration describes.

        A block's path is the sequence of layers that the merge uses in place of a few adjacent layers of the base. If
        the field `retains` is True, a block that keeps the base's own layers has an empty path. If the merge would have
        more layers than the space allows, some are left out.
        """
        spelled = []
        for names in self._names:
            bits = tuple(configuration[name] for name in names.bits)
            if names.keys:
                keys = [configuration[name] for name in names.keys]
                slots = sorted(range(self.num_copies), key=lambda slot: keys[slot])
                path = tuple(slot // self.repeats for slot in slots if bits[slot])
            else:
                path = _used(bits, configuration[names.order] if names.order else 0, self.num_candidates, self.repeats)
            spelled.append(Block(path, 1.0 if names.scale is None else configuration[names.scale]))
        return self._tidy(self._fitted(spelled))

    def configuration(self, blocks: Sequence[Block]) -> dict[str, Any]:
        """The configuration (values of the space's parameters) of a merge in which `blocks` replace layers of the base.

        A block stands for a few adjacent layers of the base; its path is the sequence of layers that the merge uses in
        their place. `blocks` must be in the form that the method `blocks` returns. If the field `retains` is True, an
        empty path stands for the base's own layers, so a block of exactly these layers must have an empty path.
        """
        found: dict[str, Any] = {}
        for names, block in zip(self._names, blocks, strict=True):
            bits, order, place = _spelling(block.path, self.num_candidates, self.repeats)
            found |= zip(names.bits, bits, strict=True)
            if names.order is not None:
                found[names.order] = place
            if names.keys:
                found |= zip(names.keys, self._keys(order), strict=True)
            if names.scale is not None:
                found[names.scale] = block.scale
        return found

    def repair(self, configuration: Configuration) -> dict[str, Any]:
        """Convert a proposed configuration to the form that studies store.

        Several configurations may describe the same merge; only one of these is stored, and is the result. If
        `configuration` describes a merge with too many layers, the result describes the shortened merge (method
        `blocks`). The values of `configuration` must be valid values of the space's parameters.
        """
        return self.configuration(self.blocks(configuration))

    def unused(self, configuration: Configuration) -> tuple[str, ...]:
        """No parameter: if a parameter has no effect, its stored value is a good start for changes.

        A block without candidates has scale 1, and candidates that a path leaves out are in the order of their numbers.
        """
        return ()

    def layers(self, blocks: Sequence[Block]) -> list[tuple[str, int, float]]:
        """The layers of the merge that consists of `blocks`, each as a tuple (model, layer number, scale).

        A block has the layers that the merge uses in place of a few adjacent layers of the base. The scale of a block
        is the scale of its last layer; its other layers have scale 1.
        """
        found = []
        for index, block in enumerate(blocks):
            steps = [(self.model_of(candidate), self.layer_of(candidate, index)) for candidate in block.path]
            if not steps and self.retains:
                first = index * self.depth_granularity
                steps = [(self.base, layer) for layer in range(first, first + self.depth_granularity)]
            last = len(steps) - 1
            found += [(model, layer, block.scale if at == last else 1.0) for at, (model, layer) in enumerate(steps)]
        return found

    def blocks_of(self, layers: Sequence[tuple[str, int, float]]) -> tuple[Block, ...] | None:
        """Divide the layers of a merge into blocks; None if no blocks of this space give the merge.

        `layers` has the merge's layers in order, each as model, layer number and scale. A block has the layers that the
        merge uses in place of a few adjacent layers of the base.
        """
        steps: list[list[tuple[str, int, float]]] = [[] for _ in range(self.num_blocks)]
        for model, layer, scale in layers:
            if not 0 <= layer < self.num_layers:
                return None
            steps[layer // self.depth_granularity].append((model, layer, scale))
        found = []
        for index, own in enumerate(steps):
            scale = own[-1][2] if own else 1.0
            numbers = [self._number(model, layer, index) for model, layer, _ in own]
            path = tuple(number for number in numbers if number is not None)
            if len(path) < len(numbers):  # the base's layers, which only an empty block has
                path = ()
            found.append(Block(path, scale))
        blocks = self._tidy(found)
        is_possible = all(block.path.count(number) <= self.repeats for block in blocks for number in block.path)
        is_possible &= self.permutes or all(list(block.path) == sorted(block.path) for block in blocks)
        in_range = all(self.scale_range[0] <= block.scale <= self.scale_range[1] for block in blocks)
        return blocks if is_possible and in_range and self.layers(blocks) == list(layers) else None

    def depth(self, blocks: Sequence[Block]) -> int:
        """The number of layers of the merge that consists of `blocks`."""
        return sum(map(self._depth, blocks))

    def _number(self, model: str, layer: int, block: int) -> int | None:
        if model not in self.models:
            return None
        return (layer - block * self.depth_granularity) * len(self.models) + self.models.index(model)

    def _depth(self, block: Block) -> int:
        return len(block.path) or (self.depth_granularity if self.retains else 0)

    def _keys(self, order: Sequence[int]) -> list[float]:
        """Make sort keys, numbers in [0, 1], that stand for the order `order` of a block's candidates.

        A candidate is a layer that the block may use, given as a number. `order` contains `repeats` copies of each
        candidate (`repeats` is a field of the class). The result has one key for each copy, ordered by candidate.
        Sorting the copies by their keys gives `order`.
        """
        next_copy = [candidate * self.repeats for candidate in range(self.num_candidates)]
        keys = [0.0] * self.num_copies
        for place, candidate in enumerate(order):
            keys[next_copy[candidate]] = (place + 0.5) / self.num_copies
            next_copy[candidate] += 1
        return keys

    def _tidy(self, blocks: Sequence[Block]) -> tuple[Block, ...]:
        """Reset values of blocks that do not influence the merge, so that equal merges have equal blocks.

        A block's path is the sequence of layers that a merge uses in place of a few adjacent layers of the base. If the
        field `retains` is True, an empty path means the base's own layers, and a path that lists exactly these layers
        becomes the empty path. If the field is False, an empty path means no layers.

        A scale that has no influence becomes 1; other scales are rounded. The scale of a block without layers has no
        influence. If scales multiply the residual stream, the scale of the last block with layers has no influence
        either, because the final norm cancels it.
        """
        base = self.own(self.base) if self.retains and self.base in self.models else None
        paths = [() if block.path == base else block.path for block in blocks]
        end = len(paths)
        if self.scale_of == "stream":
            end = max((index for index, path in enumerate(paths) if path or self.retains), default=0)
        return tuple(
            Block(path, self._rounded(block.scale) if index < end and (path or self.retains) else 1.0)
            for index, (path, block) in enumerate(zip(paths, blocks, strict=True))
        )

    def _rounded(self, scale: float) -> float:
        low, high = self.scale_range
        return min(max(round(scale, COEFFICIENT_DECIMALS), low), high)

    def _fitted(self, blocks: Sequence[Block]) -> list[Block]:
        """Shorten the blocks so that the merge has at most the number of layers in the field `max_layers`.

        A block has the layers that the merge uses in place of a few adjacent layers of the base; its path is the
        sequence of these layers. The layers to remove are chosen at random, with a seed that is a function of the paths
        of all blocks. If the field `retains` is True, at least one layer of each block with layers is kept, because an
        empty path means the base's layers. If no layer would be left in the merge, the first block uses its candidate
        number 0 (the first of the layers that it may use).
        """
        paths = [list(block.path) for block in blocks]
        excess = self.depth(blocks) - self.max_layers
        if excess > 0:
            least = 1 if self.retains else 0
            places = [(index, at) for index, path in enumerate(paths) for at in range(len(path))]
            rng = np.random.default_rng(zlib.crc32(repr(paths).encode()))
            left = [len(path) for path in paths]
            dropped = set()
            for number in rng.permutation(len(places)).tolist():
                index, _ = places[number]
                if excess > 0 and left[index] > least:
                    left[index] -= 1
                    excess -= 1
                    dropped.add(places[number])
            paths = [[c for at, c in enumerate(path) if (i, at) not in dropped] for i, path in enumerate(paths)]
        if not self.retains and not any(paths):
            paths[0] = [0]
        return [Block(tuple(path), block.scale) for path, block in zip(paths, blocks, strict=True)]

    # Paths drawn at random.

    def sample(self, rng: np.random.Generator) -> dict[str, Any]:
        """The configuration of a random path, which by default is close to one source's own sequence of layers.

        A path goes through blocks of adjacent layers. Between one and all blocks are changed; few changed blocks are
        likelier than many. First the total number of layers is drawn, then its division between the changed blocks,
        then the layers of each changed block. Blocks that are not changed have scale 1. The search in the paper (Su and
        Geiping, 2025, section 4.1) also starts from the source models.

        If the field `draws_uniformly` is True, each parameter is drawn uniformly instead, as in the published code.
        `rng` gives the random numbers. The result is in the form in which a study stores the drawn path.
        """
        if self.draws_uniformly:
            return self.repair({parameter.name: parameter.sample(rng) for parameter in self._drawn})
        source = int(rng.integers(len(self.models) + self.retains))
        own = self.own(self.models[source]) if source < len(self.models) else ()
        blocks = [Block(own)] * self.num_blocks
        # The number of changed blocks is uniform in its logarithm.
        num_changed = min(int(math.exp(rng.uniform(0.0, math.log(self.num_blocks + 1)))), self.num_blocks)
        changed = rng.permutation(self.num_blocks)[:num_changed].tolist()
        for index, size in zip(changed, self._sizes(num_changed, rng), strict=True):
            blocks[index] = Block(self._drawn_path(size, rng), self._drawn_scale(rng))
        return self.configuration(self._tidy(self._fitted(blocks)))

    @cached_property
    def _drawn(self) -> tuple[Parameter, ...]:
        return tuple(self.parameters())

    def _sizes(self, num_changed: int, rng: np.random.Generator) -> list[int]:
        """Draw the number of layers of each of the `num_changed` blocks that a random merge changes.

        A block has the layers that the merge uses in place of a few adjacent layers of the base. First the total number
        of layers in the changed blocks is drawn, and then its division between them. The merge has at most the number
        of layers in the field `max_layers`. `rng` gives the random numbers.
        """
        least, most = (1 if self.retains else 0), self.num_copies
        room = self.max_layers - self.num_layers
        low = num_changed * (least - self.depth_granularity)
        difference = int(rng.integers(low, min(room, num_changed * (most - self.depth_granularity)), endpoint=True))
        sizes = [self.depth_granularity] * num_changed
        step = 1 if difference > 0 else -1
        for _ in range(abs(difference)):
            open_ = [index for index, size in enumerate(sizes) if least <= size + step <= most]
            sizes[open_[int(rng.integers(len(open_)))]] += step
        return sizes

    def _drawn_path(self, size: int, rng: np.random.Generator) -> tuple[int, ...]:
        """A random path of `size` layers through one block, as the numbers of its candidates.

        A path is a sequence of layers, and candidates are the layers that the block may use. `rng` gives the random
        numbers. If the field `retains` is True, an empty path stands for the base's own layers. If `size` is the number
        of these layers, the result is therefore sometimes empty: with probability 1 / (number of models + 1).
        """
        if self.retains and size == self.depth_granularity and rng.integers(len(self.models) + 1) == 0:
            return ()
        path = (rng.permutation(self.num_copies)[:size] // self.repeats).tolist()
        return tuple(path if self.permutes else sorted(path))

    def _drawn_scale(self, rng: np.random.Generator) -> float:
        if not self.has_scales or rng.random() >= SCALED_SHARE:
            return 1.0
        return float(np.clip(rng.normal(1.0, SCALE_DEVIATION), *self.scale_range))


@dataclass(frozen=True)
class _Names:
    """The names of the search parameters of one block, that is, of the layers in place of a few layers of the base.

    - `bits`: one parameter for each copy of each layer that the block may use: whether the block uses it
    - `order`: the parameter for the order of the copies; None if there is only one order, or too many for one number
    - `keys`: if there are too many orders, the sort keys that define the order; otherwise empty
    - `scale`: the parameter for the block's scale; None if the block has no scale
    """

    bits: tuple[str, ...]
    order: str | None
    keys: tuple[str, ...]
    scale: str | None


def num_orders(num_candidates: int, repeats: int) -> int:
    """The number of different sequences in which each of `num_candidates` candidates occurs `repeats` times.

    A candidate is a layer that a block (a group of adjacent layers) may use.
    """
    alike: int = math.factorial(repeats) ** num_candidates
    return math.factorial(num_candidates * repeats) // alike


def order_at(place: int, num_candidates: int, repeats: int) -> tuple[int, ...]:
    """The order of candidates at index `place` in the lexicographic list of all their orders.

    A candidate is a layer that a block (a group of adjacent layers) may use, given as a number from 0 to
    `num_candidates` - 1. An order is a tuple in which each candidate occurs `repeats` times. `place` is counted from 0.
    """
    left = [repeats] * num_candidates
    order = []
    for _ in range(num_candidates * repeats):
        for candidate in range(num_candidates):
            if (size := _num_starting_with(candidate, left)) > place:
                break
            place -= size
        order.append(candidate)
        left[candidate] -= 1
    return tuple(order)


def place_of(order: Sequence[int], num_candidates: int, repeats: int) -> int:
    """The index, from 0, of an order of candidates in the lexicographic list of all their orders.

    A candidate is a layer that a block (a group of adjacent layers) may use, given as a number from 0 to
    `num_candidates` - 1. In `order`, each candidate occurs `repeats` times. This function is the inverse of the
    function `order_at`.
    """
    left = [repeats] * num_candidates
    place = 0
    for candidate in order:
        place += sum(_num_starting_with(earlier, left) for earlier in range(candidate))
        left[candidate] -= 1
    return place


def first_order(path: Sequence[int], num_candidates: int, repeats: int) -> tuple[tuple[bool, ...], tuple[int, ...]]:
    """Encode a path through one block as bits and an order of layers.

    The path is a sequence of candidates, numbers from 0 to `num_candidates` - 1 that stand for the layers that the
    block may use. Each candidate has `repeats` copies. The order lists all copies of all candidates; the bits select
    copies, and the selected ones, in this order, are the path. If the path uses a candidate n times, its first n copies
    are selected. If several orders give the path, the lexicographically first is returned. Raises ValueError if the
    path uses a candidate more than `repeats` times.
    """
    used = [path.count(candidate) for candidate in range(num_candidates)]
    if max(used, default=0) > repeats:
        raise ValueError(f"path {tuple(path)} uses a candidate more than {repeats} times")
    bits = tuple(copy < used[candidate] for candidate in range(num_candidates) for copy in range(repeats))
    coming, others = list(path), [repeats - count for count in used]
    order: list[int] = []
    while len(order) < num_candidates * repeats:
        # Copies that are not used come after those that are.
        free = next((c for c, number in enumerate(others) if number and c not in coming), num_candidates)
        if coming and coming[0] < free:
            order.append(coming.pop(0))
        else:
            order.append(free)
            others[free] -= 1
    return bits, tuple(order)


@lru_cache(maxsize=100_000)
def _spelling(
    path: tuple[int, ...], num_candidates: int, repeats: int
) -> tuple[tuple[bool, ...], tuple[int, ...], int]:
    """Encode a path through one block as bits, an order of candidates, and the index of this order.

    The path is a sequence of candidates (layers that the block may use, as numbers from 0 to `num_candidates` - 1). It
    uses a candidate at most `repeats` times. The order contains `repeats` copies of each candidate, and each bit says
    whether the path has one of these copies (function `first_order`). The index is the order's place in the
    lexicographic list of all orders.
    """
    bits, order = first_order(path, num_candidates, repeats)
    return bits, order, place_of(order, num_candidates, repeats)


@lru_cache(maxsize=100_000)
def _used(bits: tuple[bool, ...], place: int, num_candidates: int, repeats: int) -> tuple[int, ...]:
    """Decode the path through one block from bits and the index of an order of candidates.

    The path is a sequence of candidates (layers that the block may use, as numbers from 0 to `num_candidates` - 1).
    `place` is the index of an order in the lexicographic list of all orders, each of which contains `repeats` copies of
    each candidate. `bits` say which of these copies the path has (function `first_order`). This function is the inverse
    of the function `_spelling`.
    """
    copies = [0] * num_candidates
    path = []
    for candidate in order_at(place, num_candidates, repeats):
        if bits[candidate * repeats + copies[candidate]]:
            path.append(candidate)
        copies[candidate] += 1
    return tuple(path)


def _num_starting_with(candidate: int, left: Sequence[int]) -> int:
    """The number of different orders of candidates that start with `candidate`.

    Candidates are numbers that stand for layers which a block may use. `left[i]` is how often an order contains
    candidate i. The result is 0 if `left[candidate]` is 0.
    """
    if not left[candidate]:
        return 0
    total: int = math.factorial(sum(left) - 1)
    for other, number in enumerate(left):
        total //= math.factorial(number - (other == candidate))
    return total

"""Grid search: every combination of a few values of each parameter, then every combination of more values.

The combinations are in a random order. Parameters with the same meaning (role) in different layers share their value,
so a space of many layer groups is searched as if it had one group. In a space of layer paths (sequences of layers),
passthrough merges are searched: merges of one block of a model's consecutive layers, then merges of two blocks, and so
on. The number of blocks grows when a few random draws give no new merge.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from search_spaces.parameters import Configuration
from search_spaces.spaces.layer_paths import LayerPaths
from service.tune.searchers.base import ProposalContext, proposal_generator
from service.tune.searchers.encoding import Encoding, Rows

__all__ = ["SEARCHER", "GridSearcher"]

# Draws for a proposal: points of a large grid, or passthrough merges of each number of blocks.
_NUM_DRAWN = 64


@dataclass(frozen=True)
class GridSearcher:
    """Grid search, which avoids known configurations and ignores their results.

    On the first grid a numeric parameter has `first_levels` values, from one end of its range to the other. When all
    points of a grid are known, the distance between values is halved, up to `finer` times. If a grid has at most
    `max_points` points, all of them are listed; of a larger grid, random points are drawn.
    """

    first_levels: int = 5  # values of a number: the ends of its range, and evenly between
    finer: int = 4  # how often the distance between values is halved when a grid is exhausted
    max_points: int = 5_000  # a grid of this size is listed whole; of a larger grid, points are drawn

    def advance(self, context: ProposalContext) -> dict[str, Any]:
        known, rng = context.known_configurations(), context.generator()
        paths = context.parameters.structure
        if isinstance(paths, LayerPaths):
            return _passthrough(paths, rng, known) or context.sample_unseen(rng)
        encoding = Encoding(context.parameters)
        for halvings in range(self.finer + 1):
            levels = (self.first_levels - 1) * 2**halvings + 1
            points = self._points(encoding, levels, context.number, context.seed, rng)
            if (point := encoding.first_unknown(points, known)) is not None:
                return encoding.decode(point)
        return context.sample_unseen(rng)

    def _points(self, encoding: Encoding, levels: int, number: int, seed: int, rng: np.random.Generator) -> Rows:
        """Points of a grid, as rows of the `encoding`; each numeric parameter has at most `levels` values.

        All parameters with the same role have the same value; a role is a meaning that parameters of different layers
        share, such as the coefficient of a method. If the grid has at most `max_points` points, the result has all of
        them in a random order, which depends on `seed` only, rotated so that the point of trial `number` comes first.
        If the grid has more points, the result has random points, drawn with `rng`.
        """
        values = encoding.values_by_role(levels)
        shape = [len(options) for options in values]
        num_points = math.prod(shape)
        if num_points > self.max_points:
            picks = np.column_stack([rng.integers(size, size=_NUM_DRAWN) for size in shape])
        else:
            order = proposal_generator(seed=seed, number=0).permutation(num_points)
            indices = np.roll(order, -number)
            picks = np.column_stack(np.unravel_index(indices, shape))
        columns = [options[pick] for options, pick in zip(values, picks.T, strict=True)]
        return encoding.tied(np.column_stack(columns))


def _passthrough(paths: LayerPaths, rng: np.random.Generator, known: Sequence[Configuration]) -> dict[str, Any] | None:
    for num_blocks in range(1, paths.longest + 1):
        for _ in range(_NUM_DRAWN):
            found = paths.passthrough(num_blocks, rng)
            if found is not None and found not in known:
                return found
    return None


SEARCHER = GridSearcher()

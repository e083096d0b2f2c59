"""Functions that make the kernel rule of a merge, from its coefficients and the statistics of its operands.

A rule is the formula of a merge with its numbers, as plain data. Numbers that depend on the elements that a method
drops or selects are computed in a separate pass, on CPU. A method has at most one rule, registered by `@fuses(NAME)`; a
method without a rule runs by its plain function.

- `base`: the decorator, and the statistics that rules are computed from
- `averages`: passthrough, averages and interpolations, fusions of a pair
- `task_vectors`: sums of task vectors, and TIES of the largest magnitudes
- `sparse`: DARE, DELLA and Model Breadcrumbs
- `competition`: SCE, RAM and consensus masks
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping

from workers.merging.kernels.lowering.base import RULES, Lowering

__all__ = ["FUSED", "ON_CUDA"]

for _module in pkgutil.iter_modules(__path__, f"{__name__}."):
    importlib.import_module(_module.name)

FUSED: Mapping[str, Lowering] = {name: rule.lowering for name, rule in RULES.items()}
# On a GPU, the other methods run by their plain functions.
ON_CUDA = frozenset(name for name, rule in RULES.items() if rule.is_on_cuda)

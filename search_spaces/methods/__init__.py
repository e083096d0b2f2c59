"""Declarations of the merge methods that a recipe can name, without torch.

A declaration states the sources and coefficients of a method, the ranges in which its coefficients are searched, the
publication, and mergekit's counterpart. The computation is a plain function in the package `workers.merging.methods`,
registered under the same name. `METHODS` has every `MergeMethod` that a module of this package assigns to a name, in
the order of the modules' POSITION.

- `base`: the types of a declaration
- `coefficients`: coefficients and constraints that several methods share
- `mergekit`: the types of mergekit's counterparts, and how its parameters become coefficients
- `published`: passthrough, and the four methods with which LFS was published
- `averages`: averages and interpolations of whole models, fusions of a pair
- `ties`: variants of TIES, each named after its origin
- `sparse`: task vectors sparsified at random or by magnitude
- `unscaled`: mergekit's methods with settings that are not its defaults
- `competition`: methods that resolve conflicts between task vectors: SCE, RAM, PCB-Merging, TALL masks, WUDI
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator, Mapping

from search_spaces.methods.base import MergeMethod

__all__ = ["METHODS", "declarations"]


def declarations() -> Iterator[MergeMethod]:
    """Yield every merge method that the modules of this package declare, in the order of the constant METHODS."""
    modules = [importlib.import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__)]
    families = [module for module in modules if hasattr(module, "POSITION")]
    for family in sorted(families, key=lambda module: (module.POSITION, module.__name__)):
        yield from (value for value in vars(family).values() if isinstance(value, MergeMethod))


# A study's parameters have this order, so the order determines which trials a seed gives.
METHODS: Mapping[str, MergeMethod] = {method.name: method for method in declarations()}

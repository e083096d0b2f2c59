"""Search spaces, which decode a configuration to a recipe; each is one module, which is found automatically.

A module defines SPACE, the section of the study file that describes the space. The module's name is the value of the
section's key `kind`.

- `base`: `SearchSpace`, the interface of every search space; the section that describes a space; the data about models
  that a space receives
- `layers`: functions that several spaces use, for groups of layers, recipes of layer paths and aliases of models
- `layer_paths`: the paths of `hm3` through layers of several models: which layers may follow, paths as configurations
- `path_coefficients`: the coefficients of the merges along one path, which gradients refine
- `dis_paths`: the layer paths of `dis` as configurations: orders of layers, random paths, repairs
- `lfs_methods`: the methods with which LFS was published, as LFS searches them
- `lfs_ranges`: all other declared methods, searched in the ranges that they declare
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping

from search_spaces.spaces.base import SpaceSection

__all__ = ["DEFAULT_KIND", "SPACES"]

# The kind of space that a study has by default.
DEFAULT_KIND = "layerwise"

_MODULES = {
    module.name: importlib.import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__)
}

# By kind; the default comes first.
_DECLARED: dict[str, type[SpaceSection]] = {
    name: module.SPACE for name, module in _MODULES.items() if hasattr(module, "SPACE")
}
SPACES: Mapping[str, type[SpaceSection]] = dict(
    sorted(_DECLARED.items(), key=lambda item: (item[0] != DEFAULT_KIND, item[0]))
)

"""Search spaces: what a configuration means, as a recipe. One module each, which is found automatically.

A module holds the section of the study file that describes its space, SPACE; the module's name is the `kind` there.

- `base`: `SearchSpace`, the interface of every search space; the section that describes one; what it knows of models
- `layers`: groups of layers, merges at a layer, paths of layers, recipes in a space's own aliases
- `layer_paths`: paths through layers of several models: what may follow, paths as configurations
- `dis_paths`: the layer paths of DIS as configurations: orders, draws, paths that are made to fit
- `lfs_methods`: the methods that LFS was published with, as it searches them
- `lfs_ranges`: all other declared methods, searched in the ranges that they declare
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping

from search_spaces.spaces.base import SpaceSection

__all__ = ["DEFAULT_KIND", "SPACES"]

# The kind of a study that names none.
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

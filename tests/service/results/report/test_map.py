"""The maps at the heads of packages."""

from __future__ import annotations

import pkgutil
import re
from types import ModuleType

import pytest

import service
import service.api
import service.tune


@pytest.mark.parametrize("package", [service, service.api, service.tune])
def test_a_map_names_every_module_and_no_other(package: ModuleType) -> None:
    named = re.findall(r"`(\w+)`", str(package.__doc__))
    assert sorted(named) == sorted(module.name for module in pkgutil.iter_modules(package.__path__))

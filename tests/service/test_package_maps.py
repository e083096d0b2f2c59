"""The maps at the heads of packages."""

from __future__ import annotations

import importlib
import pkgutil
import re

import pytest

PACKAGES = (
    "service",
    "service.api",
    "service.api.routes",
    "service.cli",
    "service.client",
    "service.results",
    "service.results.report",
    "service.results.series",
    "service.schemas",
    "service.tune",
)


@pytest.mark.parametrize("name", PACKAGES)
def test_a_map_names_every_module_and_no_other(name: str) -> None:
    package = importlib.import_module(name)
    named = re.findall(r"^(?:- )?`(\w+)`", str(package.__doc__), re.MULTILINE)
    assert sorted(named) == sorted(module.name for module in pkgutil.iter_modules(package.__path__))

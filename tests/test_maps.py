"""Every package's docstring says what each of its modules is for. A package may have any number of modules."""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections import Counter
from collections.abc import Collection, Iterator

import pytest

import search_spaces
import service
import workers


def packages() -> Iterator[str]:
    for root in (search_spaces, workers, service):
        yield root.__name__
        for module in pkgutil.walk_packages(root.__path__, f"{root.__name__}."):
            if module.ispkg:
                yield module.name


PACKAGES = tuple(packages())


# Packages that discover modules with a variable of this name: a module is added without editing another file. Their
# docstrings name the other modules only.
DISCOVERED = {
    "search_spaces.searchers": "SEARCHER",
    "search_spaces.spaces": "SPACE",
    "service.tune.searchers": "SEARCHER",
}


def differences(docstring: str | None, modules: Collection[str]) -> list[str]:
    """The differences between a docstring's lines "- `name`: ..." and the modules and packages that exist."""
    named = Counter(re.findall(r"^- `(\w+)`: ", docstring or "", re.MULTILINE))
    return (
        [f"{name} is not on the map" for name in sorted(set(modules) - set(named))]
        + [f"{name} is no module here" for name in sorted(set(named) - set(modules))]
        + [f"{name} is on the map {count} times" for name, count in sorted(named.items()) if count > 1]
    )


def to_name(name: str) -> list[str]:
    """The modules that a package's docstring has to name: all except those that are discovered."""
    found = DISCOVERED.get(name)
    return [
        module.name
        for module in pkgutil.iter_modules(importlib.import_module(name).__path__)
        if found is None or not hasattr(importlib.import_module(f"{name}.{module.name}"), found)
    ]


@pytest.mark.parametrize("name", PACKAGES)
def test_a_map_names_every_module_and_no_other(name: str) -> None:
    assert differences(importlib.import_module(name).__doc__, to_name(name)) == []


def test_the_packages_are_those_of_the_folders() -> None:
    assert {"search_spaces.spaces", "workers.merging.kernels", "service.results.report"} <= set(PACKAGES)


@pytest.mark.parametrize(
    ("docstring", "expected"),
    [
        ("A house.\n\n- `store`: keeps `rows`\n- `cli`: parses", []),
        ("- `cli`: parses", ["store is not on the map"]),
        ("`store` keeps\n- `cli`: parses", ["store is not on the map"]),
        (None, ["cli is not on the map", "store is not on the map"]),
        ("- `store`: keeps\n- `books`: keep\n- `cli`: parses", ["books is no module here"]),
        ("- `store`: keeps\n- `cli`: parses\n- `store`: holds", ["store is on the map 2 times"]),
    ],
)
def test_a_wrong_map_is_noticed(docstring: str | None, expected: list[str]) -> None:
    assert differences(docstring, ["store", "cli"]) == expected

"""The page of differences from papers agrees with the code: defaults, accepted values, and all subjects."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple, get_args

import pytest
import yaml
from pydantic import TypeAdapter

from search_spaces.fidelity import Scheduler
from search_spaces.searchers import SEARCHERS
from search_spaces.spaces import SPACES
from search_spaces.study.fidelity import Fidelity
from search_spaces.study.search import Search
from tests.docs.test_pages import page_of
from workers.training.finetuning.spec import Method

PAGE = page_of("docs/reference/departures.md")
SECTIONS: dict[str, Any] = {**SPACES, "search": Search, "fidelity": Fidelity, "method": Method}
SETTING = re.compile(r"`([a-z0-9_]+(?:\.[a-z0-9_]+)+): ([^`]+)`")


class Setting(NamedTuple):
    """An option with a value, as `lfs.selection: all` states it in a cell of a table."""

    section: str
    option: str
    text: str

    @property
    def value(self) -> Any:
        return yaml.safe_load(self.text)

    def owner(self) -> Any:
        """The class of the section that has the option."""
        first, *others = self.section.split(".")
        owner = SECTIONS[first]
        for name in others:
            owner = type(owner.model_fields[name].default)
        return owner


def cells(*, default: bool, text: str = PAGE.text) -> Iterator[list[Setting]]:
    """The settings in each last cell of a row (if `default`, the defaults) or in each other cell."""
    for line in text.splitlines():
        if line.startswith("|"):
            *others, last = line.strip().strip("|").split("|")
            for cell in [last] if default else others:
                found = [(*name.rpartition(".")[::2], value) for name, value in SETTING.findall(cell)]
                yield [Setting(*each) for each in found]


def settings(*, default: bool, text: str = PAGE.text) -> Iterator[Setting]:
    for cell in cells(default=default, text=text):
        yield from cell


def wrong_defaults(text: str) -> list[Setting]:
    found = list(settings(default=True, text=text))
    as_data = TypeAdapter(Any).dump_python
    return [
        each for each in found if as_data(each.owner().model_fields[each.option].default, mode="json") != each.value
    ]


def test_defaults_are_those_of_the_code() -> None:
    assert len(list(settings(default=True))) > 15
    assert wrong_defaults(PAGE.text) == []


def test_wrong_default_is_noticed() -> None:
    assert wrong_defaults("| what | paper | `lfs.selection: all` |") == [Setting("lfs", "selection", "all")]


@pytest.mark.parametrize("cell", [cell for cell in cells(default=False) if cell], ids=lambda cell: cell[0].option)
def test_variants_are_accepted(cell: list[Setting]) -> None:
    """What the page says of papers and published code can be asked for, with the other options of the cell."""
    for setting in cell:
        given = {each.option: each.value for each in reversed(cell) if each.section == setting.section}
        given |= {setting.option: setting.value}
        owner = setting.owner()
        kind = {"kind": setting.section} if setting.section in SPACES else {}
        found = getattr(owner.model_validate({**kind, **given}), setting.option)
        assert TypeAdapter(Any).dump_python(found, mode="json") == setting.value


def test_every_searcher_scheduler_and_optimizer_has_a_row() -> None:
    cells = [line.split("|")[1] for line in PAGE.text.splitlines() if line.startswith("|")]
    named = {name for cell in cells for name in re.findall(r"`([a-z0-9_]+)`", cell)}
    optimizers = get_args(Method.model_fields["kind"].annotation)
    assert {*SEARCHERS, *get_args(Scheduler), *optimizers} - {"auto"} <= named


def test_every_space_has_a_table() -> None:
    titles = {line.removeprefix("## ").lower() for line in PAGE.text.splitlines() if line.startswith("## ")}
    assert set(SPACES) <= titles

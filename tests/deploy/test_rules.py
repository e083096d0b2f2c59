"""The rules for every profile; changes of the chart that break a rule are noticed."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.chart import CHART, PROFILES, Helm
from tests.deploy.conftest import Rendered
from tests.deploy.rules import RULES

MUTATIONS: list[dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("mutations.yaml").read_text())


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("name", RULES)
def test_profiles_follow_the_rules(name: str, profile: str, rendered: Rendered) -> None:
    assert list(RULES[name](rendered[profile])) == []


@pytest.mark.parametrize("change", MUTATIONS, ids=[f"{each['rule']}-{each['finding']}" for each in MUTATIONS])
def test_a_chart_that_breaks_a_rule_is_noticed(change: dict[str, Any], helm: Helm, tmp_path: Path) -> None:
    chart = tmp_path / "mergesearch"
    shutil.copytree(CHART, chart)
    file = chart / "templates" / change["file"]
    text = file.read_text()
    assert change["old"] in text, f"{change['file']} has changed"
    file.write_text(text.replace(change["old"], change["new"]))
    found = list(RULES[change["rule"]](helm.manifests(change["profile"], chart=chart)))
    assert [problem for problem in found if re.search(change["finding"], problem)], found


def test_every_rule_is_broken_by_a_change() -> None:
    assert {change["rule"] for change in MUTATIONS} == set(RULES)

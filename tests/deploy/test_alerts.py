"""The alert rules: each fires when it should and not otherwise, and has a place in the docs."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.chart import NAMESPACE, RELEASE, Helm
from tests.docs.pages import Page
from tests.prometheus import program

ROOT = Path(__file__).parents[2]
RULES = ROOT / "deploy" / "helm" / "mergesearch" / "monitoring" / "alerts.yaml"
CASES = Path(__file__).with_name("alerts_test.yaml")


def rules_of(document: dict[str, Any], kind: str) -> dict[str, dict[str, Any]]:
    """Rules in a file of rules, by their names. `kind` is "alert", or "record" for rules that record a series."""
    return {rule[kind]: rule for group in document["groups"] for rule in group["rules"] if kind in rule}


def alerts() -> dict[str, dict[str, Any]]:
    return rules_of(yaml.safe_load(RULES.read_text()), "alert")


def records() -> dict[str, dict[str, Any]]:
    return rules_of(yaml.safe_load(RULES.read_text()), "record")


def promtool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([program("promtool"), *map(str, arguments)], capture_output=True, text=True)


def test_rules_are_valid_and_a_wrong_one_is_refused(tmp_path: Path) -> None:
    checked = promtool("check", "rules", RULES)
    assert (checked.returncode, checked.stderr) == (0, "")
    wrong = tmp_path / "rules.yaml"
    wrong.write_text(RULES.read_text().replace("increase(", "increas("))
    assert "unknown function" in promtool("check", "rules", wrong).stderr


def test_each_alert_fires_when_it_should() -> None:
    tested = promtool("test", "rules", CASES)
    assert tested.returncode == 0, tested.stdout + tested.stderr


@pytest.mark.parametrize(("expression", "case"), [("vector(0) > 1", "that fires"), ("vector(1)", "that does not fire")])
def test_each_alert_has_a_case(expression: str, case: str, tmp_path: Path) -> None:
    """With rules that never fire, or always, the cases of every alert fail."""
    document = yaml.safe_load(RULES.read_text())
    for rule in rules_of(document, "alert").values():
        rule["expr"] = expression
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(document))
    cases = yaml.safe_load(CASES.read_text()) | {"rule_files": ["rules.yaml"]}
    (tmp_path / "cases.yaml").write_text(yaml.safe_dump(cases))
    tested = promtool("test", "rules", tmp_path / "cases.yaml")
    assert tested.returncode != 0
    failures = re.findall(r"alertname: (\w+), time: \w+,\s+exp:\[(.*?)\], *\n", tested.stderr, re.DOTALL)
    failed = {name for name, expected in failures if bool(expected.strip()) == (case == "that fires")}
    assert failed == set(alerts()), f"no case {case}: {set(alerts()) - failed}"


def rendered_rules(helm: Helm, profile: str, directory: Path) -> dict[str, dict[str, Any]]:
    """Rules of a profile's release by their names; the file `rules.yaml` in `directory` has them for Prometheus."""
    (rules,) = helm.manifests(profile, "--set", "monitoring.enabled=true").of("PrometheusRule")
    (directory / "rules.yaml").write_text(yaml.safe_dump(rules["spec"]))
    return rules_of(rules["spec"], "record") | rules_of(rules["spec"], "alert")


def case_of_releases(own: int | None, others: int, *, firing: str | None) -> dict[str, Any]:
    """A test case: `mergesearch_ready` is `own` in the tested release, `others` in two more; None means no series."""
    values = {(NAMESPACE, RELEASE): own, (NAMESPACE, "other"): others, ("elsewhere", RELEASE): others}
    labels = {"severity": "critical", "namespace": NAMESPACE, "app_kubernetes_io_instance": RELEASE}

    def expected(name: str) -> list[dict[str, Any]]:
        return [{"exp_labels": labels, "exp_annotations": alerts()[name]["annotations"]}] if name == firing else []

    return {
        "interval": "1m",
        "input_series": [
            {
                "series": f'mergesearch_ready{{namespace="{namespace}",app_kubernetes_io_instance="{release}"}}',
                "values": f"{value}x30",
            }
            for (namespace, release), value in values.items()
            if value is not None
        ],
        "alert_rule_test": [
            {"eval_time": "20m", "alertname": name, "exp_alerts": expected(name)}
            for name in ("MergesearchAbsent", "MergesearchNotReady")
        ],
    }


def test_alerts_of_a_release_are_about_its_own_series(helm: Helm, tmp_path: Path) -> None:
    """Another release in the same Prometheus neither hides an alert nor causes one."""
    rules = rendered_rules(helm, "multi-gpu", tmp_path)
    assert list(rules) == [*records(), *alerts()]
    cases = [
        case_of_releases(None, 1, firing="MergesearchAbsent"),
        case_of_releases(0, 1, firing="MergesearchNotReady"),
        case_of_releases(1, 0, firing=None),
    ]
    (tmp_path / "cases.yaml").write_text(yaml.safe_dump({"rule_files": ["rules.yaml"], "tests": cases}))
    tested = promtool("test", "rules", tmp_path / "cases.yaml")
    assert tested.returncode == 0, tested.stdout + tested.stderr
    expressions = " ".join(rule["expr"] for rule in rules.values())
    selectors = re.findall(r"\b(?:mergesearch|ray)_\w+(.{0,80})", expressions)
    assert len(selectors) > 15
    own = f'{{namespace="{NAMESPACE}", app_kubernetes_io_instance="{RELEASE}", '
    assert [found for found in selectors if not found.startswith(own)] == []


def test_a_queue_of_studies_misses_no_server(helm: Helm, tmp_path: Path) -> None:
    names = ["mergesearch:study_busy:share5m", "MergesearchNodeDiskFull"]
    assert list(rendered_rules(helm, "kueue", tmp_path)) == names
    assert promtool("check", "rules", tmp_path / "rules.yaml").returncode == 0


def test_alerts_say_what_how_bad_and_what_to_do() -> None:
    for name, rule in alerts().items():
        assert name.startswith("Mergesearch")
        assert rule["labels"]["severity"] in ("warning", "critical"), name
        assert rule["annotations"].keys() == {"summary", "description"}, name


def test_docs_have_each_alert_and_recorded_series() -> None:
    text = (ROOT / "docs" / "how-to" / "monitoring.md").read_text()
    assert re.findall(r"^\| `(Mergesearch\w+)` \|", text, re.MULTILINE) == list(alerts())
    assert re.findall(r"^\| `(mergesearch:\S+)` \|", text, re.MULTILINE) == list(records())


def test_the_configuration_in_the_docs_is_valid(tmp_path: Path) -> None:
    """Prometheus accepts the configuration that the docs show, beside the rules."""
    (block,) = Page.read(ROOT / "docs" / "how-to" / "monitoring.md").blocks_in("text")
    (tmp_path / "prometheus.yml").write_text(block)
    (tmp_path / "alerts.yaml").write_text(RULES.read_text())
    checked = promtool("check", "config", "--syntax-only", tmp_path / "prometheus.yml")
    assert checked.returncode == 0, checked.stdout + checked.stderr

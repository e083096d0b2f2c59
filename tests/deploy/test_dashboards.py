"""The dashboards: their form, and that every metric in their queries and in the alerts exists.

`tests/end_to_end/test_transient_faults.py` runs their queries against a Prometheus that scraped a real server.
"""

from __future__ import annotations

import importlib.util
import inspect
import itertools
import re
from pathlib import Path
from typing import Any

import pytest

from service.api.metrics import METRICS
from tests.deploy.dashboards import DASHBOARDS, GPU_SAMPLES, load, queries
from tests.deploy.test_alerts import alerts, records
from workers.serving.replica import ReplicaMetrics

ROOT = Path(__file__).parents[2]

every_dashboard = pytest.mark.parametrize("file", DASHBOARDS, ids=lambda file: file.stem)


def known_metrics() -> set[str]:
    """Metrics of the server, of replicas, of Ray's nodes and of Serve, those recorded, and those of GPU_SAMPLES."""
    replicas = re.findall(r'"(mergesearch_\w+)"', inspect.getsource(ReplicaMetrics))
    assert len(replicas) == 5
    specification = importlib.util.find_spec("ray")
    assert specification is not None
    assert specification.origin is not None
    ray = Path(specification.origin).parent
    files = ["dashboard/modules/reporter/reporter_agent.py", "serve/_private/deployment_state.py"]
    files += ["serve/_private/replica.py", "dashboard/modules/metrics/dashboards/default_dashboard_panels.py"]
    of_ray = {name for file in files for name in re.findall(r'"([a-z]+_\w+)"', (ray / file).read_text())}
    in_dashboards = re.findall(r"\bray_\w+", (ray / files[-1]).read_text())
    names = {f"ray_{name}{end}" for name in of_ray for end in ("", "_total")} | set(in_dashboards)
    ends = ("", "_total", "_bucket", "_count")
    names |= {f"ray_{name}{end}" for name in replicas for end in ends}
    for metric in METRICS:
        names |= {
            f"{metric.name}{end}" for end in (("_bucket", "_count", "_sum") if metric.type == "histogram" else ("",))
        }
    return names | set(records()) | set(re.findall(r"^DCGM_\w+", GPU_SAMPLES, re.MULTILINE))


def unknown_metrics(expression: str) -> set[str]:
    return set(re.findall(r"\b(?:mergesearch|ray|DCGM)[_:][\w:]+", expression)) - known_metrics()


@every_dashboard
def test_metrics_of_dashboards_exist(file: Path) -> None:
    dashboard = load(file)
    variables = [str(each["query"]) for each in dashboard["templating"]["list"]]
    expressions = [*variables, *(query.expression for query in queries(dashboard))]
    assert {name for expression in expressions for name in unknown_metrics(expression)} == set()


def test_metrics_of_alerts_exist() -> None:
    assert {name for rule in (alerts() | records()).values() for name in unknown_metrics(rule["expr"])} == set()


def test_a_metric_that_does_not_exist_is_noticed() -> None:
    expression = 'max(mergesearch_job_state) + rate(ray_node_gpu_utilization[1m]) + DCGM_FI_DEV_GPU_USE{a="ray"}'
    expression += " + mergesearch:study_busy:share5m + mergesearch:study_busy:rate5m"
    assert unknown_metrics(expression) == {
        "ray_node_gpu_utilization",
        "DCGM_FI_DEV_GPU_USE",
        "mergesearch:study_busy:rate5m",
    }


@every_dashboard
def test_panels_have_texts_and_places_of_their_own(file: Path) -> None:
    dashboard = load(file)
    panels: list[dict[str, Any]] = dashboard["panels"]
    assert dashboard["uid"] == f"mergesearch-{file.stem}"
    assert [panel["id"] for panel in panels] == list(range(1, len(panels) + 1))
    assert len({panel["title"] for panel in panels}) == len(panels)
    for panel in panels:
        assert panel["description"].endswith(".")
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24
        for part in (panel, *panel["targets"]):
            assert part["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        for target in panel["targets"]:
            labels = re.findall(r"{{(\w+)}}", target["legendFormat"])
            assert all(re.search(rf"\b{label}\b", target["expr"]) for label in labels), target
    for one, other in itertools.combinations(panels, 2):
        assert not overlap(one["gridPos"], other["gridPos"]), (one["title"], other["title"])


def overlap(one: dict[str, int], other: dict[str, int]) -> bool:
    return all(
        one[place] < other[place] + other[size] and other[place] < one[place] + one[size]
        for place, size in (("x", "w"), ("y", "h"))
    )


@every_dashboard
def test_variables_of_queries_are_declared(file: Path) -> None:
    dashboard = load(file)
    declared = {each["name"] for each in dashboard["templating"]["list"]}
    used = {
        name for panel in dashboard["panels"] for t in panel["targets"] for name in re.findall(r"\$(\w+)", t["expr"])
    }
    assert used - {"__rate_interval"} <= declared
    assert declared - {"datasource"} <= used

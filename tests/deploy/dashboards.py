"""The dashboards' queries, and a Prometheus that scrapes a server, its Ray, and made-up GPUs."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.end_to_end.server import Server
from tests.prometheus import Prometheus, running_prometheus

__all__ = ["DASHBOARDS", "GPU_SAMPLES", "Query", "load", "queries", "scraping", "without_series"]

DASHBOARDS = sorted((Path(__file__).parents[2] / "deploy/helm/mergesearch/monitoring/dashboards").glob("*.json"))

# Values that Grafana inserts for its variables.
VARIABLES = {"$__rate_interval": "10s", "$name": ".*", "$study": ".*"}

# GPUs as Ray and DCGM's exporter describe them. No GPU is here: names, labels and units are those of Ray's source
# (dashboard/modules/reporter/reporter_agent.py) and of the exporter's list of default counters.
GPU_SAMPLES = """
ray_resources{Name="GPU",State="USED",SessionName="SESSION"} 1
ray_node_gpus_available{ip="10.0.0.1",GpuIndex="0",GpuDeviceName="NVIDIA H100",SessionName="SESSION"} 1
ray_node_gpus_utilization{ip="10.0.0.1",GpuIndex="0",GpuDeviceName="NVIDIA H100",SessionName="SESSION"} 97
ray_node_gram_used{ip="10.0.0.1",GpuIndex="0",GpuDeviceName="NVIDIA H100",SessionName="SESSION"} 70000
ray_node_gram_available{ip="10.0.0.1",GpuIndex="0",GpuDeviceName="NVIDIA H100",SessionName="SESSION"} 11000
ray_node_gpu_power_milliwatts{ip="10.0.0.1",GpuIndex="0",GpuDeviceName="NVIDIA H100",SessionName="SESSION"} 610000
ray_node_gpu_temperature_celsius{ip="10.0.0.1",GpuIndex="0",GpuDeviceName="NVIDIA H100",SessionName="SESSION"} 61
DCGM_FI_DEV_GPU_UTIL{gpu="0",modelName="NVIDIA H100",Hostname="gpu-1"} 97
DCGM_FI_DEV_FB_USED{gpu="0",modelName="NVIDIA H100",Hostname="gpu-1"} 70000
DCGM_FI_DEV_POWER_USAGE{gpu="0",modelName="NVIDIA H100",Hostname="gpu-1"} 610
DCGM_FI_DEV_XID_ERRORS{gpu="0",modelName="NVIDIA H100",Hostname="gpu-1"} 0
""".lstrip()


@dataclass(frozen=True)
class Query:
    """A query of a dashboard's panel, as Grafana sends it."""

    panel: str
    expression: str


def load(file: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(file.read_text())
    return document


def queries(dashboard: dict[str, Any]) -> list[Query]:
    """All queries of the panels, with values for the variables."""
    found = []
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            expression = target["expr"]
            for variable, value in VARIABLES.items():
                expression = expression.replace(variable, value)
            found.append(Query(f"{dashboard['title']}: {panel['title']}", expression))
    return found


def without_series(prometheus: Prometheus, dashboard: dict[str, Any], *, last_s: float) -> list[Query]:
    """The dashboard's queries that gave no series within the last seconds."""
    return [query for query in queries(dashboard) if not prometheus.num_series(query.expression, last_s=last_s)]


@contextmanager
def scraping(server: Server, directory: Path) -> Iterator[Prometheus]:
    """A Prometheus that scrapes the server, the nodes of the Ray that it started, and GPU_SAMPLES, every second."""
    session = Path(server.host.session_dir).name
    # Other Rays of this machine may answer on the ports that are the same for all.
    of_this_ray = [{"source_labels": ["SessionName"], "regex": session, "action": "keep"}]
    nodes = {
        "url": f"{server.host.dashboard_url}/api/prometheus/sd",
        "refresh_interval": "1s",
        "authorization": {"type": "Bearer", "credentials_file": str(Path.home() / ".ray" / "auth_token")},
    }
    with _serving_text(GPU_SAMPLES.replace("SESSION", session)) as gpus:
        jobs = [
            {"job_name": "mergesearch", "static_configs": [{"targets": [server.url.removeprefix("http://")]}]},
            {
                "job_name": "ray",
                "http_sd_configs": [nodes],
                "metric_relabel_configs": of_this_ray,
            },
            {"job_name": "gpus", "static_configs": [{"targets": [gpus]}]},
        ]
        rules = {"rule_files": [str(DASHBOARDS[0].parents[1] / "alerts.yaml")]}
        every = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        configuration = {"global": every, **rules, "scrape_configs": jobs}
        directory.mkdir()
        with running_prometheus(directory, configuration) as prometheus:
            yield prometheus


@contextmanager
def _serving_text(text: str) -> Iterator[str]:
    """Address of a server that answers every request with the text."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()

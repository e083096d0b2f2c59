"""Two Ray nodes on this machine, beside the head, and one fake replica that Serve moves between them.

python -m tests.end_to_end.two_nodes DIRECTORY

Prints one line of JSON: what became of the chunks that were at the replica when its node was drained, and of the chunk
that was scored when Serve's controller and its proxy were killed.
"""

from __future__ import annotations

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import ray
from ray import serve
from ray._raylet import GcsClient  # type: ignore[attr-defined]
from ray.cluster_utils import Cluster
from ray.core.generated.autoscaler_pb2 import DrainNodeReason

from search_spaces.study.engine import EngineOptions
from tests.builders import tiny_family
from tests.workers.recipes import arithmetic
from workers.serving import application
from workers.serving.deployment import deploy_scorer
from workers.serving.fake import FakeScorer
from workers.types import ScoreRequest, Span, TaskSpec

SAMPLE_S = 0.1
FIRST, DURING_KILLS = 0.1, 0.4  # weights of the recipes that are scored first, and while parts of Serve are killed
NOTICE_S = 60
WAIT_S = 90.0
LITTLE = {"object_store_memory": 80 * 2**20, "include_dashboard": False}


def main(directory: Path) -> dict[str, Any]:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **LITTLE})
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=1, **LITTLE)
        ray.init(address=cluster.address, namespace="mergesearch", log_to_driver=False, logging_level="error")
        serve.start(proxy_location="HeadOnly", http_options={"port": 0})
        return seen(directory, cluster.address)
    finally:
        ray.shutdown()
        cluster.shutdown()


def seen(directory: Path, address: str) -> dict[str, Any]:
    family = tiny_family(directory, experts=("math", "text"))
    make_worker = partial(FakeScorer, sample_delay_s=SAMPLE_S, log_file=str(directory / "calls"))
    options = EngineOptions(max_model_len=256, threads=1)
    scorer = deploy_scorer(family, options, name="moved", make_worker=make_worker, health_check_period_s=1.0)
    scorer = replace(scorer, deadline_s=WAIT_S, poll_s=0.5)

    def chunk(weight: float) -> ScoreRequest:
        # Two of them are still being scored when the node is drained, and when parts of Serve are killed.
        num_samples = {FIRST: 100, DURING_KILLS: 50}.get(weight, 10)
        span = Span("x", TaskSpec("anything", "exact_match"), 0, num_samples)
        return ScoreRequest("study", arithmetic(family, weight, 0.1), (span,), crashes=0)

    with ThreadPoolExecutor() as pool:
        first = pool.submit(scorer.score, chunk(FIRST))
        time.sleep(1.5)
        waiting = [pool.submit(scorer.score, chunk(weight)) for weight in (0.2, 0.3)]
        time.sleep(0.5)
        (process,) = [each for each in psutil.Process().children(True) if name_of(each).startswith("ray::ServeReplica")]
        old = psutil.Process(process.pid)
        drain(address, node_of_replica())
        results = [each.result(timeout=WAIT_S) for each in (first, *waiting)]
        is_gone = not psutil.wait_procs([old], timeout=30)[1]
        calls = [call for call in FakeScorer(log_file=str(directory / "calls")).calls() if call["outcome"] == "scored"]

        again = pool.submit(scorer.score, chunk(DURING_KILLS))
        time.sleep(1.0)
        killed = [each for each in psutil.Process().children(True) if name_of(each).startswith(PARTS)]
        parts = sorted({name_of(each).removeprefix("ray::").split(".")[0] for each in killed})
        for each in killed:
            each.kill()
        last = again.result(timeout=WAIT_S)
        later = scorer.score(chunk(0.5))
    expected = [FakeScorer().score(chunk(weight)).samples for weight in (FIRST, 0.2, 0.3, DURING_KILLS, 0.5)]
    return {
        "drained": f"fake-{old.pid}",
        "replicas": [result.evidence.replica for result in results],
        "scored": len(calls),
        "is_gone": is_gone,
        "killed": parts,
        "after_kills": [last.evidence.replica, later.evidence.replica],
        "is_equal": [result.samples for result in (*results, last, later)] == expected,
    }


PARTS = ("ray::ServeController", "ray::ProxyActor")


def name_of(process: psutil.Process) -> str:
    try:
        return str((process.cmdline() or [""])[0])
    except psutil.Error:
        return ""


def node_of_replica() -> str:
    (deployment,) = application._applications()["moved"].deployments.values()
    (replica,) = deployment.replicas
    assert replica.node_id is not None
    return str(replica.node_id)


def drain(address: str, node: str) -> None:
    """Drain a node in NOTICE_S seconds, as after a notice of preemption. `ray drain-node` sends the same request."""
    reason = DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    deadline_ms = int(1000 * (time.time() + NOTICE_S))
    accepted, refusal = GcsClient(address=address).drain_node(node, reason, "a spot notice", deadline_ms)
    assert accepted, refusal


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))

"""Replicas on Ray Serve for the prompts of a served study, with a deployment that only records its arguments."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from search_spaces.study.engine import EngineOptions
from service.jobs.completers import Place
from service.jobs.serving import replicas
from service.jobs.serving.replicas import ServeCompleters
from workers.serving import deployment
from workers.serving.deployment import app_name
from workers.serving.serve_completer import ServeCompleter
from workers.serving.serve_scorer import ServeScorer
from workers.types import Family, GpuNeed, ModelSource

FAMILY = Family(ModelSource("base", "/m/base", "00"), (ModelSource("a", "/m/a", "11"),))
OPTIONS = EngineOptions()


def test_shared_replicas_are_those_of_the_machines_of_the_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs that come while a study is served get no replicas under the name of replicas on the CPU."""
    num_gpus, applications, stopped = 0, Counter[str](), list[str]()

    def deploy(family: Family, options: EngineOptions, *, name: str | None = None, **_: Any) -> ServeScorer:
        on_gpus = deployment.runs_on_gpus(family, GpuNeed.IF_ANY)
        opened = name or app_name(family, options, on_gpus=on_gpus)
        applications[opened] += 1
        return ServeScorer(opened)

    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(deployment, "_most_gpus", lambda: num_gpus)
    monkeypatch.setattr(replicas, "deploy_scorer", deploy)
    monkeypatch.setattr(replicas, "num_replicas", lambda name: Counter(RUNNING=applications[name]))
    monkeypatch.setattr(replicas, "stop", stopped.append)
    found = ServeCompleters(FAMILY, OPTIONS, own="chat-1", keep_idle_s=60.0)
    on_cpu, on_gpus = (app_name(FAMILY, OPTIONS, on_gpus=is_on_gpus) for is_on_gpus in (False, True))
    assert found.open(Place.SCORER) == ServeCompleter(on_cpu)
    assert found.running() == [Place.SCORER]
    num_gpus = 4
    assert found.running() == [], "no replica on GPUs runs yet"
    found.close(Place.SCORER)
    assert stopped == [on_cpu], "the one that was opened"
    assert found.open(Place.SCORER) == ServeCompleter(on_gpus)
    assert found.open(Place.OWN) == ServeCompleter("chat-1")
    assert found.running() == [Place.SCORER, Place.OWN]
    num_gpus = 0
    for place in Place:
        found.close(place)
    assert stopped == [on_cpu, on_gpus, "chat-1"]
    assert applications == {on_cpu: 1, on_gpus: 1, "chat-1": 1}


def test_replicas_that_searches_opened_are_closed_by_their_name(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped: list[str] = []
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(deployment, "_most_gpus", lambda: 4)
    monkeypatch.setattr(replicas, "stop", stopped.append)
    ServeCompleters(FAMILY, OPTIONS, own="chat-1", keep_idle_s=60.0).close(Place.SCORER)
    assert stopped == [app_name(FAMILY, OPTIONS, on_gpus=True)]

"""The variable that states the machines for engines: its format, refused values, and the dtype chosen for them."""

from __future__ import annotations

import re

import pytest
import torch

from search_spaces.study.file import parse_study
from service.engine_machines import (
    VARIABLE,
    EngineMachines,
    gpu_need,
    known_machines,
    parse_machines,
    planned_for,
    runs_on_gpus,
    stated_machines,
)
from service.errors import Conflict
from service.studies.preflight.dtype import engine_dtype
from tests.service.api.harness import document
from workers.types import GpuNeed

GIB = 2**30


def test_groups_are_read_with_their_units(monkeypatch: pytest.MonkeyPatch) -> None:
    assert stated_machines() == ()
    monkeypatch.setenv(VARIABLE, " gpus=8,memory=900GiB,gpu_memory=80GB,nodes=4\n gpus=0,memory=16GiB gpus=1 ")
    assert stated_machines() == (
        EngineMachines(8, 900 * GIB, 80 * 10**9, 4),
        EngineMachines(0, 16 * GIB),
        EngineMachines(1),
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gpus=8,cpus=4", "'cpus=4' is not one of gpus=, memory=, gpu_memory=, nodes="),
        ("8", "'8' is not one of"),
        ("gpus=some", "'gpus=some': invalid literal"),
        ("memory=900", "'memory=900': '900' is not a size; write it as 500MB, 5GB or 8GiB"),
        ("gpus=-1", "fewer than 0 GPUs"),
        ("gpus=1,nodes=0", "or than 1 machine"),
    ],
)
def test_what_cannot_be_read_is_refused(text: str, message: str) -> None:
    with pytest.raises(Conflict, match=rf'^{VARIABLE}: .*{re.escape(message)}.*; give groups such as "gpus=8'):
        parse_machines(text)


def test_engines_on_gpus_elsewhere_compute_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """The dtype is that of the engines, also on servers and heads without a GPU."""
    study = parse_study(document())
    monkeypatch.setattr(torch.version, "cuda", None)
    assert (runs_on_gpus(), engine_dtype(study)) == (False, "float32")
    monkeypatch.setenv(VARIABLE, "gpus=0,memory=16GiB,nodes=4")
    assert (runs_on_gpus(), engine_dtype(study)) == (False, "float32")
    monkeypatch.setenv(VARIABLE, "gpus=0,memory=16GiB gpus=8")
    assert (runs_on_gpus(), engine_dtype(study)) == (True, "bfloat16")
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert (runs_on_gpus(), engine_dtype(study)) == (True, "bfloat16")
    own = parse_study(document(engine={"dtype": "float16"}))
    assert engine_dtype(own) == "float16"


def test_nodes_of_ray_decide_on_a_head_without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs of the cluster's nodes count where they are known, and engines then never run on the CPU instead."""
    study = parse_study(document())
    monkeypatch.setattr(torch.version, "cuda", None)
    assert gpu_need() is GpuNeed.IF_ANY
    with known_machines([EngineMachines(0, GIB), EngineMachines(8, GIB)]):
        assert (runs_on_gpus(), engine_dtype(study), gpu_need()) == (True, "bfloat16", GpuNeed.NEEDED)
        with planned_for((EngineMachines(0, GIB),)):
            assert not runs_on_gpus()
    with known_machines([EngineMachines(0, GIB)]):
        assert (runs_on_gpus(), gpu_need()) == (False, GpuNeed.IF_ANY)
    monkeypatch.setenv(VARIABLE, "gpus=8,nodes=4")
    assert gpu_need() is GpuNeed.MAY_COME


def test_planned_machines_replace_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a plan its machines decide, also against the variable; after it, and after an error, they do not."""
    monkeypatch.setenv(VARIABLE, "gpus=8")
    study = parse_study(document())
    planned = (EngineMachines(0, GIB),)
    with planned_for(planned):
        assert stated_machines() == planned
        assert not runs_on_gpus()
        assert engine_dtype(study) == "float32"
    with pytest.raises(Conflict), planned_for(planned):
        raise Conflict("ends the plan")
    assert stated_machines() == (EngineMachines(8),)
    assert engine_dtype(study) == "bfloat16"

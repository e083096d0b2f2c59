"""Verification in a process for which Ray reserves a GPU; here it reserves a CPU instead."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from ray.exceptions import ActorDiedError, ActorUnschedulableError, RayError, RayTaskError

import workers.training.model
from search_spaces.study.engine import EngineOptions
from tests.workers.recipes import arithmetic
from workers.engines.transformers.backend import Reference
from workers.engines.transformers.verification import texts_to_read, verify
from workers.errors import InvalidModel, InvalidTask
from workers.evaluation.lm_eval import TaskEvaluator
from workers.evaluation.prompts import Prompts
from workers.export.checkpoint import export
from workers.merging.bank import Bank
from workers.serving import gpu_verification
from workers.serving.gpu_verification import GpuVerifier, verification_bytes, verify_on_free_gpus
from workers.types import Family, Span, TaskSpec

OPTIONS = EngineOptions(max_model_len=64)
FREE: Mapping[str, float] = {"CPU": 2.0, "GPU": 1.0}


def elsewhere(number: int) -> Mapping[str, Any]:
    """Ray options that no machine of the cluster fulfils."""
    return {"num_cpus": 0, "resources": {"elsewhere": 1}}


def a_cpu(number: int) -> Mapping[str, Any]:
    """Ray options that reserve a CPU in place of GPUs."""
    return {"num_cpus": 1}


HERE = "a1" * 28  # a node's id in Ray


@pytest.fixture(scope="module")
def asked(tied_family: Family, tmp_path_factory: pytest.TempPathFactory) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a verification of an export. Transformers has scored its samples."""
    root = tmp_path_factory.mktemp("verified")
    (root / "sums.jsonl").write_text("".join(f'{{"prompt": "{i}+{i}=", "answer": "{2 * i}"}}\n' for i in range(4)))
    recipe = arithmetic(tied_family, 0.3, 0.5)
    export(recipe, Bank(tied_family), root / "merge", dtype=torch.float32)
    spans = (Span("sums", TaskSpec({"file": str(root / "sums.jsonl"), "max_tokens": 4}, "exact_match"), 0, 4),)
    reference = Reference(str(root / "merge"), OPTIONS)
    evaluator = TaskEvaluator(reference, Prompts(str(root / "merge"), OPTIONS))
    samples = evaluator.score(spans).samples
    texts = texts_to_read(evaluator, samples, spans)
    values = {text: [-1.0] * (len(text) - 1) for text in texts[:1]}
    options = {"samples": samples, "spans": spans, "dtype": "float32", "engine_logprobs": values}
    return (recipe.digest, str(root / "merge"), OPTIONS), options


def test_a_report_of_another_process_is_that_of_this_one(
    ray_cluster: None, asked: tuple[tuple[Any, ...], dict[str, Any]]
) -> None:
    arguments, options = asked
    found = verify_on_free_gpus(
        arguments, options, num_parameters=1, device="cpu", resources=lambda: FREE, reserved=a_cpu
    )
    assert found is not None
    assert found.num_samples == 4
    assert found.num_beyond == 1, "its log-probabilities were made up"
    here = verify(*arguments, **options)
    # Another number of threads adds up in another order.
    assert found.max_logprob_difference == pytest.approx(here.max_logprob_difference, abs=1e-4)
    assert replace(found, max_logprob_difference=0.0, differences=()) == replace(
        here, max_logprob_difference=0.0, differences=()
    )
    assert [(each.position, each.what) for each in found.differences] == [
        (each.position, each.what) for each in here.differences
    ]


def test_errors_of_verification_are_raised(ray_cluster: None, asked: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
    arguments, options = asked
    with pytest.raises(InvalidTask, match="no stored sample of sums at position 0"):
        verify_on_free_gpus(
            arguments,
            {**options, "samples": ()},
            num_parameters=1,
            device="cpu",
            resources=lambda: FREE,
            reserved=a_cpu,
        )


def test_the_caller_verifies_where_no_gpu_is_free(
    ray_cluster: None, asked: tuple[tuple[Any, ...], dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    arguments, options = asked
    assert verify_on_free_gpus(arguments, options, num_parameters=1, resources=lambda: {"GPU": 0.5}) is None
    assert not [record for record in caplog.records if record.name == gpu_verification.__name__]
    # The free GPU is one of another machine.
    assert (
        verify_on_free_gpus(
            arguments,
            options,
            num_parameters=1,
            start_s=1.0,
            resources=lambda: FREE,
            reserved=elsewhere,
        )
        is None
    )
    assert "no process on a GPU verified, and the CPU computes: The actor is not schedulable" in caplog.text
    # The process that got a GPU has none, or one that is too small.
    assert verify_on_free_gpus(arguments, options, num_parameters=1, resources=lambda: FREE, reserved=a_cpu) is None
    assert "verification is computed on the CPU: PyTorch finds no GPU" in caplog.text


def test_the_share_of_an_engines_gpu_verifies(
    ray_cluster: None, asked: tuple[tuple[Any, ...], dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If no GPU is free, the share that an engine leaves is used, as soon as no gradients need it."""
    shares: list[float] = []

    def a_cpu_for(share: float) -> Mapping[str, Any]:
        shares.append(share)
        return {"num_cpus": 1}

    monkeypatch.setattr(gpu_verification, "on_share", a_cpu_for)
    arguments, options = asked

    def verified(free: float, share: float) -> Any:
        resources = {"GPU": free}
        return verify_on_free_gpus(
            arguments, options, num_parameters=1, share=share, device="cpu", resources=lambda: resources, reserved=a_cpu
        )

    assert verified(0.0, 0.4) is None, "gradients have the share"
    assert verified(0.1, 0.0) is None, "no share is left"
    assert not shares
    assert verified(0.1, 0.4) is not None
    assert shares == [0.4]
    assert verified(1.1, 0.4) is not None
    assert shares == [0.4], "a free GPU comes first"


def test_as_many_gpus_as_hold_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU with the least free memory decides how many are needed."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    free = {0: 5 * 2**30, 1: 4 * 2**30}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (free[index], 80 * 2**30))
    one, two = GpuVerifier("cuda", 1), GpuVerifier("cuda", 2)
    assert one.num_needed(2**30) == 1
    assert one.num_needed(2**30 + 1) == 2
    assert two.num_needed(8 * 2**30 // 5) == 2
    assert two.num_needed(8 * 2**30 // 5 + 1) == 3
    # Beside an engine, only its share of the memory counts, even if more is free.
    assert GpuVerifier("cuda", 1, 0.0625).num_needed(2**30) == 1
    assert GpuVerifier("cuda", 1, 0.06).num_needed(2**30) == 2


def test_batches_are_halved_rather_than_left_to_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values of a batch may need more GPUs than the weights, but only if these are free."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (41 * 10**9, 80 * 10**9))
    parameters, batch = 8 * 10**9, 32 * 1500 * 262_144
    assert verification_bytes(parameters) == verification_bytes(parameters, 8 * 10**9) == 40 * 10**9
    assert verification_bytes(parameters, batch) == 32 * 10**9 + batch
    one = GpuVerifier("cuda", 1)
    assert one.num_needed(parameters, batch) == one.num_needed(parameters, batch, 8) == 2
    assert one.num_needed(parameters, batch, 1) == 1
    assert one.num_needed(parameters, 10 * batch, 3) == 3
    assert one.num_needed(2 * parameters, batch, 1) == 2, "the weights have no room"
    # In the share of an engine there is one GPU.
    assert GpuVerifier("cuda", 1, 0.51).num_needed(parameters, batch, 1) == 1


class TwoNeeded(GpuVerifier):
    """A verifier on CPUs whose models need two devices."""

    def num_needed(self, num_parameters: int, batch_bytes: int = 0, num_free: int | None = None) -> int | str:
        return 2


def test_a_large_model_is_divided(
    ray_cluster: None,
    asked: tuple[tuple[Any, ...], dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A model that one device does not hold is verified by another process with two, if they are free."""
    monkeypatch.setattr(gpu_verification, "GpuVerifier", TwoNeeded)
    caplog.set_level("INFO", gpu_verification.__name__)
    arguments, options = asked
    numbers: list[int] = []

    def reserved(number: int) -> Mapping[str, Any]:
        numbers.append(number)
        return a_cpu(number)

    given: dict[str, Any] = {"num_parameters": 1, "device": "cpu", "reserved": reserved}
    found = verify_on_free_gpus(arguments, options, resources=lambda: {"GPU": 2.0}, **given)
    assert found is not None
    assert numbers == [1, 2]
    assert "verification runs on free GPUs of this machine: 2" in caplog.text
    here = verify(*arguments, **options)
    assert (found.num_samples, found.num_equal, found.num_beyond) == (4, here.num_equal, here.num_beyond)
    assert verify_on_free_gpus(arguments, options, resources=lambda: {"GPU": 1.0}, **given) is None
    assert "it needs 2 GPUs of this machine; free: 1" in caplog.text


def test_a_divided_model_has_the_samples_of_a_whole_one(
    asked: tuple[tuple[Any, ...], dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers on two devices give the report of one, and a wrong answer is found."""
    placed: list[tuple[int, ...]] = []
    place = workers.training.model.place
    monkeypatch.setattr(workers.training.model, "place", lambda *given: placed.append(place(*given)))
    arguments, options = asked
    report = GpuVerifier("cpu", 2).verify(*arguments, **options)
    (layers,) = placed
    assert len(layers) == 2
    assert all(layers)
    assert report == verify(*arguments, **options)
    *right, last = options["samples"]
    found = GpuVerifier("cpu", 2).verify(
        *arguments, **{**options, "samples": (*right, replace(last, value=1.0 - last.value))}
    )
    assert (found.num_equal, found.num_beyond) == (report.num_equal - 1, report.num_beyond + 1)


class _Actor:
    """Stand-in for an actor's handle, its methods, and Ray's class for it."""

    def __getattr__(self, name: str) -> _Actor:
        return self

    def options(self, **_: Any) -> _Actor:
        return self

    def remote(self, *_: Any, **__: Any) -> Any:
        return self


@pytest.mark.parametrize(
    "error",
    [
        RayTaskError("verify", "", torch.OutOfMemoryError("CUDA out of memory")),
        RayTaskError("verify", "", torch.AcceleratorError("CUDA error: an illegal memory access")),
        RayTaskError("verify", "", RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED")),
        RayTaskError("verify", "", InvalidModel(("the model has no list of its layers",))),
        ActorDiedError(),
        ActorUnschedulableError("its machine has left"),
    ],
)
def test_the_caller_verifies_if_the_gpu_fails(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with_ray(monkeypatch, error)
    assert verify_on_free_gpus((), {}, num_parameters=1, resources=lambda: FREE) is None
    assert "the CPU computes" in caplog.text


def test_other_errors_of_the_process_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    with_ray(monkeypatch, RayTaskError("verify", "", RuntimeError("shapes differ")))
    with pytest.raises(RuntimeError, match="shapes differ") as raised:
        verify_on_free_gpus((), {}, num_parameters=1, resources=lambda: FREE)
    assert not isinstance(raised.value, RayError)


def test_only_gpus_of_this_machine_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """No process is started if only another machine has a free GPU."""
    from ray._private import state

    with_ray(monkeypatch, ActorDiedError())
    free: dict[str, dict[str, float]] = {HERE: {"CPU": 2.0}, "there": {"GPU": 8.0}}
    monkeypatch.setattr(state, "available_resources_per_node", lambda: free)
    monkeypatch.setattr(ray, "remote", lambda _: pytest.fail("an actor is started"))
    assert verify_on_free_gpus((), {}, num_parameters=1) is None


def with_ray(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Replace Ray by a stand-in with a ready actor, whose call raises `error`."""
    actor, answers = _Actor(), iter([1, error])

    def get(_: Any) -> Any:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    replaced: dict[str, Any] = {
        "is_initialized": lambda: True,
        "get_runtime_context": lambda: SimpleNamespace(get_node_id=lambda: HERE),
        "remote": lambda _: actor,
        "wait": lambda refs, *, timeout: (refs, []),
        "get": get,
        "kill": lambda _: None,
    }
    for name, value in replaced.items():
        monkeypatch.setattr(ray, name, value)


def test_without_ray_the_caller_verifies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    assert gpu_verification.verify_on_free_gpus((), {}, num_parameters=1) is None

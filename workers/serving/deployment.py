"""Deployment of replicas on Ray Serve."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from search_spaces.study.engine import EngineOptions
from workers.engines.vllm.environment import engine_environment
from workers.errors import EngineUnavailable, ServeUnavailable
from workers.models.modalities import MODALITIES
from workers.serving import cores
from workers.serving.application import (
    answered,
    failure_reason,
    is_deployed,
    is_known,
    is_on_cpu,
    is_ready,
)
from workers.serving.gpu_shares import engine_gpus
from workers.serving.gpu_verification import verify_on_free_gpus
from workers.serving.replica import ScoringReplica, Worker
from workers.serving.serve_scorer import DEPLOYMENT, ServeScorer
from workers.serving.start_phases import forget_starts
from workers.serving.watchdog import TimeLimits
from workers.telemetry import logs
from workers.telemetry.environment import passed_on
from workers.types import (
    CHUNKS_IN_FLIGHT_PER_REPLICA,
    Family,
    GpuNeed,
    digest_of,
)

__all__ = ["app_name", "deploy_scorer", "runs_on_gpus", "serving", "stop"]


# One chunk is scored while the next ones wait at the replica. At 1 the router's back-off idles the engine for up to
# 0.5 s.
MAX_ONGOING_REQUESTS = 3

# Seconds for which a replica that Serve moves to another node may work on its chunk of samples. Serve stops a replica
# at the latest so long before its node is taken away.
FINISH_CHUNK_S = 300.0

# A replica that fails its health checks is killed at once: its engine has failed or hangs, and finishes no chunk.
CONTROLLER_ENVIRONMENT = {"RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1"}

# Seconds for which the end of a command waits for its replicas to stop. Serve stops them in any case.
STOP_S = 10.0

# Only one process of the cluster at a time starts Serve or deploys; this is the name of the Ray actor that it holds.
DEPLOYING = "deploying"


def app_name(family: Family, options: EngineOptions, *, on_gpus: bool) -> str:
    """Name of the Serve application with the replicas (processes with an engine) that score merges of `family`.

    `family` is a base model and its experts, and `options` are the options of the engines. The name contains a hash of
    the models and the options, so that studies with equal models and options share replicas. `on_gpus` says whether the
    replicas run on GPUs (function `runs_on_gpus`). Applications on the CPU have another name, because replicas on the
    CPU may compute in another dtype with the same options, and must not score a study that needs GPUs.
    """
    models = [(model.alias, model.origin or model.directory, model.fingerprint) for model in family.models]
    others = [family.alignments_dir] if family.alignments_dir else []
    name = f"scorer-{digest_of([models, family.tokenizer, options.document(), *others])[:12]}"
    return name if on_gpus else f"{name}-cpu"


def runs_on_gpus(family: Family, gpus: GpuNeed) -> bool:
    """Whether replicas for merges of `family` run on GPUs of the Ray cluster to which this process is connected.

    `gpus` says whether engines need GPUs. With IF_ANY, the replicas run on GPUs if a node of the cluster has GPUs;
    without a connection to Ray, no node has. NEEDED is only about vLLM, so that it counts as IF_ANY for modalities that
    vLLM does not run.
    """
    if gpus is GpuNeed.NEEDED and not MODALITIES[family.modality].runs_on_vllm:
        gpus = GpuNeed.IF_ANY
    return gpus is not GpuNeed.IF_ANY or _most_gpus() > 0


def deploy_scorer(
    family: Family,
    options: EngineOptions,
    *,
    replicas: int = 1,
    name: str | None = None,
    keep_idle_s: float | None = None,
    max_replicas: int | None = None,
    max_ongoing: int = MAX_ONGOING_REQUESTS,
    gpus: GpuNeed = GpuNeed.IF_ANY,
    make_worker: Callable[[], Worker] | None = None,
    health_check_period_s: float = 5.0,
    health_check_timeout_s: float = 30.0,
    start_timeout_s: float | None = None,
    time_limits: TimeLimits | None = None,
) -> ServeScorer:
    """Start scoring replicas on the Ray cluster of this process, and wait until they are ready.

    A replica scores merges of `family`, a base model and its experts, with an engine that has the given `options`.
    `name` is the name of the Serve application, by default the result of the function `app_name`. A running application
    of this name is used unchanged, also while a replica that died is being replaced. There is one exception: if its
    replicas run on the CPU and the new ones on GPUs, the application is replaced.
    `replicas` is the number of replicas. With `keep_idle_s`, studies share the application, and `replicas` is only the
    number of replicas at first. Then the number of replicas follows the number of requests, up to `max_replicas` or, if
    this is None, the number for which there are GPUs. Replicas that are idle for `keep_idle_s` seconds are stopped,
    even the last replica, and the next request starts replicas again. Serve sends at most `max_ongoing` requests to a
    replica at the same time. `make_worker` replaces the engine in tests.

    Replicas get GPUs if the cluster has any, and otherwise run on the CPU if `gpus` allows it. If no node has enough
    GPUs for one replica, EngineUnavailable is raised, or replicas wait for such a node (class `GpuNeed`).

    Serve checks the health of replicas every `health_check_period_s` seconds, and waits `health_check_timeout_s`
    seconds for an answer. It replaces a replica after three failed checks in a row. By default this takes at most two
    minutes if a process does not answer, and 15 seconds if the work of a process is overdue. `time_limits` are the
    limits of its work; None means those for models of this size (class `TimeLimits`). Raises EngineUnavailable, with
    the reason and the replica's log file, as soon as a replica fails to start, and if no replica is ready after
    `start_timeout_s` seconds; None means the limit of a replica's start.
    """
    from ray import serve

    time_limits = time_limits or TimeLimits.of_family(family)
    start_timeout_s = time_limits.start_s if start_timeout_s is None else start_timeout_s
    deadline = time.monotonic() + start_timeout_s
    with _deploying(deadline):
        serve.start(proxy_location="Disabled", controller_options={"runtime_env": {"env_vars": CONTROLLER_ENVIRONMENT}})
        on_gpus = runs_on_gpus(family, gpus)
        name = name or app_name(family, options, on_gpus=on_gpus)
        is_there = answered(functools.partial(is_deployed, name), deadline=deadline)
        # Earlier versions gave replicas on the CPU the same name.
        is_stale = is_there and on_gpus and answered(functools.partial(is_on_cpu, name), deadline=deadline)
        if not is_there or is_stale:
            ranks, most = options.tensor_parallel_size, _most_gpus()
            modality = MODALITIES[family.modality]
            if on_gpus and most < ranks and gpus is not GpuNeed.MAY_COME:
                raise EngineUnavailable(
                    f"{name}: an engine needs {ranks} GPU(s) of one machine, and the machine of the Ray cluster with "
                    f"most GPUs has {most}; add a machine with GPUs, or use a smaller engine.tensor_parallel_size; "
                    "nothing runs on the CPU in place of a GPU"
                )
            if is_stale:
                stop(name)
            scaling = _scaling(replicas, options, keep_idle_s, max_replicas)
            environment = passed_on() | engine_environment(options)
            if not options.threads:
                del environment["OMP_NUM_THREADS"]  # the replica sets it for its own machine
            if logs.is_json():
                environment["VLLM_CONFIGURE_LOGGING"] = "0"  # its messages are written as those of others

            class Scorer(ScoringReplica):  # Serve looks for the decorated method when it deploys
                @serve.multiplexed(max_num_models_per_replica=1)
                async def hold(self, digest: str) -> str:
                    return digest

                def __del__(self) -> None:  # Serve calls it before it kills the process of a replica that it stops
                    if hasattr(self, "_worker"):  # the worker has started
                        self.close()

            deployment = serve.deployment(
                Scorer,
                name=DEPLOYMENT,
                **scaling,
                max_ongoing_requests=max_ongoing,
                health_check_period_s=health_check_period_s,
                health_check_timeout_s=health_check_timeout_s,
                graceful_shutdown_timeout_s=FINISH_CHUNK_S,
                max_constructor_retry_count=1,
                **({"logging_config": {"encoding": "JSON"}} if logs.is_json() else {}),
                ray_actor_options={
                    "num_cpus": 0.1,
                    "num_gpus": engine_gpus(options) if on_gpus else 0,
                    "runtime_env": {"env_vars": environment},
                },
            )
            most_engines = replicas if keep_idle_s is None else max_replicas
            own: dict[str, Any] = {}
            if modality.runs_on_vllm:
                own = {"most_engines": most_engines, "verify_elsewhere": verify_on_free_gpus}
            engines = most_engines if on_gpus else replicas
            own_worker = functools.partial(
                cores.make_worker, family, options, engines=engines, on_gpus=on_gpus, own=own
            )
            forget_starts(name)
            application = deployment.bind(make_worker or own_worker, time_limits)
            serve.run_many(
                [serve.RunTarget(application, name=name, route_prefix=None)], wait_for_applications_running=False
            )
    while not answered(functools.partial(is_ready, name), deadline=deadline):
        if time.monotonic() > deadline:
            raise EngineUnavailable(f"{name}: not ready within {start_timeout_s:.0f} s: {failure_reason(name)}")
        if not answered(functools.partial(is_deployed, name), deadline=deadline):
            raise EngineUnavailable(failure_reason(name))
        time.sleep(0.5)  # Serve's controller works for each question, and starts replicas meanwhile
    return ServeScorer(name, deadline_s=max(ServeScorer.deadline_s, time_limits.start_s))


@contextmanager
def serving(
    family: Family,
    options: EngineOptions,
    *,
    replicas: int = 1,
    gpus: GpuNeed = GpuNeed.IF_ANY,
) -> Iterator[ServeScorer]:
    """Context manager that starts scoring replicas, and deletes their Serve application at the end.

    `family` is the base model and its experts, `options` are the options of the replicas' engines, and `replicas` is
    the number of replicas. `gpus` says whether engines need GPUs. Raises EngineUnavailable if a replica does not start.
    """
    import ray.serve  # noqa: F401  (sets the level of its log to INFO)

    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    scorer = deploy_scorer(family, options, replicas=replicas, gpus=gpus)
    try:
        yield scorer
    finally:
        stop(scorer.app_name)


def stop(name: str) -> None:
    """Delete the Serve application `name`, and wait at most STOP_S seconds until its replicas are gone.

    If Serve's controller does not answer, or a replica is finishing a chunk of samples, Serve stops replicas later.
    """
    from ray import serve

    serve.delete(name, _blocking=False)
    deadline = time.monotonic() + STOP_S
    with suppress(ServeUnavailable):
        while is_known(name) and time.monotonic() < deadline:
            time.sleep(0.1)


def _most_gpus() -> int:
    """The largest number of GPUs that one node of the Ray cluster has; 0 without a connection to Ray."""
    import ray

    if not ray.is_initialized():
        return 0
    return max((int(node["Resources"].get("GPU", 0)) for node in ray.nodes() if node["Alive"]), default=0)


def _num_gpus() -> int:
    import ray

    return int(ray.cluster_resources().get("GPU", 0))


def _scaling(
    replicas: int, options: EngineOptions, keep_idle_s: float | None, max_replicas: int | None
) -> dict[str, Any]:
    """Ray Serve settings for the number of replicas: fixed, or autoscaled with the load.

    If `keep_idle_s` is None, there are always `replicas` replicas. Otherwise the number is `replicas` at first, and
    then follows the number of requests, up to `max_replicas`. If `max_replicas` is None, the limit is the number of
    replicas for which there are GPUs, but at least `replicas`. A replica that gets no request for `keep_idle_s` seconds
    is stopped, even if it is the last replica. `options` has the number of GPUs that a replica uses.
    """
    if keep_idle_s is None:
        return {"num_replicas": replicas}
    return {
        "autoscaling_config": {
            "min_replicas": 0,
            "initial_replicas": replicas,
            "max_replicas": max_replicas or max(replicas, _num_gpus() // options.tensor_parallel_size),
            "target_ongoing_requests": CHUNKS_IN_FLIGHT_PER_REPLICA,
            "downscale_delay_s": keep_idle_s,
            "downscale_to_zero_delay_s": keep_idle_s,
        }
    }


@contextmanager
def _deploying(deadline: float) -> Iterator[None]:
    """Context manager that holds a cluster-wide lock while a process deploys replicas.

    Without the lock, one of two processes that start Serve at the same time fails, and deploying an application a
    second time restarts its replicas. The lock is the name of a Ray actor. Ray frees the name when the process that
    holds it ends for any reason. Raises EngineUnavailable if the lock is not free at `deadline`, a time of the clock
    `time.monotonic`.
    """
    import ray

    @ray.remote(num_cpus=0)
    class Lock:
        pass

    lock = None
    while lock is None:
        try:
            lock = Lock.options(name=DEPLOYING).remote()  # type: ignore[attr-defined]
        except ValueError as error:  # the name is taken
            if time.monotonic() > deadline:
                raise EngineUnavailable(
                    f'another process is still deploying replicas (it holds the Ray actor "{DEPLOYING}") after the '
                    "time that a replica may take to start; end that process, or run the study again"
                ) from error
            time.sleep(0.5)
    try:
        yield
    finally:
        ray.kill(lock)

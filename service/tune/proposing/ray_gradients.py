"""The gradient actor on Ray: started when it is first needed, and replaced if it dies."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import ray
from ray._private.state import available_resources_per_node
from ray.exceptions import OutOfMemoryError, RayActorError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from search_spaces.spaces.base import Coefficients
from service.engine_machines import stated_machines
from service.errors import StudyFailed
from service.store.steps import ChargedRequest, GradientRequest, GradientResult, LossesRequest, LossesResult
from service.tune.proposing.gradient_actor import GradientActor, GradientInputs
from workers.errors import EngineUnavailable, InvalidModel, InvalidTask
from workers.serving.gpu_shares import has_room, has_share, machine_with_share, on_share
from workers.types import Completions

__all__ = ["ACTOR_DEATH", "MAX_DEATHS", "RayGradients", "may_come", "on_free_device"]

logger = logging.getLogger(__name__)

# Errors of calls to an actor that died; the latter if Ray's memory monitor ended it.
ACTOR_DEATH = (RayActorError, OutOfMemoryError)

# An actor that died is replaced. After this many deaths without a result between them, the attempt ends.
MAX_DEATHS = 3

# Seconds until the process of an actor must run. Ray starts it once a machine has the resources, and it imports torch.
START_S = 300.0

# The same if the machine is one that the cluster may add: it is booted, and the image is pulled.
COME_S = 1800.0

# Seconds for which the GPU of an actor that died is waited for, and between two looks at Ray's free resources.
FREED_S, POLL_S = 15.0, 0.5

# Seconds for which the end of an actor waits until it has left the machine's shared memory, which takes milliseconds.
CLOSE_S = 10.0

# CPUs that Ray reserves for the gradient actor. As for a replica, the actor may use more.
ACTOR_CPUS = 0.1


class RayGradients:
    """The driver's client of a gradient actor: a Ray actor that computes losses and gradients, one request at a time.

    The actor computes on the device of its `inputs`. If this device is a GPU, and when the actor starts no GPU is free
    and no engine leaves a share of its GPU, the actor waits for a stated machine that the cluster may add; without such
    a machine, it computes on the CPU. `actor` is the handle of the Ray actor, or None before the first request.
    `pending` is the reference to the running call, which other code passes to `ray.wait`.
    """

    def __init__(self, inputs: GradientInputs) -> None:
        self.actor: Any = None
        self.pending: Any = None
        self._inputs = inputs
        self._completions: Callable[[], Completions] | None = None
        self._coefficients: Coefficients | None = None
        self._request: ChargedRequest | None = None
        self._num_deaths = 0
        self._start_call: Any = None  # ends once the actor runs; None if it is known to run
        self._start_by = 0.0
        self._waits_for_machine = False

    @property
    def is_waiting(self) -> bool:
        """Whether the actor waits for a machine with GPUs that the cluster may add."""
        return self._waits_for_machine and self._start_call is not None

    def use_completions(self, read: Callable[[], Completions]) -> None:
        """Use source models' completions, which `read` returns, as reference answers of later requests.

        Each request names in its field `completions` the objectives whose losses are computed on these completions. The
        losses of all other objectives are computed on the tasks' own reference answers.
        """
        self._completions = read
        if self.actor is not None:
            self.actor.use_completions.remote(read())

    def begin(self, request: ChargedRequest, coefficients: Coefficients | None = None) -> None:
        """Begin to compute the losses of one merge, or its losses and their gradient, in the background.

        `request` says whether losses alone or also a gradient are computed, on which samples, and for which merge. The
        request describes the merge by a value for each parameter of `coefficients`, the parameters that determine a
        merge's coefficients. The gradient is with respect to these parameters. If `coefficients` is None, the
        parameters of the last call that gave `coefficients` are used. If no call gave `coefficients`, the parameters of
        the study's search space are used.
        """
        if coefficients is not None and coefficients is not self._coefficients:
            self._coefficients = coefficients
            if self.actor is not None:
                self.actor.use_coefficients.remote(coefficients)
        if self.actor is None:
            self._start()
        self._request = request
        self.pending = self.actor.run.remote(request)

    def result(self, *, timeout_s: float) -> LossesResult | GradientResult | None:
        """The result of the request that `begin` sent, or None if the result is not ready within `timeout_s` seconds.

        The result is also None if the actor died; another actor then repeats the request. Raises InvalidModel,
        InvalidTask, EngineUnavailable or StudyFailed in the cases that `finish` and `check_start` list.
        """
        ready, _ = ray.wait([self.pending], timeout=timeout_s)
        if ready:
            return self.finish()
        self.check_start()
        return None

    def check_start(self) -> None:
        """Raise EngineUnavailable if the gradient actor has not started in time, and end the actor.

        The time is START_S seconds, or COME_S seconds if the actor waits for a machine that the cluster may add. It is
        not enough if other programs have taken the resources that were free when the actor was requested, or if the
        cluster has added no machine.
        """
        if self._start_call is None:
            return
        if ray.wait([self._start_call], timeout=0)[0]:
            self._start_call = None
        elif time.monotonic() > self._start_by:
            ray.kill(self.actor)
            self.actor = self._start_call = None
            raise EngineUnavailable(
                f"the gradient actor did not start in {self._patience_s:.0f} s, because no machine of the cluster had "
                "the CPUs and GPUs free that it reserves; free some, or use fewer engine.replicas"
            )

    def finish(self) -> LossesResult | GradientResult | None:
        """The result of the completed call to the gradient actor, or None if the actor died.

        If the actor died, a new actor repeats the request.

        Raises:
            InvalidModel: The actor cannot use its models.
            InvalidTask: The actor cannot use its task data.
            EngineUnavailable: The actor cannot read its files, or MAX_DEATHS actors have died in a row.
            StudyFailed: Any other error.
        """
        try:
            result: LossesResult | GradientResult = ray.get(self.pending)
        except ACTOR_DEATH as error:
            self.actor = None
            self._num_deaths += 1
            logger.warning("the gradient actor died: %s", error)
            if self._num_deaths >= MAX_DEATHS:
                message = f"the gradient actor died {MAX_DEATHS} times; the last time: {error}"
                raise EngineUnavailable(message) from None
            assert self._request is not None
            self.begin(self._request)
            return None
        except RayTaskError as error:
            if isinstance(error.cause, (InvalidModel, InvalidTask)):
                raise error.cause from None
            if isinstance(error.cause, OSError):  # files that are temporarily missing
                raise EngineUnavailable(f"a gradient cannot be computed: {error.cause}") from error
            raise StudyFailed(f"a gradient cannot be computed: {error.cause or error}") from error
        self._num_deaths = 0
        return result

    def release(self) -> None:
        """End the gradient actor, so that its GPU and memory are free for other work, such as verification.

        A later request starts another actor. The method does nothing if no actor runs. An actor that computes is killed
        after CLOSE_S seconds.
        """
        if self.actor is not None:
            if self._start_call is None or ray.wait([self._start_call], timeout=0)[0]:
                # Otherwise the sources would stay in the machine's shared memory if no engine uses them.
                ray.wait([self.actor.close.remote()], timeout=CLOSE_S)
            ray.kill(self.actor)
            self.actor = self._start_call = None

    @property
    def _patience_s(self) -> float:
        return COME_S if self._waits_for_machine else START_S

    def _start(self) -> None:
        """Start the gradient actor, and send it the completions and coefficients that were set for an earlier actor.

        Completions serve as reference answers of losses; coefficients are the parameters with respect to which
        gradients are computed. The actor executes its calls in order, so it has the completions and the coefficients
        before the first request.
        """
        # Ray frees the GPU of an actor that died a moment later.
        deadline = time.monotonic() + (FREED_S if self._num_deaths else 0.0)
        while not _is_free(self._inputs, machines := available_resources_per_node()) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        self._waits_for_machine = not _is_free(self._inputs, machines) and may_come(self._inputs)
        inputs = self._inputs if self._waits_for_machine else on_free_device(self._inputs, machines)
        kind: Any = ray.remote(SharingActor if _shares(inputs) else GradientActor)
        self.actor = kind.options(num_cpus=ACTOR_CPUS, **_reserved(inputs, machines)).remote(inputs)
        self._start_call, self._start_by = self.actor.__ray_ready__.remote(), time.monotonic() + self._patience_s
        if self._completions is not None:
            self.actor.use_completions.remote(self._completions())
        if self._coefficients is not None:
            self.actor.use_coefficients.remote(self._coefficients)


class SharingActor(GradientActor):
    """Gradient actor on the GPU of an engine; if the engine leaves less memory than was planned, the CPU computes."""

    def run(self, request: LossesRequest | GradientRequest) -> LossesResult | GradientResult:
        """Compute the result of `request`, as the method of the base class does."""
        share = self._inputs.options.gpu_share_left
        if self._opened is None and self._inputs.device == "cuda" and not has_room(share):
            logger.warning("an engine leaves less than %.0f %% of its GPU, so the CPU computes gradients", 100 * share)
            self._inputs = replace(self._inputs, device="cpu")
        return super().run(request)


def _shares(inputs: GradientInputs) -> bool:
    """Whether the gradient actor computes on the GPU of an engine."""
    return inputs.device == "cuda" and inputs.options.gpu_share_left > 0


def _reserved(inputs: GradientInputs, machines: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """Ray options for the GPUs of a gradient actor, of which it may share one with an engine.

    `machines` has Ray's free resources of each machine, keyed by node id.
    """
    if not _shares(inputs):
        return {"num_gpus": inputs.num_gpus if inputs.device == "cuda" else 0}
    options = dict(on_share(inputs.options.gpu_share_left))
    if (node := machine_with_share(machines)) is not None:
        options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node, soft=False)
    return options


def _is_free(inputs: GradientInputs, machines: Mapping[str, Mapping[str, float]]) -> bool:
    """Whether a machine has the free GPUs that a gradient actor needs, or the free part of an engine's GPU.

    `machines` has Ray's free resources of each machine, keyed by node id.
    """
    free = max((machine.get("GPU", 0) for machine in machines.values()), default=0)
    return inputs.device != "cuda" or free >= inputs.num_gpus or (_shares(inputs) and has_share(free))


def may_come(inputs: GradientInputs) -> bool:
    """Whether the cluster may add a machine with the GPUs of its own that a gradient actor needs.

    The cluster may, if it has fewer machines with so many GPUs than the operator has stated (`stated_machines`). Ray's
    autoscaler adds one for an actor that reserves the GPUs. An actor on the GPU of an engine waits for no machine.
    """
    if inputs.device != "cuda" or _shares(inputs):
        return False
    stated = sum(group.most for group in stated_machines() if group.num_gpus >= inputs.num_gpus)
    nodes = (node["Resources"] for node in ray.nodes() if node["Alive"]) if stated else ()
    there: int = sum(node.get("GPU", 0) >= inputs.num_gpus for node in nodes)
    return there < stated


def on_free_device(inputs: GradientInputs, machines: Mapping[str, Mapping[str, float]]) -> GradientInputs:
    """The inputs of a gradient actor, changed to compute on the CPU if no GPU is free.

    `machines` has Ray's free resources of each machine, keyed by node id. `inputs` is returned unchanged if it asks for
    the CPU, and if one machine has the required number of free GPUs, or the free part of an engine's GPU. An actor that
    reserves GPUs which no machine has free would wait forever. A model whose layers are divided over several GPUs is
    not computed on the CPU, which would take days: instead, EngineUnavailable is raised if no machine has the required
    number of free GPUs.
    """
    if _is_free(inputs, machines):
        return inputs
    if inputs.num_gpus > 1:
        free = max((machine.get("GPU", 0) for machine in machines.values()), default=0)
        raise EngineUnavailable(
            f"gradients are planned on {inputs.num_gpus} GPUs of one machine, and at most {free:g} are free on one; "
            "free GPUs, or use fewer engine.replicas"
        )
    logger.warning("no GPU is free for gradients, so the CPU computes them")
    return replace(inputs, device="cpu")

"""The refinement stage: after the search, it improves coefficients of the Pareto front's trials by gradient descent.

The refinement is the upper level of HM3's bilevel problem ("HM3: Hierarchical Multi-Objective Model Merging for
Pretrained Models", equations 1b and 2), for layer paths (sequences of layers) that the lower level has found. Each path
is refined for one preference vector (weights of the objectives): the vector for which the path's outcome is nearest to
the best outcome of all refined paths. The descent begins at the path's own coefficients, and its end is scored as a
trial like any other.

Everything is stored before it is used: first the choice of the paths, then every step of a descent, then the trial.
Therefore a study that is killed continues at the next step. The first stored choice ends the search for good.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from search_spaces.spaces.base import Coefficients, RefinableSpace, SearchSpace
from service.results.selection import best_of_front
from service.store import JobWriter
from service.store.steps import (
    ChargedRequest,
    GradientRequest,
    GradientResult,
    GradientStep,
    LossesRequest,
    LossesResult,
    LossesStep,
    NoteRequest,
    NoteResult,
    NoteStep,
    Step,
    StepResult,
    step_of,
)
from service.tune.plan import Plan, RefinementPlan
from service.tune.searchers.adam import minibatch, numbers_of, point_after, share_of
from service.tune.trials import Trials
from service.types import EventKind, Origin, TrialRecord, TrialState

__all__ = ["CHOICE", "Gradients", "RefinementStage", "has_begun"]

# The word with which the stored choice of paths begins.
CHOICE = "refinement "

# Steps that measure losses along a path.
MEASURED = (GradientStep, LossesStep)

# A path's loss at its start, by which its later losses are divided, counts as at least this.
LEAST_LOSS = 1e-6


class Gradients(Protocol):
    """The interface of objects that compute losses and gradients of merges in the background.

    The caller does other work meanwhile, and asks for the result from time to time.
    """

    def begin(self, request: ChargedRequest, coefficients: Coefficients | None = None) -> None:
        """Begin to compute the losses of one merge, or its losses and their gradient, in the background.

        `request` says whether losses alone or also a gradient are computed, on which samples, and for which merge. The
        request describes the merge by a value for each parameter of `coefficients`, the parameters that determine a
        merge's coefficients. The gradient is with respect to these parameters. If `coefficients` is None, the
        parameters of the last call are used again.
        """
        ...

    def result(self, *, timeout_s: float) -> LossesResult | GradientResult | None:
        """The losses, with the gradient if requested, or None if they are not ready within `timeout_s` seconds."""
        ...


def has_begun(steps: Sequence[Step]) -> bool:
    """Whether the stored `steps` show that the refinement of the Pareto front has begun, so that the search is over.

    The refinement improves coefficients of the front's trials by gradients. The steps are the gradients and other
    computations that the study has stored. Once the refinement has begun, even a resumed study does not search further.
    """
    return any(isinstance(step, NoteStep) and step.request.decision.startswith(CHOICE) for step in steps)


@dataclass(frozen=True)
class _Path:
    """A layer path whose coefficients are to be refined: the number of its trial, and a preference vector.

    A layer path is the sequence of source models' layers of which a merge consists. The vector has the weight of each
    objective in the refinement.
    """

    trial: int
    preference: Mapping[str, float]


# Between the two numbers in the label of a trial of the refinement.
REFINED_FROM = ", refined from trial "


def _refined_label(number: int, *, path: int) -> str:
    """The label of a trial of the refinement, such as "trial 40, refined from trial 31".

    The trial `number` has the layer path of the trial `path`, with refined coefficients.
    """
    return f"trial {number}{REFINED_FROM}{path}"


def _refined_from(trial: TrialRecord) -> int:
    """The number of the trial whose layer path a trial of the refinement has, read from its label."""
    return int((trial.label or "").rpartition(REFINED_FROM)[2])


class RefinementStage:
    """The stage after a study's search that learns coefficients for the Pareto front's layer paths by gradients.

    A layer path is the sequence of source models' layers of which a merged model consists. Paths are refined one after
    another, each by a gradient descent. In a study without `Plan.refinement` the stage is finished at once. The
    constructor takes the study's settings (`plan`), its search space (`space`), its trials (`trials`), the writer of
    results (`writer`), the object that computes gradients (`gradients`; None without a refinement), and these
    functions:

    - `stored`: reads the steps of the study, which are the stored results of computations such as gradients
    - `admits`: says whether the study's limit allows a number of samples; None means that this is not known yet
    - `charge`: counts the samples of a step against the limit
    - `add`: stores a new trial
    - `is_out_of_budget`: returns the limit of the study that is exhausted, or None
    - `observer`: called with "refine" or "refined" at certain points, so that tests can stop the process there
    """

    def __init__(
        self,
        plan: Plan,
        *,
        space: SearchSpace,
        trials: Trials,
        writer: JobWriter,
        gradients: Gradients | None,
        stored: Callable[[], Sequence[Step]],
        admits: Callable[[int], bool | None],
        charge: Callable[[int], None],
        add: Callable[[TrialRecord], None],
        is_out_of_budget: Callable[[], str | None],
        observer: Callable[[str], None],
    ) -> None:
        self.num_steps = 0
        self._plan = plan
        self._space = space
        self._trials = trials
        self._writer = writer
        self._gradients = gradients
        self._read_steps = stored
        self._admits = admits
        self._charge = charge
        self._add = add
        self._is_out_of_budget = is_out_of_budget
        self._observer = observer
        self._steps = list(stored()) if plan.refinement is not None else []
        self._paths = self._stored_choice()
        self._is_stopped = False
        self._descent: _Descent | None = None
        self._request: ChargedRequest | None = None  # the one that is being computed
        self._began_at = 0.0

    @property
    def is_started(self) -> bool:
        """Whether this stage has started: the search has ended, and the trials to refine have been chosen.

        To refine a trial is to improve its coefficients by gradient descent.
        """
        return self._paths is not None

    @property
    def is_finished(self) -> bool:
        is_over = self._is_stopped or self.is_started
        return self._plan.refinement is None or (is_over and self._next() is None)

    def stop(self) -> None:
        """End the refinement now: gradient descents that are not finished add no trials.

        The refinement improves coefficients of the Pareto front's trials by gradient descent.
        """
        self._is_stopped = True

    def start(self) -> bool:
        """Choose and store the layer paths (sequences of layers) whose coefficients this stage will improve.

        The search must have ended. Returns False if there is nothing to start: the study has no refinement, or the
        paths are chosen already.
        """
        plan = self._plan.refinement
        if plan is None or self.is_started or self._is_stopped:
            return False
        self._steps = list(self._read_steps())
        self._paths = self._chosen(plan)
        listed = [{"trial": path.trial, "preference": dict(path.preference)} for path in self._paths]
        steps = f", {plan.options.steps} gradients along each" if self._paths else ""
        names = ", ".join(str(path.trial) for path in self._paths) or "none"
        label = f"coefficients are refined along the paths of the front (trials {names}){steps}"
        self._store(NoteRequest(label=label, decision=CHOICE + json.dumps(listed)), NoteResult())
        return True

    def ask(self, *, timeout_s: float) -> bool:
        """Continue the gradient descent for the next layer path, and add its end point as a trial once it is reached.

        Waits up to `timeout_s` seconds for a gradient. Returns True if a trial was added. A layer path is the sequence
        of source models' layers of which a merge consists.
        """
        deadline = time.monotonic() + timeout_s
        while (index := self._next()) is not None:
            descent = self._descent_along(index)
            if self._request is None:
                request = descent.next_request(self._steps)
                if request is None:
                    self._finish(descent)
                    return True
                if not self._may_start(descent):
                    return False
                self._charge(request.num_charged)
                self._observer("refine")
                assert self._gradients is not None, "a study whose paths are refined has a gradient actor"
                self._gradients.begin(request, descent.coefficients)
                self._request = request
            assert self._gradients is not None
            result = self._gradients.result(timeout_s=max(0.0, deadline - time.monotonic()))
            if result is None:
                return False
            request, self._request = self._request, None
            self._store(request, result)
            self._observer("refined")
        return False

    def _next(self) -> int | None:
        """The index of the next layer path (sequence of layers) to improve by gradients; None if all are done."""
        if self._is_stopped:
            return None
        added = {_refined_from(trial) for trial in self._trials.values() if trial.origin is Origin.REFINED}
        failed = {_descent_of(s) for s in self._steps if isinstance(s, MEASURED) and s.result.failure is not None}
        for index, path in enumerate(self._paths or ()):
            if path.trial not in added and index not in failed:
                return index
        return None

    def _descent_along(self, index: int) -> _Descent:
        if self._descent is None or self._descent.index != index:
            assert self._paths is not None
            assert self._plan.refinement is not None
            assert isinstance(self._space, RefinableSpace), "preflight refuses other spaces"
            path = self._paths[index]
            coefficients = self._space.coefficients_of(self._trials[path.trial].read_recipe())
            self._descent = _Descent(index, path, coefficients, self._plan)
            self._began_at = time.monotonic()
        return self._descent

    def _may_start(self, descent: _Descent) -> bool:
        """Whether the study's limits allow the remaining gradients of `descent` and the trial at its end.

        If the limits do not allow them, the stage ends. The result is also False as long as the answer depends on
        running evaluations.
        """
        reason = self._is_out_of_budget()
        if reason is None:
            left = descent.num_samples_left(self._steps)
            fits = self._admits(left)
            if fits is not False:
                return bool(fits)
            reason = f"limits.max_samples leaves fewer than the {left:,} samples of the next path"
        self._is_stopped = True
        text = f"the refinement ends before trial {descent.path.trial}: {reason}"
        self._writer.add_event(EventKind.SEARCH_NOTE, {"trial": descent.path.trial, "text": text})
        return False

    def _finish(self, descent: _Descent) -> None:
        point = descent.point(self._steps)
        number = len(self._trials)
        recipe = descent.coefficients.to_recipe(dict(zip(descent.coefficients.parameters.names, point, strict=True)))
        self._add(
            TrialRecord(
                number=number,
                origin=Origin.REFINED,
                label=_refined_label(number, path=descent.path.trial),
                state=TrialState.WAITING,
                recipe=recipe,
                timings_s={"ask": time.monotonic() - self._began_at},
            )
        )
        self._descent = None

    def _store(self, request: Any, result: StepResult) -> None:
        step = step_of(len(self._steps), len(self._trials), request, result)
        self._writer.add_step(step)
        self._steps.append(step)
        self.num_steps += isinstance(step, GradientStep)
        if isinstance(step, NoteStep):
            self._writer.add_event(EventKind.SEARCH_NOTE, {"trial": step.proposal, "text": step.request.label})

    # -- the choice of paths ---------------------------------------------------------------------------------------

    def _stored_choice(self) -> tuple[_Path, ...] | None:
        for step in self._steps:
            if isinstance(step, NoteStep) and step.request.decision.startswith(CHOICE):
                listed = json.loads(step.request.decision.removeprefix(CHOICE))
                return tuple(_Path(path["trial"], path["preference"]) for path in listed)
        return None

    def _chosen(self, plan: RefinementPlan) -> tuple[_Path, ...]:
        """Choose the layer paths to refine from the search's Pareto front, and a preference vector for each.

        A layer path is the sequence of layers of a merge. `plan` has the number of paths and the preference vectors
        (weights of the objectives). The outcome of a path for a vector is minus the sum of its costs, weighted by the
        vector. Each path gets the vector for which its outcome is nearest to the best outcome of all chosen paths;
        among equally good vectors, the first.
        """
        trials = tuple(self._trials.values())
        found = best_of_front(trials, self._plan.objectives, most=plan.options.paths, origin=Origin.SEARCH)
        if not found:
            return ()
        names = tuple(plan.num_samples)
        order = [objective.name for objective in self._plan.objectives]
        places = [order.index(name) for name in names]
        costs = np.array([self._plan.costs(trial.values) for trial in found])[:, places]
        vectors = np.array(plan.vectors)
        outcomes = -costs @ vectors.T  # [paths, vectors]
        behind = (outcomes.max(axis=0) - outcomes).round(12)
        return tuple(
            _Path(trial.number, dict(zip(names, plan.vectors[int(own.argmin())], strict=True)))
            for trial, own in zip(found, behind, strict=True)
        )


class _Descent:
    """Gradient descent on the coefficients of one layer path (sequence of layers), computed from stored steps.

    `index` is the index of `path` among the refined paths. `coefficients` describes the parameters that the descent
    changes, and `plan` has the options of the refinement. The first step computes the losses at the path's own
    coefficients. Later losses are divided by these losses, so that objectives with equal weights have the same
    importance. All further steps are gradients.
    """

    def __init__(self, index: int, path: _Path, coefficients: Coefficients, plan: Plan) -> None:
        assert plan.refinement is not None
        self.index = index
        self.path = path
        self.coefficients = coefficients
        self._options = plan.refinement.options
        self._num_samples = plan.refinement.num_samples
        self._names = tuple(name for name, weight in path.preference.items() if weight > 0)
        self._last_rung = sum(plan.rung_samples[-1].values())
        self._seed = plan.seed

    def point(self, steps: Sequence[Step]) -> tuple[float, ...]:
        """The coefficients that the gradient descent has reached, computed from the gradients in `steps`.

        `steps` are all gradients and other computations that the study has stored.
        """
        start = np.array([parameter.default_value for parameter in numbers_of(self.coefficients.parameters)])
        options = self._options
        reached = point_after(
            self.coefficients.parameters,
            start,
            self._gradients(steps),
            num_steps=options.steps,
            learning_rate=options.learning_rate,
        )
        return tuple(reached.tolist())

    def next_request(self, steps: Sequence[Step]) -> ChargedRequest | None:
        """The request for losses or a gradient that comes next in the gradient descent, or None after its last step.

        `steps` are the results of all requests that the study has stored. The number of steps done and the coefficients
        reached so far are computed from them.
        """
        done = self._gradients(steps)
        if len(done) == self._options.steps:
            return None
        positions = minibatch(
            {name: range(self._num_samples[name]) for name in self._names},
            [step for step in steps if isinstance(step, GradientStep)],
            share=share_of(self._options.batch, len(self._names)),
            indices={name: index for index, name in enumerate(self._num_samples)},
            seed=self._seed,
        )
        label = _label(self.index, self.path.trial)
        first = self._first_losses(steps)
        if first is None:
            return LossesRequest(label=label, point=self.point(steps), positions=positions)
        weights = self.path.preference
        return GradientRequest(
            label=label,
            descent=self.index,
            point=self.point(steps),
            positions=positions,
            weights={name: weights[name] / max(first[name], LEAST_LOSS) for name in self._names},
            preference=dict(weights),
        )

    def num_samples_left(self, steps: Sequence[Step]) -> int:
        """The number of samples that the gradient descent and the trial at its end still take.

        The number follows from `steps`, all gradients that the study has stored.
        """
        size = share_of(self._options.batch, len(self._names)) * len(self._names)
        gradients = self._options.steps - len(self._gradients(steps))
        losses = LossesRequest.charge if self._first_losses(steps) is None else 0
        return size * (gradients * GradientRequest.charge + losses) + self._last_rung

    def _gradients(self, steps: Sequence[Step]) -> list[GradientStep]:
        return [step for step in steps if isinstance(step, GradientStep) and _descent_of(step) == self.index]

    def _first_losses(self, steps: Sequence[Step]) -> Mapping[str, float] | None:
        for step in steps:
            if isinstance(step, LossesStep) and _descent_of(step) == self.index:
                return step.result.losses
        return None


def _label(index: int, trial: int) -> str:
    """The label of every stored gradient that refines one merge's layer path, such as "refinement 2 of trial 31".

    `index` is the index of the path among the refined paths, and `trial` is the number of the trial that found the
    path. A layer path is the sequence of source models' layers of which the merge consists.
    """
    return f"refinement {index} of trial {trial}"


def _descent_of(step: Step) -> int | None:
    """The index, among all refined layer paths, of the path that a stored step refines; None for a step of the search.

    The index is read from the step's label. A step is the result of a computation such as a gradient, and a layer path
    is the sequence of a merge's layers.
    """
    word, _, rest = step.request.label.partition(" ")
    return int(rest.split()[0]) if word == "refinement" and isinstance(step, MEASURED) else None

"""Stored steps of a searcher: computations before a proposal, such as gradients, losses and policy updates.

A step consists of the searcher's request and the result of the computation. Each step counts as a number of samples,
which may be 0. A step is stored in the database before the searcher receives its result, and it is never computed
again. Therefore a search that continues after it was killed has the same steps. There are five kinds of steps:

    losses        the loss of each objective at a point: a forward pass over reference answers
    gradient      the losses, and the derivatives of their weighted sum for every parameter: with a backward pass
    completions   the samples that a source answered correctly; read from the stored samples
    note          a decision of the searcher; nothing is computed
    update        a policy learns from the trials of one iteration

A point has the values of all parameters of a search space, in the space's order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Literal, TypeAlias

from pydantic import TypeAdapter

__all__ = [
    "ChargedRequest",
    "CompletionsRequest",
    "CompletionsResult",
    "CompletionsStep",
    "GradientRequest",
    "GradientResult",
    "GradientStep",
    "LossesRequest",
    "LossesResult",
    "LossesStep",
    "NoteRequest",
    "NoteResult",
    "NoteStep",
    "Step",
    "StepRequest",
    "StepResult",
    "UpdateRequest",
    "UpdateResult",
    "UpdateStep",
    "read_step",
    "step_document",
    "step_of",
]


# Requests.


@dataclass(frozen=True, kw_only=True)
class _Request:
    """Base class of the requests in which a searcher asks for a step.

    A step is a computation that the searcher needs between two proposals, such as a gradient. `label` describes the
    step to users.
    """

    label: str

    @property
    def num_charged(self) -> int:
        """Number of samples that the requested computation takes from the study's limit `max_samples`.

        The number is 0 for most kinds of requests.
        """
        return 0


@dataclass(frozen=True, kw_only=True)
class _Measurement(_Request):
    """Base class of requests for the losses of one merge on the reference answers of some samples.

    `point` names the merge: it has the values of all parameters of the search space, in the order of the space.
    `positions` contains the samples, keyed by objective, as indices in the order in which the objective's samples are
    scored. The reference answers come from the task. For the objectives in `completions`, correct completions by the
    source models are used instead. Each sample counts as `charge` samples against the study's limit of samples.
    """

    point: tuple[float, ...]
    positions: Mapping[str, tuple[int, ...]]
    completions: tuple[str, ...] = ()

    charge: ClassVar[int]
    """Number of samples that each sample of the step takes from the study's limit of samples."""

    @property
    def num_charged(self) -> int:
        return self.charge * sum(map(len, self.positions.values()))


@dataclass(frozen=True, kw_only=True)
class LossesRequest(_Measurement):
    """A searcher's request for the mean loss of each objective for one merge, without gradients.

    `point` names the merge: it has the values of all parameters of the search space. `charge` is the number of samples
    that each computed loss takes from the study's limit of samples.
    """

    kind: Literal["losses"] = "losses"
    charge: ClassVar[int] = 1


@dataclass(frozen=True, kw_only=True)
class GradientRequest(_Measurement):
    """A searcher's request for the losses of one merge, and for the gradient of their weighted sum.

    `point` names the merge: it has the values of all parameters of the search space. The gradient is with respect to
    these parameters. `weights` has the weight of each objective's loss in the sum. `descent` is the number, from 0, of
    the gradient descent that needs the gradient. `preference` is the preference vector (the user's weights of the
    objectives) for which this descent searches; it is empty if the study has none. `charge` is the number of samples
    that the loss and the gradient of each sample take from the study's limit of samples.
    """

    descent: int
    weights: Mapping[str, float]
    preference: Mapping[str, float] = field(default_factory=dict)
    kind: Literal["gradient"] = "gradient"
    charge: ClassVar[int] = 3  # a backward pass takes twice the arithmetic of a forward pass


@dataclass(frozen=True, kw_only=True)
class CompletionsRequest(_Request):
    """A searcher's request for correct completions by source models, which will serve as reference answers.

    `completions` has the names of the objectives for which completions are requested.
    """

    completions: tuple[str, ...]
    kind: Literal["completions"] = "completions"


@dataclass(frozen=True, kw_only=True)
class NoteRequest(_Request):
    """A searcher's request to store one of its decisions, so that it can read the decision again after a restart.

    `label` describes the decision to users. `decision` is the text that the searcher reads later.
    """

    decision: str
    kind: Literal["note"] = "note"


@dataclass(frozen=True, kw_only=True)
class UpdateRequest(_Request):
    """A searcher's request to train a policy (a network that proposes configurations) on the trials of one iteration.

    `iteration` is the iteration's number. `preference` is the policy's preference vector (the weights of the objectives
    for which it learns); it is empty if the study has only one policy.
    """

    iteration: int
    preference: Mapping[str, float] = field(default_factory=dict)
    kind: Literal["update"] = "update"


ChargedRequest: TypeAlias = LossesRequest | GradientRequest
"""A request whose step counts towards the study's limit of samples."""

StepRequest: TypeAlias = ChargedRequest | CompletionsRequest | NoteRequest | UpdateRequest


# Results.


@dataclass(frozen=True, kw_only=True)
class LossesResult:
    """Mean loss on each objective's samples, for the merge that a searcher's request named.

    `failure` is the reason why there are no losses; None if there are losses. `recipe` is the digest of the merge's
    recipe, which says how the sources are merged. `bank` is the fingerprint of the weights of the source models.
    """

    losses: Mapping[str, float] = field(default_factory=dict)
    recipe: str = ""
    bank: str = ""
    failure: str | None = None


@dataclass(frozen=True, kw_only=True)
class GradientResult(LossesResult):
    """Mean losses of the merge that a searcher's request named, and the gradient of their weighted sum.

    `gradient` has the derivative with respect to each parameter of the search space, in the order of the space.
    `seconds` is the time that the computation took.
    """

    gradient: tuple[float, ...] = ()
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class CompletionsResult:
    """Samples that source models answered correctly; the correct answers later serve as reference answers for losses.

    `completions` maps the name of each objective to a pair of numbers for each such sample, sorted by position: the
    sample's position in the order in which the objective's samples are scored, and the number of the trial of the
    source model that answered it.
    """

    completions: Mapping[str, tuple[tuple[int, int], ...]]


@dataclass(frozen=True, kw_only=True)
class NoteResult:
    """Empty result of a request to store a decision of the searcher."""


@dataclass(frozen=True, kw_only=True)
class UpdateResult:
    """Result of the training of a policy on the trials of one iteration.

    A policy is a network that proposes configurations. `statistics` contains numbers about the training, keyed by name.
    `checkpoint` is the sha256 of the policy's new checkpoint, or "" if the policy learned nothing. `seconds` is the
    time that the training took; 0 if an earlier version stored the result, which did not measure the time.
    """

    statistics: Mapping[str, float] = field(default_factory=dict)
    checkpoint: str = ""
    seconds: float = 0.0


StepResult: TypeAlias = LossesResult | GradientResult | CompletionsResult | NoteResult | UpdateResult


# Steps.


@dataclass(frozen=True)
class _Step:
    """Base class of stored steps: computations, such as gradients, that a searcher asks for between proposals.

    `number` is the index of the step among the study's steps, from 0. `proposal` is the number of the trial whose
    proposal needed the step.
    """

    number: int
    proposal: int


@dataclass(frozen=True)
class LossesStep(_Step):
    request: LossesRequest
    result: LossesResult


@dataclass(frozen=True)
class GradientStep(_Step):
    request: GradientRequest
    result: GradientResult


@dataclass(frozen=True)
class CompletionsStep(_Step):
    request: CompletionsRequest
    result: CompletionsResult


@dataclass(frozen=True)
class NoteStep(_Step):
    request: NoteRequest
    result: NoteResult


@dataclass(frozen=True)
class UpdateStep(_Step):
    request: UpdateRequest
    result: UpdateResult


Step: TypeAlias = LossesStep | GradientStep | CompletionsStep | NoteStep | UpdateStep

_STEP_OF_REQUEST: Mapping[type[StepRequest], type[Step]] = {
    LossesRequest: LossesStep,
    GradientRequest: GradientStep,
    CompletionsRequest: CompletionsStep,
    NoteRequest: NoteStep,
    UpdateRequest: UpdateStep,
}


def step_of(number: int, proposal: int, request: StepRequest, result: StepResult) -> Step:
    """Make a step, a computation that a searcher asked for between proposals, from its request and its result.

    `number` is the step's index among the study's steps, from 0. `proposal` is the number of the trial whose proposal
    needed the step.
    """
    kind: Any = _STEP_OF_REQUEST[type(request)]
    step: Step = kind(number, proposal, request, result)
    return step


# JSON. Every stored step has all of these keys, whatever its kind, so that earlier versions can read it.

_REQUEST_KEYS: Mapping[str, Any] = {
    "point": (),
    "positions": {},
    "weights": {},
    "decision": "",
    "preference": {},
    "completions": (),
    "iteration": 0,
}
_RESULT_KEYS: Mapping[str, Any] = {
    "losses": {},
    "gradient": (),
    "seconds": 0.0,
    "recipe": "",
    "bank": "",
    "failure": None,
    "completions": {},
    "statistics": {},
    "checkpoint": "",
}

_READERS: Mapping[str, TypeAdapter[Any]] = {
    "losses": TypeAdapter(LossesStep),
    "gradient": TypeAdapter(GradientStep),
    "completions": TypeAdapter(CompletionsStep),
    "note": TypeAdapter(NoteStep),
    "update": TypeAdapter(UpdateStep),
}


def step_document(step: Step) -> dict[str, Any]:
    """JSON document with the request and the result of a step, as the database stores them.

    A step is a computation that a searcher asked for between proposals, such as a gradient.
    """
    return {
        "request": {**_REQUEST_KEYS, **asdict(step.request)},
        "result": {**_RESULT_KEYS, **asdict(step.result)},
    }


def read_step(number: int, proposal: int, document: Mapping[str, Any]) -> Step:
    """Read a searcher's step (a computation between proposals, such as a gradient) from its stored `document`.

    `number` is the step's index among the study's steps, from 0. `proposal` is the number of the trial whose proposal
    needed the step. The document must be a result of the function `step_document` of this or an earlier version.
    """
    request: dict[str, Any] = dict(document["request"])
    kind = request["kind"]
    if kind == "gradient" and "descent" not in request:  # earlier versions stored it in the label alone
        request["descent"] = int(request["label"].removeprefix("descent "))
    step: Step = _READERS[kind].validate_python(
        {"number": number, "proposal": proposal, "request": request, "result": document["result"]}
    )
    return step

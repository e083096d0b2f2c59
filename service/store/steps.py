"""Stored steps of a searcher: computations before a proposal, such as gradients, losses and policy updates.

A step consists of the searcher's request and the result of the computation. Each step counts as a number of samples,
which may be 0. A step is stored in the database before the searcher receives its result, and it is never computed
again. Therefore a search that continues after it was killed has the same steps. There are five kinds of steps:

    losses        the loss of each objective at a point: a forward pass over reference answers
    gradient      the losses, and the derivatives of their weighted sum for every parameter: with a backward pass
    completions   the samples that a source answered correctly; read from the stored samples
    note          a decision of the searcher; nothing is computed
    update        a policy learns from the trials of one iteration

A point has the values of all parameters of a search space, in the space's order. Positions are sample positions by
objective.
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
    """Base class of a searcher's requests for a step, such as a gradient; `label` describes the step to users."""

    label: str

    @property
    def num_charged(self) -> int:
        """Number of samples of the study's limit that the step uses; 0 for most kinds of steps."""
        return 0


@dataclass(frozen=True, kw_only=True)
class _Measurement(_Request):
    """Base class of requests for the losses of one merge, computed on reference answers of chosen samples.

    The merge is the one at `point` in the search space. `point` has the values of all parameters of the search space,
    in the order of the space. `positions` has the positions of the samples, by objective. For the objectives in
    `completions`, the reference answers are correct completions by the source models. Each sample counts as `charge`
    samples against the study's limit of samples.
    """

    point: tuple[float, ...]
    positions: Mapping[str, tuple[int, ...]]
    completions: tuple[str, ...] = ()

    charge: ClassVar[int]
    """Number of samples that are charged for each sample of the step."""

    @property
    def num_charged(self) -> int:
        return self.charge * sum(map(len, self.positions.values()))


@dataclass(frozen=True, kw_only=True)
class LossesRequest(_Measurement):
    """Request for the mean loss of each objective for the merge at `point`, computed by forward passes."""

    kind: Literal["losses"] = "losses"
    charge: ClassVar[int] = 1


@dataclass(frozen=True, kw_only=True)
class GradientRequest(_Measurement):
    """Request for the losses of the merge at `point`, and for the gradient of their weighted sum.

    `weights` has the weight of each objective's loss in the sum. The derivatives are with respect to all parameters of
    the search space. `descent` is the number, from 0, of the gradient descent to which the step belongs. `preference`
    is the preference vector of this descent, by objective; it is empty if the study has no preference vectors.
    """

    descent: int
    weights: Mapping[str, float]
    preference: Mapping[str, float] = field(default_factory=dict)
    kind: Literal["gradient"] = "gradient"
    charge: ClassVar[int] = 3  # a backward pass takes twice the arithmetic of a forward pass


@dataclass(frozen=True, kw_only=True)
class CompletionsRequest(_Request):
    """Request for correct completions by the source models, which later serve as reference answers for losses.

    `completions` names the objectives.
    """

    completions: tuple[str, ...]
    kind: Literal["completions"] = "completions"


@dataclass(frozen=True, kw_only=True)
class NoteRequest(_Request):
    """Request to store a note, which is a decision of the searcher; nothing is computed.

    `label` describes the decision to users. `decision` is the decision in the form in which the searcher reads it again
    from the stored step.
    """

    decision: str
    kind: Literal["note"] = "note"


@dataclass(frozen=True, kw_only=True)
class UpdateRequest(_Request):
    """Request to train a policy on the trials of iteration number `iteration`.

    `preference` is the preference vector of the policy that learns, by objective; it is empty if there is only one
    policy.
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
    """Mean losses of the merge at a requested point, by objective.

    `failure` is the reason why there are no losses; it is None if there are losses. `recipe` is the digest of the
    merge's recipe. `bank` is the fingerprint of the merge's source models.
    """

    losses: Mapping[str, float] = field(default_factory=dict)
    recipe: str = ""
    bank: str = ""
    failure: str | None = None


@dataclass(frozen=True, kw_only=True)
class GradientResult(LossesResult):
    """Mean losses of the merge at a requested point, and the gradient of their weighted sum.

    `gradient` has the derivative with respect to each value of the point, in the order of the values. `seconds` is the
    time that the computation took.
    """

    gradient: tuple[float, ...] = ()
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class CompletionsResult:
    """Samples that source models answered correctly, by objective.

    Each sample is given as a pair: the sample's position, and the number of the trial of a source model that answered
    the sample correctly. The pairs are sorted by position.
    """

    completions: Mapping[str, tuple[tuple[int, int], ...]]


@dataclass(frozen=True, kw_only=True)
class NoteResult:
    """Empty result of a step that only stores a note (a decision of the searcher).

    Nothing is computed for such a step.
    """


@dataclass(frozen=True, kw_only=True)
class UpdateResult:
    """Result of a policy update: statistics by name, and the sha256 of the policy's new checkpoint.

    `checkpoint` is "" if the policy learned nothing. `seconds` is the time that the computation took; it is 0 in steps
    that were stored by versions that did not measure the time.
    """

    statistics: Mapping[str, float] = field(default_factory=dict)
    checkpoint: str = ""
    seconds: float = 0.0


StepResult: TypeAlias = LossesResult | GradientResult | CompletionsResult | NoteResult | UpdateResult


# Steps.


@dataclass(frozen=True)
class _Step:
    """Base class of steps that are stored in the database, with their place in the study.

    `number` is the index of the step among the study's steps, from 0. `proposal` is the number of the trial for whose
    proposal the step was computed.
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
    """Make a step from its request and its result.

    `number` is the step's number. The step comes before the trial with the number `proposal`.
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
    """JSON document with the request and the result of a step, as the database stores them."""
    return {
        "request": {**_REQUEST_KEYS, **asdict(step.request)},
        "result": {**_RESULT_KEYS, **asdict(step.result)},
    }


def read_step(number: int, proposal: int, document: Mapping[str, Any]) -> Step:
    """Read a step with its request and result from a stored `document`.

    The document must be a result of `step_document` of this or an earlier version.
    """
    request: dict[str, Any] = dict(document["request"])
    kind = request["kind"]
    if kind == "gradient" and "descent" not in request:  # earlier versions stored it in the label alone
        request["descent"] = int(request["label"].removeprefix("descent "))
    step: Step = _READERS[kind].validate_python(
        {"number": number, "proposal": proposal, "request": request, "result": document["result"]}
    )
    return step

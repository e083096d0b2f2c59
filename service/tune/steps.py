"""Steps: what a searcher computes for its proposals beside the scores of trials, such as the gradient of a loss.

A step is charged in samples, stored before the searcher sees it, and never computed again: a search that goes on after
a kill has the steps that it had. Points are the values of all parameters of a space, in the space's order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, Self

__all__ = ["CHARGES", "Step", "StepKind", "StepRequest", "StepResult"]


class StepKind(StrEnum):
    """LOSSES: a forward pass over reference answers. GRADIENT: with a backward pass. COMPLETIONS: which of the study's
    samples have a source's own correct completion, read from what is stored. NOTE: a decision of the searcher, which
    computes nothing. UPDATE: a policy learns from the trials of one iteration."""

    LOSSES = "losses"
    GRADIENT = "gradient"
    COMPLETIONS = "completions"
    NOTE = "note"
    UPDATE = "update"


# Samples charged per sample of a step: a backward pass takes twice the arithmetic of a forward pass.
CHARGES: Mapping[StepKind, int] = {
    StepKind.LOSSES: 1,
    StepKind.GRADIENT: 3,
    StepKind.COMPLETIONS: 0,
    StepKind.NOTE: 0,
    StepKind.UPDATE: 0,
}


@dataclass(frozen=True)
class StepRequest:
    """What a searcher asks for: at `point`, on the samples at `positions` by objective, the loss of each objective; for
    a GRADIENT also the derivatives of the sum of losses times `weights` by every parameter. `label` names what it
    belongs to; of a NOTE, `label` is its text and `decision` what was decided. `preference` is the preference vector of
    a study with several: the share of each objective before losses were normalised. `completions` names the objectives
    whose references are the sources' own correct completions; those of a COMPLETIONS step are asked for. An UPDATE is
    of the iteration whose number is `iteration`."""

    kind: StepKind
    label: str
    point: tuple[float, ...] = ()
    positions: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    weights: Mapping[str, float] = field(default_factory=dict)
    decision: str = ""
    preference: Mapping[str, float] = field(default_factory=dict)
    completions: tuple[str, ...] = ()
    iteration: int = 0

    @property
    def num_charged(self) -> int:
        """Samples' worth."""
        return CHARGES[self.kind] * sum(map(len, self.positions.values()))


@dataclass(frozen=True)
class StepResult:
    """The mean loss of each objective, and the derivatives in the order of the point. `failure` says why there are
    none. `recipe` is the digest of the merge that was read, `bank` the fingerprint of its sources. `completions`: of
    each objective asked for, sample positions in ascending order, each with the number of the source whose completion
    is the reference there. `statistics` are those of an UPDATE, by name, and `checkpoint` the sha256 of the policy
    after it; "" where nothing was learned."""

    losses: Mapping[str, float] = field(default_factory=dict)
    gradient: tuple[float, ...] = ()
    seconds: float = 0.0
    recipe: str = ""
    bank: str = ""
    failure: str | None = None
    completions: Mapping[str, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    statistics: Mapping[str, float] = field(default_factory=dict)
    checkpoint: str = ""


@dataclass(frozen=True)
class Step:
    """Step `number` (from 0) of a study, computed for the proposal of trial `proposal`."""

    number: int
    proposal: int
    request: StepRequest
    result: StepResult

    def to_json(self) -> dict[str, Any]:
        return {"request": asdict(self.request), "result": asdict(self.result)}

    @classmethod
    def from_json(cls, number: int, proposal: int, document: Mapping[str, Any]) -> Self:
        asked, found = dict(document["request"]), dict(document["result"])
        request = StepRequest(
            kind=StepKind(asked["kind"]),
            label=asked["label"],
            point=tuple(asked["point"]),
            positions={name: tuple(positions) for name, positions in asked["positions"].items()},
            weights=asked["weights"],
            decision=asked["decision"],
            preference=asked.get("preference", {}),
            completions=tuple(asked.get("completions", ())),
            iteration=asked.get("iteration", 0),
        )
        completions = {
            name: tuple((position, source) for position, source in pairs)
            for name, pairs in found.get("completions", {}).items()
        }
        gradient = tuple(found["gradient"])
        return cls(number, proposal, request, StepResult(**{**found, "gradient": gradient, "completions": completions}))

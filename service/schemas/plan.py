"""Type of the document that `mergesearch plan --json` prints."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

# pydantic reads typing's own TypedDict only from Python 3.12 on.
from typing_extensions import TypedDict

__all__ = ["BoundsDocument", "PartDocument", "PhaseDocument", "PlacementDocument", "PlanDocument"]


class BoundsDocument(TypedDict):
    least: Annotated[float, Field(description="With answers as long as the reference answers.")]
    most: Annotated[float, Field(description="With answers that end at their tasks' limits.")]


class PartDocument(TypedDict):
    name: str
    place: str
    gpu_bytes: Annotated[int, Field(description="Bytes of each GPU.")]
    host_bytes: Annotated[int, Field(description="Bytes of each machine's memory.")]


class PlacementDocument(TypedDict):
    parts: list[PartDocument]
    bank: Annotated[str, Field(description="Where engines keep the source weights: gpu, host or mapped.")]
    reason: str
    nodes: Annotated[int, Field(description="Machines that the study uses.")]
    engines: Annotated[int, Field(description="Engines of the machine that has most of them.")]
    texts: Annotated[int, Field(description="Texts that an engine serves at once.")]
    gpu_capacity: Annotated[int, Field(description="Usable bytes of each GPU.")]
    host_capacity: Annotated[int, Field(description="Usable bytes of each machine's memory.")]


class PhaseDocument(TypedDict):
    name: str
    number: Annotated[float, Field(description="How often it runs.")]
    seconds: Annotated[BoundsDocument, Field(description="Seconds each time.")]
    elapsed_s: Annotated[BoundsDocument, Field(description="Seconds in all, with engines side by side.")]


class PlanDocument(TypedDict):
    study: str
    profile: Annotated[dict[str, Any], Field(description="Speeds and memory of one machine.")]
    dtype: str
    num_models: int
    num_parameters: int
    algorithm: str
    fits: bool
    lacks: Annotated[list[str], Field(description="What does not fit, and what would change that.")]
    advice: Annotated[list[str], Field(description="Changes that would make the study much shorter.")]
    placement: PlacementDocument
    phases: list[PhaseDocument]
    hours: BoundsDocument
    gpu_hours: Annotated[BoundsDocument, Field(description="Hours of GPUs; of machines, if they have no GPUs.")]
    cost: Annotated[BoundsDocument | None, Field(description="In the unit of the price; null without one.")]
    tokens: Annotated[BoundsDocument, Field(description="Mean tokens of a sample, prompt and answer.")]
    chart: Annotated[dict[str, Any], Field(description="Values of the Helm chart.")]

"""The plan of a study as the document that `mergesearch plan --json` prints."""

from __future__ import annotations

from dataclasses import asdict

from service.jobs.search.dry_run import CheckedPlan
from service.schemas.plan import BoundsDocument, PartDocument, PhaseDocument, PlacementDocument, PlanDocument
from service.studies.planning.schedule import Bounds

__all__ = ["plan_document"]


def plan_document(checked: CheckedPlan) -> PlanDocument:
    """Build the JSON document of the plan of a checked study: its samples, and its memory and hours on machines."""
    plan = checked.machine
    placed = plan.placement
    return PlanDocument(
        study=checked.study,
        profile=asdict(plan.profile),
        dtype=plan.dtype,
        num_models=checked.num_models,
        num_parameters=checked.num_parameters,
        algorithm=checked.algorithm,
        fits=plan.fits,
        lacks=list(plan.lacks),
        advice=list(plan.advice),
        placement=PlacementDocument(
            parts=[
                PartDocument(name=part.name, place=part.place, gpu_bytes=part.gpu_bytes, host_bytes=part.host_bytes)
                for part in placed.parts
            ],
            bank=placed.bank,
            reason=placed.reason,
            nodes=placed.nodes,
            engines=placed.engines,
            texts=placed.texts,
            gpu_capacity=placed.gpu_capacity,
            host_capacity=placed.host_capacity,
        ),
        phases=[
            PhaseDocument(
                name=phase.name,
                number=phase.number,
                seconds=_bounds(phase.seconds),
                elapsed_s=_bounds(phase.elapsed_s),
            )
            for phase in plan.phases
        ],
        hours=_bounds(plan.hours),
        gpu_hours=_bounds(plan.gpu_hours),
        cost=None if plan.cost is None else _bounds(plan.cost),
        tokens=BoundsDocument(least=checked.tokens[0], most=checked.tokens[1]),
        chart=plan.chart,
    )


def _bounds(bounds: Bounds) -> BoundsDocument:
    return BoundsDocument(least=bounds.least, most=bounds.most)

"""The command `mergesearch plan`: cost of a study on the machines of a profile, as tables or JSON."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from service.cli.terminal import print_json
from service.studies.planning.named import profile_named

if TYPE_CHECKING:
    from service.schemas.plan import BoundsDocument, PlanDocument

__all__ = ["plan", "plan_text"]

DOES_NOT_FIT = 1


def plan(options: argparse.Namespace) -> int:
    from search_spaces.study.file import load_study
    from service.jobs.search.dry_run import check
    from service.jobs.search.plan_document import plan_document

    profile = profile_named(options.profile, nodes=options.nodes, price=options.price)
    study = load_study(options.study)
    document = plan_document(check(study, Path.cwd(), metadata_only=True, profile=profile))
    if options.json:
        print_json(document)
    else:
        print(plan_text(document))
    return 0 if document["fits"] else DOES_NOT_FIT


def plan_text(document: PlanDocument) -> str:
    """Format the expected cost of a study on machines of a given kind, as `mergesearch plan` prints it.

    `document` is the plan. The text contains the memory needed on each GPU and each host, the seconds of each phase,
    the hours in all, and the values for the Helm chart.
    """
    import yaml

    placed, profile = document["placement"], document["profile"]
    machine = f"{placed['nodes']} x {profile['name']}"
    lines = [
        f"study    {document['study']}: {document['num_models']} models of {document['num_parameters']:,} parameters; "
        f"{document['algorithm']}",
        f"machine  {machine}, engines in {document['dtype']}",
        f"sources  {placed['bank']}: {placed['reason']}",
        "",
        *_table(("memory", "place", "each GPU", "each host"), list(_memory(document))),
        "",
        *_table(("phase", "times", "each", "in all"), list(_phases(document))),
        "",
        f"hours      {_range(document['hours'], 2)}",
        f"{'GPU' if profile['gpus'] else 'machine'}-hours  {_range(document['gpu_hours'], 2)}",
    ]
    if document["cost"] is not None:
        lines.append(f"cost       {_range(document['cost'], 2)} at {profile['price']:g} an hour")
    lines += [""] + [f"does not fit: {lack}" for lack in document["lacks"]]
    if not document["lacks"]:
        lines.append("fits")
    lines += [f"advice: {advice}" for advice in document["advice"]]
    chart = yaml.safe_dump(document["chart"], sort_keys=False).rstrip()
    return "\n".join([*lines, "", "# values of the Helm chart", chart])


def _memory(document: PlanDocument) -> list[tuple[str, ...]]:
    from service.studies.planning.placement import ON_OWN_GPUS

    placed = document["placement"]
    rows = [
        (part["name"], part["place"], _gib(part["gpu_bytes"]), _gib(part["host_bytes"])) for part in placed["parts"]
    ]
    on_gpu = sum(part["gpu_bytes"] for part in placed["parts"] if part["name"] not in ON_OWN_GPUS)
    on_host = sum(part["host_bytes"] for part in placed["parts"])
    capacity = (_gib(placed["gpu_capacity"]), _gib(placed["host_capacity"]))
    return [*rows, ("in all", "", _gib(on_gpu), _gib(on_host)), ("usable", "", *capacity)]


def _phases(document: PlanDocument) -> list[tuple[str, ...]]:
    return [
        (
            phase["name"],
            f"{phase['number']:g}",
            f"{_range(phase['seconds'], 2)} s",
            f"{_range(phase['elapsed_s'], 0)} s",
        )
        for phase in document["phases"]
    ]


def _table(head: tuple[str, ...], rows: list[Any]) -> list[str]:
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    return [
        "  ".join(
            cell.ljust(width) if (column < 2 and head[0] == "memory") or column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in [head, *rows]
    ]


def _gib(number: int) -> str:
    return f"{number / 2**30:.1f} GiB" if number else ""


def _range(bounds: BoundsDocument, digits: int) -> str:
    least, most = (f"{value:,.{digits}f}" for value in (bounds["least"], bounds["most"]))
    return least if least == most else f"{least} to {most}"

"""The contamination guard, which finds held-out data and benchmarks that overlap with the search data."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from search_spaces.errors import InvalidStudy, Problem
from search_spaces.study.file import Study
from service.store.documents import Overlap
from workers.errors import InvalidTask
from workers.evaluation.overlap import overlapping
from workers.types import TaskSpec

__all__ = ["check_overlaps", "overlaps_of", "unsearched_names"]

Sections = Mapping[str, Mapping[str, TaskSpec]]


def overlaps_of(study: Study, search: Mapping[str, TaskSpec], sections: Sections) -> tuple[Overlap, ...]:
    """Measure how much of each holdout entry and each benchmark of a study is also in its search data.

    `search` contains the tasks of the objectives, keyed by name. `sections` has the tasks of holdout data and
    benchmarks, by section of the study file ("holdout" or "benchmarks") and name. Without search data there are no
    overlaps. Raises InvalidTask if a task cannot be built.
    """
    if not search:
        return ()
    return tuple(
        Overlap(
            section=section,
            name=name,
            num_items=found.num_items,
            num_exact=found.num_exact,
            num_ngrams=found.num_overlapping,
            by_objective=found.by_other,
            examples=found.examples,
            is_allowed=name in study.contamination.allowed,
        )
        for section, tasks in sections.items()
        for name, found in overlapping(search, tasks).items()
    )


def unsearched_names(study: Study) -> frozenset[str]:
    """The names of a study's holdout entries and benchmarks, each with its section, such as "holdout.math"."""
    holdout = {f"holdout.{spec.name}" for spec in study.holdout}
    return frozenset(holdout | {f"benchmarks.{spec.name}" for spec in study.benchmarks})


def check_overlaps(
    study: Study, search: Mapping[str, TaskSpec], sections: Sections, *, accepted: Collection[str] = ()
) -> None:
    """Check that the overlap of held-out data and benchmarks with the search data is within the study file's limit.

    `search` contains the tasks of the objectives, keyed by name. `sections` has the tasks of holdout data and
    benchmarks, by section of the study file ("holdout" or "benchmarks") and name. `accepted` are entries that an
    earlier check has accepted, such as "holdout.math"; they are not checked again. Raises InvalidStudy with every
    problem.
    """
    new = {
        section: {name: task for name, task in tasks.items() if f"{section}.{name}" not in accepted}
        for section, tasks in sections.items()
    }
    if not any(new.values()):
        return
    try:
        overlaps = overlaps_of(study, search, new)
    except InvalidTask as error:
        raise InvalidStudy((Problem("", str(error)),)) from error
    most = study.contamination.max_share
    places = {
        **{("holdout", spec.name): f"holdout.{index}" for index, spec in enumerate(study.holdout)},
        **{("benchmarks", spec.name): f"benchmarks.{index}" for index, spec in enumerate(study.benchmarks)},
    }
    problems = tuple(
        Problem(f"{places[overlap.section, overlap.name]}.task", _message(overlap, most))
        for overlap in overlaps
        if overlap.share > most and not overlap.is_allowed
    )
    if problems:
        raise InvalidStudy(problems)


def _message(overlap: Overlap, most: float) -> str:
    others = ", ".join(f"{name} ({count:,})" for name, count in overlap.by_objective.items())
    return (
        f"{overlap.num_ngrams:,} of the {overlap.num_items:,} items of {overlap.name} are also in the search data of "
        f"{others}: {overlap.num_exact:,} are equal, the others have 13 words in a row in common; that is "
        f"{overlap.share:.1%}, above contamination.max_share={most:g}. Use other data, or accept it: "
        f"contamination: {{allowed: [{overlap.name}]}}"
    )

"""Sections `benchmarks` and `contamination` of a study file: tasks that are scored once, after the search."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, Tag

from search_spaces.section import Line, Name, Section, one_of
from search_spaces.study.attacks import AttackSpec
from search_spaces.study.engine import Engine
from search_spaces.study.judge import JudgeSpec
from search_spaces.study.objectives import ScoredTask

__all__ = ["EVERY_TRIAL", "AddedBenchmarks", "BenchmarkSpec", "Contamination", "TrialChoice"]


def _tag_of_choice(value: object) -> str | None:
    if isinstance(value, str):
        return "<word>"
    return "<number>" if isinstance(value, int) and not isinstance(value, bool) else None


TrialWord = Literal["finalists", "sources", "published", "recipes", "best"]

if TYPE_CHECKING:
    TrialChoice = str | int
else:
    TrialChoice = Annotated[
        Annotated[TrialWord, Tag("<word>")] | Annotated[int, Field(ge=0), Tag("<number>")],
        one_of(_tag_of_choice, "finalists, sources, published, recipes, best or the number of a trial"),
    ]

EVERY_TRIAL: tuple[TrialChoice, ...] = ("finalists", "sources", "published", "recipes")


class BenchmarkSpec(ScoredTask):
    """A task that is scored once, after the search, for the report only; it does not influence the search."""

    group: Line | None = None
    """The name of a group of benchmarks, whose unweighted mean is reported too."""
    trials: Annotated[tuple[TrialChoice, ...], Field(min_length=1)] = EVERY_TRIAL
    """The trials that are scored: finalists, sources (the base and the experts), published (baselines), recipes (those
    of search.recipes), best, and trials by number.
    """

    attack: AttackSpec | None = None
    """An attack on the prompt template, by which the robustness of each scored trial is measured. Default: none."""
    judge: JudgeSpec | None = None
    """A judge that compares each completion with the reference answer. The metric is then `win_rate`. Default: none."""

    def is_same_task(self, other: BenchmarkSpec) -> bool:
        """Whether `other` has the same samples and metric, so that stored results are valid for both benchmarks.

        The prompt attacks and the judges (LLMs that rate completions) of the two benchmarks must also be the same.
        """
        fields = set(BenchmarkSpec.model_fields) - {"name", "direction", "range", "group", "trials"}
        return all(getattr(self, name) == getattr(other, name) for name in fields)


class Contamination(Section):
    """Options of the check for contamination: how much search data may overlap with holdout data and benchmarks."""

    max_share: Annotated[float, Field(ge=0, le=1)] = 0.05
    """The largest accepted share of the items of a holdout entry or benchmark that overlap with search data."""
    allowed: tuple[Name, ...] = ()
    """Names of holdout entries and benchmarks that are accepted with a larger share."""


class AddedBenchmarks(Section):
    """The content of a file of benchmarks that are added to an existing study; its keys are keys of the study file."""

    benchmarks: Annotated[tuple[BenchmarkSpec, ...], Field(min_length=1)]
    contamination: Contamination = Contamination()
    engine: Engine | None = None
    """Options of the engine, if a single model is scored that belongs to no study."""

    def on_trial(self, trial: int | str | None) -> AddedBenchmarks:
        """Copy in which all benchmarks are scored only on the trial `trial`, a number or "best".

        If `trial` is None, each benchmark keeps its own choice of trials.
        """
        if trial is None:
            return self
        specs = tuple(spec.model_copy(update={"trials": (trial,)}) for spec in self.benchmarks)
        return self.model_copy(update={"benchmarks": specs})

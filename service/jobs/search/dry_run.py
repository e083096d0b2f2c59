"""`mergesearch run --check`: checks a study and computes its expected cost, without starting an engine."""

from __future__ import annotations

import logging
import os
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from search_spaces.errors import InvalidStudy, Problem
from search_spaces.study.file import Study
from service.disk import free_bytes, gib
from service.engine_machines import planned_for
from service.errors import NotFound
from service.jobs.search.local_run import prepared_in, read_run
from service.store.documents import Overlap
from service.store.steps import GradientRequest
from service.studies.planning.here import profile_for
from service.studies.planning.plan import StudyPlan, plan_of
from service.studies.planning.profiles import MachineProfile
from service.studies.planning.schedule import mean_tokens, study_lengths
from service.studies.preflight.algorithm import GRADIENT
from service.studies.preflight.contamination import overlaps_of
from service.studies.preflight.examine import EXPORT
from service.studies.preflight.result import ExpectedSamples, PreflightResult, refinement_of
from service.tune.searchers.descents import descents_of
from service.tune.searchers.loss_comparison import most_compared_samples
from workers.engines.transformers.outlines import outline
from workers.errors import InvalidModel
from workers.models.family import open_sources
from workers.models.remote import is_metadata_only, named
from workers.models.remote.snapshots import read_record

__all__ = ["CheckedPlan", "check", "checked_plan"]

logger = logging.getLogger(__name__)


# Words before the number of samples, and before the share saved. ASHA promotes at least the planned number of trials,
# and more where good candidates come late; a race stops most trials early.
BOUNDS = {"asha": ("at least ", "at most "), "racing": ("at most ", "at least ")}


@dataclass(frozen=True)
class CheckedPlan:
    """Expected costs of running a study: samples, time, memory and disk space.

    - `step_samples`: the number of samples that gradients count as in the limit, plus the samples of the trials that
      refine the front; 0 if the study has neither
    - `rungs`: for each rung (number of samples at which trials are compared), the samples, keyed by objective
    - `trials`: the numbers of baselines ("extras") and of proposed trials ("search")
    - `max_samples`: the limit of samples of the search; None if the study has no limit
    - `samples_used`: the samples that earlier runs have used and that count towards the limit
    - `samples_planned`: the samples, including `step_samples`, that count towards the limit if nothing ends the search
      early
    - `tokens`: the least and the most tokens that a sample is expected to have
    - `hours`, `most_hours`: rough estimates of the running time for these two numbers of tokens
    - `memory_bytes`, `disk_bytes`: bytes needed for each use, and bytes available; the bytes available are left out for
      machines whose memory is not known
    - `judgments`: the largest number of requests to judges of benchmarks
    - `overlaps`: for each holdout entry and benchmark, how much of it is in the search data
    - `absent_models`: models whose weights must be downloaded first
    - `machine`: placement, memory and seconds of each phase on this machine, or on the machines of a profile
    """

    study: str
    num_models: int
    num_parameters: int
    num_layers: int
    num_search_parameters: int
    space: str
    algorithm: str
    algorithm_reason: str
    step_samples: int
    scheduler: str
    rungs: tuple[dict[str, int], ...]
    trials: dict[str, int]
    samples: ExpectedSamples
    max_samples: int | None
    samples_used: int
    samples_planned: int
    hours: float
    most_hours: float
    tokens: tuple[float, float]
    memory_bytes: dict[str, int]
    disk_bytes: dict[str, int]
    absent_models: tuple[str, ...]
    engine_remark: str
    machine: StudyPlan
    overlaps: tuple[Overlap, ...] = ()
    judgments: int = 0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def to_text(self) -> str:
        memory = {name: gib(value) for name, value in self.memory_bytes.items()}
        search, holdout, full = self.samples.search, self.samples.holdout, self.samples.full_budget
        least, most = BOUNDS.get(self.scheduler, ("", ""))
        saved = f" ({most}{1 - search / full:.0%} fewer than {full:,} at full budget)" if search < full else ""
        return "\n".join(
            (
                f"study     {self.study}: nothing is wrong with it",
                f"models    base + {_count(self.num_models - 1, 'expert')} of {self.num_parameters:,} parameters, "
                f"{self.num_layers} layers",
                f"space     {_count(self.num_search_parameters, 'parameter')}; {self.space}",
                f"search    {self.algorithm}: {self.algorithm_reason}",
                f"trials    {self._baselines()}, {self.trials['search']} searched",
                f"rungs     {self._ladders()}; scheduler: {self.scheduler}",
                f"samples   {least}{search:,} in the search{saved}, "
                + (f"about {holdout:,}" if holdout else "none")
                + " held out"
                + (f", about {self.samples.benchmarks:,} on benchmarks" if self.samples.benchmarks else "")
                + (f", gradients charged as up to {self.step_samples:,}" if self.step_samples else ""),
                *([f"judges    about {self.judgments:,} requests to judges of benchmarks"] if self.judgments else []),
                *self._overlap(),
                *self._limit(),
                f"time      very roughly {_range(_duration(self.hours), _duration(self.most_hours))}, by "
                f"{self._machine()} and "
                f"{_range(*(f'{number:.0f}' for number in self.tokens))} tokens a sample",
                f"memory    {memory['needed']} (source weights {memory['bank']}, {memory['engines']} for engines"
                + (f", {memory['gradients']} for gradients" if self.memory_bytes["gradients"] else "")
                + f") of {memory.get('available', 'an unknown size')}",
                f"disk      {gib(self.disk_bytes['export'])} for an exported model, "
                f"{gib(self.disk_bytes['available'])} free",
                *([f"engine    {self.engine_remark}"] if self.engine_remark else []),
                *self._download(),
            )
        )

    def _machine(self) -> str:
        profile = self.machine.profile
        return "this machine's arithmetic speed" if profile.name == "here" else f"the speeds of {profile.name}"

    def _overlap(self) -> tuple[str, ...]:
        """Lines of the printed plan: how many items of held-out data and benchmarks are also in the search data."""
        if not self.overlaps:
            return ()
        found = [overlap for overlap in self.overlaps if overlap.num_ngrams]
        if not found:
            return ("overlap   none of the items of held-out data and benchmarks are in the search data",)
        return tuple(
            f"overlap   {each.num_ngrams:,} of {each.num_items:,} items of {each.section} {each.name} "
            f"({each.share:.1%}) are in the search data, {each.num_exact:,} of them whole"
            + ", allowed"
            * each.is_allowed
            for each in found
        )

    def _limit(self) -> tuple[str, ...]:
        """Line of the printed plan about the limit of samples, and whether the planned samples stay below it.

        The line is returned as a tuple of one text. Without a limit, the line says how many samples earlier runs used.
        The tuple is empty if there is neither a limit nor an earlier run.
        """
        if self.max_samples is None:
            return (f"used      {self.samples_used:,} samples in earlier runs",) if self.samples_used else ()
        used = f", {self.samples_used:,} of them used" if self.samples_used else ""
        planned = self.samples_planned
        within = "at least " if BOUNDS.get(self.scheduler) == BOUNDS["asha"] else "up to "
        ends = "the search may end before its last trial" if planned > self.max_samples else "all trials fit"
        return (
            f"limit     {self.max_samples:,} samples of the search{used}; its plan takes {within}{planned:,}: {ends}",
        )

    def _baselines(self) -> str:
        """Text about the baselines: their number, and how many samples they take in the search and on holdout data."""
        if not self.trials["extras"]:
            return "no baselines"
        held_out = f" and {self.samples.holdout_baselines:,} held out" if self.samples.holdout_baselines else ""
        counted = _count(self.trials["extras"], "baseline")
        return f"{counted} for {self.samples.baselines:,} samples{held_out}"

    def _download(self) -> tuple[str, ...]:
        if not self.absent_models:
            return ()
        if not self.disk_bytes["download"]:
            return ("weights   not read: sizes are those of the models' configurations",)
        return (
            f"download  {gib(self.disk_bytes['download'])} of weights before it starts: "
            f"{', '.join(self.absent_models)}; they are checked for NaN and infinity then",
        )

    def _ladders(self) -> str:
        """Text of the numbers of samples at each rung, such as `90 -> 270 samples of each objective`.

        If the numbers differ between objectives, the text has the numbers of each objective.
        """
        ladders = {name: " -> ".join(str(rung[name]) for rung in self.rungs) for name in self.rungs[-1]}
        if len(set(ladders.values())) > 1:
            return ", ".join(f"{name} {ladder}" for name, ladder in ladders.items()) + " samples"
        return f"{next(iter(ladders.values()))} samples of each objective, {_count(len(ladders), 'objective')}"


def check(
    study: Study,
    directory: Path,
    *,
    exports: bool = False,
    metadata_only: bool = False,
    profile: MachineProfile | None = None,
) -> CheckedPlan:
    """Check a study that would run in `directory`, and compute its expected cost.

    No engine is started, and no weights are downloaded. If a source model is a merge of another study, it is exported
    to a temporary directory. If `exports` is True, the check includes whether the best merge can be exported. If
    `metadata_only` is True, models need no weights: their sizes are computed from their configurations.

    `profile` describes the machines for which the study is planned. If their memory is too small, the plan says so. If
    `profile` is None, the study is planned for this machine or for the machines in the study file; too little memory is
    then a problem of the study. Raises InvalidStudy with every problem.
    """
    given, study = study, _outlined(study) if metadata_only else study
    with TemporaryDirectory() as temporary:
        export_dir = directory / EXPORT if exports else None
        with nullcontext() if profile is None else planned_for(profile.machines):
            preflight = prepared_in(
                directory,
                study,
                sources_in=Path(temporary),
                note=logger.info,
                export_dir=export_dir,
                downloads=False,
                allows_lack=profile is not None,
            )
            used = _samples_used(directory)
            return checked_plan(
                study,
                preflight,
                directory,
                profile=profile,
                samples_used=used,
                download_bytes=preflight.models.absent_bytes + _bytes_of_outlines(given, study),
            )


def _outlined(study: Study) -> Study:
    """Replace models without local weights by directories with the same configuration and tensor shapes.

    With these directories a study can be planned before its weights are downloaded. Raises InvalidStudy if the
    configuration of a model is missing or unknown.
    """
    problems: list[Problem] = []

    def outlined(model: str, place: str) -> str:
        try:
            return outline(model)
        except InvalidModel as error:
            problems.extend(Problem(place, text) for text in error.problems)
            return model

    models = study.models
    base = outlined(models.base, "models.base")
    named = {alias: outlined(model, f"models.experts.{alias}") for alias, model in models.named.items()}
    if problems:
        raise InvalidStudy(tuple(problems))
    changed = models.model_copy(update={"base": base, "experts": {**models.experts, **named}})
    return study.model_copy(update={"models": changed})


def _bytes_of_outlines(given: Study, study: Study) -> int:
    """Bytes of the hub models in the study `given` that `study` has as outlines, because their weights are not here."""
    models = zip(*((each.models.base, *each.models.named.values()) for each in (given, study)), strict=True)
    absent = {outlined for model, outlined in models if outlined != model and not os.path.isdir(model)}
    return sum(sum(read_record(Path(outlined)).sizes.values()) for outlined in absent)


def checked_plan(
    study: Study,
    preflight: PreflightResult,
    directory: Path,
    *,
    profile: MachineProfile | None = None,
    samples_used: int = 0,
    download_bytes: int | None = None,
) -> CheckedPlan:
    """Compute the expected cost of a checked study.

    `directory` is on the disk to which models are written. `profile` describes the machines; None means the machines
    for which the study was checked. `samples_used` is the number of samples that earlier runs of the study have used.
    `download_bytes` is the size of the weights that must be downloaded; by default that of the models' weights that are
    known not to be on this machine.
    """
    places = [model.directory for model in preflight.models.family.models]
    memory = preflight.memory
    samples = preflight.expected_samples()
    step_samples = _step_samples(preflight)
    sources = open_sources(preflight.models.family)
    lengths = study_lengths(preflight, sources.result_dir)
    machine = plan_of(
        preflight,
        sources,
        profile or profile_for(preflight.machines),
        dtype=preflight.dtype,
        steps=_steps(preflight),
        lacks=tuple(str(problem) for problem in preflight.lacks),
        lengths=lengths,
        download_bytes=preflight.models.absent_bytes if download_bytes is None else download_bytes,
    )
    infos = preflight.tasks.holdout_infos
    scored = {b.name: float(preflight.num_scored_on(b) * b.facts.num_samples) for b in preflight.tasks.benchmarks}
    tokens = mean_tokens(
        (
            (
                preflight.within_limit(samples.search + step_samples),
                preflight.budget.rung_samples[-1],
                lengths.objectives,
            ),
            (samples.holdout, {name: info.num_samples for name, info in infos.items()}, lengths.holdout),
            (samples.benchmarks, scored, lengths.benchmarks),
        )
    )
    return CheckedPlan(
        study=study.name,
        num_models=len(preflight.models.family.models),
        num_parameters=preflight.models.num_parameters,
        num_layers=preflight.models.num_layers,
        num_search_parameters=len(preflight.space.parameters.names),
        space=f"{preflight.space.kind}: {preflight.space.describe().text}",
        algorithm=preflight.algorithm.name,
        algorithm_reason=preflight.algorithm.reason,
        step_samples=step_samples,
        scheduler=study.fidelity.scheduler,
        rungs=tuple(dict(rung) for rung in preflight.budget.rung_samples),
        trials={"extras": len(preflight.baselines()), "search": study.search.num_proposals},
        samples=samples,
        max_samples=study.limits.max_samples,
        samples_used=samples_used,
        samples_planned=samples.search + step_samples + _most_compared(preflight),
        hours=machine.hours.least,
        most_hours=machine.hours.most,
        tokens=(tokens.least, tokens.most),
        memory_bytes={
            "bank": memory.bank_bytes,
            "engines": memory.replicas * memory.engine_bytes,
            "gradients": memory.gradient_bytes,
            "needed": memory.needed_bytes,
            **({} if memory.available_bytes is None else {"available": memory.available_bytes}),
        },
        disk_bytes={
            "export": preflight.models.export_bytes,
            "available": free_bytes(directory),
            "download": preflight.models.absent_bytes,
        },
        absent_models=tuple(sorted({named(place) for place in places if is_metadata_only(Path(place))})),
        engine_remark=preflight.models.engine_note,
        machine=machine,
        overlaps=overlaps_of(study, preflight.tasks.search, preflight.tasks.unsearched),
        judgments=sum(
            2 * preflight.num_scored_on(benchmark) * benchmark.facts.num_samples
            for benchmark in preflight.tasks.benchmarks
            if benchmark.judge is not None
        ),
    )


def _samples_used(directory: Path) -> int:
    """Number of samples that the search of the study in `directory` has used.

    The number includes the scored samples, and the number of samples that the searcher's losses and gradients count as
    in the study's limit. Returns 0 if the directory holds no study.
    """
    with suppress(NotFound), read_run(directory) as (store, record):
        scored = sum(trial.samples_scored for trial in store.trials(record.id))
        return scored + store.num_charged(record.id)
    return 0


def _step_samples(preflight: PreflightResult) -> int:
    if preflight.algorithm.name != GRADIENT:
        return _refined_samples(preflight)
    num_steps, batch = _steps(preflight)
    return num_steps * batch * GradientRequest.charge


def _steps(preflight: PreflightResult) -> tuple[int, int]:
    """Number of gradient steps that a checked study (`preflight`) makes, and the number of samples of each step.

    If the searcher is `gradient`, its steps are counted. Otherwise, the steps of the refinement are counted. The
    refinement learns coefficients for merges of the Pareto front after the search. Returns (0, 0) if the study has
    neither this searcher nor a refinement.
    """
    if preflight.algorithm.name == GRADIENT:
        setting = preflight.search_setting(num_baselines=len(preflight.baselines()))
        options = setting.options.gradient
        return sum(descent.num_steps for descent in descents_of(options, setting.vectors)), options.batch
    plan = refinement_of(preflight.study, preflight.tasks.search_infos)
    if plan is None:
        return 0, 0
    return plan.options.paths * plan.options.steps, plan.options.batch


def _refined_samples(preflight: PreflightResult) -> int:
    """Upper limit of the number of samples that a checked study (`preflight`) uses to refine its Pareto front.

    The refinement learns coefficients by gradients and scores the results as new trials. The samples of the gradients
    and of the new trials are counted.
    """
    plan = refinement_of(preflight.study, preflight.tasks.search_infos)
    return 0 if plan is None else plan.most_samples(sum(preflight.budget.rung_samples[-1].values()))


def _most_compared(preflight: PreflightResult) -> int:
    if preflight.algorithm.name != GRADIENT:
        return 0
    return most_compared_samples(preflight.search_setting(num_baselines=len(preflight.baselines())))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _range(least: str, most: str) -> str:
    """Text of a range from two texts with a unit: `least` "6 min" and `most` "8 min" give "6 to 8 min"."""
    if least == most:
        return least
    unit = f" {most.rpartition(' ')[2]}" if " " in most else ""
    return f"{least.removesuffix(unit) if unit else least} to {most}"


def _duration(hours: float) -> str:
    if hours < 1:
        return f"{max(1, round(hours * 60))} min"
    return f"{hours:.1f} h"

"""Quantised export of a trial's merge, and a comparison of its held-out scores with those before quantisation.

The unquantised merge is written beside the result, and removed after it is quantised. vLLM loads the quantised model in
a separate process and scores the samples of the holdout data that the study scored. Differences are paired, sample by
sample.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from search_spaces.objectives import Objective
from search_spaces.study.file import Study
from service.disk import gib
from service.errors import Conflict
from service.resolved_study import ResolvedStudy
from service.results.holdout import sample_bounds
from service.results.statistics import estimate, paired_difference
from service.studies.export import chosen_trial, export_trial
from service.studies.preflight.files import check_files
from service.studies.preflight.models import with_revisions
from service.types import Estimate
from workers.directories import scratch
from workers.engines.vllm.checkpoint_engine import scores_of
from workers.errors import InvalidModel
from workers.models.family import resolve_family
from workers.types import SampleResult, Span, Split

if TYPE_CHECKING:
    from service.store import Store
    from service.types import JobRecord
    from workers.export.quantised import Quantised

__all__ = ["QuantisedScore", "export_quantised", "scores_table"]

Score = Callable[[Path, Any, Sequence[Span]], tuple[SampleResult, ...]]


@dataclass(frozen=True)
class QuantisedScore:
    """Held-out scores of one objective: of the merge, of the quantised model, and their paired difference.

    The difference is the score of the quantised model minus the score of the merge, on the same samples.
    """

    merge: Estimate
    quantised: Estimate
    difference: Estimate


def export_quantised(
    store: Store,
    record: JobRecord,
    trial: str,
    out: Path,
    *,
    scheme: str,
    dtype: str | None = None,
    note: Callable[[str], None] = lambda _: None,
    score: Score | None = None,
    **details: Any,
) -> dict[str, QuantisedScore]:
    """Write the quantised merged model of a trial to the new directory `out`, and return its held-out scores.

    `record` is the study's job in `store`, and `trial` is "best" or the trial's number. `scheme` is a key of
    `workers.export.quantised.SCHEMES`. `dtype` is the dtype of tensors that are not quantised; None means the dtype of
    the study's engines. `note` is called with messages about the progress. `score(directory, engine options, spans)` is
    a function that scores the model; by default, vLLM does it in a separate process. `details` are passed on to the
    function `export_trial`. The result is empty if the study has no holdout data that were scored for this trial.

    Raises:
        NotFound, Conflict, InvalidStudy: Raised in the same cases as by `export_trial`. Conflict is also raised if
            `out` is not empty, or if a holdout task has changed since the study.
        InvalidModel: The model cannot be quantised, or vLLM has no models of its modality.
        EngineUnavailable: vLLM cannot score the model. The model is then written without scores.
    """
    from workers.export.quantised import check_quantisable, quantise

    out = out.resolve()
    if out.exists() and any(out.iterdir()):
        raise Conflict(f"{out}: is not empty; a quantised export needs a new or empty directory")
    chosen = chosen_trial(store, record, trial)
    if any(layer.alignment is not None for layer in chosen.read_recipe().layers):
        raise InvalidModel((f"trial {chosen.number}: vLLM has no model class for its alignments between layers",))
    # Requests are refused before the merge is computed and written, which may take an hour.
    study, resolved = Study.model_validate(record.document), ResolvedStudy.of(record)
    samples = store.samples(record.id, chosen.recipe.digest, Split.HOLDOUT, has_tokens=False)
    check_files(study, resolved.access)
    models = with_revisions(study, resolved).models
    sources = resolve_family(models.base, models.named, tokenizer=models.tokenizer)
    if not sources.modality.runs_on_vllm:
        raise InvalidModel(
            (f"{models.base}: is a model of kind {sources.modality.name}; expected a model that vLLM runs",)
        )
    check_quantisable(sources.base.directory, scheme=scheme)
    spans = _spans(study, resolved, samples)
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        with scratch(0, name="mergesearch-quantise", places=[out.parent]) as place:  # the export looks for its space
            full = export_trial(store, record, str(chosen.number), place / out.name, dtype=dtype, **details)
            found = quantise(full, out, scheme=scheme)
    except FileExistsError as error:
        raise Conflict(str(error)) from error
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise Conflict(
            f"{out}: {os.strerror(error.errno)}: the merge in full and the quantised model do not both fit; make "
            "room or give a directory on another disk"
        ) from error
    note(
        f"quantised {found.num_layers} linear layers: {gib(found.bytes_before)} became {gib(found.bytes_after)}; "
        f"weights differ by {found.error:.1%}"
    )
    _describe(out, found, {})
    if not spans:
        note("no held-out scores: the study has none of this trial")
        return {}
    note(f"scoring {sum(span.stop for span in spans):,} held-out samples with the quantised model ...")
    options = study.engine.options
    if scheme == "int4" and options.dtype in ("auto", "float32"):
        # vLLM has no kernel for 4 bits with activations in float32.
        options = options.model_copy(update={"dtype": "bfloat16"})
    scored = (score or scores_of)(out, options, spans)
    scores = _scores(samples, scored, resolved.objectives)
    _describe(out, found, scores)
    return scores


def scores_table(scores: Mapping[str, QuantisedScore]) -> list[tuple[str, ...]]:
    """A row of texts for each objective: name, scores of the merge and of the quantised model, difference, and samples.

    The scores and the difference have 95% confidence intervals. The last text is the number of samples.
    """

    def text(each: Estimate, sign: str = "") -> str:
        low, high = each.ci95
        return f"{each.value:{sign}.4f} [{low:{sign}.4f}, {high:{sign}.4f}]"

    return [
        (name, text(each.merge), text(each.quantised), text(each.difference, "+"), str(each.merge.samples))
        for name, each in scores.items()
    ]


def _spans(study: Study, resolved: ResolvedStudy, samples: Sequence[SampleResult]) -> tuple[Span, ...]:
    """The samples of the holdout data that the study has scored, as ranges that begin at the first position.

    A range ends before the first position that was not scored; later samples are left out.

    Raises Conflict if a task differs from the task that the study scored.
    """
    from service.studies.preflight.tasks import task_spec

    spans = []
    for spec in study.holdout:
        scored = {sample.position for sample in samples if sample.objective == spec.name}
        count = next(position for position in itertools.count() if position not in scored)
        if not count:
            continue
        task = task_spec(spec, seed=study.search.seed, access=resolved.access, stored=resolved.task_digests)
        if task.digest != resolved.holdout_tasks.get(spec.name):
            raise Conflict(f"holdout {spec.name!r}: its task has changed since the study, so scores do not compare")
        spans.append(Span(spec.name, task, 0, count))
    return tuple(spans)


def _scores(
    merge: Sequence[SampleResult], quantised: Sequence[SampleResult], objectives: Sequence[Objective]
) -> dict[str, QuantisedScore]:
    """Estimates of both models, and of their paired difference, keyed by objective."""
    known = {(sample.objective, sample.position): sample.value for sample in merge}
    found: dict[str, QuantisedScore] = {}
    for objective in objectives:
        name = objective.name
        new = sorted((each.position, each.value) for each in quantised if each.objective == name)
        if not new:
            continue
        values = np.array([value for _, value in new])
        before = np.array([known[name, position] for position, _ in new])
        bounds = sample_bounds((objective,), ({name: before}, {name: values})).get(name)
        found[name] = QuantisedScore(
            estimate(before, bounds=bounds),
            estimate(values, bounds=bounds),
            paired_difference(values, before, bounds=bounds),
        )
    return found


def _describe(directory: Path, found: Quantised, scores: Mapping[str, QuantisedScore]) -> None:
    """Write the quantisation and the scores to recipe.json and to the model card of an export."""
    file = directory / "recipe.json"
    document = json.loads(file.read_text())
    document["quantisation"] = {
        **asdict(found),
        "holdout": {name: asdict(each) for name, each in scores.items()},
    }
    file.write_text(json.dumps(document, indent=2) + "\n")
    card = directory / "README.md"
    text = card.read_text().partition(HEADING)[0].rstrip("\n")
    group = f"groups of {found.group} weights" if found.group else "rows"
    lines = [
        f"{text}\n\n{HEADING}\n",
        f"The weights of {found.num_layers} linear layers are rounded to {found.scheme} with a scale for {group} "
        f"(round to nearest, format of compressed-tensors, read by vLLM). They differ from those of the merge by "
        f"{found.error:.1%}. The digests above are those of the merge before that.",
    ]
    if scores:
        rows = [("objective", "merge", "quantised", "difference", "samples"), *scores_table(scores)]
        table = [f"| {' | '.join(row)} |" for row in rows]
        lines += ["", "Held-out scores with 95 % intervals; differences are paired:", ""]
        lines += [table[0], "|---|---|---|---|---|", *table[1:]]
    card.write_text("\n".join(lines) + "\n")


HEADING = "## Quantisation"

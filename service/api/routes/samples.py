"""Routes of the scored samples of a study's trials, one trial or two side by side, and of their pictures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Literal
from urllib.parse import urlencode

import numpy as np
from fastapi import APIRouter, Path, Query, Request
from fastapi.concurrency import run_in_threadpool
from starlette.responses import Response

from search_spaces.objectives import Objective
from search_spaces.section import NAME
from search_spaces.study.file import Study as StudyFile
from service.api.conditional import NOT_MODIFIED, tagged, unchanging
from service.api.dependencies import MAX_NUMBER, Context, Services, Study, TrialNumber, found_trial
from service.api.prefix import below_root
from service.api.problems import Json, Refusal, refusals
from service.errors import InvalidQuery
from service.jobs.search.kind import SEARCH
from service.resolved_study import ResolvedStudy
from service.results.documents import estimate_document
from service.results.pictures import has_pictures, has_right_answers, predictions, section_of
from service.results.side_by_side import Kept, SideBySide, best_value, side_by_side
from service.schemas.api import SampleCountsDocument, SampleDocument, ScoredSampleDocument, TrialSamplesDocument
from service.store import Store
from service.store.documents import BENCHMARKS as BENCHMARK_FACTS
from service.store.documents import read_benchmarks
from service.types import JobRecord
from workers.types import SampleResult, Split

__all__ = ["router"]

router = APIRouter(tags=["results"])

# A picture (`workers.evaluation.image_pictures`) is a WebP file.
PICTURE_TYPE = "image/webp"
MAX_SAMPLES = 500
# A page of samples ends after the sample with which its texts (in UTF-8) have this many bytes.
MAX_TEXT_BYTES = 4 * 2**20
# Samples whose texts are read from the store at a time.
READ_SAMPLES = 50
NO_VALUES = np.empty(0)
NO_PROMPTS = (
    "prompts and references are stored when the search has ended, and those of benchmarks when these are scored; "
    "studies of earlier versions have none"
)
NO_PICTURES = (
    "pictures are stored when prompts are, of the first samples (8 MiB of them) whose images can be read; studies of "
    "earlier versions have none"
)
NO_RESPONSES = "responses were removed (`limits.keep_responses` or the server's retention), or were empty"


@router.get(
    "/studies/{study_id:segment}/trials/{number:segment}/samples",
    response_model=None,
    responses={200: {"model": TrialSamplesDocument}, **NOT_MODIFIED, **refusals(404, 422)},
)
async def list_samples(
    study: Study,
    number: TrialNumber,
    services: Context,
    request: Request,
    objective: Annotated[
        str | None, Query(description="Name of an objective or benchmark; by default the first.")
    ] = None,
    split: Annotated[
        Literal["search", "holdout", "bench"], Query(description="Search data, held-out data, or benchmarks.")
    ] = "search",
    against: Annotated[
        int | None, Query(description="Number of another trial, whose samples are shown beside.", ge=0, le=MAX_NUMBER)
    ] = None,
    only: Annotated[
        Kept | None,
        Query(
            description="Only samples with different values (`differs`), that one trial alone has right (`a_only`, "
            "`b_only`), or that neither has right (`both_wrong`). Needs `against`."
        ),
    ] = None,
    after: Annotated[int | None, Query(description="Only samples at a larger position.", ge=0, le=MAX_NUMBER)] = None,
    limit: Annotated[int, Query(description="Maximum number of samples.", ge=1, le=MAX_SAMPLES)] = 50,
) -> Response:
    """List the samples of a trial, or of two trials side by side: prompts, references, completions and values.

    A trial has a sample right if its value is the best of the metric's range. With the metric `entropy`, which does not
    depend on right answers, `counts` and `is_right` are null, and `only` may be `differs` alone. `only` selects the
    samples that are listed, but `counts` and `difference` always refer to all samples that both trials have. A page
    ends before `limit` if its texts are long (4 MiB); the link `next` leads to the following samples.
    """
    if only is not None and against is None:
        raise InvalidQuery("only", f"{only} compares two trials; give the other trial as against")

    def page() -> bytes:
        store, shown = services.store, [number, *([] if against is None else [against])]
        trials = [found_trial(services, study, each) for each in shown]
        scored = _objective(services, study, Split(split), objective)
        are_images = _are_images(study, Split(split), scored.name)
        has_right = has_right_answers(scored.metric, are_images=are_images)
        if not has_right and only not in (None, "differs"):
            raise InvalidQuery(
                "only", f"{only}: the metric {scored.metric} of {scored.name} knows no right answers; give differs"
            )
        digests = [trial.recipe.digest for trial in trials]
        values = store.sample_values(study.id, Split(split), recipes=set(digests), objectives=[scored.name])
        arrays = [values.get(digest, {}).get(scored.name, NO_VALUES) for digest in digests]
        kept, comparison = side_by_side(scored, arrays[0], arrays[1] if against is not None else None, only=only)
        left = [position for position in kept if after is None or position > after]
        samples, missing = _samples(store, study, Split(split), scored, digests, left[:limit], are_images=are_images)
        query = {"objective": scored.name, "split": split, "against": against, "only": only, "limit": limit}
        more = None
        if left[len(samples) :]:
            more = {**{k: v for k, v in query.items() if v is not None}, "after": samples[-1]["position"]}
        path = f"{SEARCH.path_of(study.id)}/trials/{number}/samples"
        return Json.encode(
            TrialSamplesDocument(
                trial=number,
                against=against,
                objective=scored.name,
                split=split,
                has_pictures=are_images,
                counts=None if comparison is None or not has_right else _counts(comparison),
                difference=None
                if comparison is None or comparison.difference is None
                else estimate_document(comparison.difference),
                total=len(kept),
                samples=samples,
                missing=missing,
                next=None if more is None else below_root(f"{path}?{urlencode(more)}"),
            )
        )

    return await tagged(request, services.records, study.id, page, is_large=True)


def _counts(comparison: SideBySide) -> SampleCountsDocument:
    return {
        "samples": comparison.num_samples,
        "both_right": comparison.both_right,
        "a_only": comparison.a_only,
        "b_only": comparison.b_only,
        "both_wrong": comparison.both_wrong,
    }


def _objective(services: Services, study: JobRecord, split: Split, name: str | None) -> Objective:
    """Find the objective or benchmark whose samples are shown: the one called `name`, or the first if `name` is None.

    `split` says whether samples of the search data, the holdout data or the benchmarks are shown. Raises InvalidQuery
    if the study has no such objective or benchmark.
    """
    if split is Split.BENCHMARK:
        facts = read_benchmarks(services.store.document(study.id, BENCHMARK_FACTS))
        known = {each.name: each.objective for each in facts}
    else:
        objectives = ResolvedStudy.of(study).objectives
        known = {each.name: each for each in objectives if each.cost_of_recipe is None}
    found = known.get(next(iter(known), "") if name is None else name)
    if found is None:
        kind = "benchmark with samples" if split is Split.BENCHMARK else "objective with samples"
        raise InvalidQuery(
            "objective", f"{name!r} is no {kind} of the study; accepted are {', '.join(known) or 'none yet'}"
        )
    return found


def _are_images(study: JobRecord, split: Split, objective: str) -> bool:
    """Whether the samples of an objective or benchmark of the study file are images."""
    specs = section_of(StudyFile.model_validate(study.document), split)
    return any(spec.name == objective and has_pictures(spec) for spec in specs)


def _samples(
    store: Store,
    study: JobRecord,
    split: Split,
    objective: Objective,
    digests: Sequence[str],
    positions: Sequence[int],
    *,
    are_images: bool,
) -> tuple[list[SampleDocument], list[str]]:
    """Describe the samples at `positions` for one trial or two, and list the reasons why texts are missing.

    If the texts of the first samples already have MAX_TEXT_BYTES bytes, the samples after them are left out. `digests`
    has the digest of each trial's recipe (merge). `split` says whether samples of search data, held-out data or
    benchmarks are described; `objective` is the objective or benchmark. If `are_images` is True, samples have pictures
    and predicted classes.
    """
    documents: list[SampleDocument] = []
    num_bytes = 0
    for document in _described(store, study, split, objective, digests, positions, are_images=are_images):
        documents.append(document)
        num_bytes += _num_bytes(document)
        if num_bytes >= MAX_TEXT_BYTES:
            break
    missing = []
    if any(row["prompt"] is None for row in documents):
        missing.append(NO_PROMPTS)
    if are_images and any(row["picture"] is None for row in documents):
        missing.append(NO_PICTURES)
    if any(each is not None and each["response"] is None for row in documents for each in (row["a"], row["b"])):
        missing.append(NO_RESPONSES)
    return documents, missing


def _described(
    store: Store,
    study: JobRecord,
    split: Split,
    objective: Objective,
    digests: Sequence[str],
    positions: Sequence[int],
    *,
    are_images: bool,
) -> Iterator[SampleDocument]:
    """Yield a description of the sample at each of `positions`, for one trial or for two.

    `digests` has the digest of each trial's recipe (merge). `split` says whether samples of search data, held-out data
    or benchmarks are described; `objective` is the objective or benchmark. A few samples are read from the database at
    a time. If `are_images` is True, the samples have links to stored pictures, and predicted classes.
    """
    has_right = has_right_answers(objective.metric, are_images=are_images)
    best = best_value(objective) if has_right else None
    of_task = f"{SEARCH.path_of(study.id)}/pictures/{split}/{objective.name}"
    for first in range(0, len(positions), READ_SAMPLES):
        part = positions[first : first + READ_SAMPLES]
        texts = store.prompts(study.id, split, objective.name, set(part))
        pictured = store.picture_positions(study.id, split, objective.name, set(part)) if are_images else set()
        found: list[dict[int, SampleResult]] = []
        for digest in digests:
            read = store.samples(
                study.id, digest, split, objective=objective.name, positions=set(part), has_tokens=False
            )
            found.append({sample.position: sample for sample in read})
        for position in part:
            text = texts.get(position)
            yield {
                "position": position,
                "document": found[0][position].document,
                "prompt": None if text is None else text.prompt,
                "reference": None if text is None else text.reference,
                "picture": below_root(f"{of_task}/{position}") if position in pictured else None,
                "a": _scored_sample(found[0][position], best, is_image=are_images),
                "b": _scored_sample(found[1][position], best, is_image=are_images) if len(digests) > 1 else None,
            }


def _num_bytes(sample: SampleDocument) -> int:
    """Number of bytes of a sample's prompt, reference and responses in UTF-8."""
    responses = [each["response"] for each in (sample["a"], sample["b"]) if each is not None]
    texts = [sample["prompt"], sample["reference"], *responses]
    return sum(len((text or "").encode(errors="surrogatepass")) for text in texts)


def _scored_sample(sample: SampleResult, best: float | None, *, is_image: bool) -> ScoredSampleDocument:
    """Describe a trial's response to a sample: its value, its text, and whether it is right.

    `best` is the value of a right response; None if the metric does not say whether a response is right. If `is_image`
    is True, the sample is an image, and the description has the predicted classes.
    """
    has_text = bool(sample.response or sample.tokens)
    response = sample.response if has_text else None
    return {
        "value": sample.value,
        "is_right": None if best is None else sample.value == best,
        "response": response,
        "is_truncated": sample.is_truncated,
        "predictions": None
        if not is_image or response is None
        else [{"name": each.name, "probability": each.probability} for each in predictions(response)],
    }


@router.get(
    "/studies/{study_id:segment}/pictures/{split:segment}/{objective:segment}/{position:segment}",
    response_model=None,
    responses={
        200: {
            "description": "The picture, a WebP file.",
            "content": {PICTURE_TYPE: {"schema": {"type": "string", "format": "binary"}}},
        },
        **NOT_MODIFIED,
        **refusals(404),
    },
)
async def get_picture(
    study: Study,
    split: Annotated[
        Literal["search", "holdout", "bench"], Path(description="Search data, held-out data, or benchmarks.")
    ],
    objective: Annotated[str, Path(description="Name of an objective or benchmark.", pattern=NAME)],
    position: Annotated[int, Path(description="Index of the sample in the order of scoring.", ge=0, le=MAX_NUMBER)],
    services: Context,
    request: Request,
) -> Response:
    """A small picture of a sample that is an image.

    Pictures are stored when the search ends, so this request reads no file of the task. All trials share a sample's
    picture, and pictures do not change.
    """

    def read() -> Response:
        content = services.store.picture(study.id, Split(split), objective, position)
        if content is None:
            raise Refusal(404, f"sample {position} of {objective}, {split}: no picture is stored")
        return unchanging(request, content, media_type=PICTURE_TYPE)

    return await run_in_threadpool(read)

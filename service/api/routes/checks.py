"""Routes for people who write a study file: checks of a file without creating a study, and files to begin with."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal, cast

from fastapi import APIRouter, Query, Request
from fastapi.concurrency import run_in_threadpool
from starlette.responses import Response

from search_spaces.errors import InvalidRecipe, InvalidStudy, Problem
from search_spaces.section import NAME
from search_spaces.study.yaml import parse_document
from service.api.dependencies import Context, Reader, Submitter
from service.api.problems import InvalidRequest, Json, refusals
from service.api.requests import JSON_TYPES, YAML_TYPES, read_body, sent_as_json
from service.jobs.search.checks import CHECKS, Level
from service.jobs.search.kind import SEARCH
from service.merges.study_file import study_from_mergekit
from service.schemas.api import BegunStudyDocument, CheckDocument, CheckedPlanDocument
from workers.tiny_family import study_text

__all__ = ["router"]

router = APIRouter(tags=["studies"])

# The file may be wrong: its schema describes what is accepted, not what may be sent.
BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "description": "A study file. Its paths must be absolute: the server reads them.",
        "content": {media: {"schema": {"type": "object"}} for media in (*JSON_TYPES, *YAML_TYPES)},
    }
}

STUDY = {"$ref": f"#/components/schemas/{SEARCH.schema_name}"}


@router.get(
    "/studies:example",
    response_class=Response,
    responses={200: {"description": "The study file.", "content": {YAML_TYPES[0]: {"schema": STUDY}}}, **refusals(422)},
)
def example_study(
    _: Reader,
    name: Annotated[
        Literal["study", "front", "lfs"],
        Query(
            description="`study`: gradient descent of task-arithmetic coefficients; `front`: a front of three "
            "objectives from few samples; `lfs`: a search by scores alone, with Hyperband."
        ),
    ] = "study",
) -> Response:
    """A complete study file with comments, as YAML: it merges the tiny models that are shipped with mergesearch."""
    return Response(study_text(name), media_type=YAML_TYPES[0])


@router.post(
    "/studies:from_mergekit",
    response_model=None,
    responses={200: {"model": BegunStudyDocument}, **refusals(413, 415, 422)},
    openapi_extra={"requestBody": {**BODY["requestBody"], "description": "A mergekit configuration."}},
)
async def begin_from_mergekit(
    request: Request,
    _: Submitter,
    name: Annotated[str, Query(description="Name of the study.", pattern=NAME)] = "mergekit",
) -> Response:
    """Begin a study file with the models of a mergekit configuration and with its merge; nothing is stored.

    The study has the configuration's base and experts. The study scores the configuration's merge (`search.recipes`)
    beside the baselines, and searches for better merges. The objectives are left to be filled in.
    """
    is_json = sent_as_json(request.headers, accepted=(*JSON_TYPES, *YAML_TYPES))
    content = await read_body(request)
    document = await run_in_threadpool(parse_document, content, "the request's body", is_json=is_json)
    warnings: list[str] = []
    try:
        study = await run_in_threadpool(study_from_mergekit, document, name=name, warn=warnings.append)
    except InvalidRecipe as error:
        raise InvalidRequest(tuple(Problem("", line) for line in str(error).splitlines())) from error
    return Json(BegunStudyDocument(study=study, warnings=warnings))


@router.post(
    "/studies:check",
    response_model=None,
    responses={200: {"model": CheckDocument}, **refusals(413, 415, 422, 503)},
    openapi_extra=BODY,
)
async def check_study(
    request: Request,
    services: Context,
    sender: Submitter,
    level: Annotated[
        Level, Query(description="`syntax`: the file alone; `full`: also models, tasks and memory, with the plan.")
    ] = "full",
) -> Response:
    """Check a study file, and say every problem with its field; nothing is stored.

    A body that is no JSON or YAML object is refused (422). A wrong study file is not refused: the response has its
    problems.

    With `level=full`, the response for a file without problems also has the plan of the study: samples, hours, memory
    and disk space, as `mergesearch run --check` prints it.
    """
    is_json = sent_as_json(request.headers, accepted=(*JSON_TYPES, *YAML_TYPES))
    content = await read_body(request)
    await run_in_threadpool(parse_document, content, "the request's body", is_json=is_json)
    try:
        accepted = await services.preflight.accept(
            content,
            is_json=is_json,
            kind=replace(SEARCH, accept=CHECKS[level]),
            client=sender.name,
            reader=sender.account,
        )
    except InvalidStudy as error:
        problems = [{"field": problem.field, "message": problem.message} for problem in error.problems]
        return Json({"is_valid": False, "problems": problems, "plan": None})
    plan = cast("CheckedPlanDocument", dict(accepted.facts)) if accepted.facts else None
    return Json(CheckDocument(is_valid=True, problems=[], plan=plan))

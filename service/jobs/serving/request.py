"""The request to serve a study, its checks, and the limit on the number of served studies."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from search_spaces.errors import InvalidStudy, Problem
from search_spaces.section import Name
from search_spaces.study.yaml import read_document
from service.errors import Conflict, NotFound
from service.jobs.base import Accepted, RequestContext
from service.jobs.search.kind import SEARCH
from service.jobs.serving import NAME
from service.store import Store
from service.types import Account, JobRecord
from workers.models.modalities import modality_of_task

__all__ = ["ServingOptions", "ServingRequest", "accept", "accepted_for", "check_number", "load"]

MAX_NAME = 63
SUFFIX = "-served"


class ServingOptions(BaseModel):
    """Options that a user can set when the trials of a study are served."""

    model_config = ConfigDict(extra="forbid", strict=True)

    idle_minutes: Annotated[
        float, Field(gt=0, le=1440, description="Minutes without a request after which serving ends.")
    ] = 30
    shares_engines: Annotated[
        bool,
        Field(
            description=(
                "Whether prompts are completed by engines that a search uses, which slows the search; only "
                "administrators of the server may say so."
            )
        ),
    ] = False


class ServingRequest(ServingOptions):
    """Request for a served study: a job that answers the prompts of clients with the merges of the study's trials."""

    study: Annotated[str, Field(pattern="^[0-9a-f]{32}$", description="The `id` of the study.")]
    name: Annotated[Name | None, Field(description="By default the name of the study with `-served`.")] = None


def load(file: Path) -> Mapping[str, Any]:
    """Read a serving request from a YAML or JSON file. Raises InvalidStudy if the file cannot be read."""
    return read_document(file)


def accept(document: Mapping[str, Any], context: RequestContext) -> Accepted:
    """Check a request for a served study, and return the job that it asks for.

    A served study is a job that answers prompts with the merges of a study's trials. `document` is the body of the
    request, and `context` has the database and the rights of the user who sent the request. The limit on the number of
    served studies is checked when the job is created. Raises InvalidStudy with every problem.
    """
    try:
        request = ServingRequest.model_validate(dict(document))
    except ValidationError as error:
        raise InvalidStudy(
            tuple(Problem(".".join(map(str, each["loc"])), each["msg"]) for each in error.errors(include_url=False))
        ) from error
    if context.store_url is None:
        raise InvalidStudy((Problem("study", "only a server serves studies"),))
    store = Store(context.store_url)
    try:
        study = _usable(store, request.study, context.reader)
    except NotFound as error:
        raise InvalidStudy((Problem("study", str(error)),)) from error
    finally:
        store.close()
    return accepted_for(study, request, context.reader)


def accepted_for(study: JobRecord, request: ServingRequest, sender: Account | None) -> Accepted:
    """Make the job that serves the trials of `study`, in the form in which jobs are stored.

    The job's name is stated in `request`; by default, the name is the study's name followed by `-served`. Only
    administrators may set the option `shares_engines`, which shares the engines of a search. Raises InvalidStudy if
    `sender` sets it and is no administrator, or if the study's models complete no prompts.
    """
    tasks = (entry["task"] for entry in study.document.get("objectives", ()) if "task" in entry)
    without = next((modality for modality in map(modality_of_task, tasks) if not modality.has_vocabulary), None)
    if without is not None:
        message = f"{study.name}: its models are of the modality {without.name}, and complete no prompts"
        raise InvalidStudy((Problem("study", message),))
    if request.shares_engines and sender is not None and not sender.is_admin:
        message = "only administrators of the server may let chats use the engines of a search"
        raise InvalidStudy((Problem("shares_engines", message),))
    name = request.name or f"{study.name[: MAX_NAME - len(SUFFIX)]}{SUFFIX}"
    return Accepted(name, {**request.model_dump(), "name": name}, {})


def check_number(store: Store, *, team: str | None, limit: int | None, sender: Account | None, number: int = 1) -> None:
    """Check that `number` more studies may be served: for the team `team` or, if this is None, for the user `sender`.

    Raises Conflict if the team or the user would serve more than `limit` studies (None: no limit). The error message
    names the served studies that `sender` may read.
    """
    owner = None if sender is None else sender.user
    served = [
        job
        for job in store.unfinished_jobs()
        if job.kind == NAME and job.team == team and (team is not None or job.owner == owner)
    ]
    if limit is not None and number > 0 and len(served) + number > limit:
        who = f"quota max_served: team {team}" if team is not None else "this server" if sender is None else "you"
        names = ", ".join(job.name for job in served if sender is None or sender.may_read(job))
        studies = "1 study" if limit == 1 else f"{limit} studies"
        raise Conflict(
            f"{who} may serve {studies} at the same time, and serves {names or len(served)}; cancel one "
            "(`mergesearch cancel NAME`)"
        )


def _usable(store: Store, study_id: str, reader: Account | None) -> JobRecord:
    """Read the study with the id `study_id`, after checking that the user `reader` may use its models.

    If `reader` is None, every study may be used. Raises NotFound if there is no such study, or its models may not be
    used.
    """
    study = store.job(study_id)
    is_usable = reader is None or reader.may_use(study)
    if study.kind != SEARCH.name or not is_usable:
        raise NotFound(f"study {study_id!r}: there is no such study whose models you may use")
    return study

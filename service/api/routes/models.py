"""Route that lists the models that jobs may use, for people who write a study."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from starlette.responses import Response

from service.api.dependencies import Context, Submitter
from service.api.problems import Json, refusals
from service.schemas.api import SourceModelDocument, SourceModelsDocument
from workers.models.listing import FoundModel

__all__ = ["router"]

router = APIRouter(tags=["studies"])

MAX_MODELS = 1000


@router.get("/models", response_model=None, responses={200: {"model": SourceModelsDocument}, **refusals(422, 503)})
async def list_models(
    services: Context,
    sender: Submitter,
    under: Annotated[
        str | None,
        Query(description="Absolute directory to search; by default all that jobs may read.", max_length=4096),
    ] = None,
    q: Annotated[
        str | None, Query(description="Text that the name, directory or architecture has.", max_length=200)
    ] = None,
    limit: Annotated[int, Query(description="Maximum number of models.", ge=1, le=MAX_MODELS)] = 200,
) -> Response:
    """List the models (checkpoints and LoRA adapters with safetensors files) in directories that jobs may read.

    A search of very many directories ends early; `is_complete` is false then. Links to directories are not followed.
    """
    found = await services.preflight.find_models(
        under=under, text=q, limit=limit, client=sender.name, reader=sender.account
    )
    return Json(
        SourceModelsDocument(
            models=[_document(model) for model in found.models],
            is_complete=found.is_complete,
            directories=list(found.directories),
        )
    )


def _document(model: FoundModel) -> SourceModelDocument:
    return {
        "path": model.directory,
        "name": model.name,
        "architecture": model.architecture,
        "bytes": model.num_bytes,
        "is_adapter": model.is_adapter,
        "base": model.base,
    }

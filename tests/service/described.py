"""Documents compared with the JSON Schemas of `service.schemas`, whose validators are built once in a process."""

from __future__ import annotations

from functools import cache
from typing import Any

from jsonschema import Draft202012Validator

from service.schemas.json_schemas import schemas

__all__ = ["check_document"]


@cache
def _validator(name: str) -> Draft202012Validator:
    schema = schemas()[name]
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


def check_document(document: Any, name: str) -> None:
    """Raise `jsonschema.ValidationError` unless the document is valid under the schema `name`, such as "summary"."""
    _validator(name).validate(document)

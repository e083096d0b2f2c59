"""Section: the base class of every section of a study file, and the constrained string types for fields of sections."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Discriminator, Field

__all__ = ["LINE", "NAME", "Line", "Name", "Section", "one_of"]

NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$"
LINE = r"^[^\x00-\x1f\x7f]+$"

Name = Annotated[str, Field(pattern=NAME)]
Line = Annotated[str, Field(pattern=LINE)]


class Section(BaseModel):
    """The base class of the sections of a study file: a frozen, validated model.

    A section refuses unknown keys, and numbers that are not finite.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)


def one_of(tag_of: Any, accepted: str) -> Discriminator:
    """A pydantic discriminator for a field of the study file whose value may be one of several sections.

    The field's type is a union of sections, each annotated with a tag. `tag_of` is a function that returns the tag for
    a value, and so chooses the section that the value is checked against. If no section has this tag, the error message
    asks for `accepted`, a text that names the accepted values.
    """
    return Discriminator(tag_of, custom_error_type="union", custom_error_message=f"give {accepted}")

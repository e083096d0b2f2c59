"""Section `models` of a study file: the base model, the experts, and references to other studies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Discriminator, Field, Tag

from search_spaces.section import Line, Name, Section

__all__ = ["AnotherStudy", "Chained", "FromStudy", "Models"]


class AnotherStudy(Section):
    """A reference to another study.

    The other study is that of a `mergesearch run` in the directory `dir`, or the study with the id `id` on the same
    server.
    """

    dir: Line | None = None
    """The directory of a run (`mergesearch run STUDY --out DIR`)."""
    id: Line | None = None
    """The id of a study on the server."""


class FromStudy(AnotherStudy):
    """A reference to a merged model of another study.

    `trial` is the number of the trial whose merge is meant, or "best" for the study's best trial.
    """

    trial: Literal["best"] | Annotated[int, Field(ge=0)] = "best"
    """The number of the other study's trial, or best. It is determined when this study is created and does not change
    later.
    """


class Chained(Section):
    """An expert that is a merge of another study."""

    from_study: FromStudy


def _tag_of_expert(value: object) -> str | None:
    return "<name>" if isinstance(value, str) else "<from_study>" if isinstance(value, Mapping | Chained) else None


if TYPE_CHECKING:
    Expert = str | Chained
else:
    Expert = Annotated[
        Annotated[Line, Tag("<name>")] | Annotated[Chained, Tag("<from_study>")],
        Discriminator(
            _tag_of_expert,
            custom_error_type="union",
            custom_error_message="give a directory, a hub id, s3://BUCKET/FOLDER "
            "or {from_study: {dir: DIR, trial: best}}",
        ),
    ]


class Models(Section):
    base: Line
    """The base model: a directory, or a hub id, which may name a tag or commit: owner/name@commit."""
    experts: Annotated[dict[Name, Expert], Field(min_length=1)]
    """Models fine-tuned from the base, PEFT LoRA adapters for it, or merges of other studies: alias to directory, hub
    id or {from_study: {dir: DIR, trial: best}}. The base's alias is "base".
    """
    tokenizer: Name = "base"
    """The tokenizer of the merges, if the models' tokenizers differ: base, an expert's alias, or union, which has the
    base's tokens and those that experts have added. Embeddings are aligned by the tokens' strings.
    """

    path_of: FromStudy | None = None
    """A merge whose layer path is applied to the base and to every expert: they get its layers in its order."""

    @property
    def chained(self) -> dict[str, FromStudy]:
        """The references to merges of other studies, for the experts that are such merges, by the expert's name."""
        return {alias: e.from_study for alias, e in self.experts.items() if isinstance(e, Chained)}

    @property
    def named(self) -> dict[str, str]:
        """Experts that are given as directories or hub ids, by name, without experts from other studies.

        Once the merges of other studies have been exported (`service.studies.chains`), all experts are directories or
        hub ids.
        """
        return {alias: expert for alias, expert in self.experts.items() if isinstance(expert, str)}

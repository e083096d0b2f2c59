"""Section `models` of a study file: the base model, the experts, and references to other studies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Discriminator, Field, Tag

from search_spaces.section import Line, Name, Section

__all__ = ["AnotherStudy", "Chained", "FromFinetune", "FromStudy", "Models", "Trained"]


class AnotherStudy(Section):
    """A reference to another study.

    The other study is a `mergesearch run` in the directory `dir`, or has the id `id` on the same server.
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


class FromFinetune(Section):
    """A reference to an expert that a fine-tuning on the same server has trained."""

    id: Line
    """The id of the fine-tuning on the server."""
    expert: Name | None = None
    """The expert's name in the fine-tuning. If it is missing, it is the name (alias) that the expert has here."""


class Trained(Section):
    """An expert that a fine-tuning on the same server has trained."""

    from_finetune: FromFinetune


def _tag_of_expert(value: object) -> str | None:
    if isinstance(value, Trained) or (isinstance(value, Mapping) and "from_finetune" in value):
        return "<from_finetune>"
    return "<name>" if isinstance(value, str) else "<from_study>" if isinstance(value, Mapping | Chained) else None


if TYPE_CHECKING:
    Expert = str | Chained | Trained
else:
    Expert = Annotated[
        Annotated[Line, Tag("<name>")]
        | Annotated[Chained, Tag("<from_study>")]
        | Annotated[Trained, Tag("<from_finetune>")],
        Discriminator(
            _tag_of_expert,
            custom_error_type="union",
            custom_error_message="give a directory, a hub id, s3://BUCKET/FOLDER, "
            "{from_study: {dir: DIR, trial: best}} or {from_finetune: {id: ID}}",
        ),
    ]


class Models(Section):
    base: Line
    """The base model: a directory, or a hub id, which may name a tag or commit: owner/name@commit."""
    experts: Annotated[dict[Name, Expert], Field(min_length=1)]
    """Models fine-tuned from the base, PEFT LoRA adapters for it, or merges of other studies: alias to directory, hub
    id or {from_study: {dir: DIR, trial: best}}. On a server also experts of a fine-tuning: {from_finetune: {id: ID}}.
    The base's alias is "base".
    """
    tokenizer: Name = "base"
    """The tokenizer of the merges, if the models' tokenizers differ: base, an expert's alias, or union, which has the
    base's tokens and those that experts have added. Embeddings are aligned by the tokens' strings.
    """

    path_of: FromStudy | None = None
    """A merge whose layer path is applied to the base and to every expert: they get its layers in its order."""

    @property
    def chained(self) -> dict[str, FromStudy]:
        """The experts that are merges of other studies: a mapping from the expert's name to the reference."""
        return {alias: e.from_study for alias, e in self.experts.items() if isinstance(e, Chained)}

    @property
    def trained(self) -> dict[str, FromFinetune]:
        """References to experts that fine-tunings have trained, keyed by the name of the expert in this study."""
        return {alias: e.from_finetune for alias, e in self.experts.items() if isinstance(e, Trained)}

    @property
    def named(self) -> dict[str, str]:
        """Experts that are given as directories or hub ids, keyed by name.

        Experts that are results of other jobs are missing until the module `service.studies.chains` has replaced them
        by directories. Afterwards all experts are included.
        """
        return {alias: expert for alias, expert in self.experts.items() if isinstance(expert, str)}

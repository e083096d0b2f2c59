"""JSON Schemas of the files that users submit (studies, fine-tunings) and of result files."""

from __future__ import annotations

from typing import Any

from pydantic import TypeAdapter

from search_spaces.study.file import Study
from service.schemas.files import ParetoDocument, SummaryDocument, TrialDocument
from service.schemas.plan import PlanDocument
from service.schemas.recipe import RecipeDocument
from workers.training.finetuning.fleet import ANALYSIS, OPTIONAL_SECTIONS, SECTIONS, SIDE_BY_SIDE, Analysis
from workers.training.finetuning.spec import FinetuneSpec

__all__ = ["pipeline_schemas", "schemas"]

DRAFT = "https://json-schema.org/draft/2020-12/schema"
TEMPLATE = "#/$defs/{model}"


def pipeline_schemas(template: str) -> dict[str, dict[str, Any]]:
    """JSON Schemas of the specification of a fine-tuning, keyed by name.

    The schema "Finetuning" describes the specification, and refers to the other schemas. `template` is the format of
    references between schemas, as in pydantic's `ref_template`.
    """
    spec = FinetuneSpec.model_json_schema(ref_template=template)
    analysis: dict[str, Any] = {
        ANALYSIS: {
            "anyOf": [Analysis.model_json_schema(), {"type": "null"}],
            "description": "Analysis of the trained experts; null for none.",
        }
    }
    # Sections may be incomplete: an expert's own sections may have the missing options.
    sections: dict[str, dict[str, Any]] = {name: {"type": "object"} for name in SECTIONS}
    sections |= {name: {"type": ["object", "null"]} for name in OPTIONAL_SECTIONS}
    fleet = {
        "type": "object",
        "description": "Fine-tuning of several experts. The options of each expert are laid over the other sections; "
        "`study` then merges the experts.",
        "properties": {
            **spec["properties"],
            **sections,
            "experts": {"type": "object", "minProperties": 1, "additionalProperties": {"type": "object"}},
            "study": {
                "type": ["object", "null"],
                "description": "A study file without `models`; its models are the trained experts.",
            },
            SIDE_BY_SIDE: {
                "type": ["integer", "null"],
                "minimum": 1,
                "description": "The number of experts that train at the same time. Default: as many as the cluster has "
                "GPUs for, and one on CPU cores.",
            },
            **analysis,
        },
        "required": ["name", "base", "experts"],
    }
    spec["properties"] |= analysis
    references = [{"$ref": template.format(model=name)} for name in ("FinetuneSpec", "Fleet")]
    return {**spec.pop("$defs", {}), "FinetuneSpec": spec, "Fleet": fleet, "Finetuning": {"anyOf": references}}


def schemas() -> dict[str, dict[str, Any]]:
    """JSON Schemas of submitted files and result files, keyed by name.

    The names are study, finetune, trial (a line of trials.jsonl), summary, pareto, recipe and plan (the output of
    `mergesearch plan --json`).
    """
    return {
        "study": Study.model_json_schema(),
        "finetune": {"$schema": DRAFT, "$ref": "#/$defs/Finetuning", "$defs": pipeline_schemas(TEMPLATE)},
        "trial": TypeAdapter(TrialDocument).json_schema(),
        "summary": TypeAdapter(SummaryDocument).json_schema(),
        "pareto": TypeAdapter(ParetoDocument).json_schema(),
        "recipe": TypeAdapter(RecipeDocument).json_schema(),
        "plan": TypeAdapter(PlanDocument).json_schema(),
    }

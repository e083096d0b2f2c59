"""Trainings that an earlier version of this program began, whose options had other defaults.

A stored specification without the option `method.noise_layers` is of such a version. Its default of
`method.weight_decay` was 0. With `training.layers`, MergOPT added noise to the trained layers only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workers.training.finetuning.spec import FinetuneSpec, parse_spec

__all__ = ["read_spec", "with_stored_defaults", "written_as"]

# The default of `method.weight_decay` in specifications without `method.noise_layers`.
FIRST_WEIGHT_DECAY = 0.0

NOISE_LAYERS = "noise_layers"


def read_spec(document: Mapping[str, Any]) -> FinetuneSpec:
    """Read a stored specification; if an earlier version wrote `document`, state the layers with noise."""
    spec = parse_spec(document)
    if not _is_earlier(document) or spec.method.kind != "mergopt" or spec.adapter is not None:
        return spec
    return _with_method(spec, noise_layers=spec.training.layers)


def with_stored_defaults(
    spec: FinetuneSpec, document: Mapping[str, Any], *, fleet_layers: tuple[int, ...] | None = None
) -> tuple[FinetuneSpec, tuple[str, ...]]:
    """Replace defaults in `spec` by those with which an earlier version began the training; also return messages.

    Args:
        spec: The present specification. Options that its file states are kept.
        document: The stored specification of the training. If no earlier version wrote it, `spec` is not changed.
        fleet_layers: The layers with noise that the fleet of the expert sets if its file states none. A file that
            states just these layers is treated as if it did not state them.

    Returns the specification with which the training continues, and a message for each option that was replaced.
    """
    if not _is_earlier(document):
        return spec, ()
    before, given = read_spec(document).method, spec.method
    kept: dict[str, Any] = {}
    if before.weight_decay == FIRST_WEIGHT_DECAY and "weight_decay" not in given.model_fields_set:
        kept["weight_decay"] = before.weight_decay
    if given.noise_layers in (None, fleet_layers):
        kept[NOISE_LAYERS] = before.noise_layers
    changed = {option: value for option, value in kept.items() if value != getattr(given, option)}
    messages = tuple(
        f"{spec.name}: method.{option} stays {_shown(value)}, as in the version that began this training; the default "
        f"is now {_shown(getattr(given, option))}"
        for option, value in changed.items()
        if option != NOISE_LAYERS or given.kind == "mergopt"  # fleets set it for all methods
    )
    return _with_method(spec, **changed) if changed else spec, messages


def written_as(spec: FinetuneSpec, before: Mapping[str, Any] | None) -> dict[str, Any]:
    """Convert `spec` to the document to store for a training whose stored document is `before`; None if it is new.

    The document of a training that an earlier version began is recognised as such again.
    """
    document = spec.canonical()
    if before is not None and _is_earlier(before):
        del document["method"][NOISE_LAYERS]
    return document


def _is_earlier(document: Mapping[str, Any]) -> bool:
    return NOISE_LAYERS not in document["method"]


def _with_method(spec: FinetuneSpec, **options: Any) -> FinetuneSpec:
    return spec.model_copy(update={"method": spec.method.model_copy(update=options)})


def _shown(value: Any) -> str:
    return "all layers" if value is None else str(list(value) if isinstance(value, tuple) else value)

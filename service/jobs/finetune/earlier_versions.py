"""Trainings that an earlier version of this program began, whose options had other defaults.

A stored specification without the option `method.noise_layers` is of such a version. Its default of
`method.weight_decay` was 0. With `training.layers`, MergOPT added noise to the trained layers only. A stored
specification without the option `method.noise_targets` is of such a version, too: with an adapter, MergOPT added noise
to the weights that the adapter changes, whatever the other adapters of a fleet changed. Without the option
`data.chat_bos`, chats began with BOS only if the chat template wrote it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workers.training.finetuning.spec import FinetuneSpec, parse_spec

__all__ = ["read_spec", "with_stored_defaults", "written_as"]

# The default of `method.weight_decay` in specifications without `method.noise_layers`.
FIRST_WEIGHT_DECAY = 0.0

NOISE_LAYERS, NOISE_TARGETS, CHAT_BOS = "noise_layers", "noise_targets", "chat_bos"

# Options that specifications of earlier versions lack, with their sections.
NEW_OPTIONS = (("method", NOISE_LAYERS), ("method", NOISE_TARGETS), ("data", CHAT_BOS))


def read_spec(document: Mapping[str, Any]) -> FinetuneSpec:
    """Read a stored specification; if an earlier version wrote `document`, state its noise and the start of chats."""
    spec = parse_spec(document)
    if CHAT_BOS not in document["data"]:
        spec = _with_options(spec, "data", chat_bos=False)
    if not _is_earlier(document) or spec.method.kind != "mergopt" or spec.adapter is not None:
        return spec
    return _with_options(spec, "method", noise_layers=spec.training.layers)


def with_stored_defaults(
    spec: FinetuneSpec, document: Mapping[str, Any], *, fleet: Mapping[str, Any] | None = None
) -> tuple[FinetuneSpec, tuple[str, ...]]:
    """Replace defaults in `spec` by those with which an earlier version began the training; also return messages.

    Args:
        spec: The present specification. Options that its file states are kept.
        document: The stored specification of the training. If no earlier version wrote it, `spec` is not changed.
        fleet: The options of `method` that the fleet of the expert sets if its file does not state them (function
            `fleet_noise`). A file that states just these values is treated as if it did not state them.

    Returns the specification with which the training continues, and a message for each option that was replaced.
    """
    stored, given, of_fleet = read_spec(document), spec.method, fleet or {}
    before = stored.method
    kept: dict[str, Any] = {}
    if NOISE_TARGETS not in document["method"] and given.noise_targets in (None, of_fleet.get(NOISE_TARGETS)):
        kept[NOISE_TARGETS] = None
    is_earlier = _is_earlier(document)
    if is_earlier and before.weight_decay == FIRST_WEIGHT_DECAY and "weight_decay" not in given.model_fields_set:
        kept["weight_decay"] = before.weight_decay
    if is_earlier and given.noise_layers in (None, of_fleet.get(NOISE_LAYERS)):
        kept[NOISE_LAYERS] = before.noise_layers
    changed = {option: value for option, value in kept.items() if value != getattr(given, option)}
    messages = [
        _message(spec, f"method.{option}", _shown(option, value), _shown(option, getattr(given, option)))
        for option, value in changed.items()
        if option not in (NOISE_LAYERS, NOISE_TARGETS) or given.kind == "mergopt"  # fleets set them for all methods
    ]
    spec = _with_options(spec, "method", **changed)
    if CHAT_BOS not in document["data"] and CHAT_BOS not in spec.data.model_fields_set:
        spec = _with_options(spec, "data", chat_bos=stored.data.chat_bos)
        if spec.data.images is None:
            messages.append(_message(spec, "data.chat_bos", "false", "true"))
    return spec, tuple(messages)


def _message(spec: FinetuneSpec, option: str, kept: str, default: str) -> str:
    return (
        f"{spec.name}: {option} stays {kept}, as in the version that began this training; the default is now {default}"
    )


def written_as(spec: FinetuneSpec, before: Mapping[str, Any] | None) -> dict[str, Any]:
    """Convert `spec` to the document to store for a training whose stored document is `before`; None if it is new.

    The document of a training that an earlier version began is recognised as such again.
    """
    document = spec.canonical()
    for section, option in NEW_OPTIONS:
        if before is not None and option not in before[section]:
            del document[section][option]
    return document


def _is_earlier(document: Mapping[str, Any]) -> bool:
    return NOISE_LAYERS not in document["method"]


def _with_options(spec: FinetuneSpec, section: str, **options: Any) -> FinetuneSpec:
    return spec.model_copy(update={section: getattr(spec, section).model_copy(update=options)})


def _shown(option: str, value: Any) -> str:
    if value is None:
        return "all layers" if option == NOISE_LAYERS else "what the adapter changes"
    return str(list(value) if isinstance(value, tuple) else value)

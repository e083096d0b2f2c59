"""Checks of KubeRay's objects against its custom resource definitions: unknown fields, types, and the CEL rules.

The definitions are KubeRay's (Apache-2.0), and no part of this project. KUBERAY_CRDS names a directory with the files
of `ray-operator/config/crd/bases` in KubeRay's version VERSION.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import celpy
import jsonschema
import yaml
from celpy.adapter import json_to_cel

__all__ = ["KINDS", "VARIABLE", "VERSION", "problems", "reason_to_skip"]

VERSION = "1.7.0"
VARIABLE = "KUBERAY_CRDS"
KINDS = {"RayCluster": "ray.io_rayclusters.yaml", "RayJob": "ray.io_rayjobs.yaml"}


def reason_to_skip() -> str | None:
    """The reason why objects cannot be checked here; None if they can."""
    directory = os.environ.get(VARIABLE)
    if not directory:
        return f"{VARIABLE} is not set: it names a directory with the CRDs of KubeRay {VERSION}"
    missing = [file for file in KINDS.values() if not (Path(directory) / file).is_file()]
    return f"{VARIABLE}={directory}: has no {', '.join(missing)}" if missing else None


def problems(document: Mapping[str, Any]) -> list[str]:
    """What an API server with KubeRay's definitions would refuse about `document`, each with its place."""
    schema = _schema(document["kind"])
    found = [
        f"{'.'.join(map(str, error.absolute_path))}: {error.message}"
        for error in jsonschema.Draft202012Validator(_strict(schema)).iter_errors(document)
    ]
    return found + list(_broken_rules(schema, document, ""))


@cache
def _schema(kind: str) -> dict[str, Any]:
    """The OpenAPI schema of version v1 of a kind."""
    text = (Path(os.environ[VARIABLE]) / KINDS[kind]).read_text()
    definition = yaml.load(text, Loader=yaml.CSafeLoader)
    (version,) = [each for each in definition["spec"]["versions"] if each["name"] == "v1"]
    schema: dict[str, Any] = version["schema"]["openAPIV3Schema"]
    return schema


def _strict(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON Schema of an OpenAPI schema, in which unknown fields are refused as kubectl refuses them."""
    strict: dict[str, Any] = {
        key: value for key, value in schema.items() if not key.startswith("x-") and key != "format"
    }
    if schema.get("x-kubernetes-int-or-string"):
        strict["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    if "properties" in schema:
        strict["properties"] = {name: _strict(each) for name, each in schema["properties"].items()}
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            strict["additionalProperties"] = False
    if isinstance(schema.get("additionalProperties"), Mapping):
        strict["additionalProperties"] = _strict(schema["additionalProperties"])
    if "items" in schema:
        strict["items"] = _strict(schema["items"])
    return strict


def _broken_rules(schema: Mapping[str, Any], value: Any, place: str) -> Iterator[str]:
    """Messages of the CEL rules that `value` breaks. Rules about changes of an object (`oldSelf`) are left out."""
    for each in schema.get("x-kubernetes-validations", ()):
        if "oldSelf" not in each["rule"] and not _program(each["rule"]).evaluate({"self": json_to_cel(value)}):
            yield f"{place}: {each['message']}"
    if isinstance(value, Mapping):
        for name, part in value.items():
            inner = schema.get("properties", {}).get(name) or schema.get("additionalProperties")
            if isinstance(inner, Mapping):
                yield from _broken_rules(inner, part, f"{place}.{name}".lstrip("."))
    elif isinstance(value, list) and "items" in schema:
        for number, part in enumerate(value):
            yield from _broken_rules(schema["items"], part, f"{place}.{number}")


@cache
def _program(rule: str) -> Any:
    environment = celpy.Environment()
    return environment.program(environment.compile(rule))

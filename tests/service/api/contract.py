"""Contract of the API: the routes, parameters and fields of its OpenAPI document that later versions keep.

`released.json` has the contract of the last release. `python -m tests.service.api.contract` writes it, as part of
`make release`.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

__all__ = ["RELEASED", "breaks", "contract_of"]

RELEASED = Path(__file__).with_name("released.json")

# Levels of nested objects that are compared.
MAX_DEPTH = 6

Contract = Mapping[str, Any]


def contract_of(document: Mapping[str, Any]) -> Contract:
    """The contract of an OpenAPI document: by "METHOD path", its parameters, its body and its successful responses.

    A response is the list of its fields, as dotted paths, in which [] are the items of a list and * are other keys.
    """
    schemas = document["components"]["schemas"]
    found: dict[str, Any] = {}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
            found[f"{method.upper()} {path}"] = {
                "deprecated": bool(operation.get("deprecated")),
                "parameters": {f"{p['in']} {p['name']}": _parameter(p) for p in operation.get("parameters", ())},
                "body": None if body is None else _body(body, schemas),
                "responses": {
                    status: sorted(_fields(media.get("schema", {}), schemas))
                    for status, answer in operation["responses"].items()
                    if status.startswith("2")
                    for name, media in answer.get("content", {}).items()
                    if name == "application/json"
                },
            }
    return dict(sorted(found.items()))


def _parameter(parameter: Mapping[str, Any]) -> dict[str, Any]:
    schema = parameter.get("schema", {})
    options = [schema, *schema.get("anyOf", ())]
    values = [value for option in options for value in option.get("enum", ())]
    return {"required": bool(parameter.get("required")), "values": sorted(map(str, values))}


def _body(schema: Mapping[str, Any], schemas: Mapping[str, Any]) -> dict[str, Any]:
    whole = _resolved(schema, schemas)
    return {
        "required": sorted(whole.get("required", ())),
        "fields": sorted(_fields(schema, schemas, depth=MAX_DEPTH - 2)),
    }


def _resolved(schema: Mapping[str, Any], schemas: Mapping[str, Any]) -> Mapping[str, Any]:
    reference = schema.get("$ref")
    return schemas[reference.rpartition("/")[2]] if reference is not None else schema


def _fields(
    schema: Any, schemas: Mapping[str, Any], *, prefix: str = "", depth: int = 0, seen: tuple[str, ...] = ()
) -> set[str]:
    if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
        return set()
    reference = schema.get("$ref")
    if reference is not None:
        if reference in seen:
            return set()
        seen = (*seen, reference)
    whole = _resolved(schema, schemas)
    found: set[str] = set()
    for name, inner in whole.get("properties", {}).items():
        found.add(f"{prefix}{name}")
        found |= _fields(inner, schemas, prefix=f"{prefix}{name}.", depth=depth + 1, seen=seen)
    for key in ("anyOf", "oneOf", "allOf"):
        for option in whole.get(key, ()):
            found |= _fields(option, schemas, prefix=prefix, depth=depth, seen=seen)
    items = whole.get("items")
    found |= _fields(items, schemas, prefix=f"{prefix}[].", depth=depth + 1, seen=seen)
    found |= _fields(whole.get("additionalProperties"), schemas, prefix=f"{prefix}*.", depth=depth + 1, seen=seen)
    return found


def breaks(released: Contract, now: Contract) -> Iterator[str]:
    """Yield what a client of the `released` contract would miss in the one of `now`.

    An operation that the release says is deprecated may change and go.
    """
    for name, before in released.items():
        if before["deprecated"]:
            continue
        after = now.get(name)
        if after is None:
            yield f"{name}: is gone; a release must say that it is deprecated before"
            continue
        yield from (f"{name}: {problem}" for problem in _broken(before, after))


def _broken(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    for name, parameter in before["parameters"].items():
        given = after["parameters"].get(name)
        if given is None:
            yield f"the parameter {name} is gone"
            continue
        if given["required"] and not parameter["required"]:
            yield f"the parameter {name} is needed now"
        for value in sorted(set(parameter["values"]) - set(given["values"])) if given["values"] else ():
            yield f"the parameter {name} does not accept {value} any more"
    for name in sorted(after["parameters"].keys() - before["parameters"].keys()):
        if after["parameters"][name]["required"]:
            yield f"the new parameter {name} is needed"
    old, new = before["body"], after["body"]
    if old is None:
        if new is not None and new["required"]:
            yield "a body is needed now"
    elif new is None:
        yield "the body is gone"
    else:
        yield from (f"the body's field {name} is gone" for name in sorted(set(old["fields"]) - set(new["fields"])))
        yield from (
            f"the body's field {name} is needed now" for name in sorted(set(new["required"]) - set(old["required"]))
        )
    for status, fields in before["responses"].items():
        missing = sorted(set(fields) - set(after["responses"].get(status, ())))
        if status not in after["responses"]:
            yield f"the response {status} is gone"
        else:
            yield from (f"the field {name} of the response {status} is gone" for name in missing)


def current() -> Contract:
    """The contract of this version's server."""
    from service.api.app import create_app
    from service.store import Store
    from tests.service.api.harness import QuickPreflight
    from tests.service.site import FakeCluster

    with tempfile.TemporaryDirectory() as directory:
        store = Store(f"sqlite:///{directory}/mergesearch.db")
        try:
            app = create_app(store, cluster=FakeCluster(), data_dir=Path(directory), preflight=QuickPreflight())
            return contract_of(app.openapi())
        finally:
            store.close()


if __name__ == "__main__":
    RELEASED.write_text(json.dumps(current(), indent=1, sort_keys=True) + "\n")
    print(f"contract of {len(current())} routes: {RELEASED}")

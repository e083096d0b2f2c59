"""The API of the last release: a later version removes only what the release has marked as deprecated."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.service.api.contract import RELEASED, Contract, breaks, current

STUDY, CREATE = "GET /v1/studies/{study_id}", "POST /v1/studies"


@pytest.fixture(scope="module")
def now() -> Contract:
    return current()


def test_this_version_keeps_what_was_released(now: Contract) -> None:
    """`make release` stores the contract of each release; a route or field that must go is deprecated first."""
    released = json.loads(RELEASED.read_text())
    assert len(released) > 50
    assert {STUDY, CREATE} <= released.keys()
    assert {"state", "progress.stage"} <= set(released[STUDY]["responses"]["200"])
    assert list(breaks(released, now)) == []


CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "route": (lambda now: now.pop(STUDY), f"{STUDY}: is gone"),
    "parameter": (lambda now: now["GET /v1/studies"]["parameters"].pop("query state"), "query state is gone"),
    "value": (
        lambda now: now["GET /v1/studies"]["parameters"]["query state"]["values"].remove("PAUSED"),
        "query state does not accept PAUSED any more",
    ),
    "needed": (
        lambda now: now["GET /v1/studies"]["parameters"]["query state"].update(required=True),
        "query state is needed now",
    ),
    "new parameter": (
        lambda now: now[STUDY]["parameters"].update({"query x": {"required": True, "values": []}}),
        "the new parameter query x is needed",
    ),
    "field of a response": (lambda now: now[STUDY]["responses"]["200"].remove("state"), "the field state of"),
    "response": (lambda now: now[STUDY]["responses"].pop("200"), "the response 200 is gone"),
    "field of a body": (lambda now: now[CREATE]["body"]["fields"].remove("models"), "the body's field models is gone"),
    "needed field": (lambda now: now[CREATE]["body"]["required"].append("x"), "the body's field x is needed now"),
    "body": (lambda now: now[CREATE].update(body=None), "the body is gone"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_breaks_clients_is_found(now: Contract, change: str) -> None:
    """Unless the release says that the route is deprecated."""
    apply, message = CHANGES[change]
    later: Any = copy.deepcopy(dict(now))
    apply(later)
    found = list(breaks(now, later))
    assert len(found) == 1, found
    assert message in found[0]
    deprecated: Any = copy.deepcopy(dict(now))
    for name in (STUDY, CREATE, "GET /v1/studies"):
        deprecated[name]["deprecated"] = True
    assert list(breaks(deprecated, later)) == []


def test_additions_break_nothing(now: Contract) -> None:
    later: Any = copy.deepcopy(dict(now))
    later["GET /v1/new"] = later[STUDY]
    later[STUDY]["parameters"]["query x"] = {"required": False, "values": []}
    later[STUDY]["responses"]["200"].append("x")
    later[CREATE]["body"]["fields"].append("x")
    assert list(breaks(now, later)) == []

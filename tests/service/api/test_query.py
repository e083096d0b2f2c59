"""Query parameters that are given several times."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.service.api.harness import ApiServer


@pytest.fixture
def client(tmp_path: Path) -> Iterator[httpx.Client]:
    with ApiServer(tmp_path) as server, httpx.Client(base_url=server.url) as client:
        yield client


def test_a_parameter_of_one_value_is_given_once(client: httpx.Client) -> None:
    """The last of several values would count, and the others would be ignored."""
    assert client.get("/v1/studies?limit=1").status_code == 200
    answer = client.get("/v1/studies?limit=1&limit=2&limit=3")
    assert answer.status_code == 422
    assert "limit: given 3 times; give it once" in answer.text


def test_a_list_is_given_as_often_as_one_likes(client: httpx.Client) -> None:
    answer = client.get("/v1/events?kind=trial&kind=stage", headers={"Accept": "application/json"})
    assert answer.status_code == 200


def test_unknown_parameters_are_ignored_as_before(client: httpx.Client) -> None:
    assert client.get("/v1/studies?unknown=1&unknown=2").status_code == 200

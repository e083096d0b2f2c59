"""Pictures of samples over HTTP: which samples have one, who gets it, and what can be asked for."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from service.api.routes.samples import NO_PICTURES
from service.types import JobRecord, Scope
from tests.service.api.accounts import Company, bearer
from tests.service.api.harness import ApiServer, finished_study
from tests.service.pictured import CLASSES, NUM_PICTURES, NUM_SAMPLES, class_of, picture, pictured_study
from workers.types import Split


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    with ApiServer(Path(tmp_path_factory.mktemp("server"))) as server:
        yield server


@pytest.fixture(scope="module")
def study(server: ApiServer) -> JobRecord:
    return pictured_study(server.store)


@pytest.fixture(scope="module")
def http(server: ApiServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


def samples(http: httpx.Client, study: JobRecord, **query: Any) -> dict[str, Any]:
    query = {"split": "holdout", "objective": "text", **query}
    found: dict[str, Any] = http.get(f"/v1/studies/{study.id}/trials/1/samples", params=query).json()
    return found


def test_samples_of_images_have_pictures_and_predictions(
    http: httpx.Client, server: ApiServer, study: JobRecord
) -> None:
    """Links lead to the stored pictures; classes and probabilities are those of the stored responses."""
    found = samples(http, study, against=2)
    assert found["has_pictures"] is True
    assert found["missing"] == [NO_PICTURES]
    assert len(found["samples"]) == NUM_SAMPLES
    digest = server.store.trial(study.id, 1).recipe.digest
    stored = server.store.samples(study.id, digest, Split.HOLDOUT, objective="text")
    for row, sample in zip(found["samples"], stored, strict=True):
        position = row["position"]
        assert row["reference"] == class_of(position)
        if position >= NUM_PICTURES:
            assert row["picture"] is None
        else:
            answer = http.get(row["picture"])
            assert answer.content == picture(position)
            assert answer.headers["content-type"] == "image/webp"
            assert answer.headers["x-content-type-options"] == "nosniff"
        (first, shown), (second, other) = ((each["name"], each["probability"]) for each in row["a"]["predictions"])
        assert (first == class_of(position)) is row["a"]["is_right"] is bool(sample.value)
        assert {first, second} <= set(CLASSES)
        assert shown + other == pytest.approx(1, abs=1e-5)
        assert json.loads(sample.response)["top"][0] == [first, pytest.approx(math.log(shown))]
        assert row["b"]["predictions"] is not None


def test_samples_of_unlabelled_images_are_not_called_right(http: httpx.Client, server: ApiServer) -> None:
    """The entropy has a best value, but no right answers: nothing is counted, and nothing selected, by who is right."""
    record = pictured_study(server.store, name="plain", metrics={"text": "entropy"})
    found = samples(http, record, against=2)
    assert found["counts"] is None
    assert found["difference"] is not None
    assert {row[trial]["is_right"] for row in found["samples"] for trial in ("a", "b")} == {None}
    assert 0 < samples(http, record, against=2, only="differs")["total"] < NUM_SAMPLES
    for only in ("a_only", "b_only", "both_wrong"):
        refused = samples(http, record, against=2, only=only)
        assert refused["status"] == 422
        assert f"{only}: the metric entropy of text knows no right answers; give differs" in str(refused["problems"])
    labelled = samples(http, record, against=2, objective="math")
    assert labelled["counts"]["samples"] == NUM_SAMPLES
    assert {row["a"]["is_right"] for row in labelled["samples"]} == {True, False}


def test_samples_of_text_have_none(http: httpx.Client, server: ApiServer) -> None:
    """Nothing changes for text, also where a response looks like an image's."""
    text = finished_study(server.store)
    found = samples(http, text)
    assert found["has_pictures"] is False
    assert {row["picture"] for row in found["samples"]} == {None}
    assert {row["a"]["predictions"] for row in found["samples"]} == {None}
    assert NO_PICTURES not in found["missing"]


def test_a_picture_that_is_known_is_not_sent_again(http: httpx.Client, study: JobRecord) -> None:
    """The tag follows from the content; browsers ask again at each use, and no shared cache keeps it."""
    path = f"/v1/studies/{study.id}/pictures/holdout/text/0"
    answer = http.get(path)
    tag = answer.headers["etag"]
    assert answer.headers["cache-control"] == "private, no-cache"
    again = http.get(path, headers={"If-None-Match": tag})
    assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
    assert http.get(f"{path[:-1]}1", headers={"If-None-Match": tag}).status_code == 200


@pytest.mark.parametrize(
    ("path", "status"),
    [
        (f"holdout/text/{NUM_PICTURES}", 404),
        ("holdout/text/99999", 404),
        ("search/text/0", 404),
        ("holdout/other/0", 404),
        ("holdout/text/-1", 404),
        ("holdout/text/0.png", 404),
        ("all/text/0", 404),
        ("holdout/..%2F..%2Fetc%2Fpasswd/0", 404),
        ("holdout/%2e%2e/0", 404),
        ("holdout/..;x/0", 404),
        ("holdout/text/..%2f..%2f0", 404),
        ("holdout/%00/0", 404),
    ],
)
def test_nothing_but_pictures_is_found(http: httpx.Client, study: JobRecord, path: str, status: int) -> None:
    """Addresses name a place in the database, and no file: whatever is asked for, only pictures are sent."""
    answer = http.get(f"/v1/studies/{study.id}/pictures/{path}")
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"


def test_pictures_have_the_rights_of_their_study(tmp_path: Path) -> None:
    """Who may not read the study gets no picture of it, and no hint that there is one."""
    with ApiServer(tmp_path) as server:
        company = Company.on(server)
        record = company.own(pictured_study(server.store))
        path = f"{server.url}/v1/studies/{record.id}/pictures/holdout/text/0"
        assert httpx.get(path).status_code == 401
        assert httpx.get(path, headers=bearer(company.tokens["root", Scope.ADMIN])).content == picture(0)
        refused = httpx.get(path, headers=bearer(company.tokens["stranger", Scope.SUBMIT]))
        assert refused.status_code == 404
        assert "there is no such study" in refused.json()["detail"]


def test_pictures_stay_when_responses_are_removed(server: ApiServer, http: httpx.Client) -> None:
    """Retention removes what merges have answered, not what samples show."""
    record = pictured_study(server.store, name="kept")
    server.store.remove_texts(record.id, num_samples=NUM_SAMPLES, num_bytes=1)
    row = samples(http, record)["samples"][0]
    assert (row["a"]["response"], row["a"]["predictions"]) == (None, None)
    assert http.get(row["picture"]).content == picture(0)

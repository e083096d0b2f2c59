"""The application below a path prefix, as behind a proxy that passes whole paths on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from service.api.prefix import ROOT_PATH, prefix_problem, with_root
from service.client import Client
from tests.service.api.harness import ApiServer, document, finished_study, stored_study

PREFIX = "/teams/search"


@pytest.fixture
def url(server: ApiServer) -> str:
    return f"{server.url}{PREFIX}"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ApiServer]:
    with ApiServer(tmp_path, prefix=PREFIX) as server:
        yield server


def test_routes_answer_below_the_prefix_and_at_the_root(server: ApiServer, url: str) -> None:
    """Probes and metrics stay at the root; everything is below the prefix, too, and nothing below similar paths."""
    record = stored_study(server.store)
    for base in (server.url, url):
        assert httpx.get(f"{base}/healthz").json() == {"status": "alive"}
        assert httpx.get(f"{base}/v1/studies/{record.id}").json()["id"] == record.id
        assert "swagger-ui-bundle" in httpx.get(f"{base}/docs").text
        assert httpx.get(f"{base}/docs/swagger-ui.css").status_code == 200
    for path in (f"{PREFIX}er/healthz", f"/x{PREFIX}/healthz", PREFIX + PREFIX + "/healthz"):
        assert httpx.get(server.url + path).status_code == 404


def test_clients_work_below_the_prefix(url: str, server: ApiServer) -> None:
    """Clients follow links of a server below a prefix, whether or not the proxy that they ask passes it on."""
    with Client(url) as client:
        study = client.submit(document())
        assert [each["id"] for each in client.studies()] == [study["id"]]
        assert client.log(study) == server.cluster.log_text
    with Client(server.url) as client:
        assert client.log(study) == server.cluster.log_text


def test_links_have_the_prefix_of_their_request(server: ApiServer, url: str) -> None:
    """Links in documents of jobs, exports, pages and plots can be asked for as they are."""
    study = f"/v1/studies/{finished_study(server.store, num_trials=3).id}"
    for base, prefix in ((server.url, ""), (url, PREFIX)):
        with httpx.Client(base_url=base) as http:
            job = http.get(study).json()
            listed = http.get("/v1/studies").json()["studies"][0]
            export = http.post(f"{study}/exports", json={"dtype": "float32"}).json()
            page = http.get(f"{study}/trials", params={"limit": 1}).json()
            plots = http.get(f"{study}/plots").json()["plots"]
        assert job["links"] == listed["links"]
        links = [*job["links"].values(), export["links"]["self"], page["next"], *(plot["link"] for plot in plots)]
        assert len(links) > 10
        assert [link for link in links if not link.startswith(prefix + study)] == []
        for link in links:
            if not link.endswith("/events"):
                assert httpx.get(server.url + link).status_code == 200, link


def test_an_expert_may_be_named_links() -> None:
    own = {"links": {"download": "/v1/x"}, "steps": 3}
    token = ROOT_PATH.set(PREFIX)
    try:
        assert with_root({"experts": {"links": own}}) == {
            "experts": {"links": {"links": {"download": f"{PREFIX}/v1/x"}, "steps": 3}}
        }
    finally:
        ROOT_PATH.reset(token)


def test_locations_have_the_prefix_of_their_request(server: ApiServer, url: str) -> None:
    """The address of a new study is below the prefix if the request was, and at the root otherwise."""
    for base, prefix in ((server.url, ""), (url, PREFIX)):
        answer = httpx.post(f"{base}/v1/studies", json=document(name=f"study-{len(prefix)}"))
        assert answer.headers["location"] == f"{prefix}/v1/studies/{answer.json()['id']}"
        assert httpx.get(httpx.URL(base).join(answer.headers["location"])).status_code == 200


def test_the_openapi_document_names_the_prefix(server: ApiServer, url: str) -> None:
    assert httpx.get(f"{url}/openapi.json").json()["servers"] == [{"url": PREFIX}]
    assert "servers" not in httpx.get(f"{server.url}/openapi.json").json()


@pytest.mark.parametrize("prefix", ["", "/", "search", "/search/", "//search", "/a b", "/a?b", "/%41"])
def test_other_prefixes_are_refused(prefix: str) -> None:
    assert prefix_problem(prefix) == (
        f"{prefix!r} is not a path prefix; it begins with / and does not end with it, as /mergesearch does"
    )

"""The server's delivery of the page: addresses, headers, and the message if the page is not built."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from urllib.parse import urljoin

import httpx
import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from service.types import EventKind
from service.web.pages import STATIC, install_pages

HTML = {"Accept": "text/html,application/xhtml+xml"}
PROBLEM = "application/problem+json"

# Kilobytes of 1,000 bytes, compressed: of the scripts that the first page loads, and of all that a study's page adds.
FIRST_KB, STUDY_KB = 150, 300


@pytest.mark.parametrize("path", ["/", "/studies", "/studies/0123/trials/5", "/nowhere", "/login"])
def test_every_address_of_the_page_has_the_document(http: httpx.Client, path: str) -> None:
    """A browser gets the page at each of its addresses, with the policy that keeps it on this server."""
    answer = http.get(path, headers=HTML)
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/html")
    policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["connect-src"] == "'self'"
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert '<div id="root">' in answer.text


def test_links_of_the_page_lead_to_the_server_root(http: httpx.Client) -> None:
    """The document's base is relative to its address, so that a proxy may have removed a path prefix."""
    for path in ("/", "/studies", "/studies/", "/studies/0123/trials/5", "/studies/a%2Fb"):
        (base,) = re.findall('<base href="(.*?)"', http.get(path, headers=HTML).text)
        assert urljoin(f"https://search.example.org/merge{path}", base) == "https://search.example.org/merge/"


@pytest.mark.parametrize("path", ["/v1/nowhere", "/v1", "/assets/none.js", "/metrics/none"])
def test_addresses_of_the_api_have_no_page(http: httpx.Client, path: str) -> None:
    """An address of the API that does not exist is not found, whatever the client accepts."""
    answer = http.get(path, headers=HTML)
    assert answer.status_code in (404, 503)
    assert "root" not in answer.text


def test_clients_of_the_api_get_problems(http: httpx.Client) -> None:
    """A client that does not ask for HTML gets a problem document, and other methods are refused as before."""
    assert http.get("/nowhere").headers["content-type"] == PROBLEM
    assert http.get("/nowhere").status_code == 404
    assert http.post("/nowhere", headers=HTML).status_code == 404
    assert http.request("HEAD", "/studies", headers=HTML).status_code == 200


def test_files_of_the_page_may_be_kept(http: httpx.Client) -> None:
    """Files whose names have a hash may be kept for a year."""
    script = next((STATIC / "assets").glob("index-*.js"))
    answer = http.get(f"/assets/{script.name}")
    assert answer.headers["cache-control"] == "public, max-age=31536000, immutable"
    assert answer.headers["content-encoding"] == "gzip"


def test_without_a_built_page_there_is_a_hint(tmp_path: Path) -> None:
    """An installation without the built files says how to build them, and where the API's documentation is."""
    app = FastAPI()
    install_pages(app, tmp_path / "none")
    answer = TestClient(app, root_path="/below").get("/below/studies", headers=HTML)
    assert answer.status_code == 200
    assert "make web" in answer.text
    assert 'href="/below/docs"' in answer.text


def test_without_a_built_page_there_are_no_files(tmp_path: Path) -> None:
    """An installation without the built files answers that a file of the page does not exist."""
    app = FastAPI()
    install_pages(app, tmp_path / "none")
    assert TestClient(app).get("/assets/index.js").status_code == 404


def test_sizes(http: httpx.Client) -> None:
    """The first page loads at most 150 kB of scripts, and a study's page at most 300 kB more."""
    first = scripts("index.html")
    study = scripts("src/pages/study/StudyLayout.tsx", "src/pages/study/Overview.tsx") - first
    assert 50 < kilobytes(http, first) <= FIRST_KB
    assert 100 < kilobytes(http, study) <= STUDY_KB


def scripts(*sources: str) -> set[str]:
    """Files of the scripts that the given sources load at once, including all imports."""
    manifest = json.loads((STATIC / ".vite" / "manifest.json").read_text())
    found: set[str] = set()
    remaining = list(sources)
    while remaining:
        entry = manifest[remaining.pop()]
        if entry["file"] not in found:
            found.add(entry["file"])
            remaining += entry.get("imports", ())
    return found


def kilobytes(http: httpx.Client, files: set[str]) -> float:
    """Compressed size of the files in transfer, in kilobytes."""
    total = 0
    for file in files:
        with http.stream("GET", f"/{file}") as answer:
            total += sum(map(len, answer.iter_raw()))
    return total / 1000


def test_the_wheel_has_the_page(tmp_path: Path) -> None:
    """The declared package data of the wheel have the page with its licenses, and none of its sources."""
    root = STATIC.parents[2]
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir"]
    subprocess.run([*command, tmp_path, root], check=True, timeout=300, cwd=tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "service/web/static/index.html" in names
    assert "service/web/static/licenses.md" in names
    assert any(name.startswith("service/web/static/assets/index-") for name in names)
    assert not [name for name in names if "web/app" in name]


def test_kinds_of_events_are_those_of_the_server() -> None:
    """The page subscribes to every kind of event that the server sends."""
    source = (STATIC.parent / "app" / "src" / "api" / "kinds.ts").read_text()
    listed = {
        line.strip(" ',") for part in source.split("[", 1)[1].split("]")[0].splitlines() for line in part.split(",")
    }
    of_streams = {"progress", "end", "start", "added", "removed"}  # not stored as events of a job
    assert listed - {""} == {kind.value for kind in EventKind} | of_streams

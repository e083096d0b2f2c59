"""Fixtures of tests of servers and their clients: a server with one finished study, and the certificates."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import httpx
import pytest

from tests.service.site import Site, serving


@pytest.fixture(scope="session", autouse=True)
def _certificates() -> Iterator[None]:
    """Certificates are read once in each process: every client of httpx would read them, for 40 ms of a core."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("httpx._transports.default.create_ssl_context", cache(httpx.create_ssl_context))
        yield


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with serving(tmp_path_factory.mktemp("site")) as site:
        yield site


@pytest.fixture(scope="session")
def finished(site: Site) -> str:
    """The id of a study that is COMPLETE."""
    writer = site.begin("finished")
    site.finish(writer)
    return writer.job_id

"""A server with one finished study, shared by the tests of everything that talks to servers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.service.site import Site, serving


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

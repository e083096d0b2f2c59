"""Fixtures of tests of servers and their clients: a server with one finished study, certificates, new databases.

The server's application and torch are imported in the fixture that needs them, as most tests of one file do not.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING

import httpx
import pytest

from tests.service.forked_workers import ForkingContext
from tests.service.new_databases import copying

if TYPE_CHECKING:
    from tests.service.site import Site

# Modules whose tests are about the migrations, which run in them for each new database.
OF_MIGRATIONS = ("test_upgrade.py", "test_migrate_database.py", "test_new_databases.py")


@pytest.fixture(scope="session", autouse=True)
def _certificates() -> Iterator[None]:
    """Read certificates once in each process: otherwise every client of httpx and every server reads them.

    That takes 40 ms of a core.
    """
    once = cache(httpx.create_ssl_context)
    with pytest.MonkeyPatch.context() as patch:
        for module in ("httpx", "httpx._transports.default"):
            patch.setattr(f"{module}.create_ssl_context", once)
        yield


@pytest.fixture(scope="module", autouse=True)
def _new_databases(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Create new SQLite databases as copies of a migrated one, except in tests of migrations."""
    with pytest.MonkeyPatch.context() as patch:
        if request.path.name not in OF_MIGRATIONS:
            template = tmp_path_factory.getbasetemp() / "migrated.db"
            patch.setattr("service.store.database.upgrade", copying(template))
        yield


@pytest.fixture(scope="session")
def _forks(_cache_of_findings: None) -> ForkingContext:
    return ForkingContext()


@pytest.fixture(scope="module", autouse=True)
def _forked_workers(request: pytest.FixtureRequest, _forks: ForkingContext) -> Iterator[None]:
    """Let worker processes begin as forks of one process, except in the tests of worker processes."""
    with pytest.MonkeyPatch.context() as patch:
        if request.path.name != "test_worker_process.py":
            patch.setattr("service.worker_process.CONTEXT", _forks)
        yield


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    from tests.service.site import serving

    with serving(tmp_path_factory.mktemp("site")) as site:
        yield site


@pytest.fixture(scope="session")
def finished(site: Site) -> str:
    """The id of a study that is COMPLETE."""
    writer = site.begin("finished")
    site.finish(writer)
    return writer.job_id

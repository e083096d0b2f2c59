"""Creation of the HTTP application from its parts, and the start and stop of its services."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from functools import cache
from importlib.metadata import version
from pathlib import Path

from fastapi import APIRouter, FastAPI
from fastapi.concurrency import run_in_threadpool

from service.api.dependencies import Services
from service.api.event_stream import EventHub
from service.api.export_queue import Exports
from service.api.limits.artifacts import ArtifactQuota
from service.api.limits.exports import ExportLimits
from service.api.limits.headers import SecureHeaders
from service.api.limits.origin import CheckOrigin
from service.api.limits.rates import RateLimits
from service.api.openapi import install_docs, install_openapi
from service.api.permissions import Guard, check_rules
from service.api.prefix import BelowPrefix
from service.api.preflight_process import Preflight, PreflightProcess, default_access
from service.api.problems import install_handlers, refusals
from service.api.protocols import Cluster
from service.api.record_cache import RunRecords
from service.api.regular_cleaning import clean_regularly
from service.api.request_counter import CountRequests, RequestCounter
from service.api.routes import accounts as account_routes
from service.api.routes import exports, finetunes, jobs, login, operations, results
from service.api.sample_mover import move_old_samples
from service.auth.authenticator import Authenticator
from service.auth.logins import Logins
from service.auth.settings import OidcSettings
from service.disk import artifacts_dir
from service.jobs.base import RequestContext
from service.retention.cleaning import Cleaner
from service.retention.limits import Limit
from service.store import Store
from service.store.accounts import AccountStore
from service.store.artifacts import ArtifactStore

__all__ = ["create_app"]

DESCRIPTION = "Searches for the best merges of language models. Errors are problem details (RFC 9457)."


def create_app(
    store: Store,
    *,
    cluster: Cluster,
    data_dir: Path,
    preflight: Preflight | None = None,
    hosts: Iterable[str] = (),
    prefix: str = "",
    keep: ExportLimits | None = None,
    files: str | Path | None = None,
    artifact_quota_bytes: int | None = None,
    retention: Mapping[str, Limit] | None = None,
    has_accounts: bool = True,
    rates: RateLimits | None = None,
    has_open_metrics: bool = False,
    oidc: OidcSettings | None = None,
) -> FastAPI:
    """Create the server's FastAPI application, which starts and stops `cluster`; the caller closes `store`.

    Args:
        store: Database of jobs and results.
        cluster: The cluster on which drivers work on jobs.
        data_dir: Directory of exported models, artifacts and the files of jobs.
        preflight: Checks of submitted jobs; by default a PreflightProcess with the files of `default_access`.
        hosts: Accepted values of the header Host, besides loopback names and the address of the server.
        prefix: Path prefix below which the routes are served too, such as `/mergesearch`; empty for none.
        keep: Limits on the age and total size of exported models; by default `ExportLimits()`.
        files: Location of artifacts: a directory, or the URL of an object store; by default in `data_dir`.
        artifact_quota_bytes: Bytes that experts and policies may take; by default a tenth of the disk, or no limit in
            an object store.
        retention: Limits on the data that are kept of ended jobs, by kind; by default all data are kept.
        has_accounts: Whether requests need a token once the database has a user.
        rates: Limits on the number of requests; by default `RateLimits()`.
        has_open_metrics: Whether everybody may read the metrics, also with accounts.
        oidc: The identity provider with which browsers log in; by default they cannot.
    """
    requests = RequestCounter()
    accounts = AccountStore(store)
    authenticator = Authenticator(accounts, is_on=has_accounts)
    artifacts = ArtifactStore(store, files or artifacts_dir(data_dir))
    services = Services(
        store=store,
        data_dir=data_dir,
        cluster=cluster,
        preflight=preflight or PreflightProcess(RequestContext(default_access(data_dir), store.url, data_dir, files)),
        exports=Exports(store, data_dir, keep=keep, artifacts=artifacts, is_leader=cluster.is_leader),
        artifacts=artifacts,
        quota=ArtifactQuota(store, artifacts, artifact_quota_bytes),
        hub=EventHub(store),
        records=RunRecords(store),
        requests=requests,
        accounts=accounts,
        authenticator=authenticator,
        logins=None if oidc is None else Logins(accounts, oidc),
    )

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        cluster.start()
        services.preflight.start()
        services.exports.start()
        services.hub.start()
        moving = asyncio.create_task(move_old_samples(store), name="samples of earlier versions")
        cleaner = Cleaner(store, data_dir, artifacts, retention or {}, delete_job=services.exports.delete_job_now)
        cleaning = asyncio.create_task(clean_regularly(cleaner, is_leader=cluster.is_leader), name="retention")
        using = asyncio.create_task(authenticator.record_uses(), name="last uses of tokens")
        try:
            yield
        finally:
            moving.cancel()
            cleaning.cancel()
            using.cancel()
            await run_in_threadpool(services.hub.stop)
            await services.exports.stop()
            await run_in_threadpool(services.preflight.stop)
            await run_in_threadpool(cluster.stop)

    app = FastAPI(
        title="mergesearch",
        version=version("mergesearch"),
        description=DESCRIPTION,
        lifespan=lifespan,
        redirect_slashes=False,
        docs_url=None,  # FastAPI's own page loads Swagger UI from the web: see `install_docs`
        redoc_url=None,
    )
    app.state.services = services
    app.state.guard = Guard(authenticator, rates or RateLimits(), has_open_metrics, has_login=oidc is not None)
    app.add_middleware(CheckOrigin, hosts=tuple(hosts))
    app.add_middleware(CountRequests, counter=requests)
    app.add_middleware(SecureHeaders)
    if prefix:
        app.add_middleware(BelowPrefix, prefix=prefix)  # the last one added gets requests first
    install_handlers(app)
    install_openapi(app)
    app.router.routes.extend(_router().routes)
    check_rules(app.routes)
    install_docs(app)
    return app


@cache
def _router() -> APIRouter:
    """Router of all API routes, without those of the documentation.

    It is created once per process, because that takes 0.2 s.
    """
    router = APIRouter()
    for part in (
        *jobs.routers(),
        finetunes.router,
        results.router,
        exports.router,
        account_routes.router,
        login.router,
    ):
        router.include_router(part, prefix="/v1", responses=refusals(401, 403, 429))
    router.include_router(operations.router)
    return router

"""Creation of the HTTP application from its parts, and the start and stop of its services."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Depends, FastAPI
from starlette.middleware.gzip import DEFAULT_EXCLUDED_CONTENT_TYPES, GZipMiddleware

from service.api.dependencies import Services
from service.api.event_stream import EventHub
from service.api.export_queue import Exports
from service.api.importances import Importances
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
from service.api.query import refuse_repetitions
from service.api.ray_dashboard.forwarding import DashboardProxy
from service.api.record_cache import RunRecords, program_version
from service.api.regular_cleaning import clean_regularly
from service.api.request_counter import CountRequests, RequestCounter
from service.api.request_tracing import TraceRequests
from service.api.routes import accounts as account_routes
from service.api.routes import (
    checks,
    cluster,
    events,
    exports,
    finetunes,
    jobs,
    login,
    models,
    operations,
    plots,
    queue,
    ray_dashboard,
    results,
    samples,
    served,
    trials,
)
from service.api.routes import notifications as notification_routes
from service.api.sample_mover import move_old_samples
from service.api.team_bytes import TeamBytes
from service.auth.authenticator import Authenticator
from service.auth.logins import Logins
from service.auth.settings import OidcSettings
from service.disk import artifacts_dir
from service.jobs.base import RequestContext
from service.notifications.notifier import Notifier
from service.notifications.settings import NotificationSettings
from service.retention.cleaning import Cleaner
from service.retention.limits import Limit
from service.store import Store
from service.store.accounts import AccountStore
from service.store.artifacts import ArtifactStore
from service.store.exports import ExportStore
from service.store.notifications import NotificationStore
from service.store.steering import SteeringStore
from service.threads import Work, in_thread, limit_reads
from service.web.pages import install_pages
from workers.telemetry import tracing

__all__ = ["create_app", "openapi_document"]

# Responses of fewer bytes are sent as they are. Higher levels take twice the time for a few percent.
MIN_COMPRESSED = 1000
GZIP_LEVEL = 5

# Event streams must not wait for a compressor; models and archives do not become smaller.
NOT_COMPRESSED = (*DEFAULT_EXCLUDED_CONTENT_TYPES, "application/octet-stream", "application/x-tar")

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
    has_open_dashboard: bool = False,
    oidc: OidcSettings | None = None,
    notifications: NotificationSettings | None = None,
) -> FastAPI:
    """Create the server's FastAPI application, which starts and stops `cluster`; the caller closes `store`.

    Args:
        store: Database of jobs (studies and fine-tunings) and their results.
        cluster: The cluster that runs the drivers, which are the processes that work on jobs.
        data_dir: Directory of exported models, artifacts and the files of jobs.
        preflight: Checks of submitted jobs. By default they run in a PreflightProcess, and jobs may read the files of
            `service.api.preflight_process.default_access()`.
        hosts: Accepted values of the header Host, besides loopback names and the address of the server.
        prefix: Path prefix below which the routes are served too, such as `/mergesearch`; empty for none.
        keep: Limits on the age and total size of exported models; by default `ExportLimits()`.
        files: Location of artifacts (trained experts and policies): a directory, or the URL of an object store; by
            default a directory in `data_dir`.
        artifact_quota_bytes: Bytes that artifacts may take; by default a tenth of the disk, or no limit in an object
            store.
        retention: Limits on the data that are kept of ended jobs, keyed by kind of data; by default all data are kept.
        has_accounts: Whether requests need a token once the database has a user.
        rates: Limits on the number of requests; by default `RateLimits()`.
        has_open_metrics: Whether everybody may read the metrics even if the server has accounts.
        has_open_dashboard: Whether every user may read Ray's dashboard, which shows the jobs of all teams.
        oidc: The identity provider with which users log in in a browser; by default, browsers cannot log in.
        notifications: Settings of the messages to users about their jobs; by default, messages go to public webhooks
            only, and no e-mails are sent.
    """
    requests = RequestCounter()
    notifications = notifications or NotificationSettings()
    public_url = notifications.public_url if oidc is None else oidc.public_url or notifications.public_url
    accounts = AccountStore(store)
    authenticator = Authenticator(accounts, is_on=has_accounts)
    guard = Guard(
        authenticator, rates or RateLimits(), has_open_metrics, has_open_dashboard, has_login=oidc is not None
    )
    artifacts = ArtifactStore(store, files or artifacts_dir(data_dir))
    exports_queue = Exports(store, data_dir, keep=keep, artifacts=artifacts, is_leader=cluster.is_leader)
    records = RunRecords(store)
    services = Services(
        store=store,
        steering=SteeringStore(store),
        stored_exports=ExportStore(store),
        data_dir=data_dir,
        cluster=cluster,
        preflight=preflight or PreflightProcess(RequestContext(default_access(data_dir), store.url, data_dir, files)),
        exports=exports_queue,
        artifacts=artifacts,
        quota=ArtifactQuota(store, artifacts, artifact_quota_bytes),
        team_bytes=TeamBytes(store, accounts, artifacts, exports_queue),
        hub=EventHub(store),
        records=records,
        importances=Importances(store, records),
        requests=requests,
        accounts=accounts,
        authenticator=authenticator,
        guard=guard,
        dashboard=DashboardProxy(cluster, public_url=public_url),
        logins=None if oidc is None else Logins(accounts, oidc),
        notifications=NotificationStore(store),
        notifier=Notifier(store, cluster, notifications, has_accounts=has_accounts),
    )

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        limit_reads()
        cluster.start()
        services.preflight.start()
        services.exports.start()
        services.hub.start()
        services.notifier.start()
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
            await in_thread(Work.BACKGROUND, services.notifier.stop)
            await in_thread(Work.BACKGROUND, services.hub.stop)
            await services.dashboard.stop()
            await services.exports.stop()
            await in_thread(Work.BACKGROUND, services.preflight.stop)
            await in_thread(Work.BACKGROUND, services.importances.stop)
            await in_thread(Work.BACKGROUND, cluster.stop)

    app = _application(lifespan)
    app.state.services = services
    app.state.guard = guard
    app.add_middleware(
        GZipMiddleware, minimum_size=MIN_COMPRESSED, compresslevel=GZIP_LEVEL, exclude_content_types=NOT_COMPRESSED
    )
    app.add_middleware(CheckOrigin, hosts=tuple(hosts))
    app.add_middleware(CountRequests, counter=requests)
    app.add_middleware(SecureHeaders)
    if tracing.is_on():
        app.add_middleware(TraceRequests)
    if prefix:
        app.add_middleware(BelowPrefix, prefix=prefix)  # the last one added gets requests first
    install_handlers(app)
    install_docs(app)
    install_pages(app)
    return app


def openapi_document() -> dict[str, Any]:
    """OpenAPI document of the server's routes, made without starting a server."""
    return _application(None).openapi()


def _application(lifespan: Callable[[FastAPI], AbstractAsyncContextManager[None]] | None) -> FastAPI:
    """Create an application with the API's routes and their OpenAPI document, without middleware."""
    app = FastAPI(
        title="mergesearch",
        version=program_version(),
        description=DESCRIPTION,
        lifespan=lifespan,
        redirect_slashes=False,
        docs_url=None,  # FastAPI's own page loads Swagger UI from the web: see `install_docs`
        redoc_url=None,
    )
    install_openapi(app)
    app.router.routes.extend(_router().routes)
    return app


@cache
def _router() -> APIRouter:
    """Router of all API routes except the routes of the documentation.

    The router is created once per process, because its creation takes 0.2 s. Raises TypeError if a route declares no
    access rule.
    """
    router = APIRouter()
    for part in (
        *jobs.routers(),
        checks.router,
        cluster.router,
        events.router,
        models.router,
        finetunes.router,
        trials.router,
        samples.router,
        results.router,
        plots.router,
        exports.router,
        queue.router,
        served.router,
        account_routes.router,
        login.router,
        notification_routes.router,
    ):
        router.include_router(
            part, prefix="/v1", responses=refusals(401, 403, 429), dependencies=[Depends(refuse_repetitions)]
        )
    router.include_router(operations.router)
    router.include_router(ray_dashboard.router)
    check_rules(router.routes)
    return router

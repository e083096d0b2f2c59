"""Creates the HTTP application from its parts, and starts and stops its services."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from importlib.metadata import version
from pathlib import Path

from fastapi import Depends, FastAPI
from fastapi.concurrency import run_in_threadpool

from service.api.dependencies import Services
from service.api.event_stream import EventHub
from service.api.export_queue import Exports
from service.api.limits.artifacts import ArtifactQuota
from service.api.limits.exports import ExportLimits
from service.api.limits.origin import CheckOrigin
from service.api.metrics import CountRequests, RequestCounter
from service.api.openapi import install_docs, install_openapi
from service.api.preflight_process import Preflight, PreflightProcess, default_access
from service.api.problems import install_handlers
from service.api.protocols import Cluster
from service.api.record_cache import RunRecords
from service.api.requests import principal
from service.api.routes import exports, finetunes, jobs, operations, results
from service.disk import artifacts_dir
from service.jobs.base import RequestContext
from service.store import Store
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
    keep: ExportLimits | None = None,
    files: str | Path | None = None,
    artifact_quota_bytes: int | None = None,
) -> FastAPI:
    """Create the server's application, which starts and stops `cluster`; the caller closes `store`.

    Exported models are kept in `data_dir` as long as `keep` says (None: the defaults). By default `preflight` is a
    PreflightProcess, and jobs may read what `default_access` says. `hosts` are names of the server besides the loopback
    names and its address. Experts and policies are stored at `files` (None: in `data_dir`), where they may take
    `artifact_quota_bytes` (None: a tenth of the disk).
    """
    requests = RequestCounter()
    artifacts = ArtifactStore(store, files or artifacts_dir(data_dir))
    services = Services(
        store=store,
        data_dir=data_dir,
        cluster=cluster,
        preflight=preflight or PreflightProcess(RequestContext(default_access(data_dir), store.url, data_dir, files)),
        exports=Exports(store, data_dir, keep=keep),
        artifacts=artifacts,
        quota=ArtifactQuota(store, artifacts, artifact_quota_bytes),
        hub=EventHub(store),
        records=RunRecords(store),
        requests=requests,
    )

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        cluster.start()
        services.preflight.start()
        services.exports.start()
        try:
            yield
        finally:
            await services.exports.stop()
            await run_in_threadpool(services.preflight.stop)
            await run_in_threadpool(cluster.stop)

    app = FastAPI(
        title="mergesearch",
        version=version("mergesearch"),
        description=DESCRIPTION,
        lifespan=lifespan,
        redirect_slashes=False,
        docs_url=None,  # FastAPI's own page loads Swagger UI from the web: see `docs`
        redoc_url=None,
        dependencies=[Depends(principal)],
    )
    app.state.services = services
    app.add_middleware(CheckOrigin, hosts=tuple(hosts))
    app.add_middleware(CountRequests, counter=requests)  # the last one added gets requests first
    install_handlers(app)
    install_openapi(app)
    for router in (*jobs.routers(), finetunes.router, results.router, exports.router):
        app.include_router(router, prefix="/v1")
    app.include_router(operations.router)
    install_docs(app)
    return app

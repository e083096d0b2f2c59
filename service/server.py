"""`mergesearch serve`: runs the HTTP server in this process, and Ray in separate processes.

The server answers requests while Ray is still starting. All its state is in the database and the data directory, so a
server that was killed continues when it is restarted.
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import os
import signal
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from service.api.limits.exports import DAY_S, ExportLimits
from service.api.limits.rates import RateLimits
from service.disk import artifacts_dir, locked, single_server
from service.engine_machines import stated_machines
from service.errors import Conflict, InUse
from service.jobs.base import RequestContext
from service.jobs.registry import KINDS, kind_of
from service.open_files import raise_limit
from workers.file_access import FileAccess
from workers.object_store import object_url_problem
from workers.telemetry import logs, tracing

if TYPE_CHECKING:
    from sqlalchemy import URL

    from service.auth.settings import OidcSettings
    from service.notifications.settings import NotificationSettings
    from service.retention.limits import Limit
    from service.store import Store
    from service.types import JobRecord

__all__ = ["KEEP_ALIVE_S", "alone", "bind", "page_of", "serve"]

logger = logging.getLogger(__name__)

# Seconds for requests to finish once the server stops; event streams end then.
SHUTDOWN_S = 5

# Seconds for which an idle connection is kept. Clients and proxies keep theirs for up to 60 s (nginx); a server that
# closes earlier than they do resets requests that they send at that moment.
KEEP_ALIVE_S = 75


def serve(
    data_dir: Path,
    *,
    database: str | None = None,
    host: str = "127.0.0.1",
    port: int = 8080,
    dashboard_host: str = "127.0.0.1",
    dashboard_port: int | None = None,
    allow_dirs: Sequence[Path] = (),
    trust_dirs: Sequence[Path] = (),
    allow_urls: Sequence[str] = (),
    allow_judges: Sequence[str] = (),
    allow_hosts: Sequence[str] = (),
    prefix: str = "",
    export_days: float = 7.0,
    export_quota_bytes: int | None = None,
    files: str | None = None,
    artifact_quota_bytes: int | None = None,
    keep: Mapping[str, Limit] | None = None,
    has_accounts: bool = True,
    requests_per_s: float | None = None,
    has_open_metrics: bool = False,
    has_open_dashboard: bool = False,
    oidc: OidcSettings | None = None,
    max_running: int | None = None,
    notifications: NotificationSettings | None = None,
    log_format: str | None = None,
    has_access_log: bool = False,
) -> None:
    """Run the HTTP server until SIGTERM or SIGINT.

    Args:
        data_dir: Directory of the server's files, and by default of its database.
        database: URL of the database; by default the URL that `service.store.database_url` finds.
        host: Address to listen on.
        port: Port to listen on; 0 is any free port.
        dashboard_host: Address of Ray's dashboard, if the server starts Ray.
        dashboard_port: Port of Ray's dashboard; by default 8265, or the next free port.
        allow_dirs: Directories whose files jobs may read; by default the data directory, the working directory and the
            hub's cache.
        trust_dirs: Further directories whose files jobs may read; task files there may also name Python functions.
        allow_urls: Folders of object stores in which jobs may name models.
        allow_judges: URLs of endpoints of language models that jobs may name as judges of benchmarks' completions.
        allow_hosts: Names of the server besides the loopback names, `host` and the address that it listens on.
        prefix: Path prefix below which the routes are served too, for a proxy that does not remove the prefix; empty
            for none.
        export_days: Days after which exports are removed.
        export_quota_bytes: Size of all exports above which the oldest exports are removed before their time; by default
            a tenth of the disk.
        files: Location of trained experts and policies: a directory or the URL of an object store; by default in the
            data directory.
        artifact_quota_bytes: Size of all experts and policies beyond which fine-tunings are refused; by default a tenth
            of the disk, or no limit in an object store.
        keep: Limits on the data that are kept of ended jobs, keyed by kind of data; by default all data are kept.
        has_accounts: Whether requests need a token once the database has a user.
        requests_per_s: Requests per second that are accepted from each token or, without accounts, from each network
            address; None uses the default limit.
        has_open_metrics: Whether everybody may read the metrics.
        has_open_dashboard: Whether every user may read Ray's dashboard, which shows the jobs of all teams.
        oidc: The identity provider with which browsers log in; by default, browsers cannot log in.
        max_running: Number of jobs that run at the same time; by default MAX_RUNNING of the reconciler.
        notifications: Settings of the messages to users about their jobs; by default, messages go to public webhooks
            only, and no e-mails are sent.
        log_format: Format of the logs of the server and of the drivers and replicas of its jobs, "text" or "json"; by
            default the value of the variable MERGESEARCH_LOG_FORMAT, else "text".
        has_access_log: Whether a line is logged for each request.

    Raises:
        Conflict: The server has no user, and other machines may reach it; options contradict each other; the
            port or the data directory is taken, the database or `files` cannot be used, or the variable
            MERGESEARCH_ENGINE_NODES or MERGESEARCH_LOG_FORMAT cannot be read.
    """
    import uvicorn

    from service.api.app import create_app
    from service.api.preflight_process import PreflightProcess, default_access
    from service.cluster.reconciler import MAX_RUNNING, RayCluster
    from service.store import Store
    from service.store.blobs import check_location
    from service.store.database_url import VARIABLE, database_url, has_password, parse_url, remember

    _start_logs(log_format)
    if problem := raise_limit():
        logger.warning("%s", problem)
    tracing.start_tracing("server")
    data_dir = data_dir.resolve()
    if oidc is not None and not has_accounts:
        raise Conflict(f"--oidc-issuer {oidc.issuer}: has no effect with --no-accounts; give one of the two")
    readable, trusted = _directories("--allow-dir", allow_dirs), _directories("--trust-dir", trust_dirs)
    access = FileAccess(
        readable or default_access(data_dir).readable, trusted, _urls(allow_urls), _judges(allow_judges)
    )
    if database is not None and has_password(parse_url(database)):
        logger.warning("every user of this machine can read the password in --database; give the URL in %s", VARIABLE)
    stated_machines()
    address = database_url(data_dir, database)
    with alone(data_dir, address), bind(host, port) as listener:
        check_location(files or artifacts_dir(data_dir))
        store = Store(address)
        try:
            protection = _protection(store, host, has_accounts=has_accounts)
            # A Ray of others has the variable for its drivers; engines there may read the data directory.
            by_variable = not database and bool(os.environ.get(VARIABLE)) and "RAY_ADDRESS" in os.environ
            remember(data_dir, address, by_variable=by_variable)
            cluster = RayCluster(
                store,
                data_dir,
                files=files,
                dashboard_host=dashboard_host,
                dashboard_port=dashboard_port,
                places=max_running or MAX_RUNNING,
                demand_of=lambda job: kind_of(job.kind).demand(job),
                time_left_of=lambda job: kind_of(job.kind).time_left_s(job),
                placeless=[kind.name for kind in KINDS.values() if not kind.takes_place],
                page_of=partial(page_of, public_url=_public_url(oidc, notifications)),
            )
            app = create_app(
                store,
                cluster=cluster,
                data_dir=data_dir,
                preflight=PreflightProcess(RequestContext(access, store.url, data_dir, files), cluster=cluster.calls),
                hosts=(host, *allow_hosts, *_public_hosts(notifications)),
                prefix=prefix,
                keep=ExportLimits(export_days * DAY_S, export_quota_bytes),
                files=files,
                artifact_quota_bytes=artifact_quota_bytes,
                retention=keep,
                has_accounts=has_accounts,
                rates=None if requests_per_s is None else RateLimits.of(requests_per_s),
                has_open_metrics=has_open_metrics,
                has_open_dashboard=has_open_dashboard,
                oidc=oidc,
                notifications=notifications,
            )
            url = "http://{}:{}".format(*listener.getsockname()[:2])
            places = f"data in {data_dir}, database {store.place}"
            _announce(f"{url}, documentation under /docs, {places}")
            _announce(protection)
            if oidc is not None:
                place = f"{oidc.public_url or url + prefix}/v1/login"
                _announce(f"browsers log in at {place}, with {oidc.issuer}")
            config = uvicorn.Config(
                app,
                log_config=None,
                log_level="warning",
                timeout_graceful_shutdown=SHUTDOWN_S,
                timeout_keep_alive=KEEP_ALIVE_S,
            )
            if has_access_log:
                access_log = logging.getLogger("uvicorn.access")
                access_log.setLevel(logging.INFO)
                access_log.addFilter(logs.AccessFields())
            server = uvicorn.Server(config)
            for number in (signal.SIGTERM, signal.SIGINT):  # uvicorn raises them again once it has shut down
                signal.signal(number, lambda *_: setattr(server, "should_exit", True))
            server.run(sockets=[listener])
        finally:
            store.close()
            tracing.stop_tracing()


def _start_logs(log_format: str | None) -> None:
    """Start the logs of this process in `log_format`; None is the format that the environment names.

    The format is put into the environment, from which processes of jobs take it. Raises Conflict if there is no such
    format.
    """
    if log_format is not None:
        os.environ[logs.VARIABLE] = log_format
    if (chosen := os.environ.get(logs.VARIABLE, "text")) not in logs.FORMATS:
        raise Conflict(f"{logs.VARIABLE}={chosen}: no such format of logs; use {' or '.join(logs.FORMATS)}")
    logs.log_to_stderr()


def _announce(text: str) -> None:
    """Print `text`, such as the server's address, for users of a terminal; if logs are JSON, write it as a log line."""
    if logs.is_json():
        logger.info("mergesearch: %s", text)
    else:
        print(f"mergesearch: {text}", flush=True)


def _protection(store: Store, host: str, *, has_accounts: bool) -> str:
    """Text for the operator that says who may use a server listening on `host`.

    `store` is the server's database. `has_accounts` says whether the server uses accounts. Raises Conflict if the
    server uses accounts, the database has no user yet, and other machines can reach `host`.
    """
    from service.store.accounts import AccountStore

    if not has_accounts:
        return "no accounts (--no-accounts): everybody who reaches this address may do everything"
    if AccountStore(store).has_users():
        return "requests need a token: `mergesearch tokens create`"
    if not _is_loopback(host):
        raise Conflict(
            f"--host {host}: others can reach this address, and the database {store.place} has no user; add an "
            "administrator (`mergesearch users add NAME --admin`), or say --no-accounts to let everybody do everything"
        )
    return "no accounts: every user of this machine may do everything; `mergesearch users add` adds an administrator"


def page_of(job: JobRecord, *, public_url: str | None) -> str | None:
    """URL of a job's page on the server that users reach at `public_url`; None if `public_url` is None."""
    return None if public_url is None else f"{public_url.rstrip('/')}{kind_of(job.kind).page_of(job)}"


def _public_url(oidc: OidcSettings | None, notifications: NotificationSettings | None) -> str | None:
    """URL under which users reach the server, from the settings that state it; None if neither does."""
    given = [settings.public_url for settings in (oidc, notifications) if settings is not None]
    return next((url for url in given if url is not None), None)


def _public_hosts(notifications: NotificationSettings | None) -> tuple[str, ...]:
    """The host, with its port if given, of the URL under which users reach the server; empty if no such URL is set."""
    url = None if notifications is None else notifications.public_url
    return () if url is None else (urlsplit(url).netloc,)


def _is_loopback(host: str) -> bool:
    """Whether only programs of this machine can reach the address `host`. Raises Conflict if `host` is no address."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError) as error:
        raise Conflict(f"--host {host}: no such address: {error}") from error
    return all(ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback for *_, address in found)


@contextmanager
def alone(data_dir: Path, address: URL, *, is_shared: bool | None = None) -> Iterator[None]:
    """Context in which this server holds the locks of its data directory and its database.

    `address` is the URL of the database. If `is_shared` is True, other servers may share the data directory and the
    database at the same time. The default, None, shares a PostgreSQL database, and does not share an SQLite file.

    Raises:
        InUse: Another server uses the data directory or the database and does not share it, or it uses the data
            directory together with another database.
    """
    from service.store.database_url import remembered_place, shown

    is_postgresql = address.get_backend_name() == "postgresql"
    is_shared = is_postgresql if is_shared is None else is_shared
    with ExitStack() as stack:
        is_first = stack.enter_context(locked(data_dir, is_shared=is_shared))
        if not is_postgresql:
            stack.enter_context(single_server(Path(str(address.database))))
        elif is_shared and not is_first and (before := remembered_place(data_dir)) != shown(address):
            raise InUse(f"{data_dir}: a server with another database, {before}, uses this directory")
        yield


def _directories(option: str, directories: Sequence[Path]) -> tuple[str, ...]:
    """Check that `directories` exist, and return their absolute paths.

    The directories are the values of the command's option `option`. Raises Conflict, with the option's name, if one of
    them is not a directory.
    """
    for directory in directories:
        if not directory.is_dir():
            raise Conflict(f"{option} {directory}: is not a directory; give one that exists")
    return tuple(str(directory.resolve()) for directory in directories)


def _urls(urls: Sequence[str]) -> tuple[str, ...]:
    """Check the values `urls` of the command's option --allow-url, and return them unchanged.

    Raises Conflict if a value is not the URL of an object store.
    """
    for url in urls:
        if problem := object_url_problem(url):
            raise Conflict(f"--allow-url {problem}")
    return tuple(urls)


def _judges(urls: Sequence[str]) -> tuple[str, ...]:
    """Check the values `urls` of the option --allow-judge: endpoints of models that may judge completions.

    Returns the values. Raises Conflict if a value is not the URL of an endpoint.
    """
    from search_spaces.study.judge import JudgeSpec

    for url in urls:
        for _, problem in JudgeSpec(url=url, model="any").problems():
            raise Conflict(f"--allow-judge {problem}")
    return tuple(urls)


def bind(host: str, port: int) -> socket.socket:
    """Create a socket that listens at the address `host` and the port `port`; port 0 is any free port.

    Raises Conflict if the address cannot be used.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (socket.gaierror, OverflowError) as error:
        raise Conflict(f"--host {host} --port {port}: no such address: {error}") from error
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(1024)
    except OSError as error:
        listener.close()
        is_taken = error.errno == errno.EADDRINUSE
        reason = "in use by another program; give another --port" if is_taken else f"not available: {error.strerror}"
        raise Conflict(f"port {port} of {host}: {reason}") from error
    return listener

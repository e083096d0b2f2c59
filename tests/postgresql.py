"""A PostgreSQL server for tests: on a unix socket, as an unprivileged user, without waiting for the disk."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import sqlalchemy as sa

from service.store import Store

__all__ = ["PASSWORD", "PostgreSQL", "postgresql_server"]

USER = "tests"
# No message may show it.
PASSWORD = "pass@word/4711"
START_S = 60.0
# Characters of the path of the directory in which the server has its own.
MAX_PLACE = 60

# A message among the server's last log lines if processes of a killed server still hold its memory.
SHARED_MEMORY = "pre-existing shared memory block"

SETTINGS = """
listen_addresses = ''
fsync = off
full_page_writes = off
shared_buffers = 32MB
max_connections = 100
"""


class PostgreSQL:
    """One server, with its files in `directory`."""

    def __init__(self, programs: Path, directory: Path, user: str | None) -> None:
        self._programs = programs
        self._directory = directory
        self._user = user
        self._data = directory / "data"
        self._process: subprocess.Popen[bytes] | None = None
        # The server ends with the thread that started it.
        self._starter = ThreadPoolExecutor(1)
        # One connection, which is replaced after the server was restarted: new ones, and new engines, take long.
        url = sa.make_url(self.url("postgres")).set(drivername="postgresql+psycopg")
        self._administration = sa.create_engine(url, isolation_level="AUTOCOMMIT", pool_size=1, pool_pre_ping=True)
        (directory / "password").write_text(PASSWORD + "\n")
        for place in (directory, directory / "password"):
            if user is not None:
                shutil.chown(place, user)
        # The rules of a language, by which PostgreSQL sorts unless columns say otherwise.
        locale = ["--encoding=UTF8", "--locale=C.UTF-8", "--locale-provider=icu", "--icu-locale=en-US"]
        access = [f"--username={USER}", "--auth=scram-sha-256", f"--pwfile={directory / 'password'}"]
        self._call("initdb", "-D", str(self._data), "--no-sync", *locale, *access)
        with (self._data / "postgresql.conf").open("a") as file:
            file.write(f"{SETTINGS}unix_socket_directories = '{directory}'\n")

    @property
    def log(self) -> str:
        return (self._directory / "log").read_text()

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """Process id of the postmaster."""
        return int((self._data / "postmaster.pid").read_text().split()[0])

    def start(self) -> None:
        """Start the server, and wait until it answers."""
        deadline = time.monotonic() + START_S
        self._launch()
        while True:
            try:
                with self._administration.connect():
                    return
            except sa.exc.OperationalError:
                assert self._process is not None
                assert time.monotonic() < deadline, self.log
                time.sleep(0.02)
                if self._process.poll() is not None:
                    # Processes of a server that was killed may outlive it for a moment, with its memory.
                    assert any(SHARED_MEMORY in line for line in self.log.splitlines()[-4:]), self.log
                    self._launch()

    def _launch(self) -> None:
        (self._data / "postmaster.pid").unlink(missing_ok=True)  # of a server that was killed
        command = self._command("postgres", "-D", str(self._data))
        with (self._directory / "log").open("ab") as log:
            self._process = self._starter.submit(subprocess.Popen, command, stdout=log, stderr=log).result()

    def stop(self, *, at_once: bool = False) -> None:
        """Stop the server and end its connections. `at_once` is quicker, for a server that is not started again."""
        if self._process is not None:
            os.kill(self.pid, signal.SIGQUIT if at_once else signal.SIGINT)
            self._process.wait(timeout=START_S)
            self._process = None

    def kill(self) -> None:
        """Kill the postmaster and all its processes by SIGKILL."""
        assert self._process is not None
        children = subprocess.run(["ps", "--ppid", str(self.pid), "-o", "pid="], capture_output=True, text=True)
        for process in (self.pid, *map(int, children.stdout.split())):
            try:
                os.kill(process, signal.SIGKILL)
            except ProcessLookupError:  # it ended with the postmaster
                continue
        self._process.wait(timeout=START_S)
        self._process = None

    def listen(self, network: str) -> None:
        """Let clients of `network` connect by TCP too, to any address of this machine; the server is restarted."""
        with (self._data / "postgresql.conf").open("a") as file:
            file.write("listen_addresses = '0.0.0.0'\n")
        with (self._data / "pg_hba.conf").open("a") as file:
            file.write(f"host all all {network} scram-sha-256\n")
        self.stop()
        self.start()

    def create(self, *, template: str | None = None, encoding: str | None = None) -> str:
        """Create a database, empty or a copy of `template`, and return its URL."""
        name = f"test_{uuid.uuid4().hex}"
        options = f" TEMPLATE {template}" if template else ""
        if encoding:
            options = f" TEMPLATE template0 ENCODING '{encoding}' LOCALE_PROVIDER libc LC_COLLATE 'C' LC_CTYPE 'C'"
        with self._administration.connect() as connection:
            version = connection.dialect.server_version_info or ()
            if template and version >= (15,) and self._directory.is_relative_to("/dev/shm"):
                options += " STRATEGY FILE_COPY"  # in memory a quarter of the time, on a disk four times as much
            connection.execute(sa.text(f"CREATE DATABASE {name}{options}"))
        return self.url(name)

    def migrated(self) -> str:
        """Create a database that has the newest tables, and return its URL."""
        if not hasattr(self, "_template"):
            url = sa.make_url(self.create())
            Store(url).close()
            self._template = url.database
        return self.create(template=self._template)

    def drop(self, url: str) -> None:
        """Drop a database; its connections end."""
        with self._administration.connect() as connection:
            connection.execute(sa.text(f"DROP DATABASE IF EXISTS {sa.make_url(url).database} WITH (FORCE)"))

    def url(self, database: str) -> str:
        url = sa.URL.create(
            "postgresql", USER, PASSWORD, database=database, query={"host": str(self._directory), "port": "5432"}
        )
        return url.render_as_string(hide_password=False)

    def _command(self, program: str, *arguments: str) -> list[str]:
        """The command that runs a program as the unprivileged user, and ends it with the tests."""
        command = [str(self._programs / program), *arguments]
        if setpriv := shutil.which("setpriv"):
            found = pwd.getpwnam(self._user) if self._user is not None else None
            user = [f"--reuid={found.pw_uid}", f"--regid={found.pw_gid}", "--clear-groups"] if found else []
            return [setpriv, *user, "--pdeathsig=INT", *command]
        return command if self._user is None else ["runuser", "-u", self._user, "--", *command]

    def _call(self, program: str, *arguments: str) -> None:
        done = subprocess.run(
            self._command(program, *arguments), capture_output=True, text=True, cwd="/", stdin=subprocess.DEVNULL
        )
        assert done.returncode == 0, f"{program}: {done.stdout}{done.stderr}"


def postgresql_server() -> Iterator[PostgreSQL]:
    """A running server. The test is skipped where PostgreSQL is not installed, and fails there in CI."""
    programs = _programs()
    if programs is None:
        missing = "PostgreSQL is not installed (Debian: apt-get install postgresql)"
        if os.environ.get("CI"):
            pytest.fail(missing)
        pytest.skip(missing)
    directory = Path(tempfile.mkdtemp(prefix="mergesearch-pg-", dir=_place()))
    try:
        server = PostgreSQL(programs, directory, "nobody" if os.geteuid() == 0 else None)
        server.start()
        try:
            yield server
        finally:
            server.stop(at_once=True)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _place() -> Path:
    """Directory for the server's own one: that of the tests, such as /dev/shm, if an unprivileged user may enter it.

    Pytest's own directories in it may not be entered. A socket's path has at most 107 characters.
    """
    place = Path(os.environ.get("PYTEST_DEBUG_TEMPROOT", "/tmp"))
    is_open = place.is_dir() and all(each.stat().st_mode & 0o001 for each in (place, *place.parents))
    return place if is_open and len(str(place)) <= MAX_PLACE else Path("/tmp")


def _programs() -> Path | None:
    """Directory with the programs of the newest PostgreSQL here; Debian keeps them out of PATH."""
    versions = [place.parent for place in Path("/usr/lib/postgresql").glob("*/bin/initdb")]
    if versions:
        return max(versions, key=lambda place: int(place.parent.name))
    found = shutil.which("initdb")
    return Path(found).resolve().parent if found else None

"""Database URLs: their parsing, their display without passwords, and the places where processes find them.

A server that is not given a database, and every driver, look in the same places: the variable MERGESEARCH_DATABASE,
then the file `URL_FILE` in the data directory, then an SQLite file in the data directory. A server writes `URL_FILE`
when it starts. If the server takes the URL from the variable, and does not run Ray itself, the file contains the name
of the variable and the URL without secrets, because engines may read the data directory. A password is therefore never
part of a driver's command line or of its Ray Job.
"""

from __future__ import annotations

import os
from pathlib import Path

import sqlalchemy as sa

from service.disk import DATABASE
from service.errors import Conflict
from workers.directories import replacing
from workers.file_access import DATABASE_URL as URL_FILE

__all__ = [
    "URL_FILE",
    "VARIABLE",
    "database_url",
    "has_password",
    "known_url",
    "named_url",
    "parse_url",
    "remember",
    "remembered",
    "remembered_place",
    "shown",
]

VARIABLE = "MERGESEARCH_DATABASE"

ACCEPTED = "give sqlite:///FILE or postgresql://USER@HOST:PORT/NAME"

# Schemes of URLs, and SQLAlchemy's drivers for them.
DRIVERS = {
    "sqlite": "sqlite",
    "sqlite+pysqlite": "sqlite",
    "postgresql": "postgresql+psycopg",
    "postgres": "postgresql+psycopg",
    "postgresql+psycopg": "postgresql+psycopg",
}

# Parameters of PostgreSQL's URLs that hold secrets.
SECRETS = ("password", "sslpassword", "oauth_client_secret")


def parse_url(text: str | sa.URL) -> sa.URL:
    """Parse the URL of a database, SQLite or PostgreSQL, for SQLAlchemy. The path of an SQLite file becomes absolute.

    Raises:
        Conflict: The URL does not belong to a database that can be used. The message contains no part of the URL that
            may be secret.
    """
    try:
        url = sa.make_url(text)
    except (sa.exc.ArgumentError, ValueError) as error:
        raise Conflict(f"database: what was given is not a URL; {ACCEPTED}") from error
    scheme = url.drivername
    if scheme not in DRIVERS:
        raise Conflict(f"database: {scheme!r} is not supported; {ACCEPTED}")
    url = url.set(drivername=DRIVERS[scheme])
    if url.get_backend_name() == "sqlite":
        return _sqlite(url)
    if any("@" in part for part in (url.host or "", url.database or "")):
        raise Conflict(
            "database: the URL has more than one @; write the characters @ : / ? # % in a user name or a password as "
            "%40 %3A %2F %3F %23 %25"
        )
    if url.database is None and "dbname" not in url.query and "service" not in url.query:
        raise Conflict(f"database {shown(url)}: names no database; {ACCEPTED}")
    return url


def _sqlite(url: sa.URL) -> sa.URL:
    if url.host is not None:
        raise Conflict(f"database {shown(url)}: a file has three slashes, or four with an absolute path; {ACCEPTED}")
    if url.database in (None, "", ":memory:"):
        raise Conflict(f"database {shown(url)}: names no file, and other processes could not read memory; {ACCEPTED}")
    return url.set(database=str(Path(str(url.database)).absolute()))


def shown(url: sa.URL) -> str:
    """Text of a database's URL for messages: without secrets, and with the scheme `sqlite` or `postgresql` only."""
    hidden = {name: "hidden" for name in SECRETS if name in url.query}
    return url.set(drivername=url.get_backend_name()).update_query_dict(hidden).render_as_string()


def has_password(url: sa.URL) -> bool:
    """Whether the URL of a database contains a password or another secret."""
    return url.password is not None or any(name in url.query for name in SECRETS)


def database_url(data_dir: Path, given: str | None = None) -> sa.URL:
    """Find the URL of the database of the server with the data directory `data_dir`.

    The URL is the first of these that exists:

    - `given`, the URL that the user gave on the command line
    - the environment variable MERGESEARCH_DATABASE
    - the URL that the function `remember` stored in the data directory at an earlier start
    - the URL of an SQLite file in the data directory

    Raises:
        Conflict: The text that was found is not the URL of a database.
    """
    text = given or os.environ.get(VARIABLE)
    return parse_url(text) if text else remembered(data_dir)


def known_url(data_dir: Path, given: str | None = None) -> sa.URL:
    """Find the URL of the database of the server with the data directory `data_dir`, without creating a database.

    The URL is `given`. If this is None, the URL is the value of the environment variable MERGESEARCH_DATABASE. Without
    this variable, it is the URL that the server stored in the data directory.

    Raises:
        Conflict: The URL names an SQLite file that does not exist, or is not the URL of a database.
    """
    url = database_url(data_dir, given)
    if url.get_backend_name() == "sqlite" and not Path(str(url.database)).exists():
        raise Conflict(
            f"database {shown(url)}: is not there; give the server's own data directory, or set {VARIABLE} to the URL "
            "of its database (for jobs: where Ray's head is started)"
        )
    return url


def remembered(data_dir: Path) -> sa.URL:
    """URL of the database that the last server with this data directory used.

    The server stores the URL in `data_dir`, unless it is the default: an SQLite file in `data_dir`.

    Raises:
        Conflict: The server took the URL, which may have secrets, from the environment variable MERGESEARCH_DATABASE,
            and stored only the name of the database.
    """
    text, place = _stored(data_dir)
    if text is None:
        raise Conflict(
            f"{data_dir / URL_FILE}: the server takes its database, {place}, from {VARIABLE}; set this variable "
            "here too, with the password"
        )
    return parse_url(text)


def remembered_place(data_dir: Path) -> str:
    """Text that names, in messages, the database that the last server with this data directory used, without secrets.

    The server stores this text even if it does not store the URL, which it took from the environment.
    """
    text, place = _stored(data_dir)
    return place if text is None else shown(parse_url(text))


def _stored(data_dir: Path) -> tuple[str | None, str]:
    """Read the record of the server's database in its data directory: the URL, or a text that names the database.

    Returns one of these pairs:

    - the URL that the server stored, and ""
    - None and a text that names the database, if the server stored no URL because the URL may have secrets
    - the URL of the default database, an SQLite file in the data directory, and "", if the server stored nothing
    """
    try:
        text = (data_dir / URL_FILE).read_text().strip()
    except FileNotFoundError:
        return f"sqlite:///{data_dir / DATABASE}", ""
    name, _, place = text.partition(" ")
    return (None, place) if name == VARIABLE else (text, "")


def named_url(text: str) -> sa.URL:
    """URL of the database that `text` names, either by this URL or by the data directory of its server.

    Raises:
        Conflict: `text` is neither of these.
    """
    if "://" not in text and Path(text).is_dir():
        return database_url(Path(text))
    return parse_url(text)


def remember(data_dir: Path, url: sa.URL, *, by_variable: bool = False) -> None:
    """Store the URL of a server's database, `url`, in its data directory, for its drivers and for its next start.

    Drivers are the processes that work on jobs. If the database is the default, an SQLite file in the data directory,
    nothing is stored, and an earlier URL is removed. If `by_variable` is True, the server took the URL from the
    environment variable MERGESEARCH_DATABASE, which its drivers read too. In this case only the URL without its secrets
    is stored. Error messages show this URL if the variable is not set.
    """
    place = data_dir / URL_FILE
    if url.get_backend_name() == "sqlite" and Path(str(url.database)) == (data_dir / DATABASE).absolute():
        place.unlink(missing_ok=True)
        return
    with replacing(place) as new:
        new.touch(mode=0o600)
        text = f"{VARIABLE} {shown(url)}" if by_variable else url.render_as_string(hide_password=False)
        new.write_text(text + "\n")

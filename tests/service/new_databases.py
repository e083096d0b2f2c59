"""New SQLite databases of tests are copies of a migrated one, so that tests do not each run all migrations."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import sqlalchemy as sa

from service.store import upgrade as migrations
from service.store.connection import connect

__all__ = ["copying"]


def copying(template: Path) -> Callable[[sa.Engine], None]:
    """Function that creates or migrates a database as `upgrade` does; a new SQLite file begins as a copy of `template`.

    The template is made by the migrations when it is first needed.
    """

    def upgrade(engine: sa.Engine) -> None:
        file = Path(engine.url.database or "")
        is_new = engine.url.get_backend_name() == "sqlite" and file.name not in ("", ":memory:") and not file.exists()
        if not (is_new and os.access(file.parent, os.W_OK) and _copy(template, file)):
            migrations.upgrade(engine)

    return upgrade


def _copy(template: Path, file: Path) -> bool:
    """Copy the template to `file`; return False if another thread or process creates the file at this moment."""
    if not template.exists():
        made = template.with_name(f"{template.name}-{os.getpid()}")
        engine = connect(sa.engine.make_url(f"sqlite:///{made}"))
        migrations.upgrade(engine)
        engine.dispose()
        assert not made.with_name(f"{made.name}-wal").exists(), "all pages are in the file"
        made.rename(template)
    copy = file.with_name(f"{file.name}-copy-{os.getpid()}-{id(file)}")
    shutil.copyfile(template, copy)
    try:
        os.link(copy, file)
    except FileExistsError:
        return False
    else:
        return True
    finally:
        copy.unlink()

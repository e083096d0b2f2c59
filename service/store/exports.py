"""Database rows of exports, which are merged models for download. The server's queue writes their files."""

from __future__ import annotations

from dataclasses import asdict

import sqlalchemy as sa

from service.errors import NotFound
from service.store import schema
from service.store.availability import repeated
from service.store.connection import insert, reading, transaction
from service.store.sql import Store
from service.types import ExportRecord, ExportState

__all__ = ["ExportStore"]


@repeated
class ExportStore:
    """Store of the database rows of exports (merged models for download), in the database of `store`. Thread-safe."""

    def __init__(self, store: Store) -> None:
        self._engine = store.engine
        self._reads = reading(self._engine)

    def add_export(self, record: ExportRecord) -> ExportRecord:
        """Store a new export (a merged model for download), and return the stored export.

        If an export with the same id is stored already, it is not changed.
        """
        with transaction(self._engine) as connection:
            row = {**asdict(record), "state": record.state.value}
            connection.execute(insert(connection, schema.exports).on_conflict_do_nothing(), row)
        return self.export(record.id)

    def set_export_state(self, export_id: str, state: ExportState, reason: str | None = None) -> None:
        table = schema.exports
        with transaction(self._engine) as connection:
            connection.execute(sa.update(table).where(table.c.id == export_id).values(state=state.value, reason=reason))

    def delete_export(self, export_id: str) -> None:
        """Delete the database row of an export (a merged model for download) if the row exists, but not the files."""
        with transaction(self._engine) as connection:
            connection.execute(sa.delete(schema.exports).where(schema.exports.c.id == export_id))

    def export(self, export_id: str) -> ExportRecord:
        """Read the export (a merged model for download) with the id `export_id`. Raises NotFound for an unknown id."""
        found = self._exports(schema.exports.c.id == export_id)
        if not found:
            raise NotFound(f"export {export_id!r}: no such export")
        return found[0]

    def exports(self, study_id: str | None = None) -> tuple[ExportRecord, ...]:
        """Read the exports (merged models for download) of a study, oldest first.

        If `study_id` is None, the exports of all studies are read.
        """
        return self._exports(sa.true() if study_id is None else schema.exports.c.study == study_id)

    def exports_of_team(self, team: str) -> tuple[ExportRecord, ...]:
        """Read the exports (merged models for download) of the jobs of a team, oldest first."""
        jobs = schema.studies
        return self._exports(schema.exports.c.study.in_(sa.select(jobs.c.id).where(jobs.c.team == team)))

    def unfinished_exports(self) -> tuple[ExportRecord, ...]:
        """Read the exports (merged models for download) that wait to be written or are being written, oldest first."""
        return self._exports(schema.exports.c.state.in_([ExportState.WAITING.value, ExportState.RUNNING.value]))

    def _exports(self, where: sa.ColumnElement[bool]) -> tuple[ExportRecord, ...]:
        table = schema.exports
        with self._reads.connect() as connection:
            rows = connection.execute(sa.select(table).where(where).order_by(table.c.created_at, table.c.id))
            return tuple(ExportRecord(**{**row, "state": ExportState(row["state"])}) for row in rows.mappings())

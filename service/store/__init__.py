"""Jobs, trials, samples and events in SQL: SQLite, or PostgreSQL.

- `sql`: every job of one database: creates, reads and hands out writers
- `attempt_writer`: the writes of one driver, refused once another has taken the job over
- `samples`: samples, packed in chunks, and those of engines that failed a check
- `records`: rows as dataclasses
- `steps`: what searchers computed besides scores, and its JSON
- `documents`: results of a study's closing stages, and their JSON
- `artifacts`: directories that drivers make, each with a row in SQL
- `blobs`: files stored by content, in a directory or an object store
- `database_url`: URLs of databases, and where servers and drivers find theirs
- `availability`: whether the database answers, and calls that wait until it does
- `connection`: how transactions begin and end, and the clock for stored times
- `column_types`: types that store and sort the same on both databases
- `schema`: the tables
- `servers`: which server of a database is the leader, and how servers learn of new events
- `move`: copies a database to another one
- `upgrade`: creates and migrates databases, by the Alembic migrations in `migrations`
"""

from service.store.attempt_writer import JobWriter
from service.store.records import (
    BracketRecord,
    EngineFaultRecord,
    EventRecord,
    EvidenceRecord,
)
from service.store.samples import VoidSample
from service.store.sql import Store

__all__ = [
    "BracketRecord",
    "EngineFaultRecord",
    "EventRecord",
    "EvidenceRecord",
    "JobWriter",
    "Store",
    "VoidSample",
]

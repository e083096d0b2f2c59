"""Store of jobs, trials, rungs, samples and events: SQLite or PostgreSQL through SQLAlchemy.

Every process may read. Only a job's driver writes its trials, rungs, samples and events, through a `JobWriter` that
checks its attempt number in every transaction, so a driver that was replaced can no longer write.
"""

from __future__ import annotations

from service.store.jobs import JobStore
from service.store.results import ResultStore

__all__ = ["Store"]


class Store(JobStore, ResultStore):
    """Store of all jobs, their events and their results in one database; thread-safe, and must be closed after use.

    The methods are in base classes by subject: `JobStore`, `EventStore`, and `ResultStore`, which includes
    `EventStore`. They are one object so that a snapshot covers them all. Their base `Database` opens the database;
    there, see the constructor's arguments and errors. Other stores, such as `SteeringStore`, `ExportStore` and
    `AccountStore`, take a `Store` and use its database.
    """

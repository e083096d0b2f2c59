"""Database of jobs, trials, samples and events: SQLite or PostgreSQL.

- `sql`: the store of all jobs in one database; joins the classes of `jobs`, `events` and `results`
- `database`: base class of that store: opens the database, and gives snapshots and units of work
- `jobs`: creates, lists and deletes jobs, records their drivers, and makes writers of their results
- `events`: reads the events of jobs
- `results`: reads the trials, samples, evidence and documents of studies
- `steering`: users' requests that change jobs: pause, resume, stop, edit, evaluate a merge, mark a trial as invalid
- `exports`: database rows of exports, the merged models for download
- `attempt_writer`: writes the results of one driver; refuses once another driver has taken over the job
- `samples`: stored samples, packed in chunks, and samples of engines that failed a check
- `prompts`: prompts, references and pictures of samples, which all trials share
- `records`: rows as dataclasses
- `steps`: computations of searchers other than scoring, such as gradients, and their JSON
- `documents`: JSON documents of a study, such as benchmark facts and the report of a verification
- `artifacts`: directories of files that drivers create, each with a row in SQL
- `accounts`: users, teams, tokens and the audit log
- `usage`: GPU-hours that the jobs of each team have used
- `notifications`: webhooks, e-mail addresses, and the notices of jobs that are delivered to them
- `blobs`: files stored by content, in a directory or an object store
- `database_url`: URLs of databases, and where servers and drivers look for the URL
- `availability`: whether the database answers, and calls that wait until it does
- `connection`: how transactions begin and end, the clock for stored times, and conditions on many numbers
- `column_types`: column types whose values are stored and sorted in the same way on both databases
- `schema`: the tables
- `servers`: which server of a database is the leader, and how servers learn of new events
- `move`: copies a database to another one
- `backup`: copies a database and the files of its artifacts to a directory, and restores them from there
- `upgrade`: creates and migrates databases, by the Alembic migrations in `migrations`
"""

from service.store.attempt_writer import JobWriter
from service.store.prompts import SampleText
from service.store.records import (
    BracketRecord,
    EngineFaultRecord,
    EvaluationRequest,
    EventRecord,
    EvidenceRecord,
    JudgmentRecord,
)
from service.store.results import RELOAD_EVENTS
from service.store.samples import VoidSample
from service.store.sql import Store

__all__ = [
    "RELOAD_EVENTS",
    "BracketRecord",
    "EngineFaultRecord",
    "EvaluationRequest",
    "EventRecord",
    "EvidenceRecord",
    "JobWriter",
    "JudgmentRecord",
    "SampleText",
    "Store",
    "VoidSample",
]

"""Tables of the database, for SQLite and PostgreSQL. All state that must survive a restart is in their rows."""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Float,
    ForeignKeyConstraint,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    UniqueConstraint,
    false,
)

from service.store.column_types import BIG_NUMBER, LosslessText, string

__all__ = [
    "BASELINE",
    "BASELINE_VERSION",
    "REVISION",
    "SCHEMA_VERSION",
    "artifacts",
    "audit",
    "brackets",
    "commit_tokens",
    "deliveries",
    "documents",
    "drains",
    "engine_faults",
    "evaluation_requests",
    "events",
    "evidence",
    "exports",
    "judgments",
    "logins",
    "memberships",
    "metadata",
    "notices",
    "pictures",
    "prompt_templates",
    "prompts",
    "rungs",
    "sample_chunks",
    "sample_documents",
    "sample_texts",
    "samples",
    "search_steps",
    "sessions",
    "studies",
    "subscriptions",
    "team_usage",
    "teams",
    "tokens",
    "trials",
    "users",
    "waits",
]

# The newest migration in `migrations/versions`, which makes the tables below. Every change of the tables needs
# a migration.
REVISION = "0027"

# The revision of a database from before the migrations, and its `schema_version`.
BASELINE = "0001"
BASELINE_VERSION = 2

# The number in `schema_version` after the newest migration. Programs from before the migrations open a database with
# number 2 only, so a migration after which they could no longer work with it raises the number.
SCHEMA_VERSION = 3

metadata = MetaData()

schema_version = Table("schema_version", metadata, Column("version", Integer, primary_key=True))

studies = Table(
    "studies",
    metadata,
    Column("id", string(64), primary_key=True),
    Column("name", string(128), nullable=False),
    Column("state", string(16), nullable=False),
    Column("reason", LosslessText),
    Column("document", JSON, nullable=False),
    Column("facts", JSON, nullable=False),
    Column("created_at", Float, nullable=False),
    # The number of the driver that owns the study: writes under an older one are refused.
    Column("attempt", Integer, nullable=False, default=0),
    Column("heartbeat_at", Float),
    # The driver's progress, for displays; replaced with every heartbeat.
    Column("progress", JSON),
    # Drivers submitted to the cluster so far, and the time of the last submission; 0 for a study without a server.
    Column("submissions", Integer, nullable=False, default=0),
    Column("submitted_at", Float, nullable=False, default=0.0),
    # The attempt at that time: the submitted driver has begun once there is a newer attempt.
    Column("submitted_after", Integer, nullable=False, default=0),
    # A client's idempotency key, and the digest of its request: a request that is sent twice creates one study.
    Column("idempotency_key", string(255), unique=True),
    Column("request_digest", string(64)),
    # Seconds that drivers have worked on the study, over all attempts.
    Column("wall_clock_s", Float, nullable=False, default=0.0),
    # When the driver last made progress, and after how many seconds without progress it is replaced. As of the last
    # heartbeat.
    Column("progressed_at", Float),
    Column("patience_s", Float),
    # What the driver waits for, as of the last heartbeat.
    Column("waiting_for", LosslessText),
    # The kind of job: a JobKind.
    Column("kind", string(16), nullable=False, server_default="search"),
    # Names of the user who created the job and of its team, and who else may read it: a Sharing. Without accounts, the
    # first two are NULL.
    Column("owner", string(64)),
    Column("team", string(64)),
    Column("sharing", string(16), nullable=False, server_default="team"),
    # Requests to pause the job, and to end its search early with the reason. The driver and the reconciler obey them.
    Column("is_paused", Boolean, nullable=False, server_default=false()),
    Column("stop_reason", LosslessText),
    # Texts of users about the job, and its place among the jobs that wait.
    Column("description", LosslessText),
    Column("tags", JSON),
    Column("notes", LosslessText),
    Column("priority", Integer, nullable=False, server_default="0"),
    # The number of edits, and the attempt at the last one that a driver must read.
    Column("version", Integer, nullable=False, server_default="0"),
    Column("edited_after", Integer),
    # The name before the first edit of it: Ray Jobs are named after it.
    Column("first_name", string(128)),
    # The attempt whose driver was asked to give its place up.
    Column("yields_after", Integer),
    # Where an administrator has moved the job while it waits: the id of another job, or "" for the front; and when.
    Column("moved_before", string(64)),
    Column("moved_at", Float),
    # The place of the request that created the job in its trace, in the form of the header `traceparent`.
    Column("traceparent", string(64)),
)


def _in_study() -> ForeignKeyConstraint:
    return ForeignKeyConstraint(["study"], ["studies.id"], ondelete="CASCADE")


trials = Table(
    "trials",
    metadata,
    Column("study", string(64), primary_key=True),
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("origin", string(16), nullable=False),
    Column("label", LosslessText, nullable=False),
    Column("state", string(16), nullable=False),
    Column("reason", LosslessText),
    Column("bracket", Integer),
    Column("configuration", JSON),
    Column("recipe", JSON, nullable=False),
    Column("recipe_digest", string(64), nullable=False),
    Column("samples_scored", Integer, nullable=False, default=0),
    Column("samples_reused", Integer, nullable=False, default=0),
    Column("timings_s", JSON, nullable=False),
    # Why a user marked the trial as invalid: nothing selects it.
    Column("invalid", LosslessText),
    # The trial against which a scheduler has stopped it; unknown of trials of early versions.
    Column("rival", Integer),
    _in_study(),
    Index("trials_by_state", "study", "state", "number"),
)

# Requests to evaluate a merge at the full budget: the recipe of `trial`, or the enqueued `recipe` or `configuration`
# with the label `label`. `added` is the number of the trial that answers one.
evaluation_requests = Table(
    "evaluation_requests",
    metadata,
    Column("study", string(64), primary_key=True),
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("trial", Integer),
    Column("added", Integer),
    Column("label", LosslessText),
    Column("recipe", JSON),
    Column("configuration", JSON),
    _in_study(),
)

# A bracket's size is fixed when it opens, so that a study may later be given more trials.
brackets = Table(
    "brackets",
    metadata,
    Column("study", string(64), primary_key=True),
    Column("bracket", Integer, primary_key=True, autoincrement=False),
    Column("first_rung", Integer, nullable=False),
    Column("size", Integer, nullable=False),
    _in_study(),
)

rungs = Table(
    "rungs",
    metadata,
    Column("study", string(64), primary_key=True),
    Column("trial", Integer, primary_key=True, autoincrement=False),
    Column("rung", Integer, primary_key=True, autoincrement=False),
    Column("samples", JSON, nullable=False),
    Column("values", JSON, nullable=False),
    Column("standard_errors", JSON, nullable=False),
    _in_study(),
)


def _of_samples() -> list[Column[Any]]:
    """Key columns of tables in which a row has adjacent samples of one objective and one recipe (merge).

    The column `start` has the position of the first sample in the order in which samples are scored. Rows name a
    recipe, not a trial, so trials with equal recipes share samples.
    """
    return [
        Column("study", string(64), primary_key=True),
        Column("split", string(8), primary_key=True),
        Column("recipe_digest", string(64), primary_key=True),
        Column("objective", string(64), primary_key=True),
        Column("start", Integer, primary_key=True, autoincrement=False),
    ]


# Adjacent samples that were scored together (`service.store.samples`): how many, their values and flags.
sample_chunks = Table(
    "sample_chunks",
    metadata,
    *_of_samples(),
    Column("num_samples", Integer, nullable=False),
    # Tokens in all completions; NULL where a sample has none stored, such as scored options.
    Column("num_tokens", Integer),
    Column("documents", BigInteger, nullable=False),
    Column("evidence", BigInteger, nullable=False),
    Column("packed", LargeBinary, nullable=False),
    _in_study(),
)

# Responses and tokens of the same samples.
sample_texts = Table(
    "sample_texts",
    metadata,
    *_of_samples(),
    Column("packed", LargeBinary, nullable=False),
    _in_study(),
)

# Prompts and references of samples, which all trials share (`service.store.prompts`); removed with the study alone.
prompts = Table(
    "prompts",
    metadata,
    Column("study", string(64), primary_key=True),
    Column("split", string(8), primary_key=True),
    Column("objective", string(64), primary_key=True),
    Column("start", Integer, primary_key=True, autoincrement=False),
    Column("packed", LargeBinary, nullable=False),
    _in_study(),
)

# Small pictures (WebP) of samples, which all trials share (`service.store.prompts`); removed with the study alone.
pictures = Table(
    "pictures",
    metadata,
    Column("study", string(64), primary_key=True),
    Column("split", string(8), primary_key=True),
    Column("objective", string(64), primary_key=True),
    Column("position", Integer, primary_key=True, autoincrement=False),
    Column("content", LargeBinary, nullable=False),
    _in_study(),
)

# Lists of documents, by the sha256 of their content: recipes that are scored on the same data share them.
sample_documents = Table(
    "sample_documents",
    metadata,
    Column("id", BIG_NUMBER, primary_key=True),
    Column("study", string(64), nullable=False),
    Column("digest", string(64), nullable=False),
    Column("packed", LargeBinary, nullable=False),
    _in_study(),
    UniqueConstraint("study", "digest"),
)

# Samples as earlier versions stored them, a row each; they are moved to the tables above.
samples = Table(
    "samples",
    metadata,
    Column("study", string(64), primary_key=True),
    Column("recipe_digest", string(64), primary_key=True),
    Column("split", string(8), primary_key=True),
    Column("objective", string(64), primary_key=True),
    Column("position", Integer, primary_key=True, autoincrement=False),
    Column("document", string(64), nullable=False),
    Column("value", Float, nullable=False),
    Column("response", LosslessText, nullable=False),
    Column("is_truncated", Boolean, nullable=False),
    Column("evidence", BIG_NUMBER, nullable=False),
    # The token ids of each completion as JSON; NULL for scored options, and in rows of earlier versions.
    Column("tokens", LosslessText),
    _in_study(),
)

evidence = Table(
    "evidence",
    metadata,
    Column("id", BIG_NUMBER, primary_key=True),
    Column("study", string(64), nullable=False),
    Column("trial", Integer, nullable=False),
    Column("recipe_digest", string(64), nullable=False),
    Column("bank_fingerprint", string(64), nullable=False),
    Column("prompts", JSON, nullable=False),
    Column("weights_checksum", LosslessText, nullable=False),
    Column("replica", LosslessText, nullable=False),
    Column("swap_count", Integer, nullable=False),
    Column("engine", LosslessText, nullable=False),
    Column("timings_s", JSON, nullable=False),
    Column("num_samples", Integer, nullable=False),
    Column("finished_at", Float, nullable=False),
    # Canaries that the engine had passed before; NULL in rows of a version that did not count them.
    Column("canaries", Integer),
    # Bytes of the chunk's samples: values and flags, and texts; NULL in rows of earlier versions.
    Column("sample_bytes", BigInteger),
    Column("text_bytes", BigInteger),
    _in_study(),
    Index("evidence_by_study", "study"),
)

# Steps that a searcher computed, beside the scores of trials, for the proposal of trial `proposal`; `charged` is the
# cost in samples.
search_steps = Table(
    "search_steps",
    metadata,
    Column("study", string(64), primary_key=True),
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("proposal", Integer, nullable=False),
    Column("charged", Integer, nullable=False),
    Column("document", JSON, nullable=False),
    Column("time", Float, nullable=False),
    _in_study(),
)

# Prompt templates that attacks on benchmarks have scored. Their samples are stored under the name, in place of an
# objective's.
prompt_templates = Table(
    "prompt_templates",
    metadata,
    Column("study", string(64), primary_key=True),
    Column("name", string(64), primary_key=True),
    Column("benchmark", string(64), nullable=False),
    Column("template", LosslessText, nullable=False),
    _in_study(),
)

# Judgments of completions by the judge of a benchmark. Each completion is judged twice: as the first answer in the
# prompt, and as the second one (`is_swapped`).
judgments = Table(
    "judgments",
    metadata,
    Column("study", string(64), primary_key=True),
    Column("benchmark", string(64), primary_key=True),
    Column("recipe_digest", string(64), primary_key=True),
    Column("position", Integer, primary_key=True, autoincrement=False),
    Column("is_swapped", Boolean, primary_key=True),
    # From 0 (the reference answer is better) to 1; NULL for an answer without a verdict.
    Column("preference", Float),
    # The judge's model as the endpoint reports it, the sha256 of the prompt, and the whole answer.
    Column("model", LosslessText, nullable=False),
    Column("prompt_digest", string(64), nullable=False),
    Column("answer", LosslessText, nullable=False),
    _in_study(),
)

# Engines that failed a check, over all studies: samples that they scored after their last passed canary are void.
engine_faults = Table(
    "engine_faults",
    metadata,
    Column("id", BIG_NUMBER, primary_key=True),
    Column("replica", LosslessText, nullable=False, unique=True),
    Column("canaries", Integer, nullable=False),
    Column("reason", LosslessText, nullable=False),
    Column("time", Float, nullable=False),
)

events = Table(
    "events",
    metadata,
    Column("id", BIG_NUMBER, primary_key=True),
    Column("study", string(64), nullable=False),
    Column("time", Float, nullable=False),
    Column("kind", string(32), nullable=False),
    Column("payload", JSON, nullable=False),
    _in_study(),
    Index("events_by_study", "study", "id"),
    Index("events_by_kind", "study", "kind", "id"),
    sqlite_autoincrement=True,  # ids are never reused: clients resume after the last one they saw
)

# Merged models written for download.
exports = Table(
    "exports",
    metadata,
    Column("id", string(64), primary_key=True),
    Column("study", string(64), nullable=False),
    Column("trial", Integer, nullable=False),
    Column("dtype", string(16), nullable=False),
    Column("state", string(16), nullable=False),
    Column("reason", LosslessText),
    Column("created_at", Float, nullable=False),
    _in_study(),
)

# Results of a study's closing stages by name: "holdout", "verification", "export".
documents = Table(
    "documents",
    metadata,
    Column("study", string(64), primary_key=True),
    Column("name", string(32), primary_key=True),
    Column("document", JSON, nullable=False),
    _in_study(),
)

# Files and directories that drivers created, stored by content (`service.store.artifacts`).
artifacts = Table(
    "artifacts",
    metadata,
    Column("study", string(64), primary_key=True),
    Column("name", string(64), primary_key=True),
    Column("digest", string(64), nullable=False),
    Column("num_bytes", BigInteger, nullable=False),
    Column("facts", JSON, nullable=False),
    Column("created_at", Float, nullable=False),
    _in_study(),
)

# One row for each PostgreSQL connection that has written: a token of its last transaction
# (`service.store.connection.transaction`). Empty on SQLite.
commit_tokens = Table(
    "commit_tokens",
    metadata,
    Column("token", string(32), primary_key=True),
    Column("time", Float, nullable=False),
)

# A row while the servers are drained, with the time since when; else empty.
drains = Table("drains", metadata, Column("since", Float, primary_key=True))

# Users and teams are known by their names, which are never given to others: users are disabled, not deleted.
users = Table(
    "users",
    metadata,
    Column("name", string(64), primary_key=True),
    Column("is_admin", Boolean, nullable=False),
    Column("is_disabled", Boolean, nullable=False),
    Column("created_at", Float, nullable=False),
    # The issuer and the subject of the identity that has logged in as the user, which alone may do so.
    Column("identity", LosslessText),
)

teams = Table(
    "teams",
    metadata,
    Column("name", string(64), primary_key=True),
    Column("created_at", Float, nullable=False),
    # The team's share and its quotas, as in `TeamLimits`; a quota that is NULL is no limit.
    Column("weight", Float, nullable=False, server_default="1"),
    Column("max_running", Integer),
    Column("max_replicas", Integer),
    Column("max_served", Integer, server_default="4"),
    Column("gpu_hours", Float),
    Column("artifact_bytes", BigInteger),
    Column("export_bytes", BigInteger),
    Column("requests_per_minute", Integer),
)

# Seconds that drivers of a team's jobs have worked, times the GPUs of each job, by the day (UTC; days since the epoch).
# The name "" stands for jobs without a team. Rows stay when jobs and teams are deleted.
team_usage = Table(
    "team_usage",
    metadata,
    Column("team", string(64), primary_key=True),
    Column("day", Integer, primary_key=True, autoincrement=False),
    Column("gpu_s", Float, nullable=False),
)

memberships = Table(
    "memberships",
    metadata,
    Column("user", string(64), primary_key=True),
    Column("team", string(64), primary_key=True),
    Column("role", string(16), nullable=False),
    ForeignKeyConstraint(["user"], ["users.name"]),
    ForeignKeyConstraint(["team"], ["teams.name"], ondelete="CASCADE"),
)

# API tokens: the sha256 of each, and its beginning, which is shown.
tokens = Table(
    "tokens",
    metadata,
    Column("id", string(32), primary_key=True),
    Column("user", string(64), nullable=False),
    Column("name", string(64), nullable=False),
    Column("digest", string(64), nullable=False, unique=True),
    Column("prefix", string(16), nullable=False),
    Column("scope", string(16), nullable=False),
    Column("created_at", Float, nullable=False),
    Column("expires_at", Float),
    Column("last_used_at", Float),
    Column("revoked_at", Float),
    ForeignKeyConstraint(["user"], ["users.name"]),
)

# Sessions of browsers: the sha256 of the value in each one's cookie. A session that ends is deleted.
sessions = Table(
    "sessions",
    metadata,
    Column("id", string(32), primary_key=True),
    Column("user", string(64), nullable=False),
    Column("digest", string(64), nullable=False, unique=True),
    Column("created_at", Float, nullable=False),
    Column("expires_at", Float, nullable=False),
    Column("last_used_at", Float, nullable=False),
    # The id of the token with which the browser logged in; null for a login with the identity provider.
    Column("token", string(32)),
    ForeignKeyConstraint(["user"], ["users.name"]),
)

# Logins that browsers began: the sha256 of the state, and of the value in the browser's cookie. A login that ends is
# deleted.
logins = Table(
    "logins",
    metadata,
    Column("state", string(64), primary_key=True),
    Column("browser", string(64), nullable=False),
    Column("nonce", string(64), nullable=False),
    Column("verifier", string(128), nullable=False),
    Column("redirect_uri", LosslessText, nullable=False),
    Column("next", LosslessText, nullable=False),
    Column("expires_at", Float, nullable=False),
)

# The audit log. Triggers of the database refuse to change or delete its rows.
audit = Table(
    "audit",
    metadata,
    Column("id", BIG_NUMBER, primary_key=True),
    Column("time", Float, nullable=False),
    Column("user", string(64)),
    Column("origin", LosslessText, nullable=False),
    Column("token", string(16)),
    Column("action", string(64), nullable=False),
    Column("target", LosslessText, nullable=False),
    Column("before", JSON),
    Column("after", JSON),
    sqlite_autoincrement=True,
)

# Changes of jobs that users may want to be notified of. The leader of the servers makes deliveries of a row, and
# deletes it.
notices = Table(
    "notices",
    metadata,
    Column("id", BIG_NUMBER, primary_key=True),
    Column("study", string(64), nullable=False),
    Column("kind", string(16), nullable=False),
    Column("state", string(16), nullable=False),
    Column("reason", LosslessText),
    Column("time", Float, nullable=False),
    _in_study(),
)

# Webhooks and e-mail addresses that receive notices. The secret of a webhook must be known to sign what is sent.
subscriptions = Table(
    "subscriptions",
    metadata,
    Column("id", string(32), primary_key=True),
    Column("kind", string(16), nullable=False),
    Column("target", LosslessText, nullable=False),
    Column("secret", string(64)),
    Column("owner", string(64)),
    Column("covers", string(16), nullable=False),
    Column("team", string(64)),
    Column("events", JSON, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("failing_since", Float),
    Column("disabled_at", Float),
    Column("disabled_reason", LosslessText),
    ForeignKeyConstraint(["owner"], ["users.name"]),
    ForeignKeyConstraint(["team"], ["teams.name"], ondelete="CASCADE"),
)

# Notices that are sent to a subscription; `study` is NULL for a test.
deliveries = Table(
    "deliveries",
    metadata,
    Column("id", string(32), primary_key=True),
    Column("subscription", string(32), nullable=False),
    Column("study", string(64)),
    Column("event", string(16), nullable=False),
    Column("body", LosslessText, nullable=False),
    Column("state", string(16), nullable=False),
    Column("attempts", Integer, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("next_at", Float),
    Column("finished_at", Float),
    Column("status", Integer),
    Column("error", LosslessText),
    ForeignKeyConstraint(["subscription"], ["subscriptions.id"], ondelete="CASCADE"),
    _in_study(),
    Index("deliveries_by_state", "state", "next_at"),
    Index("deliveries_by_subscription", "subscription", "created_at"),
)

# Jobs that wait: the reason, the time since when, the time since when a driver works again, and whether users were
# notified.
waits = Table(
    "waits",
    metadata,
    Column("study", string(64), primary_key=True),
    Column("reason", LosslessText, nullable=False),
    Column("since", Float, nullable=False),
    Column("working_since", Float),
    Column("is_notified", Boolean, nullable=False),
    _in_study(),
)

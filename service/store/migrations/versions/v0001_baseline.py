"""Migration: creates the tables that the last version of the program without migrations had.

Existing tables are not changed: a program of that version may have been stopped after it had created some of them.
"""

import sqlalchemy as sa
from alembic import op

from service.store.column_types import BIG_NUMBER, string

revision = "0001"
down_revision = None

# The number that programs from before the migrations look for; they refuse a database with any other number.
SCHEMA_VERSION = 2


def upgrade() -> None:
    op.create_table(
        "schema_version",
        sa.Column("version", sa.Integer(), primary_key=True),
        if_not_exists=True,
    )
    op.create_table(
        "studies",
        sa.Column("id", string(64), primary_key=True),
        sa.Column("name", string(128), nullable=False),
        sa.Column("state", string(16), nullable=False),
        sa.Column("reason", sa.Text()),
        sa.Column("document", sa.JSON(), nullable=False),
        sa.Column("facts", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("heartbeat_at", sa.Float()),
        sa.Column("progress", sa.JSON()),
        sa.Column("submissions", sa.Integer(), nullable=False),
        sa.Column("submitted_at", sa.Float(), nullable=False),
        sa.Column("submitted_after", sa.Integer(), nullable=False),
        sa.Column("idempotency_key", string(255), unique=True),
        sa.Column("request_digest", string(64)),
        sa.Column("wall_clock_s", sa.Float(), nullable=False),
        if_not_exists=True,
    )
    op.create_table(
        "trials",
        sa.Column("study", string(64), primary_key=True),
        sa.Column("number", sa.Integer(), primary_key=True, autoincrement=False),
        sa.Column("origin", string(16), nullable=False),
        sa.Column("label", sa.Text(), nullable=False),
        sa.Column("state", string(16), nullable=False),
        sa.Column("reason", sa.Text()),
        sa.Column("bracket", sa.Integer()),
        sa.Column("configuration", sa.JSON()),
        sa.Column("recipe", sa.JSON(), nullable=False),
        sa.Column("recipe_digest", string(64), nullable=False),
        sa.Column("samples_scored", sa.Integer(), nullable=False),
        sa.Column("samples_reused", sa.Integer(), nullable=False),
        sa.Column("timings_s", sa.JSON(), nullable=False),
        _in_study(),
        if_not_exists=True,
    )
    op.create_table(
        "brackets",
        sa.Column("study", string(64), primary_key=True),
        sa.Column("bracket", sa.Integer(), primary_key=True, autoincrement=False),
        sa.Column("first_rung", sa.Integer(), nullable=False),
        sa.Column("size", sa.Integer(), nullable=False),
        _in_study(),
        if_not_exists=True,
    )
    op.create_table(
        "rungs",
        sa.Column("study", string(64), primary_key=True),
        sa.Column("trial", sa.Integer(), primary_key=True, autoincrement=False),
        sa.Column("rung", sa.Integer(), primary_key=True, autoincrement=False),
        sa.Column("samples", sa.JSON(), nullable=False),
        sa.Column("values", sa.JSON(), nullable=False),
        sa.Column("standard_errors", sa.JSON(), nullable=False),
        _in_study(),
        if_not_exists=True,
    )
    op.create_table(
        "samples",
        sa.Column("study", string(64), primary_key=True),
        sa.Column("recipe_digest", string(64), primary_key=True),
        sa.Column("split", string(8), primary_key=True),
        sa.Column("objective", string(64), primary_key=True),
        sa.Column("position", sa.Integer(), primary_key=True, autoincrement=False),
        sa.Column("document", string(64), nullable=False),
        sa.Column("value", sa.Float(), nullable=False),
        sa.Column("response", sa.Text(), nullable=False),
        sa.Column("is_truncated", sa.Boolean(), nullable=False),
        sa.Column("evidence", BIG_NUMBER, nullable=False),
        _in_study(),
        if_not_exists=True,
    )
    op.create_table(
        "evidence",
        sa.Column("id", BIG_NUMBER, primary_key=True),
        sa.Column("study", string(64), nullable=False),
        sa.Column("trial", sa.Integer(), nullable=False),
        sa.Column("recipe_digest", string(64), nullable=False),
        sa.Column("bank_fingerprint", string(64), nullable=False),
        sa.Column("prompts", sa.JSON(), nullable=False),
        sa.Column("weights_checksum", sa.Text(), nullable=False),
        sa.Column("replica", sa.Text(), nullable=False),
        sa.Column("swap_count", sa.Integer(), nullable=False),
        sa.Column("engine", sa.Text(), nullable=False),
        sa.Column("timings_s", sa.JSON(), nullable=False),
        sa.Column("num_samples", sa.Integer(), nullable=False),
        sa.Column("finished_at", sa.Float(), nullable=False),
        _in_study(),
        if_not_exists=True,
    )
    op.create_index("evidence_by_study", "evidence", ["study"], if_not_exists=True)
    op.create_table(
        "events",
        sa.Column("id", BIG_NUMBER, primary_key=True),
        sa.Column("study", string(64), nullable=False),
        sa.Column("time", sa.Float(), nullable=False),
        sa.Column("kind", string(32), nullable=False),
        sa.Column("payload", sa.JSON(), nullable=False),
        _in_study(),
        sqlite_autoincrement=True,
        if_not_exists=True,
    )
    op.create_index("events_by_study", "events", ["study", "id"], if_not_exists=True)
    op.create_table(
        "exports",
        sa.Column("id", string(64), primary_key=True),
        sa.Column("study", string(64), nullable=False),
        sa.Column("trial", sa.Integer(), nullable=False),
        sa.Column("dtype", string(16), nullable=False),
        sa.Column("state", string(16), nullable=False),
        sa.Column("reason", sa.Text()),
        sa.Column("created_at", sa.Float(), nullable=False),
        _in_study(),
        if_not_exists=True,
    )
    op.create_table(
        "documents",
        sa.Column("study", string(64), primary_key=True),
        sa.Column("name", string(32), primary_key=True),
        sa.Column("document", sa.JSON(), nullable=False),
        _in_study(),
        if_not_exists=True,
    )
    if op.get_bind().execute(sa.text("SELECT version FROM schema_version")).first() is None:
        op.execute(f"INSERT INTO schema_version (version) VALUES ({SCHEMA_VERSION})")


def _in_study() -> sa.ForeignKeyConstraint:
    return sa.ForeignKeyConstraint(["study"], ["studies.id"], ondelete="CASCADE")

"""Migration: adds users, teams, tokens and the audit log, and the owner of each job."""

import sqlalchemy as sa
from alembic import op

from service.store.column_types import BIG_NUMBER, LosslessText, string

revision = "0015"
down_revision = "0014"

# The audit log is append-only for every program that uses the database.
SQLITE_TRIGGER = """
    CREATE TRIGGER audit_refuses_{change} BEFORE {change} ON audit
    BEGIN SELECT RAISE(ABORT, 'the audit log is append-only'); END
"""
POSTGRESQL_FUNCTION = """
    CREATE FUNCTION audit_is_append_only() RETURNS trigger LANGUAGE plpgsql AS
    $$ BEGIN RAISE EXCEPTION 'the audit log is append-only'; END $$
"""
POSTGRESQL_TRIGGER = """
    CREATE TRIGGER audit_refuses_changes BEFORE UPDATE OR DELETE OR TRUNCATE ON audit
    FOR EACH STATEMENT EXECUTE FUNCTION audit_is_append_only()
"""


def upgrade() -> None:
    op.create_table(
        "users",
        sa.Column("name", string(64), primary_key=True),
        sa.Column("is_admin", sa.Boolean(), nullable=False),
        sa.Column("is_disabled", sa.Boolean(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
    )
    op.create_table(
        "teams",
        sa.Column("name", string(64), primary_key=True),
        sa.Column("created_at", sa.Float(), nullable=False),
    )
    op.create_table(
        "memberships",
        sa.Column("user", string(64), sa.ForeignKey("users.name"), primary_key=True),
        sa.Column("team", string(64), sa.ForeignKey("teams.name", ondelete="CASCADE"), primary_key=True),
        sa.Column("role", string(16), nullable=False),
    )
    op.create_table(
        "tokens",
        sa.Column("id", string(32), primary_key=True),
        sa.Column("user", string(64), sa.ForeignKey("users.name"), nullable=False),
        sa.Column("name", string(64), nullable=False),
        sa.Column("digest", string(64), nullable=False, unique=True),
        sa.Column("prefix", string(16), nullable=False),
        sa.Column("scope", string(16), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("expires_at", sa.Float()),
        sa.Column("last_used_at", sa.Float()),
        sa.Column("revoked_at", sa.Float()),
    )
    op.create_table(
        "audit",
        sa.Column("id", BIG_NUMBER, primary_key=True),
        sa.Column("time", sa.Float(), nullable=False),
        sa.Column("user", string(64)),
        sa.Column("origin", LosslessText(), nullable=False),
        sa.Column("token", string(16)),
        sa.Column("action", string(64), nullable=False),
        sa.Column("target", LosslessText(), nullable=False),
        sa.Column("before", sa.JSON()),
        sa.Column("after", sa.JSON()),
        sqlite_autoincrement=True,
    )
    op.add_column("studies", sa.Column("owner", string(64)))
    op.add_column("studies", sa.Column("team", string(64)))
    op.add_column("studies", sa.Column("sharing", string(16), nullable=False, server_default="team"))
    if op.get_bind().dialect.name == "sqlite":
        for change in ("UPDATE", "DELETE"):
            op.execute(SQLITE_TRIGGER.format(change=change))
    else:
        op.execute(POSTGRESQL_FUNCTION)
        op.execute(POSTGRESQL_TRIGGER)

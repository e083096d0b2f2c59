"""Migration: adds tables of job changes, of webhooks and mail addresses that receive them, and of waiting jobs."""

import sqlalchemy as sa
from alembic import op

from service.store.column_types import BIG_NUMBER, LosslessText, string

revision = "0021"
down_revision = "0020"


def upgrade() -> None:
    op.create_table(
        "notices",
        sa.Column("id", BIG_NUMBER, primary_key=True),
        sa.Column("study", string(64), sa.ForeignKey("studies.id", ondelete="CASCADE"), nullable=False),
        sa.Column("kind", string(16), nullable=False),
        sa.Column("state", string(16), nullable=False),
        sa.Column("reason", LosslessText()),
        sa.Column("time", sa.Float(), nullable=False),
    )
    op.create_table(
        "subscriptions",
        sa.Column("id", string(32), primary_key=True),
        sa.Column("kind", string(16), nullable=False),
        sa.Column("target", LosslessText(), nullable=False),
        sa.Column("secret", string(64)),
        sa.Column("owner", string(64), sa.ForeignKey("users.name")),
        sa.Column("covers", string(16), nullable=False),
        sa.Column("team", string(64), sa.ForeignKey("teams.name", ondelete="CASCADE")),
        sa.Column("events", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("failing_since", sa.Float()),
        sa.Column("disabled_at", sa.Float()),
        sa.Column("disabled_reason", LosslessText()),
    )
    op.create_table(
        "deliveries",
        sa.Column("id", string(32), primary_key=True),
        sa.Column("subscription", string(32), sa.ForeignKey("subscriptions.id", ondelete="CASCADE"), nullable=False),
        sa.Column("study", string(64), sa.ForeignKey("studies.id", ondelete="CASCADE")),
        sa.Column("event", string(16), nullable=False),
        sa.Column("body", LosslessText(), nullable=False),
        sa.Column("state", string(16), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("next_at", sa.Float()),
        sa.Column("finished_at", sa.Float()),
        sa.Column("status", sa.Integer()),
        sa.Column("error", LosslessText()),
    )
    op.create_index("deliveries_by_state", "deliveries", ["state", "next_at"])
    op.create_index("deliveries_by_subscription", "deliveries", ["subscription", "created_at"])
    op.create_table(
        "waits",
        sa.Column("study", string(64), sa.ForeignKey("studies.id", ondelete="CASCADE"), primary_key=True),
        sa.Column("reason", LosslessText(), nullable=False),
        sa.Column("since", sa.Float(), nullable=False),
        sa.Column("working_since", sa.Float()),
        sa.Column("is_notified", sa.Boolean(), nullable=False),
    )

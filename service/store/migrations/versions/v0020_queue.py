"""Migration: adds weights, quotas and usage of teams, and moves and preemptions of jobs in the queue."""

import sqlalchemy as sa
from alembic import op

from service.store.column_types import string

revision = "0020"
down_revision = "0019"


def upgrade() -> None:
    op.add_column("studies", sa.Column("yields_after", sa.Integer()))
    op.add_column("studies", sa.Column("moved_before", string(64)))
    op.add_column("studies", sa.Column("moved_at", sa.Float()))
    op.add_column("teams", sa.Column("weight", sa.Float(), nullable=False, server_default="1"))
    op.add_column("teams", sa.Column("max_running", sa.Integer()))
    op.add_column("teams", sa.Column("max_replicas", sa.Integer()))
    op.add_column("teams", sa.Column("gpu_hours", sa.Float()))
    op.add_column("teams", sa.Column("artifact_bytes", sa.BigInteger()))
    op.add_column("teams", sa.Column("export_bytes", sa.BigInteger()))
    op.add_column("teams", sa.Column("requests_per_minute", sa.Integer()))
    op.create_table(
        "team_usage",
        sa.Column("team", string(64), primary_key=True),
        sa.Column("day", sa.Integer(), primary_key=True, autoincrement=False),
        sa.Column("gpu_s", sa.Float(), nullable=False),
    )

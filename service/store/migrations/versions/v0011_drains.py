"""Migration: adds a table that says whether the servers are drained, that is, accept and start no jobs."""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"


def upgrade() -> None:
    op.create_table("drains", sa.Column("since", sa.Float(), primary_key=True))

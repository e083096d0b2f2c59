"""Migration: adds a table of engines that failed a check, and a column for the number of canaries passed earlier."""

import sqlalchemy as sa
from alembic import op

from service.store.column_types import BIG_NUMBER

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    op.create_table(
        "engine_faults",
        sa.Column("id", BIG_NUMBER, primary_key=True),
        sa.Column("replica", sa.Text(), nullable=False, unique=True),
        sa.Column("canaries", sa.Integer(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("time", sa.Float(), nullable=False),
    )
    op.add_column("evidence", sa.Column("canaries", sa.Integer()))

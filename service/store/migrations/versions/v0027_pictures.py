"""Migration: adds a table of small versions of the pictures in samples, which all trials of a study share."""

import sqlalchemy as sa
from alembic import op

from service.store.column_types import string

revision = "0027"
down_revision = "0026"


def upgrade() -> None:
    op.create_table(
        "pictures",
        sa.Column("study", string(64), primary_key=True),
        sa.Column("split", string(8), primary_key=True),
        sa.Column("objective", string(64), primary_key=True),
        sa.Column("position", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("content", sa.LargeBinary, nullable=False),
        sa.ForeignKeyConstraint(["study"], ["studies.id"], ondelete="CASCADE"),
    )

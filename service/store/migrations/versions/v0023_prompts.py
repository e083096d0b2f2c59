"""Migration: adds a table of the prompts and references of samples, which all trials of a study share."""

import sqlalchemy as sa
from alembic import op

from service.store.column_types import string

revision = "0023"
down_revision = "0022"


def upgrade() -> None:
    op.create_table(
        "prompts",
        sa.Column("study", string(64), primary_key=True),
        sa.Column("split", string(8), primary_key=True),
        sa.Column("objective", string(64), primary_key=True),
        sa.Column("start", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("packed", sa.LargeBinary, nullable=False),
        sa.ForeignKeyConstraint(["study"], ["studies.id"], ondelete="CASCADE"),
    )

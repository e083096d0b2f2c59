"""Migration: adds a table of steps, such as gradients, that searchers compute before they propose a configuration."""

import sqlalchemy as sa
from alembic import op

from service.store.column_types import string

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    op.create_table(
        "search_steps",
        sa.Column("study", string(64), sa.ForeignKey("studies.id", ondelete="CASCADE"), primary_key=True),
        sa.Column("number", sa.Integer(), primary_key=True, autoincrement=False),
        sa.Column("proposal", sa.Integer(), nullable=False),
        sa.Column("charged", sa.Integer(), nullable=False),
        sa.Column("document", sa.JSON(), nullable=False),
        sa.Column("time", sa.Float(), nullable=False),
    )

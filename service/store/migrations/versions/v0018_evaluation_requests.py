"""Migration: adds requests to evaluate the recipe of a trial at the full budget."""

import sqlalchemy as sa
from alembic import op

from service.store.column_types import string

revision = "0018"
down_revision = "0017"


def upgrade() -> None:
    op.create_table(
        "evaluation_requests",
        sa.Column("study", string(64), sa.ForeignKey("studies.id", ondelete="CASCADE"), primary_key=True),
        sa.Column("number", sa.Integer(), primary_key=True, autoincrement=False),
        sa.Column("trial", sa.Integer(), nullable=False),
        sa.Column("added", sa.Integer()),
    )

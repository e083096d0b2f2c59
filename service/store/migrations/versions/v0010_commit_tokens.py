"""Migration: adds a table of tokens, which show after a lost connection whether a transaction was committed."""

import sqlalchemy as sa
from alembic import op

from service.store.column_types import string

revision = "0010"
down_revision = "0009"


def upgrade() -> None:
    op.create_table(
        "commit_tokens",
        sa.Column("token", string(32), primary_key=True),
        sa.Column("time", sa.Float(), nullable=False),
    )

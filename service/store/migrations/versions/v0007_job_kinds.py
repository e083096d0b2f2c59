"""Migration: adds a column for the kind of each job (until then all jobs were studies), and a table of artifacts."""

import sqlalchemy as sa
from alembic import op

from service.store.column_types import string

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    op.add_column("studies", sa.Column("kind", string(16), nullable=False, server_default="search"))
    op.create_table(
        "artifacts",
        sa.Column("study", string(64), sa.ForeignKey("studies.id", ondelete="CASCADE"), primary_key=True),
        sa.Column("name", string(64), primary_key=True),
        sa.Column("digest", string(64), nullable=False),
        sa.Column("num_bytes", sa.BigInteger(), nullable=False),
        sa.Column("facts", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
    )

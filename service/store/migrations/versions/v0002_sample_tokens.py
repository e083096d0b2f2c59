"""Migration: adds a column with the numbers of tokens of each sample's completions."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.add_column("samples", sa.Column("tokens", sa.Text()))

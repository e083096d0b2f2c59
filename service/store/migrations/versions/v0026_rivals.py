"""Migration: adds a column for the rival of a stopped trial, the better trial because of which it was stopped."""

import sqlalchemy as sa
from alembic import op

revision = "0026"
down_revision = "0025"


def upgrade() -> None:
    op.add_column("trials", sa.Column("rival", sa.Integer()))

"""Migration: adds the rival of a trial that a scheduler stopped: the trial that was better."""

import sqlalchemy as sa
from alembic import op

revision = "0026"
down_revision = "0025"


def upgrade() -> None:
    op.add_column("trials", sa.Column("rival", sa.Integer()))

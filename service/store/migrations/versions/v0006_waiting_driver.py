"""Migration: adds a column for the reason why a driver waits."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    op.add_column("studies", sa.Column("waiting_for", sa.Text()))

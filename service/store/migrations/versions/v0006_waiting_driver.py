"""Heartbeats store the reason why the driver waits."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    op.add_column("studies", sa.Column("waiting_for", sa.Text()))

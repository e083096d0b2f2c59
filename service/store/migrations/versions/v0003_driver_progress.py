"""Migration: adds columns for the time of a driver's last progress, and for its longest time without progress."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    op.add_column("studies", sa.Column("progressed_at", sa.Float()))
    op.add_column("studies", sa.Column("patience_s", sa.Float()))

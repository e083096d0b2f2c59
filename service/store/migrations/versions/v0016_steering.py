"""Migration: adds requests to pause a job or end its search early, users' edits of jobs, and invalid trials."""

import sqlalchemy as sa
from alembic import op

from service.store.column_types import LosslessText, string

revision = "0016"
down_revision = "0015"


def upgrade() -> None:
    op.add_column("studies", sa.Column("is_paused", sa.Boolean(), nullable=False, server_default=sa.false()))
    op.add_column("studies", sa.Column("stop_reason", LosslessText()))
    op.add_column("studies", sa.Column("description", LosslessText()))
    op.add_column("studies", sa.Column("tags", sa.JSON()))
    op.add_column("studies", sa.Column("notes", LosslessText()))
    op.add_column("studies", sa.Column("priority", sa.Integer(), nullable=False, server_default="0"))
    op.add_column("studies", sa.Column("version", sa.Integer(), nullable=False, server_default="0"))
    op.add_column("studies", sa.Column("edited_after", sa.Integer()))
    op.add_column("studies", sa.Column("first_name", string(128)))
    op.add_column("trials", sa.Column("invalid", LosslessText()))

"""Migration: adds the requests to pause a job, and to end its search early."""

import sqlalchemy as sa
from alembic import op

from service.store.column_types import LosslessText

revision = "0016"
down_revision = "0015"


def upgrade() -> None:
    op.add_column("studies", sa.Column("is_paused", sa.Boolean(), nullable=False, server_default=sa.false()))
    op.add_column("studies", sa.Column("stop_reason", LosslessText()))

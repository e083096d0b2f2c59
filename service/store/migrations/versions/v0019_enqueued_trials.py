"""Migration: a request for an evaluation may have its own recipe or configuration instead of naming a trial."""

import sqlalchemy as sa
from alembic import op

from service.store.column_types import LosslessText

revision = "0019"
down_revision = "0018"


def upgrade() -> None:
    with op.batch_alter_table("evaluation_requests") as table:
        table.alter_column("trial", existing_type=sa.Integer(), nullable=True)
        table.add_column(sa.Column("label", LosslessText()))
        table.add_column(sa.Column("recipe", sa.JSON()))
        table.add_column(sa.Column("configuration", sa.JSON()))

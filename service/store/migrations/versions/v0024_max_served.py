"""Migration: the number of studies that a team serves at the same time becomes a quota; it was 4 for every team."""

import sqlalchemy as sa
from alembic import op

revision = "0024"
down_revision = "0023"


def upgrade() -> None:
    op.add_column("teams", sa.Column("max_served", sa.Integer(), server_default="4"))

"""Migration: adds a column for the API token with which a session of a browser was begun."""

import sqlalchemy as sa
from alembic import op

from service.store.column_types import string

revision = "0025"
down_revision = "0024"


def upgrade() -> None:
    op.add_column("sessions", sa.Column("token", string(32)))

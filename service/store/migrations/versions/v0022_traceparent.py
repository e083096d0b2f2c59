"""Migration: adds a column for the OpenTelemetry trace and span of the request that created a job."""

import sqlalchemy as sa
from alembic import op

from service.store.column_types import string

revision = "0022"
down_revision = "0021"


def upgrade() -> None:
    op.add_column("studies", sa.Column("traceparent", string(64)))

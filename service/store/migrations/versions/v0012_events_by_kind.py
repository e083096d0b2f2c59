"""Migration: adds an index of events by kind, for counts of events and for the last event of a kind."""

from alembic import op

revision = "0012"
down_revision = "0011"


def upgrade() -> None:
    op.create_index("events_by_kind", "events", ["study", "kind", "id"])

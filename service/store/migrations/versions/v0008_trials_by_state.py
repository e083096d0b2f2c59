"""Migration: adds an index of trials by state, for lists of trials in one state."""

from alembic import op

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    op.create_index("trials_by_state", "trials", ["study", "state", "number"])

"""Migration: adds a table of the prompt templates that attacks on benchmarks have scored."""

import sqlalchemy as sa
from alembic import op

from service.store.column_types import LosslessText, string

revision = "0013"
down_revision = "0012"


def upgrade() -> None:
    op.create_table(
        "prompt_templates",
        sa.Column("study", string(64), sa.ForeignKey("studies.id", ondelete="CASCADE"), primary_key=True),
        sa.Column("name", string(64), primary_key=True),
        sa.Column("benchmark", string(64), nullable=False),
        sa.Column("template", LosslessText(), nullable=False),
    )

"""Migration: adds a table of the judgments of completions by the judges of benchmarks."""

import sqlalchemy as sa
from alembic import op

from service.store.column_types import LosslessText, string

revision = "0014"
down_revision = "0013"


def upgrade() -> None:
    op.create_table(
        "judgments",
        sa.Column("study", string(64), sa.ForeignKey("studies.id", ondelete="CASCADE"), primary_key=True),
        sa.Column("benchmark", string(64), primary_key=True),
        sa.Column("recipe_digest", string(64), primary_key=True),
        sa.Column("position", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("is_swapped", sa.Boolean, primary_key=True),
        sa.Column("preference", sa.Float),
        sa.Column("model", LosslessText(), nullable=False),
        sa.Column("prompt_digest", string(64), nullable=False),
        sa.Column("answer", LosslessText(), nullable=False),
    )

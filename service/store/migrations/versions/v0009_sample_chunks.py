"""Migration: adds tables of samples in chunks, with separate tables for names of documents and for responses.

Samples in the table of earlier versions are moved later, while the server runs. Programs from before the migrations
cannot read chunks, so they must refuse the database.
"""

from typing import Any

import sqlalchemy as sa
from alembic import op

from service.store.column_types import BIG_NUMBER, string

revision = "0009"
down_revision = "0008"


def upgrade() -> None:
    op.create_table(
        "sample_documents",
        sa.Column("id", BIG_NUMBER, primary_key=True),
        sa.Column("study", string(64), sa.ForeignKey("studies.id", ondelete="CASCADE"), nullable=False),
        sa.Column("digest", string(64), nullable=False),
        sa.Column("packed", sa.LargeBinary(), nullable=False),
        sa.UniqueConstraint("study", "digest"),
    )
    op.create_table(
        "sample_chunks",
        *_key(),
        sa.Column("num_samples", sa.Integer(), nullable=False),
        sa.Column("num_tokens", sa.Integer()),
        sa.Column("documents", sa.BigInteger(), nullable=False),
        sa.Column("evidence", sa.BigInteger(), nullable=False),
        sa.Column("packed", sa.LargeBinary(), nullable=False),
    )
    op.create_table("sample_texts", *_key(), sa.Column("packed", sa.LargeBinary(), nullable=False))
    op.add_column("evidence", sa.Column("sample_bytes", sa.BigInteger()))
    op.add_column("evidence", sa.Column("text_bytes", sa.BigInteger()))
    op.execute("UPDATE schema_version SET version = 3")


def _key() -> list[sa.Column[Any]]:
    return [
        sa.Column("study", string(64), sa.ForeignKey("studies.id", ondelete="CASCADE"), primary_key=True),
        sa.Column("split", string(8), primary_key=True),
        sa.Column("recipe_digest", string(64), primary_key=True),
        sa.Column("objective", string(64), primary_key=True),
        sa.Column("start", sa.Integer(), primary_key=True, autoincrement=False),
    ]

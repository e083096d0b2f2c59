"""Migration: adds sessions of browsers, logins that have begun, and the identity of a user at a provider."""

import sqlalchemy as sa
from alembic import op

from service.store.column_types import LosslessText, string

revision = "0017"
down_revision = "0016"


def upgrade() -> None:
    op.add_column("users", sa.Column("identity", LosslessText()))
    op.create_table(
        "sessions",
        sa.Column("id", string(32), primary_key=True),
        sa.Column("user", string(64), sa.ForeignKey("users.name"), nullable=False),
        sa.Column("digest", string(64), nullable=False, unique=True),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("expires_at", sa.Float(), nullable=False),
        sa.Column("last_used_at", sa.Float(), nullable=False),
    )
    op.create_table(
        "logins",
        sa.Column("state", string(64), primary_key=True),
        sa.Column("browser", string(64), nullable=False),
        sa.Column("nonce", string(64), nullable=False),
        sa.Column("verifier", string(128), nullable=False),
        sa.Column("redirect_uri", LosslessText(), nullable=False),
        sa.Column("next", LosslessText(), nullable=False),
        sa.Column("expires_at", sa.Float(), nullable=False),
    )

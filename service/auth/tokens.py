"""API tokens: random texts by which a server recognizes a user. Only the hash of a token is stored."""

from __future__ import annotations

import hashlib
import re
import secrets
from dataclasses import dataclass

__all__ = ["NewToken", "digest_of", "given_token", "new_token"]

# The beginning of every token, by which scanners of source code recognize leaked ones.
MARK = "mst_"
NUM_BYTES = 32

# Tokens that operators make themselves have as many random bits: 43 characters of 62 or 64.
GIVEN = re.compile(rf"{MARK}[A-Za-z0-9_-]{{43,128}}")

# Characters that are stored and shown: six of them are random.
PREFIX = len(MARK) + 6


@dataclass(frozen=True)
class NewToken:
    """A new API token. `secret` is the whole token, which is shown to the user once and never stored."""

    secret: str

    @property
    def digest(self) -> str:
        return digest_of(self.secret)

    @property
    def prefix(self) -> str:
        return self.secret[:PREFIX]

    def __repr__(self) -> str:
        return f"NewToken({self.prefix}...)"


def new_token() -> NewToken:
    """Make a new API token with 256 random bits."""
    return NewToken(MARK + secrets.token_urlsafe(NUM_BYTES))


def given_token(text: str) -> NewToken:
    """Read an API token that an operator has made, for example one from the secrets of a deployment.

    Raises ValueError if the text is not `mst_` followed by 43 to 128 letters, digits, `-` and `_`. The message has no
    part of the text.
    """
    if not GIVEN.fullmatch(text):
        raise ValueError(f"not a token; a token is {MARK} and 43 to 128 random letters, digits, - and _")
    return NewToken(text)


def digest_of(secret: str) -> str:
    """Hash (sha256) of an API token or of a session's cookie; only the hash is stored.

    A fast hash is safe, because these values have 256 random bits.
    """
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()

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
    """A token that was just made. `secret` is the whole token, which is shown once and never stored."""

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
    """Make a token with 256 random bits."""
    return NewToken(MARK + secrets.token_urlsafe(NUM_BYTES))


def given_token(text: str) -> NewToken:
    """Read a token that an operator made, such as one of a deployment's secrets.

    Raises ValueError if it is not `mst_` and 43 to 128 letters, digits, `-` and `_`. The message has no part of it.
    """
    if not GIVEN.fullmatch(text):
        raise ValueError(f"not a token; a token is {MARK} and 43 to 128 random letters, digits, - and _")
    return NewToken(text)


def digest_of(secret: str) -> str:
    """The sha256 of a token, which is stored. A token has 256 random bits, so that a slow hash would add nothing."""
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()

"""SQLAlchemy column types that store and sort values equally on SQLite and PostgreSQL."""

from __future__ import annotations

import re
from typing import Any

import sqlalchemy as sa

__all__ = ["BIG_NUMBER", "LosslessText", "string"]

# Ids that the database counts up. SQLite counts only columns of the type INTEGER, which has 64 bits there.
BIG_NUMBER = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def string(length: int) -> sa.String:
    """Column type for text of at most `length` characters, which the database sorts by the numbers of its code points.

    With an ordinary text type, PostgreSQL would sort by the rules of a language.
    """
    return sa.String(length).with_variant(sa.String(length, collation="C"), "postgresql")


class LosslessText(sa.types.TypeDecorator[str]):
    """Column type for text with any character of a Python string, such as NUL in a model's response.

    PostgreSQL cannot store NUL, and UTF-8 cannot encode lone surrogates. These characters, and the escape character
    U+001A itself, are stored as U+001A and the four hexadecimal digits of their code point. Text that earlier versions
    stored has no such sequence and is read unchanged.
    """

    impl = sa.Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Any) -> str | None:
        return value if value is None else _SPECIAL.sub(_escaped, value)

    def process_result_value(self, value: str | None, dialect: Any) -> str | None:
        return value if value is None or ESCAPE not in value else _SEQUENCE.sub(_unescaped, value)


ESCAPE = "\x1a"

_SPECIAL = re.compile(f"[\x00{ESCAPE}\ud800-\udfff]")
_SEQUENCE = re.compile(f"{ESCAPE}(0000|001A|D[89A-F][0-9A-F]{{2}})")


def _escaped(match: re.Match[str]) -> str:
    return f"{ESCAPE}{ord(match[0]):04X}"


def _unescaped(match: re.Match[str]) -> str:
    return chr(int(match[1], 16))

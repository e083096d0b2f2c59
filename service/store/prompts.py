"""Storage of the prompts, references and pictures of a study's samples.

The table `prompts` has one row for several adjacent samples of one objective. The table `pictures` has one row for
each picture. Texts and pictures belong to the task, not to a merge, so all trials share them. They are written once and
never changed. All functions work inside the caller's transaction.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import sqlalchemy as sa

from service.store import schema
from workers.types import Split

__all__ = ["SampleText", "picture_positions", "read_picture", "read_prompts", "stored_prompts", "write_prompts"]

# Samples in one row. A page of samples reads the rows that have them.
ROW_SAMPLES = 50


@dataclass(frozen=True)
class SampleText:
    """The prompt and the right answer (`reference`) of a sample; `reference` is None if the task has no such text.

    `picture` is a small picture of the sample for people, a WebP file; None if the sample has no picture. `picture` is
    only written: the function `read_prompts` returns texts without pictures, and the function `read_picture` reads one
    picture.
    """

    prompt: str
    reference: str | None
    picture: bytes | None = None


def write_prompts(
    connection: sa.Connection, study: str, split: Split, objective: str, texts: Sequence[SampleText]
) -> None:
    """Store the texts of an objective's samples, in the order of their positions, unless its texts are stored already.

    `split` says whether the samples are of search data, held-out data or benchmarks. `connection` must be in a
    transaction that holds the lock of the job's row.
    """
    if (split, objective) in stored_prompts(connection, study):
        return
    rows = [
        {
            "study": study,
            "split": Split(split).value,
            "objective": objective,
            "start": start,
            "packed": _pack(texts[start : start + ROW_SAMPLES]),
        }
        for start in range(0, len(texts), ROW_SAMPLES)
    ]
    if rows:
        connection.execute(sa.insert(schema.prompts), rows)
    key = {"study": study, "split": Split(split).value, "objective": objective}
    pictures = [
        {**key, "position": position, "content": text.picture}
        for position, text in enumerate(texts)
        if text.picture is not None
    ]
    if pictures:
        connection.execute(sa.insert(schema.pictures), pictures)


def stored_prompts(connection: sa.Connection, study: str) -> frozenset[tuple[Split, str]]:
    """Find the pairs of a split and an objective for which a study has stored prompts.

    `study` is the study's id. A split is the search data, the holdout data or the benchmarks.
    """
    table = schema.prompts
    query = sa.select(table.c.split, table.c.objective).where((table.c.study == study) & (table.c.start == 0))
    return frozenset((Split(split), objective) for split, objective in connection.execute(query))


def read_prompts(
    connection: sa.Connection, study: str, split: Split, objective: str, positions: Collection[int]
) -> dict[int, SampleText]:
    """Read the prompts and references of samples by position; positions without stored texts are left out.

    `study` is the study's id. `split` says whether the samples are of the search data, the holdout data or the
    benchmarks, and `objective` is the objective's name. A position is a sample's index in the order of scoring.
    """
    table = schema.prompts
    where = (table.c.study == study) & (table.c.split == Split(split).value) & (table.c.objective == objective)
    where &= table.c.start.in_({position // ROW_SAMPLES * ROW_SAMPLES for position in positions})
    found = {}
    for start, packed in connection.execute(sa.select(table.c.start, table.c.packed).where(where)):
        for position, texts in enumerate(json.loads(zlib.decompress(packed)), start=start):
            if position in positions:
                found[position] = SampleText(*texts)
    return found


def read_picture(connection: sa.Connection, study: str, split: Split, objective: str, position: int) -> bytes | None:
    """Read the picture of a sample, a WebP file; None if no picture is stored.

    `study` is the study's id. `split` is the search data, the holdout data or the benchmarks, and `objective` is the
    objective's name. A position is a sample's index in the order of scoring.
    """
    table = schema.pictures
    where = _is_of(study, split, objective) & (table.c.position == position)
    return connection.execute(sa.select(table.c.content).where(where)).scalar_one_or_none()


def picture_positions(
    connection: sa.Connection, study: str, split: Split, objective: str, positions: Collection[int]
) -> set[int]:
    """Select the `positions` at which a sample has a stored picture.

    `study` is the study's id. `split` is the search data, the holdout data or the benchmarks, and `objective` is the
    objective's name.
    """
    if not positions:
        return set()
    position = schema.pictures.c.position
    where = _is_of(study, split, objective) & position.between(min(positions), max(positions))
    return {each for (each,) in connection.execute(sa.select(position).where(where)) if each in set(positions)}


def _is_of(study: str, split: Split, objective: str) -> sa.ColumnElement[bool]:
    table = schema.pictures
    return (table.c.study == study) & (table.c.split == Split(split).value) & (table.c.objective == objective)


def _pack(texts: Sequence[SampleText]) -> bytes:
    rows = [[text.prompt, text.reference] for text in texts]
    return zlib.compress(json.dumps(rows, separators=(",", ":")).encode())

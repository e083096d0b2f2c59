"""Storage of samples in SQL: one row for adjacent samples of one objective that were scored together.

    sample_chunks      values and flags, packed: float64 and one bit for each sample, compressed by zlib
    sample_documents   lists of document names; recipes that are scored on the same data share them
    sample_texts       responses and tokens, which are most of the bytes, as JSON compressed by zlib

Earlier versions stored a row for each sample, in the table `samples`. This module can read these rows. The server moves
them to the other tables, one recipe at a time. If a driver adds samples of a recipe earlier, it moves the recipe's rows
itself.

All functions work inside the caller's transaction. Functions that write require that the transaction holds the lock of
the job's row.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import zlib
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
import sqlalchemy as sa
from numpy.typing import NDArray

from service.store import schema
from service.store.connection import one_of
from workers.types import SampleResult, Split

__all__ = [
    "SampleChunk",
    "VoidSample",
    "delete_texts",
    "has_old_samples",
    "holdings",
    "move_old_samples",
    "not_stored",
    "num_tokens",
    "pack_documents",
    "pack_texts",
    "pack_values",
    "read_chunks",
    "read_samples",
    "read_void_samples",
    "remove_samples",
    "remove_texts",
    "store_samples",
    "text_sizes",
    "void_holdings",
    "with_room",
]

Flags = NDArray[np.bool_]
Values = NDArray[np.float64]


# Columns of the table of evidence: bytes of its samples' values, and of their texts.
SIZES = ("sample_bytes", "text_bytes")


@dataclass(frozen=True)
class SampleChunk:
    """Metric values of samples with adjacent positions, for one objective and one recipe (merge).

    `recipe_digest` is the recipe's digest. `values` [num_samples] begins with the value of the sample at position
    `start`. The position of a sample is its index in the order in which the objective's samples are scored.
    """

    recipe_digest: str
    objective: str
    start: int
    values: Values


@dataclass(frozen=True)
class VoidSample:
    """A void sample: the engine that scored it later failed a check, so the sample must be scored again.

    `recipe_digest` is the digest of the scored recipe (merge), and `split` is the data that the sample belongs to.
    `position` is the sample's index in the order in which the objective's samples are scored. `value` is the doubtful
    value, and `replica` is the id of the engine's replica.
    """

    recipe_digest: str
    split: Split
    objective: str
    position: int
    value: float
    replica: str


# -- formats -----------------------------------------------------------------------------------------------------------


def pack_values(values: Values, is_truncated: Flags) -> bytes:
    """Pack the metric values of samples [num_samples] into compressed bytes.

    `is_truncated` [num_samples] says which samples' prompts were cut to the longest length that the engine accepts.
    """
    return zlib.compress(values.astype("<f8").tobytes() + np.packbits(is_truncated).tobytes())


def _unpack_values(packed: bytes, count: int) -> tuple[Values, Flags]:
    content = zlib.decompress(packed)
    values = np.frombuffer(content, dtype="<f8", count=count).astype(np.float64)
    bits = np.frombuffer(content, dtype=np.uint8, offset=8 * count)
    return values, np.unpackbits(bits, count=count).astype(bool)


def pack_texts(samples: Sequence[SampleResult]) -> bytes:
    """Pack the model's responses to samples, and the token ids of the completions, into compressed bytes."""
    return _pack_json([[sample.response, sample.tokens] for sample in samples])


def _unpack_texts(packed: bytes | None, count: int) -> list[tuple[str, list[list[int]] | None]]:
    """Unpack the texts of `count` samples to pairs: the sample's response, and the token ids of each completion.

    `packed` is a result of the function `pack_texts`. The token ids are None if no token ids were stored. If `packed`
    is None, because the texts were deleted, each response is "", and the token ids are None.
    """
    if packed is None:
        return [("", None)] * count
    found: list[tuple[str, list[list[int]] | None]] = json.loads(zlib.decompress(packed))
    return found


def _tokens(stored: list[list[int]] | None, *, has_tokens: bool) -> tuple[tuple[int, ...], ...] | None:
    """Convert the stored token ids of a sample's completions to tuples, one for each completion.

    If `has_tokens` is False, the tuples are empty. Returns None if no token ids were stored.
    """
    return None if stored is None else tuple(tuple(ids) if has_tokens else () for ids in stored)


def pack_documents(names: Sequence[str]) -> bytes:
    """Pack the `names` of documents into compressed bytes.

    A document is the item of a task from which a sample was made.
    """
    return _pack_json(names)


def _pack_json(content: Any) -> bytes:
    return zlib.compress(json.dumps(content, separators=(",", ":")).encode())


# -- reading -----------------------------------------------------------------------------------------------------------


def read_chunks(
    connection: sa.Connection,
    study: str,
    split: Split,
    *,
    recipes: Collection[str] | None = None,
    objectives: Collection[str] | None = None,
) -> Iterator[SampleChunk]:
    """Yield the stored metric values of a study's samples on one split, in groups with adjacent positions.

    `study` is the study's id. `split` is the search data, the holdout data or the benchmarks. `recipes` has the digests
    of the recipes (merges) to read, and `objectives` has the names of the objectives; None reads all.
    """
    table = schema.sample_chunks
    where = (table.c.study == study) & (table.c.split == Split(split).value)
    old = schema.samples
    where_old = (old.c.study == study) & (old.c.split == Split(split).value)
    if recipes is not None:
        where &= table.c.recipe_digest.in_(list(recipes))
        where_old &= old.c.recipe_digest.in_(list(recipes))
    if objectives is not None:
        where &= table.c.objective.in_(list(objectives))
        where_old &= old.c.objective.in_(list(objectives))
    columns = (table.c.recipe_digest, table.c.objective, table.c.start, table.c.num_samples, table.c.packed)
    for digest, objective, start, count, packed in connection.execute(sa.select(*columns).where(where)):
        yield SampleChunk(digest, objective, start, _unpack_values(packed, count)[0])
    columns_old = (old.c.recipe_digest, old.c.objective, old.c.position, old.c.value)
    for digest, objective, position, value in connection.execute(sa.select(*columns_old).where(where_old)):
        yield SampleChunk(digest, objective, position, np.array([value]))


def with_room(known: Values | None, stop: int) -> Values:
    """Lengthen an array of sample values, indexed by sample position, to at least `stop` values.

    `known` is the array; None means an empty array. The values that are added are NaN: no value is known there.
    """
    if known is None:
        return np.full(stop, np.nan)
    return known if len(known) >= stop else np.concatenate([known, np.full(stop - len(known), np.nan)])


def read_samples(
    connection: sa.Connection,
    study: str,
    digest: str,
    split: Split,
    *,
    objective: str | None = None,
    positions: Set[int] | None = None,
    has_tokens: bool = True,
) -> tuple[SampleResult, ...]:
    """Read the scored samples of one recipe (merge), ordered by objective and position.

    `study` is the study's id, and `digest` is the recipe's digest. `split` is the search data, the holdout data or the
    benchmarks. The position of a sample is its index in the order in which the objective's samples are scored. If
    `objective` is not None, only samples of this objective are read. If `positions` is not None, only samples at these
    positions are read. If `has_tokens` is False, stored completions are returned without their token ids.
    """
    chunks, old = schema.sample_chunks, schema.samples
    where, where_old = (sa.true() if objective is None else table.c.objective == objective for table in (chunks, old))
    if positions is not None:
        where &= one_of(chunks.c.start, _starts(connection, _is_of(chunks, study, digest, split) & where, positions))
        where_old &= one_of(old.c.position, positions)
    of_recipe = (connection, study, digest, split)
    new = _samples_of(*of_recipe, where, positions=positions, has_tokens=has_tokens)
    earlier = _old_samples(*of_recipe, where_old, positions=positions, has_tokens=has_tokens)
    found = [*(sample for _, sample in new), *(sample for _, _, sample in earlier)]
    return tuple(sorted(found, key=lambda sample: (sample.objective, sample.position)))


def _starts(connection: sa.Connection, where: sa.ColumnElement[bool], positions: Set[int]) -> set[int]:
    """Find the stored groups (chunks) of adjacent samples that have a sample at one of `positions`.

    `where` is an SQL condition on the chunks to search. Returns the position of the first sample of each chunk found.
    """
    table, ordered = schema.sample_chunks, sorted(positions)
    found = set()
    for start, count in connection.execute(sa.select(table.c.start, table.c.num_samples).where(where)):
        index = bisect_left(ordered, start)
        if index < len(ordered) and ordered[index] < start + count:
            found.add(start)
    return found


def _samples_of(
    connection: sa.Connection,
    study: str,
    digest: str,
    split: Split,
    where: sa.ColumnElement[bool],
    *,
    positions: Set[int] | None = None,
    has_tokens: bool = True,
) -> Iterator[tuple[int, SampleResult]]:
    """Yield the stored samples of one recipe (merge), each with the id of its row in the table `evidence`.

    A row of this table says which weights the engine held when it scored samples. `study` is the study's id, `digest`
    is the recipe's digest, and `split` is the search data, the holdout data or the benchmarks. Samples in the table in
    which earlier versions of the program stored them are left out. `where` is a condition on rows of the table
    `sample_chunks`; each row has adjacent samples that were scored together. From the selected rows, only samples at
    `positions` are yielded (None: all samples). If `has_tokens` is False, completions are yielded without their token
    ids.
    """
    table, texts, documents = schema.sample_chunks, schema.sample_texts, schema.sample_documents
    same = [texts.c[column.name] == column for column in table.primary_key]
    query = (
        sa.select(table, texts.c.packed.label("texts"), documents.c.packed.label("names"))
        .join(documents, documents.c.id == table.c.documents)
        .outerjoin(texts, sa.and_(*same))
        .where(_is_of(table, study, digest, split) & where)
    )
    for row in connection.execute(query):
        values, is_truncated = _unpack_values(row.packed, row.num_samples)
        names = json.loads(zlib.decompress(row.names))
        each = zip(
            names, values.tolist(), is_truncated.tolist(), _unpack_texts(row.texts, row.num_samples), strict=True
        )
        for position, (name, value, flag, (response, stored)) in enumerate(each, start=row.start):
            if positions is None or position in positions:
                tokens = _tokens(stored, has_tokens=has_tokens)
                yield row.evidence, SampleResult(row.objective, position, name, value, response, flag, tokens)


def num_tokens(connection: sa.Connection, study: str, split: Split) -> dict[str, int]:
    """Number of tokens that a study's merges generated, keyed by the digest of the merge's recipe.

    `split` is the data for which tokens are counted: the search data, the holdout data or the benchmarks. Recipes with
    a scored sample whose tokens are not stored are left out.
    """
    table = schema.sample_chunks
    where = (table.c.study == study) & (table.c.split == Split(split).value)
    total = sa.case((sa.func.count() == sa.func.count(table.c.num_tokens), sa.func.sum(table.c.num_tokens)))
    found: dict[str, int | None] = {}
    for digest, number in connection.execute(
        sa.select(table.c.recipe_digest, total).where(where).group_by(table.c.recipe_digest)
    ):
        found[digest] = None if number is None else int(number)
    for digest in _old_recipes(connection, study, split):
        for _, _, sample in _old_samples(connection, study, digest, split):
            before, own = found.get(digest, 0), _num_tokens([sample])
            found[digest] = None if before is None or own is None else before + own
    return {digest: number for digest, number in found.items() if number is not None}


def holdings() -> sa.Subquery:
    """SQL subquery that counts the stored samples of each evidence row, with columns study, evidence and num_samples.

    A row of the table `evidence` says which weights the engine held when it scored some samples; the column `evidence`
    has the id of this row. Several rows of the subquery may have the same study and evidence; the number of samples is
    then the sum over these rows.
    """
    chunks, old = schema.sample_chunks, schema.samples
    return sa.union_all(
        sa.select(chunks.c.study, chunks.c.evidence, chunks.c.num_samples),
        sa.select(old.c.study, old.c.evidence, sa.literal(1).label("num_samples")),
    ).subquery("holdings")


def void_holdings(*columns: Any, held: sa.Subquery) -> sa.Select[Any]:
    """SQL query for void samples, which must be scored again because their engine later failed a check.

    A sample is void if its engine scored it after the last check with fixed prompts that the engine passed. `held` is a
    result of the function `holdings`, whose rows are groups of samples with equal evidence of which weights the engine
    held. The query selects the rows whose samples are void. `columns` are the columns to select, of `held` or of the
    joined tables `evidence` and `engine_faults`.
    """
    return _void(sa.select(*columns).select_from(held), held.c.evidence)


def _void(query: sa.Select[Any], of: sa.ColumnElement[int]) -> sa.Select[Any]:
    evidence, faults = schema.evidence, schema.engine_faults
    is_void = (faults.c.replica == evidence.c.replica) & (evidence.c.canaries >= faults.c.canaries)
    return query.join(evidence, evidence.c.id == of).join(faults, is_void)


def read_void_samples(connection: sa.Connection, study: str) -> tuple[VoidSample, ...]:
    """Read the void samples of a study: samples that must be scored again because their engine later failed a check.

    The samples are ordered by the digest of the recipe (merge), by split (search data, holdout data or benchmarks), by
    objective and by position.
    """
    chunks, old, replica = schema.sample_chunks, schema.samples, schema.evidence.c.replica
    found = []
    query = _void(sa.select(chunks, replica).select_from(chunks), chunks.c.evidence).where(chunks.c.study == study)
    for row in connection.execute(query):
        for position, value in enumerate(_unpack_values(row.packed, row.num_samples)[0].tolist(), start=row.start):
            found.append((row.recipe_digest, row.split, row.objective, position, value, row.replica))
    query = _void(sa.select(old, replica).select_from(old), old.c.evidence).where(old.c.study == study)
    for row in connection.execute(query):
        found.append((row.recipe_digest, row.split, row.objective, row.position, row.value, row.replica))
    return tuple(VoidSample(digest, Split(split), *rest) for digest, split, *rest in sorted(found))


# -- writing -----------------------------------------------------------------------------------------------------------


def not_stored(
    connection: sa.Connection, study: str, digest: str, split: Split, samples: Sequence[SampleResult]
) -> list[SampleResult]:
    """Select the `samples` that are not stored yet for one recipe (merge) of a study.

    `digest` is the recipe's digest, and `split` is the data that the samples belong to: search data, holdout data or
    benchmarks. Samples that are only in the table `samples`, where earlier versions stored them, count as not stored.
    """
    key = {"of_study": study, "of_recipe": digest, "of_split": Split(split).value}
    known: dict[str, set[int]] = defaultdict(set)
    for objective, start, count in connection.execute(_STORED, key):
        known[objective].update(range(start, start + count))
    return [sample for sample in samples if sample.position not in known[sample.objective]]


# Statements of every request are built once: to build one takes as long as to execute it.
_STORED = sa.select(
    schema.sample_chunks.c.objective, schema.sample_chunks.c.start, schema.sample_chunks.c.num_samples
).where(
    schema.sample_chunks.c.study == sa.bindparam("of_study"),
    schema.sample_chunks.c.split == sa.bindparam("of_split"),
    schema.sample_chunks.c.recipe_digest == sa.bindparam("of_recipe"),
)
_DOCUMENTS = sa.select(schema.sample_documents.c.id).where(
    schema.sample_documents.c.study == sa.bindparam("of_study"),
    schema.sample_documents.c.digest == sa.bindparam("of_names"),
)
_SIZES = (
    sa.update(schema.evidence)
    .where(schema.evidence.c.id == sa.bindparam("of_evidence"))
    .values({name: sa.bindparam(name) for name in SIZES})
)


def store_samples(
    connection: sa.Connection, study: str, digest: str, split: Split, evidence: int, samples: Iterable[SampleResult]
) -> None:
    """Store samples of one recipe (merge) that an engine scored in one request.

    `study` is the study's id, `digest` is the recipe's digest, and `split` is the data that the samples belong to, such
    as the search data. `evidence` is the id of a row in the table `evidence`, which says which weights the engine held.
    None of the samples may be stored already. This function is called once for a request, because it also writes the
    total size of `samples`, in bytes, to this row.
    """
    chunks: list[dict[str, Any]] = []
    texts: list[dict[str, Any]] = []
    for run in _runs(samples):
        key = {
            "study": study,
            "split": Split(split).value,
            "recipe_digest": digest,
            "objective": run[0].objective,
            "start": run[0].position,
        }
        packed = pack_values(
            np.array([sample.value for sample in run]), np.array([sample.is_truncated for sample in run])
        )
        documents = _documents_id(connection, study, [sample.document for sample in run])
        numbers = {
            "num_samples": len(run),
            "num_tokens": _num_tokens(run),
            "documents": documents,
            "evidence": evidence,
        }
        chunks.append({**key, **numbers, "packed": packed})
        texts.append({**key, "packed": pack_texts(run)})
    if chunks:
        connection.execute(sa.insert(schema.sample_chunks), chunks)
        connection.execute(sa.insert(schema.sample_texts), texts)
    sizes = {name: sum(len(row["packed"]) for row in rows) for name, rows in zip(SIZES, (chunks, texts), strict=True)}
    connection.execute(_SIZES, {"of_evidence": evidence, **sizes})


def delete_texts(connection: sa.Connection, study: str, *, keep: Collection[str]) -> None:
    """Delete the stored model responses and tokens of a study, except for the recipes (merges) in `keep`.

    `study` is the study's id, and `keep` has the digests of these recipes.
    """
    texts, evidence, old = schema.sample_texts, schema.evidence, schema.samples

    def is_other(table: sa.Table) -> sa.ColumnElement[bool]:
        return (table.c.study == study) & table.c.recipe_digest.not_in(list(keep))

    connection.execute(sa.delete(texts).where(is_other(texts)))
    connection.execute(sa.update(evidence).where(is_other(evidence)).values(text_bytes=0))
    connection.execute(sa.update(old).where(is_other(old)).values(response="", tokens=None))


def remove_samples(
    connection: sa.Connection, study: str, digest: str, split: Split, keys: Collection[tuple[str, int]]
) -> None:
    """Remove some stored samples of one recipe (merge).

    `study` is the study's id, `digest` is the recipe's digest, and `split` is the data that the samples belong to, such
    as the search data. `keys` has the samples to remove, each as (objective, position in the order of scoring).
    """
    if not keys:
        return
    kept: dict[int, list[SampleResult]] = defaultdict(list)
    for evidence, sample in _samples_of(connection, study, digest, split, sa.true()):
        kept[evidence] += [] if (sample.objective, sample.position) in keys else [sample]
    for table in (schema.sample_texts, schema.sample_chunks):
        connection.execute(sa.delete(table).where(_is_of(table, study, digest, split)))
    for evidence, samples in kept.items():
        store_samples(connection, study, digest, split, evidence, samples)


def text_sizes(connection: sa.Connection) -> dict[str, tuple[int, int]]:
    """Number of samples with stored responses, and the bytes of the responses, by study id.

    A study is left out while some of its samples are still in the table in which earlier versions stored them.
    """
    chunks, texts, old = schema.sample_chunks, schema.sample_texts, schema.samples
    same = sa.and_(*(texts.c[column.name] == column for column in chunks.primary_key))
    query = (
        sa.select(texts.c.study, sa.func.sum(chunks.c.num_samples), sa.func.sum(sa.func.length(texts.c.packed)))
        .join(chunks, same)
        .where(~sa.select(old.c.study).where(old.c.study == texts.c.study).exists())
        .group_by(texts.c.study)
    )
    return {study: (int(count), int(num_bytes)) for study, count, num_bytes in connection.execute(query)}


def remove_texts(connection: sa.Connection, study: str) -> int:
    """Remove the model responses and tokens of one recipe (merge) of a study, and return the number of rows removed.

    The recipe is any recipe of the study that still has responses or tokens. The result is 0 if no recipe of the study
    has any. Callers repeat the call until the result is 0.
    """
    texts = schema.sample_texts
    digest = sa.select(texts.c.recipe_digest).where(texts.c.study == study).limit(1).scalar_subquery()
    where = (texts.c.study == study) & (texts.c.recipe_digest == digest)
    return connection.execute(sa.delete(texts).where(where)).rowcount


def _runs(samples: Iterable[SampleResult]) -> Iterator[list[SampleResult]]:
    """Group samples that have adjacent positions of one objective, because each such group becomes one database row.

    The groups are ordered by objective and position. A position is a sample's index in the order of scoring.
    """
    ordered = sorted(samples, key=lambda sample: (sample.objective, sample.position))
    numbered = enumerate(ordered)
    for _, run in itertools.groupby(numbered, key=lambda item: (item[1].objective, item[1].position - item[0])):
        yield [sample for _, sample in run]


def _documents_id(connection: sa.Connection, study: str, names: Sequence[str]) -> int:
    """Return the database id of a list of documents' names, and store the list if it is new.

    A document is the item of a task from which a sample was made. Samples of different recipes (merges) on the same
    documents therefore share one stored list.
    """
    table = schema.sample_documents
    packed = pack_documents(names)
    digest = hashlib.sha256(packed).hexdigest()
    found: int | None = connection.execute(_DOCUMENTS, {"of_study": study, "of_names": digest}).scalar()
    if found is None:
        row = sa.insert(table).values(study=study, digest=digest, packed=packed).returning(table.c.id)
        found = connection.execute(row).scalar_one()
    return found


def _num_tokens(samples: Iterable[SampleResult]) -> int | None:
    """Number of tokens in the completions of all `samples`; None if the tokens of a sample are not stored."""
    total = 0
    for sample in samples:
        if sample.tokens is None:
            return None
        total += sum(map(len, sample.tokens))
    return total


def _is_of(table: sa.Table, study: str, digest: str, split: Split) -> sa.ColumnElement[bool]:
    return (table.c.study == study) & (table.c.split == Split(split).value) & (table.c.recipe_digest == digest)


# -- rows of earlier versions ------------------------------------------------------------------------------------------


def has_old_samples(connection: sa.Connection, study: str) -> bool:
    """Whether a study has samples in the table `samples`, in which earlier program versions stored them."""
    table = schema.samples
    found = connection.execute(sa.select(table.c.study).where(table.c.study == study).limit(1)).scalar()
    return found is not None


def move_old_samples(connection: sa.Connection, study: str, digest: str) -> int:
    """Move the samples of one recipe (merge) from the table of earlier program versions to the present tables.

    The earlier table is `samples`, with a row for each sample. `study` is the study's id, and `digest` is the recipe's
    digest. Returns the number of samples that were moved.
    """
    by_chunk: dict[tuple[Split, int], list[SampleResult]] = defaultdict(list)
    for split, evidence, sample in _old_samples(connection, study, digest):
        by_chunk[split, evidence].append(sample)
    for (split, evidence), samples in by_chunk.items():
        store_samples(connection, study, digest, split, evidence, samples)
    table = schema.samples
    where = (table.c.study == study) & (table.c.recipe_digest == digest)
    return connection.execute(sa.delete(table).where(where)).rowcount


def _old_samples(
    connection: sa.Connection,
    study: str,
    digest: str,
    split: Split | None = None,
    condition: sa.ColumnElement[bool] | None = None,
    *,
    positions: Set[int] | None = None,
    has_tokens: bool = True,
) -> Iterator[tuple[Split, int, SampleResult]]:
    """Yield the samples of one recipe (merge) from the table `samples`, in which earlier program versions stored them.

    `study` is the study's id, and `digest` is the recipe's digest. `split` is the data to read: search data, holdout
    data or benchmarks; None reads all. `condition` is a further condition on the table's rows. `positions` are the
    positions to read; None reads all. Without `has_tokens`, completions have no token ids. Each sample is yielded as
    its split, the id of its row in the table `evidence` (which says which weights the engine held), and the result.
    """
    table = schema.samples
    where = (table.c.study == study) & (table.c.recipe_digest == digest)
    if split is not None:
        where &= table.c.split == Split(split).value
    if condition is not None:
        where &= condition
    for row in connection.execute(sa.select(table).where(where)):
        if positions is not None and row.position not in positions:
            continue
        tokens = _tokens(None if row.tokens is None else json.loads(row.tokens), has_tokens=has_tokens)
        found = SampleResult(
            row.objective, row.position, row.document, row.value, row.response, row.is_truncated, tokens
        )
        yield Split(row.split), row.evidence, found


def _old_recipes(connection: sa.Connection, study: str, split: Split) -> list[str]:
    table = schema.samples
    where = (table.c.study == study) & (table.c.split == Split(split).value)
    return list(connection.execute(sa.select(table.c.recipe_digest).where(where).distinct()).scalars())

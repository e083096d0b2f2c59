"""Results of a study: its trials, scored samples, evidence of engines, steps of its searcher, and documents.

The study's driver writes them through a `JobWriter`. The store of this module reads them, and removes or moves the
samples of studies that no driver needs any more.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import asdict
from typing import Any

import numpy as np
import sqlalchemy as sa
from numpy.typing import NDArray

from service.errors import Conflict, NotFound
from service.store import schema
from service.store.attempt_writer import insert_event, lock_job
from service.store.availability import repeated
from service.store.connection import insert, one_of, transaction
from service.store.documents import RESPONSES, RemovedResponses
from service.store.events import EventStore
from service.store.prompts import SampleText, picture_positions, read_picture, read_prompts, stored_prompts
from service.store.records import (
    BracketRecord,
    ChunkWork,
    EngineFaultRecord,
    EvidenceRecord,
    JudgmentRecord,
    trial_record,
    trial_result,
)
from service.store.samples import (
    VoidSample,
    holdings,
    move_old_samples,
    num_tokens,
    read_chunks,
    read_samples,
    read_void_samples,
    remove_texts,
    text_sizes,
    void_holdings,
    with_room,
)
from service.store.steps import Step, read_step
from service.types import EventKind, JobState, RungRecord, TrialRecord, TrialResult, TrialState
from workers.types import SampleResult, Split

__all__ = ["CHUNKS_AT_ONCE", "CLOCK_STEP_S", "RELOAD_EVENTS", "ResultStore"]

# Columns of the table of trials: those of results, and those of whole trials. Recipes are read as text.
RESULT_COLUMNS = tuple(c for c in schema.trials.c if c.name not in ("study", "configuration", "recipe"))
TRIAL_COLUMNS = (
    *RESULT_COLUMNS,
    schema.trials.c.configuration,
    sa.cast(schema.trials.c.recipe, sa.Text).label("recipe"),
)

# Events that name the trial whose result they change, and events after which trials may have changed that no event
# names: a new driver may have taken over, or samples are scored again.
TRIAL_EVENTS = (EventKind.TRIAL, EventKind.RUNG, EventKind.TRIAL_STATE, EventKind.STEERED)
RELOAD_EVENTS = (EventKind.ATTEMPT, EventKind.ENGINE_FAULT, EventKind.SCORED_AGAIN)

# Seconds by which the clock of stored times may be set back without a chunk of samples being overlooked, and the rows
# of chunks that are read at once.
CLOCK_STEP_S = 10.0
CHUNKS_AT_ONCE = 100


@repeated
class ResultStore(EventStore):
    """Store that reads the results of studies, and the named JSON documents of all jobs.

    It reads events too, because they say which results have changed since they were read.
    """

    # -- trials --------------------------------------------------------------------------------------------------------

    def trial_numbers(self, study_id: str) -> frozenset[int]:
        """Numbers of all trials of a study."""
        table = schema.trials
        with self._reads.connect() as connection:
            query = sa.select(table.c.number).where(table.c.study == study_id)
            return frozenset(connection.execute(query).scalars())

    def trial_counts(self, study_id: str | None = None) -> dict[str, dict[str, int]]:
        """Number of trials in each state, as study id -> state -> number; zeros are left out.

        If `study_id` is None, the trials of all studies are counted.
        """
        table = schema.trials
        counts: dict[str, dict[str, int]] = defaultdict(dict)
        query = sa.select(table.c.study, table.c.state, sa.func.count()).group_by(table.c.study, table.c.state)
        if study_id is not None:
            query = query.where(table.c.study == study_id)
        with self._reads.connect() as connection:
            for study, state, count in connection.execute(query):
                counts[study][state] = count
        return dict(counts)

    def trials(
        self,
        study_id: str,
        *,
        start: int = 0,
        stop: int | None = None,
        state: TrialState | None = None,
        limit: int | None = None,
    ) -> tuple[TrialRecord, ...]:
        """Read the trials of a study with numbers from `start` to `stop` (exclusive; None: no end).

        If `state` is not None, only trials in this state are returned. At most `limit` trials are returned, in the
        order of their numbers; None means all.
        """
        table = schema.trials
        query = sa.select(*TRIAL_COLUMNS).where((table.c.study == study_id) & (table.c.number >= start))
        if stop is not None:
            query = query.where(table.c.number < stop)
        if state is not None:
            query = query.where(table.c.state == state.value)
        with self._reads.connect() as connection:
            rows = connection.execute(query.order_by(table.c.number).limit(limit)).mappings().all()
            rungs = self._rungs(connection, study_id, [row["number"] for row in rows])
        return tuple(trial_record(row, rungs.get(row["number"], ())) for row in rows)

    def named_trials(self, study_id: str, numbers: Sequence[int]) -> tuple[TrialRecord, ...]:
        """Read the trials of a study with the given numbers, in the order of `numbers`; missing trials are left out."""
        table = schema.trials
        query = sa.select(*TRIAL_COLUMNS).where((table.c.study == study_id) & table.c.number.in_(numbers))
        with self._reads.connect() as connection:
            rows = {row["number"]: row for row in connection.execute(query).mappings()}
            rungs = self._rungs(connection, study_id, list(rows))
        found = (rows[number] for number in numbers if number in rows)
        return tuple(trial_record(row, rungs.get(row["number"], ())) for row in found)

    def trial(self, study_id: str, number: int) -> TrialRecord:
        """Read the study's trial with the given number. Raises NotFound if there is no such trial."""
        found = self.trials(study_id, start=number, stop=number + 1)
        if not found:
            raise NotFound(f"trial {number}: study {study_id} has no such trial")
        return found[0]

    def trial_results(self, study_id: str, numbers: Set[int] | None = None) -> tuple[TrialResult, ...]:
        """Read the results of trials of a study, ordered by number, without their recipes (merges) and configurations.

        `numbers` has the numbers of the trials; None reads all. Recipes and configurations are most of a trial's data.
        """
        table = schema.trials
        query = sa.select(*RESULT_COLUMNS).where(table.c.study == study_id).order_by(table.c.number)
        if numbers is not None:
            query = query.where(one_of(table.c.number, numbers))
        with self._reads.connect() as connection:
            every = connection.execute(query).mappings()
            rows = [row for row in every if numbers is None or row["number"] in numbers]
            rungs = self._rungs(connection, study_id, [row["number"] for row in rows])
        return tuple(trial_result(row, rungs.get(row["number"], ())) for row in rows)

    def changed_trials(self, study_id: str, *, after: int) -> frozenset[int] | None:
        """Numbers of the trials of a study whose results may have changed since the event with the id `after`.

        These are the trials that later events name, and the trials for which samples of search data were stored since:
        a stored chunk of samples changes a trial's number of samples and its state without an event. Returns None if
        any trial may have changed: after events of the kinds RELOAD_EVENTS, and if the study has no event with an id up
        to `after` or none from `after` on, as after its database was restored from a backup.
        """
        table = schema.events
        kinds = (*TRIAL_EVENTS, *RELOAD_EVENTS)
        upto = sa.select(table.c.time).where((table.c.study == study_id) & (table.c.id <= after))
        with self._reads.connect() as connection:
            time_s: float | None = connection.execute(upto.order_by(table.c.id.desc()).limit(1)).scalar()
        events = self.events(study_id, after=after, kinds=kinds)
        if time_s is None or after > self.last_event_id(study_id) or any(e.kind in RELOAD_EVENTS for e in events):
            return None
        named = {number for event in events if (number := event.payload.get("trial")) is not None}
        return frozenset(named | self._scored_trials(study_id, since=time_s - CLOCK_STEP_S))

    def _scored_trials(self, study_id: str, *, since: float) -> set[int]:
        """Numbers of the trials of a study for which samples of search data were stored after the time `since`.

        `since` is in seconds since the epoch. Only the newest chunks are read, from the last one back to `since`.
        """
        table = schema.evidence
        newest = sa.select(table.c.id, table.c.trial, table.c.prompts, table.c.finished_at)
        newest = newest.where(table.c.study == study_id).order_by(table.c.id.desc()).limit(CHUNKS_AT_ONCE)
        found: set[int] = set()
        with self._reads.connect() as connection:
            query = newest
            while rows := connection.execute(query).all():
                for _, trial, prompts, finished_at in rows:
                    if finished_at < since:
                        return found
                    if any(key.startswith(f"{Split.SEARCH} ") for key in prompts):
                        found.add(trial)
                query = newest.where(table.c.id < rows[-1].id)
        return found

    def configurations(self, study_id: str, numbers: Set[int] | None = None) -> dict[int, dict[str, Any]]:
        """Read the configurations of the trials of a study with the given numbers (None: all), keyed by trial number.

        Trials without a configuration, such as baselines, are left out.
        """
        table = schema.trials
        query = sa.select(table.c.number, table.c.configuration).where(table.c.study == study_id)
        if numbers is not None:
            query = query.where(one_of(table.c.number, numbers))
        with self._reads.connect() as connection:
            return {
                number: found
                for number, found in connection.execute(query)
                if found is not None and (numbers is None or number in numbers)
            }

    def _rungs(
        self, connection: sa.Connection, study_id: str, trials: Sequence[int]
    ) -> dict[int, tuple[RungRecord, ...]]:
        """Read the results of the rungs that some trials of a study have finished, keyed by trial number.

        A rung is one of the increasing numbers of samples on which trials are compared. `trials` are the numbers of the
        trials. If there are many numbers, the result may also have other trials with numbers in the same range.
        """
        table = schema.rungs
        where = (table.c.study == study_id) & one_of(table.c.trial, trials)
        columns = (table.c.trial, table.c.rung, table.c.samples, table.c["values"], table.c.standard_errors)
        found: dict[int, list[RungRecord]] = defaultdict(list)
        for trial, *fields in connection.execute(sa.select(*columns).where(where).order_by(*table.primary_key)):
            found[trial].append(RungRecord(*fields))
        return {trial: tuple(rungs) for trial, rungs in found.items()}

    def brackets(self, study_id: str) -> tuple[BracketRecord, ...]:
        table = schema.brackets
        with self._reads.connect() as connection:
            rows = connection.execute(sa.select(table).where(table.c.study == study_id).order_by(table.c.bracket))
            return tuple(BracketRecord(row.bracket, row.first_rung, row.size) for row in rows)

    # -- samples -------------------------------------------------------------------------------------------------------

    def sample_values(
        self,
        study_id: str,
        split: Split,
        *,
        recipes: Collection[str] | None = None,
        objectives: Collection[str] | None = None,
    ) -> dict[str, dict[str, NDArray[np.float64]]]:
        """Read the metric values of a study's scored samples as arrays: recipe digest -> objective -> array.

        `split` is the search data, the holdout data or the benchmarks. `recipes` has the digests of the recipes
        (merges) to read, and `objectives` has the names of the objectives; None reads all. An array has the value of
        the sample at each position, or NaN if no value is stored. A position is a sample's index in the order in which
        the objective's samples are scored.
        """
        found: dict[str, dict[str, NDArray[np.float64]]] = defaultdict(dict)
        with self._reads.connect() as connection:
            for chunk in read_chunks(connection, study_id, split, recipes=recipes, objectives=objectives):
                of_recipe, stop = found[chunk.recipe_digest], chunk.start + len(chunk.values)
                values = of_recipe[chunk.objective] = with_room(of_recipe.get(chunk.objective), stop)
                values[chunk.start : stop] = chunk.values
        return dict(found)

    def num_tokens(self, study_id: str, split: Split) -> dict[str, int]:
        """Number of tokens that a study's merges generated, keyed by the digest of the merge's recipe.

        `split` is the data for which tokens are counted: the search data, the holdout data or the benchmarks. Recipes
        with a scored sample whose tokens are not stored are left out.
        """
        with self._reads.connect() as connection:
            return num_tokens(connection, study_id, split)

    def samples(
        self,
        study_id: str,
        recipe_digest: str,
        split: Split,
        *,
        objective: str | None = None,
        positions: Set[int] | None = None,
        has_tokens: bool = True,
    ) -> tuple[SampleResult, ...]:
        """Read the scored samples of one recipe (merge) of a study, ordered by objective and position.

        `split` is the search data, the holdout data or the benchmarks. The position of a sample is its index in the
        order in which the objective's samples are scored. If `objective` is not None, only samples of this objective
        are read. If `positions` is not None, only samples at these positions are read. If `has_tokens` is False, stored
        completions are returned without their token ids.
        """
        with self._reads.connect() as connection:
            return read_samples(
                connection,
                study_id,
                recipe_digest,
                split,
                objective=objective,
                positions=positions,
                has_tokens=has_tokens,
            )

    def prompts(self, study_id: str, split: Split, objective: str, positions: Collection[int]) -> dict[int, SampleText]:
        """Read the prompts and references of samples by position; positions without stored texts are left out.

        `split` is the search data, the holdout data or the benchmarks, and `objective` is the objective's name. A
        position is a sample's index in the order in which the objective's samples are scored.
        """
        with self._reads.connect() as connection:
            return read_prompts(connection, study_id, split, objective, positions)

    def picture(self, study_id: str, split: Split, objective: str, position: int) -> bytes | None:
        """Read the small picture of a sample, a WebP file; None if no picture is stored.

        `split` is the search data, the holdout data or the benchmarks, and `objective` is the objective's name. A
        position is a sample's index in the order in which the objective's samples are scored.
        """
        with self._reads.connect() as connection:
            return read_picture(connection, study_id, split, objective, position)

    def picture_positions(self, study_id: str, split: Split, objective: str, positions: Collection[int]) -> set[int]:
        """Select the `positions` at which a sample has a stored picture.

        `split` is the search data, the holdout data or the benchmarks, and `objective` is the objective's name.
        """
        with self._reads.connect() as connection:
            return picture_positions(connection, study_id, split, objective, positions)

    def stored_prompts(self, study_id: str) -> frozenset[tuple[Split, str]]:
        """Find the pairs of a split and an objective for which a study has stored prompts.

        A split is the search data, the holdout data or the benchmarks.
        """
        with self._reads.connect() as connection:
            return stored_prompts(connection, study_id)

    def move_old_samples(self) -> int:
        """Move old samples from the table of earlier program versions to the present tables, and return their number.

        A call moves the samples of one recipe (merge); the result is 0 if no old sample is left. The old table has a
        row for each sample, which takes ten times the space. The study stays readable meanwhile, and its driver (the
        process that works on it) may write.
        """
        old = schema.samples
        with self._reads.connect() as connection:
            found = connection.execute(sa.select(old.c.study, old.c.recipe_digest).limit(1)).one_or_none()
        if found is None:
            return 0
        with transaction(self._engine) as connection:
            lock_job(connection, found.study)
            return max(1, move_old_samples(connection, found.study, found.recipe_digest))

    def text_sizes(self) -> dict[str, tuple[int, int]]:
        """Number of samples with stored responses, and the number of bytes of the responses, by study id.

        Earlier versions stored responses in another table. Studies that still have samples in that table are left out.
        """
        with self._reads.connect() as connection:
            return text_sizes(connection)

    def remove_texts(self, job_id: str, *, num_samples: int, num_bytes: int) -> None:
        """Remove the model responses and tokens of a study's samples to save space; their metric values are kept.

        `num_samples` and `num_bytes` say how many samples and bytes are removed; they are stored in a record of the
        removal before anything is removed. From then on the study cannot be resumed. Each merge's responses are removed
        in a transaction of their own, so that other processes can write in between. An interrupted removal is completed
        by the next call. Raises NotFound if there is no such study, and Conflict if the study is neither COMPLETE nor
        CANCELLED.
        """
        table, documents = schema.studies, schema.documents
        removed = RemovedResponses(self.now(), num_samples, num_bytes)
        with transaction(self._engine) as connection:
            state = connection.execute(
                sa.select(table.c.state).where(table.c.id == job_id).with_for_update()
            ).scalar_one_or_none()
            if state is None:
                raise NotFound(f"job {job_id!r}: no such job in {self.place}")
            if JobState(state) not in (JobState.COMPLETE, JobState.CANCELLED):
                raise Conflict(f"job {job_id} is {state}; its responses are kept until it is COMPLETE or CANCELLED")
            row = {"study": job_id, "name": RESPONSES, "document": asdict(removed)}
            added = insert(connection, documents).values(row).on_conflict_do_nothing()
            if connection.execute(added.returning(documents.c.study)).scalar() is not None:  # else it was interrupted
                insert_event(connection, job_id, EventKind.RESPONSES_REMOVED, asdict(removed))
        while True:
            with transaction(self._engine) as connection:
                if not remove_texts(connection, job_id):
                    return

    # -- engines and checks --------------------------------------------------------------------------------------------

    def evidence(
        self, study_id: str, *, after: int = 0, limit: int | None = None, recipe_digest: str | None = None
    ) -> tuple[EvidenceRecord, ...]:
        """Read the evidence of a study's samples: which weights the engine held when it scored them.

        There is one record for each chunk (up to 512 samples scored together). At most `limit` records with an id above
        `after` are returned; the limit None returns all. If `recipe_digest` is not None, only records of this recipe
        (merge) are returned.
        """
        table = schema.evidence
        where = (table.c.study == study_id) & (table.c.id > after)
        if recipe_digest is not None:
            where &= table.c.recipe_digest == recipe_digest
        with self._reads.connect() as connection:
            rows = connection.execute(sa.select(table).where(where).order_by(table.c.id).limit(limit))
            return tuple(EvidenceRecord(**row) for row in rows.mappings())

    def chunk_work(self, study_id: str, *, since: float | None = None) -> tuple[ChunkWork, ...]:
        """Read how long replicas worked on a study's chunks of samples, one record a chunk, in the order of storing.

        A replica is a process with one inference engine. A chunk is a group of up to 512 samples that a replica scores
        together. If `since` is not None, only chunks that were stored after this time (seconds since the epoch) are
        read.
        """
        table = schema.evidence
        where = table.c.study == study_id
        if since is not None:
            where &= table.c.finished_at > since
        columns = (table.c.replica, table.c.trial, table.c.num_samples, table.c.timings_s, table.c.finished_at)
        with self._reads.connect() as connection:
            return tuple(
                ChunkWork(*row) for row in connection.execute(sa.select(*columns).where(where).order_by(table.c.id))
            )

    def engine_faults(self, *, after: int = 0) -> tuple[EngineFaultRecord, ...]:
        """Read the records of the inference engines that have failed a check, with ids above `after`, ordered by id."""
        table = schema.engine_faults
        with self._reads.connect() as connection:
            rows = connection.execute(sa.select(table).where(table.c.id > after).order_by(table.c.id))
            return tuple(EngineFaultRecord(**row) for row in rows.mappings())

    def num_engine_faults(self) -> int:
        """Number of inference engines, of all studies, that have failed a check of their weights or outputs."""
        with self._reads.connect() as connection:
            return int(connection.execute(sa.select(sa.func.count()).select_from(schema.engine_faults)).scalar_one())

    def has_void(self, job_id: str) -> bool:
        """Whether a study has void samples: samples to score again because their engine later failed a check."""
        held = holdings()
        query = void_holdings(held.c.study, held=held).where(held.c.study == job_id).limit(1)
        with self._reads.connect() as connection:
            return connection.execute(query).first() is not None

    def void_samples(self, study_id: str) -> tuple[VoidSample, ...]:
        """Read a study's void samples, which must be scored again because their engine later failed a check."""
        with self._reads.connect() as connection:
            return read_void_samples(connection, study_id)

    def num_unchecked(self, study_id: str, passed: Mapping[str, int]) -> int:
        """Number of a study's samples that are not yet confirmed by a canary, a check of an engine with fixed prompts.

        A sample is confirmed if its engine has passed a canary after it scored the sample. Therefore each sample is
        stored with the number of canaries that its engine had passed before. `passed` contains the number of canaries
        that each engine has passed until now, keyed by replica (the process with the engine). If the database has a
        larger number for a replica, the larger number counts.
        """
        held, table = holdings(), schema.evidence
        scored = (
            sa.select(table.c.replica, table.c.canaries, sa.func.sum(held.c.num_samples))
            .join(held, held.c.evidence == table.c.id)
            .where(held.c.study == study_id)
            .group_by(table.c.replica, table.c.canaries)
        )
        latest = sa.select(table.c.replica, sa.func.max(table.c.canaries)).group_by(table.c.replica)
        with self._reads.connect() as connection:
            known = {replica: max(count or 0, passed.get(replica, 0)) for replica, count in connection.execute(latest)}
            rows = connection.execute(scored).all()
        return sum(count for replica, canaries, count in rows if canaries is None or canaries >= known[replica])

    # -- searcher, benchmarks and documents ----------------------------------------------------------------------------

    def steps(self, study_id: str, *, start: int = 0) -> tuple[Step, ...]:
        """Read the steps of a study's searcher with numbers from `start`, ordered by number.

        A step is a computation that the searcher asked for between proposals, such as a gradient.
        """
        table = schema.search_steps
        where = (table.c.study == study_id) & (table.c.number >= start)
        with self._reads.connect() as connection:
            rows = connection.execute(sa.select(table).where(where).order_by(table.c.number))
            return tuple(read_step(row.number, row.proposal, row.document) for row in rows)

    def num_charged(self, study_id: str) -> int:
        """Number of samples that a study's gradients and similar computations take from the limit `max_samples`.

        Such computations, the steps of a study's searcher, are made between the searcher's proposals.
        """
        table = schema.search_steps
        with self._reads.connect() as connection:
            charged = sa.select(sa.func.coalesce(sa.func.sum(table.c.charged), 0)).where(table.c.study == study_id)
            return int(connection.execute(charged).scalar_one())

    def prompt_templates(self, study_id: str) -> dict[str, tuple[str, str]]:
        """Read the adversarial prompt templates that were scored in attacks on a study's benchmarks.

        Keys are the names under which the samples that were scored with a template are stored. Values are pairs of the
        benchmark's name and the template.
        """
        table = schema.prompt_templates
        with self._reads.connect() as connection:
            rows = connection.execute(sa.select(table).where(table.c.study == study_id).order_by(table.c.name))
            return {row.name: (row.benchmark, row.template) for row in rows}

    def judgments(
        self, study_id: str, *, benchmark: str | None = None, recipe_digest: str | None = None
    ) -> tuple[JudgmentRecord, ...]:
        """Read the verdicts of judges (models that compare answers) on completions by a study's merges.

        `benchmark` selects the judgments of one benchmark, and `recipe_digest` selects the judgments of one recipe;
        None selects all. The judgments are ordered by benchmark, recipe and position, and for one sample by the order
        of both answers in the judge's prompt.
        """
        table = schema.judgments
        query = sa.select(*(column for column in table.c if column.name != "study")).where(table.c.study == study_id)
        if benchmark is not None:
            query = query.where(table.c.benchmark == benchmark)
        if recipe_digest is not None:
            query = query.where(table.c.recipe_digest == recipe_digest)
        with self._reads.connect() as connection:
            rows = connection.execute(query.order_by(*table.primary_key))
            return tuple(JudgmentRecord(**row) for row in rows.mappings())

    def document(self, job_id: str, name: str) -> Any | None:
        """Read the JSON document of a job by `name`, such as "contamination"; None if there is no such document."""
        table = schema.documents
        with self._reads.connect() as connection:
            return connection.execute(
                sa.select(table.c.document).where((table.c.study == job_id) & (table.c.name == name))
            ).scalar()

    def result_version(self, study_id: str) -> tuple[int, int]:
        """Read a pair of numbers that changes whenever the study's results may have changed.

        The numbers are the number of the study's last attempt (the work of one driver) and the id of its last event.
        Raises NotFound if there is no such study.
        """
        jobs, events = schema.studies, schema.events
        last = sa.select(sa.func.coalesce(sa.func.max(events.c.id), 0)).where(events.c.study == study_id)
        query = sa.select(jobs.c.attempt, last.scalar_subquery()).where(jobs.c.id == study_id)
        with self._reads.connect() as connection:
            found = connection.execute(query).one_or_none()
        if found is None:
            raise NotFound(f"job {study_id!r}: no such job in {self.place}")
        return found[0], found[1]

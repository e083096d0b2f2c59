"""Records and enums shared by the whole package `service`: plain data without SQL or Ray."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Self

from search_spaces.recipe import Recipe, may_keep_equal

__all__ = [
    "HEARTBEAT_S",
    "RESUMED_BY_REQUEST",
    "Account",
    "ArtifactRecord",
    "AuditRecord",
    "Comparison",
    "Estimate",
    "EventKind",
    "ExportRecord",
    "ExportState",
    "JobRecord",
    "JobState",
    "LoginRecord",
    "Origin",
    "RecipeDigest",
    "Role",
    "RungRecord",
    "Scope",
    "SessionRecord",
    "Sharing",
    "Steering",
    "StoredRecipe",
    "TeamRecord",
    "TokenRecord",
    "TrialRecord",
    "TrialResult",
    "TrialState",
    "UserRecord",
]

# The interval of a driver's heartbeats; a driver without one for several intervals is considered dead.
HEARTBEAT_S = 5.0

# Seconds after a heartbeat during which a job still has a driver.
ALIVE_S = 3 * HEARTBEAT_S

# The reason of a STOPPED job that a request resumed.
RESUMED_BY_REQUEST = "resumed by request"


class TrialState(StrEnum):
    """State of a trial, with the names of Optuna. A PRUNED trial was scored, but not promoted to the full budget."""

    WAITING = "WAITING"
    RUNNING = "RUNNING"
    COMPLETE = "COMPLETE"
    PRUNED = "PRUNED"
    FAIL = "FAIL"

    @property
    def is_finished(self) -> bool:
        return self in (TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL)


class Origin(StrEnum):
    """Origin of a trial: a baseline (`source` or `published`), the search, or the user (`user`).

    The recipe of a `source` trial is the base or an expert alone. The recipe of a `published` trial is from the
    literature or common practice. A `search` trial is a proposal of the searcher. The recipe of a `refined` trial is
    that of a `search` trial with coefficients that were learned after the search.
    """

    SOURCE = "source"
    PUBLISHED = "published"
    SEARCH = "search"
    REFINED = "refined"
    USER = "user"

    @property
    def is_searched(self) -> bool:
        """Whether a trial results from the search: proposed by the searcher, or refined from the Pareto front."""
        return self in (Origin.SEARCH, Origin.REFINED)

    @property
    def is_given(self) -> bool:
        """Whether a trial's recipe was given before the search: by a baseline or by the user."""
        return not self.is_searched


class JobState(StrEnum):
    """State of a job: CREATED, then RUNNING, and at its end COMPLETE, FAILED or CANCELLED.

    A job is STOPPED if its driver ended before the job did. A server continues a STOPPED job automatically, and a
    FAILED or PAUSED job on request.
    """

    CREATED = "CREATED"
    RUNNING = "RUNNING"
    STOPPED = "STOPPED"
    PAUSED = "PAUSED"
    COMPLETE = "COMPLETE"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"

    @property
    def is_finished(self) -> bool:
        return self in (JobState.COMPLETE, JobState.FAILED, JobState.CANCELLED)


class ExportState(StrEnum):
    """State of an export: WAITING, then RUNNING, and at its end COMPLETE or FAIL."""

    WAITING = "WAITING"
    RUNNING = "RUNNING"
    COMPLETE = "COMPLETE"
    FAIL = "FAIL"


class EventKind(StrEnum):
    """Kind of event in the history of a job, in the database and in the API.

    Later versions may store further kinds.
    """

    CREATED = "created"
    ATTEMPT = "attempt"
    STATE = "state"
    WAITING = "waiting"
    RESUMED = "resumed"
    STEERED = "steered"
    JOB_REFUSED = "job_refused"
    TRIAL = "trial"
    RUNG = "rung"
    TRIAL_STATE = "trial_state"
    REPLICA = "replica"
    CRASH = "crash"
    ACTORS = "actors"
    DATABASE = "database"
    SEARCH_NOTE = "search_note"
    SEARCH_ENDED = "search_ended"
    STOPPING = "stopping"
    HOLDOUT_STARTED = "holdout_started"
    HOLDOUT_SCORED = "holdout_scored"
    HOLDOUT_FAILED = "holdout_failed"
    BENCHMARKS_ADDED = "benchmarks_added"
    BENCHMARKS_STARTED = "benchmarks_started"
    BENCHMARK_SCORED = "benchmark_scored"
    BENCHMARK_FAILED = "benchmark_failed"
    OUT_OF_RANGE = "out_of_range"
    VERIFICATION = "verification"
    ENGINE_FAULT = "engine_fault"
    SCORED_AGAIN = "scored_again"
    TEXTS_DELETED = "texts_deleted"
    CANARIES = "canaries"
    TRAINING = "training"
    STUDY = "study"
    ANALYSIS = "analysis"
    RESPONSES_REMOVED = "responses_removed"


@dataclass(frozen=True)
class Estimate:
    """Mean over `samples` scored samples with its standard error and 95 % interval, in the metric's unit."""

    value: float
    standard_error: float
    samples: int
    ci95: tuple[float, float]


@dataclass(frozen=True, slots=True)  # a study has tens of thousands
class RungRecord:
    """A rung that a trial has finished.

    By objective, `num_samples` has the number of the rung's samples, `values` their mean, and `standard_errors` the
    standard error of the mean. The standard error is None if there is a single sample.
    """

    rung: int
    num_samples: Mapping[str, int]
    values: Mapping[str, float]
    standard_errors: Mapping[str, float | None]


@dataclass(frozen=True)
class StoredRecipe:
    """Recipe of a stored trial: its digest, and its JSON text, which is parsed when the recipe is read.

    Parsing a recipe takes milliseconds and a hundred KB of memory; most code does not need the parsed recipe.
    """

    digest: str
    text: str = field(repr=False)

    def read(self) -> Recipe:
        """Parse the recipe from its JSON text; every call parses the text again."""
        return Recipe.from_json(json.loads(self.text))

    @property
    def keeps_equal(self) -> bool:
        """Whether merges keep all elements whose magnitude equals the threshold of a sparse method.

        If True, the share of elements that are kept may exceed the method's density (the share that was asked for).
        `Recipe.keeps_equal` is the same property of a parsed recipe. The recipe is parsed only if its text may have
        this setting (`may_keep_equal`).
        """
        return may_keep_equal(self.text) and self.read().keeps_equal

    def __eq__(self, other: object) -> bool:
        if isinstance(other, StoredRecipe):
            return (self.digest, self.text) == (other.digest, other.text)
        return self.read() == other if isinstance(other, Recipe) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.digest)


@dataclass(frozen=True, slots=True)
class RecipeDigest:
    """Digest of a trial's recipe, in place of a recipe that was not read from the database."""

    digest: str


@dataclass(frozen=True)
class TrialResult:
    """Result of a trial, without its configuration and, possibly, without its recipe.

    Configuration and recipe are most of a trial's data, so they are read only where they are needed.

    - `number`: unique in the study and never reused.
    - `recipe`: the recipe, or only the recipe's digest.
    - `bracket`: None for baselines, which belong to no bracket.
    - `reason`: why the trial ended as PRUNED or FAIL.
    - `invalid`: reason why a user marked the trial as invalid; nothing selects an invalid trial. None if it is valid.
    - `rungs`: the finished rungs in order.
    - `samples_scored`: the number of samples of search data that were scored for this trial.
    - `samples_reused`: the number of samples known from lower rungs or from trials with an equal recipe.
    - `timings_s`: the seconds that parts of scoring took, by name.
    - `values`: the objectives' values at full budget; empty if the trial did not reach the full budget.
    - `standard_errors`: the standard errors of `values`; None if an error is not known.
    """

    number: int
    origin: Origin
    label: str
    state: TrialState
    recipe: Recipe | StoredRecipe | RecipeDigest
    bracket: int | None = None
    reason: str | None = None
    invalid: str | None = None
    rungs: tuple[RungRecord, ...] = ()
    samples_scored: int = 0
    samples_reused: int = 0
    timings_s: Mapping[str, float] = field(default_factory=dict)
    values: Mapping[str, float] = field(default_factory=dict)
    standard_errors: Mapping[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True)
class TrialRecord(TrialResult):
    """Trial of a study with its recipe and its configuration, which is None for a baseline."""

    recipe: Recipe | StoredRecipe
    configuration: Mapping[str, Any] | None = None

    def read_recipe(self) -> Recipe:
        """Return the trial's recipe.

        If the trial has the recipe's JSON text from the database, every call parses the text again.
        """
        return self.recipe if isinstance(self.recipe, Recipe) else self.recipe.read()

    def after_chunk(self, timings_s: Mapping[str, float], num_scored: int | None) -> Self:
        """Copy of this trial, updated for one more stored chunk of samples.

        The chunk's `timings_s` (seconds by name) and its number of newly scored samples are added. `num_scored` is None
        for holdout data, whose samples are not counted.
        """
        timings = {name: self.timings_s.get(name, 0.0) + seconds for name, seconds in timings_s.items()}
        found = replace(self, timings_s={**self.timings_s, **timings})
        if num_scored is None:
            return found
        state = TrialState.RUNNING if self.state is TrialState.WAITING else self.state
        return replace(found, samples_scored=self.samples_scored + num_scored, state=state)


class Scope(StrEnum):
    """Scope of a token, from the smallest to the largest.

    A token may be used to read, or also to submit and change jobs, or also to manage accounts.
    """

    READ = "read"
    SUBMIT = "submit"
    ADMIN = "admin"

    def allows(self, needed: Scope) -> bool:
        """Whether a token of this scope may be used for a request that needs the scope `needed`."""
        return list(Scope).index(self) >= list(Scope).index(needed)


class Role(StrEnum):
    """Role of a user in a team, from the smallest rights to the largest.

    A `viewer` reads the team's jobs. A `member` can also submit jobs. An `admin` can also manage the team.
    """

    VIEWER = "viewer"
    MEMBER = "member"
    ADMIN = "admin"


class Sharing(StrEnum):
    """Permission to read a job: for nobody else, for the job's team, or for every user of the server.

    The job's owner and administrators may always read it.
    """

    PRIVATE = "private"
    TEAM = "team"
    ALL = "all"


@dataclass(frozen=True)
class Account:
    """A user's rights on a server.

    `user` is the user's name, `is_admin` says whether the user administers the server, and `roles` has the user's role
    in each team. The administrators of a job are those of the server and those of the job's team.
    """

    user: str
    is_admin: bool = False
    roles: Mapping[str, Role] = field(default_factory=dict)

    def may_read(self, job: JobRecord) -> bool:
        """Whether the user may read the job and everything that belongs to it."""
        if self._administers(job) or job.sharing is Sharing.ALL:
            return True
        return job.sharing is Sharing.TEAM and job.team in self.roles

    def may_use(self, job: JobRecord) -> bool:
        """Whether the user may have models of the job exported, and delete these exports."""
        return self._administers(job) or (self.may_read(job) and self.roles.get(job.team or "") is Role.MEMBER)

    def may_change(self, job: JobRecord) -> bool:
        """Whether the user may cancel, resume, extend, share and delete the job."""
        return self._administers(job)

    def _administers(self, job: JobRecord) -> bool:
        is_owner = job.owner == self.user
        return self.is_admin or is_owner or self.roles.get(job.team or "") is Role.ADMIN


@dataclass(frozen=True)
class UserRecord:
    """A stored user.

    `is_admin` says whether the user administers the server. A disabled user (`is_disabled`) has no rights. `roles` has
    the user's role in each team. `created_at` is in seconds since the epoch.

    `identity` is the identity at an identity provider with which the user has logged in: the issuer and the subject, in
    one text. No other identity may log in as the user. It is None as long as the user has not logged in with a
    provider.
    """

    name: str
    is_admin: bool
    is_disabled: bool
    created_at: float
    identity: str | None = None
    roles: Mapping[str, Role] = field(default_factory=dict)

    @property
    def account(self) -> Account:
        """Rights of the user, whether or not the user is disabled; callers must check `is_disabled` first."""
        return Account(self.name, self.is_admin, self.roles)


@dataclass(frozen=True)
class TeamRecord:
    """A stored team, with the role of each of its members by the member's name."""

    name: str
    created_at: float
    members: Mapping[str, Role] = field(default_factory=dict)


@dataclass(frozen=True)
class TokenRecord:
    """Record of an API token, without the hash by which the server recognizes the token.

    `user` is the token's user, and `name` the name that the user gave the token. `prefix` is the token's beginning, by
    which users recognize it. `scope` says for which requests the token may be used. Times are in seconds since the
    epoch; None is never.
    """

    id: str
    user: str
    name: str
    prefix: str
    scope: Scope
    created_at: float
    expires_at: float | None = None
    last_used_at: float | None = None
    revoked_at: float | None = None

    def is_valid(self, *, now: float) -> bool:
        return self.revoked_at is None and (self.expires_at is None or now < self.expires_at)


@dataclass(frozen=True)
class SessionRecord:
    """A stored session of a browser, without the hash by which the server recognises its cookie.

    Times are in seconds since the epoch. Before the first use is stored, `last_used_at` is the time at which the
    session began.
    """

    id: str
    user: str
    created_at: float
    expires_at: float
    last_used_at: float

    def is_valid(self, *, now: float, idle_s: float) -> bool:
        """Whether the session may still be used at the time `now`, in seconds since the epoch.

        A session ends at its expiry, or earlier if it was not used for `idle_s` seconds.
        """
        return now < self.expires_at and now < self.last_used_at + idle_s

    @property
    def label(self) -> str:
        """Text that stands for the session in the audit log, where requests with a token have the token's prefix."""
        return f"session {self.id[:8]}"


@dataclass(frozen=True)
class LoginRecord:
    """A login that a browser began, which ends when the identity provider sends the browser back.

    - `nonce`: the value that the ID token must have
    - `verifier`: the secret of PKCE, which the provider compares with its hash
    - `redirect_uri`: the address to which the provider sends the browser back
    - `next`: the path of this server to which the browser goes then
    """

    nonce: str
    verifier: str
    redirect_uri: str
    next: str


@dataclass(frozen=True)
class AuditRecord:
    """An entry of the audit log: a user's change of an object, its origin, and the object before and after.

    - `user`: the user, or None if the server had no accounts
    - `origin`: the address that the request came from, or the user and the machine of a command
    - `token`: the prefix of the token that was used, or "session" and the beginning of the session's id
    - `action`: the kind of change, such as "job.share"
    - `target`: the changed object, such as "job ID"
    - `before`, `after`: the object before and after the change, as JSON; None if there is nothing to describe
    """

    id: int
    time: float
    user: str | None
    origin: str
    token: str | None
    action: str
    target: str
    before: Mapping[str, Any] | None
    after: Mapping[str, Any] | None


@dataclass(frozen=True)
class Steering:
    """A request that changes how a job continues, such as `action` "pause", with the user and the user's reason.

    `user` is None if the server has no accounts; `reason` is None if none was given. `changes` has, for the action
    "edit", the value of each edited option before and after. `trial` is the number of the trial that the request is
    about, if it is about one.
    """

    action: str
    user: str | None = None
    reason: str | None = None
    changes: Mapping[str, Any] | None = None
    trial: int | None = None

    @property
    def payload(self) -> dict[str, Any]:
        """Payload of the event that stores this request."""
        changes = {} if self.changes is None else {"changes": dict(self.changes)}
        trial = {} if self.trial is None else {"trial": self.trial}
        return {"action": self.action, "user": self.user, "reason": self.reason, **changes, **trial}

    def describe(self, done: str) -> str:
        """Text such as "paused by ann: the GPUs are needed"; `done` is the first word of the text."""
        text = f"{done} by {self.user or 'request'}"
        return f"{text}: {self.reason}" if self.reason else text


@dataclass(frozen=True)
class JobRecord:
    """A stored job: a study or a fine-tuning.

    Times are in seconds since the epoch; 0 or None means never.

    - `kind`: name of the kind of job, such as "search" for a study.
    - `document`: the submitted document in canonical form.
    - `accepted`: findings of the checks when the job was created, as JSON; for a study, a `ResolvedStudy`.
    - `reason`: reason for the current state.
    - `wall_clock_s`: total seconds that all attempts have worked on the job.
    - `attempt`: number of drivers that have taken over the job.
    - `progress`: the driver's latest progress, as JSON that is shown to users; None before the first report.
    - `submissions`: number of drivers that were submitted to a cluster.
    - `submitted_after`: value of `attempt` at the last submission.
    - `request_digest`: hash of the body of the request that created the job; None if no request did.
    - `progressed_at`: time at which the driver last made progress.
    - `patience_s`: seconds without progress after which the driver counts as hung; None if not known.
    - `waiting_for`: text that says what the driver waits for; None if it does not wait.
    - `owner`: name of the user who created the job; None if the server had no accounts then.
    - `team`: name of the team that the job belongs to; None for a job of its owner alone.
    - `sharing`: who may read the job besides its owner and administrators.
    - `is_paused`: whether the job was asked to pause. Its state is PAUSED once no driver works on it.
    - `stop_reason`: reason why the search was asked to end early; None if it was not.
    - `description`, `tags`, `notes`: texts of users about the job, which change nothing.
    - `priority`: of the jobs that wait for a place, those with the largest priority start first.
    - `version`: number of edits of the job.
    - `edited_after`: value of `attempt` at the last edit that a driver must read; a driver of this attempt has the
      document from before the edit. None if there was no such edit.
    - `first_name`: name of the job when it was created, if it was renamed. Its Ray Jobs keep this name.
    """

    id: str
    name: str
    state: JobState
    document: Mapping[str, Any]
    accepted: Mapping[str, Any]
    created_at: float
    kind: str
    reason: str | None = None
    wall_clock_s: float = 0.0
    attempt: int = 0
    heartbeat_at: float | None = None
    progress: Mapping[str, Any] | None = None
    submissions: int = 0
    submitted_at: float = 0.0
    submitted_after: int = 0
    request_digest: str | None = None
    progressed_at: float | None = None
    patience_s: float | None = None
    waiting_for: str | None = None
    owner: str | None = None
    team: str | None = None
    sharing: Sharing = Sharing.TEAM
    is_paused: bool = False
    stop_reason: str | None = None
    description: str | None = None
    tags: tuple[str, ...] = ()
    notes: str | None = None
    priority: int = 0
    version: int = 0
    edited_after: int | None = None
    first_name: str | None = None

    @property
    def is_outdated(self) -> bool:
        """Whether the driver of the present attempt works with a document from before the last edit."""
        return self.edited_after is not None and self.edited_after == self.attempt

    def has_driver(self, *, now: float) -> bool:
        """Whether a driver works on the job: the job has not ended, and there was a heartbeat shortly before `now`."""
        return not self.state.is_finished and self.heartbeat_at is not None and now - self.heartbeat_at < ALIVE_S


@dataclass(frozen=True)
class ArtifactRecord:
    """A stored directory of files that a job made, such as a trained expert.

    The server stores each file under the hash of its content. `study` is the id of the job, which may be of any kind.
    `digest` is the sha256 of the list of the artifact's files and their hashes. `num_bytes` is the total size of its
    files. `facts` are properties that the job stored with the artifact.
    """

    study: str
    name: str
    digest: str
    num_bytes: int
    created_at: float
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ExportRecord:
    """Export: the merged model of a trial, which a user requested for download.

    `reason` says why the model could not be written; None if it was written, or is not written yet.
    """

    id: str
    study: str
    trial: int
    dtype: str
    state: ExportState
    created_at: float
    reason: str | None = None


@dataclass(frozen=True)
class Comparison:
    """Values of one trial on the holdout data, compared with those of the best finalist (the reference).

    - `label`, `trial`: name and number of the trial
    - `values`: the estimate of each objective
    - `mean`: the mean over the accuracy objectives; None if there are none
    - `differences`: by objective, the trial's value minus that of the reference, paired by sample; "mean" has the
      difference of the means
    """

    label: str
    trial: int
    values: Mapping[str, Estimate]
    differences: Mapping[str, Estimate] = field(default_factory=dict)
    mean: Estimate | None = None

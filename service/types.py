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
    "NO_IDENTITY",
    "RESUMED_BY_REQUEST",
    "Account",
    "ArtifactRecord",
    "AuditRecord",
    "Comparison",
    "Coverage",
    "DeliveryRecord",
    "DeliveryState",
    "Demand",
    "DriverWait",
    "Estimate",
    "EventKind",
    "ExportRecord",
    "ExportState",
    "JobRecord",
    "JobState",
    "LoginRecord",
    "LoginRule",
    "NoticeKind",
    "Origin",
    "RecipeDigest",
    "Role",
    "RungRecord",
    "Scope",
    "SessionRecord",
    "Sharing",
    "Steering",
    "StoredRecipe",
    "SubscriptionKind",
    "SubscriptionRecord",
    "TeamLimits",
    "TeamRecord",
    "TeamUsage",
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

# Stored in place of the identity of a user as whom nobody can log in; identities contain a space.
NO_IDENTITY = "none"


class TrialState(StrEnum):
    """State of a trial; the states have Optuna's names.

    A PRUNED trial was scored, but not on all samples of the search.
    """

    WAITING = "WAITING"
    RUNNING = "RUNNING"
    COMPLETE = "COMPLETE"
    PRUNED = "PRUNED"
    FAIL = "FAIL"

    @property
    def is_finished(self) -> bool:
        return self in (TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL)


class Origin(StrEnum):
    """Origin of a trial: where its recipe comes from.

    - `source`: a baseline whose recipe is the base model or one expert alone
    - `published`: a baseline whose recipe is from the literature or common practice
    - `search`: a proposal of the searcher
    - `refined`: a trial of the search with coefficients that gradients improved after the search
    - `user`: a recipe that the user gave
    """

    SOURCE = "source"
    PUBLISHED = "published"
    SEARCH = "search"
    REFINED = "refined"
    USER = "user"

    @property
    def is_searched(self) -> bool:
        """Whether the search found the trial: the searcher proposed it, or it was refined from a proposed trial."""
        return self in (Origin.SEARCH, Origin.REFINED)

    @property
    def is_given(self) -> bool:
        """Whether a trial's recipe was not found by the search: it is a baseline, or a user requested it."""
        return not self.is_searched


class JobState(StrEnum):
    """State of a job: first CREATED, then RUNNING, and at the end COMPLETE, FAILED or CANCELLED.

    A job is STOPPED if its driver (the process that works on it) ended before the job was done. A job is PAUSED if a
    user paused it. A server continues a STOPPED job automatically, and a FAILED or PAUSED job on request.
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
    PREEMPTED = "preempted"
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
    ENDPOINT = "endpoint"
    ANSWERED = "answered"


@dataclass(frozen=True)
class Estimate:
    """Mean of a metric over a number of scored samples (`samples`), with standard error and 95 % interval.

    Value, standard error and interval are in the metric's unit.
    """

    value: float
    standard_error: float
    samples: int
    ci95: tuple[float, float]


@dataclass(frozen=True, slots=True)  # a study has tens of thousands
class RungRecord:
    """Values of a trial at one finished rung; a rung is a number of samples at which trials are compared.

    `rung` is the rung's index from 0. The other fields are keyed by objective: `num_samples` contains the number of the
    rung's samples, `values` contains the mean of the metric over these samples, and `standard_errors` contains the
    standard error of this mean, or None for a single sample.
    """

    rung: int
    num_samples: Mapping[str, int]
    values: Mapping[str, float]
    standard_errors: Mapping[str, float | None]


@dataclass(frozen=True)
class StoredRecipe:
    """Recipe of a stored trial as its digest and its JSON text, which the method `read` parses.

    Parsing a recipe takes milliseconds and a hundred KB of memory, and most code does not need the parsed recipe.
    """

    digest: str
    text: str = field(repr=False)

    def read(self) -> Recipe:
        """Parse the recipe from its JSON text; every call parses the text again."""
        return Recipe.from_json(json.loads(self.text))

    @property
    def keeps_equal(self) -> bool:
        """Whether sparse merge methods in this recipe keep every element whose magnitude equals their threshold.

        A sparse method keeps the elements of a task vector with the largest magnitudes; its density is the share of
        elements to keep. The threshold is the smallest magnitude that is kept. Many elements can have this magnitude,
        so if the result is True, more elements than the density states may be kept.
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
    """Recipe of a trial that is represented by its hash alone, because its content was not read from the database."""

    digest: str


@dataclass(frozen=True)
class TrialResult:
    """Result of a trial, without its configuration and, possibly, without its recipe.

    Configuration and recipe are most of a trial's data, so they are read only where they are needed. A rung is a number
    of samples at which trials are compared; the full budget is the samples of the last rung, which are all samples of
    the search.

    - `number`: unique in the study and never reused.
    - `origin`, `label`: where the trial's recipe comes from, and the trial's name.
    - `recipe`: the recipe, or only the recipe's digest.
    - `bracket`: index of the trial's bracket (a ladder of rungs, as in Hyperband). None for trials that are evaluated
      only at the full budget, such as baselines.
    - `reason`: why the trial ended as PRUNED or FAIL.
    - `invalid`: reason why a user marked the trial as invalid; nothing selects an invalid trial. None if the trial is
      valid.
    - `rival`: number of the better trial because of which a scheduler has stopped this trial. With racing, it is a
      trial that was ahead; with other schedulers, it is the worst of the trials that the rung promoted. None for trials
      that were not stopped, and for trials that early versions stopped.
    - `rungs`: the trial's values at each rung that it has finished, in order.
    - `samples_scored`: the number of samples of search data that were scored for this trial.
    - `samples_reused`: the number of samples known from lower rungs or from trials with an equal recipe.
    - `timings_s`: the seconds that parts of scoring took, keyed by name.
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
    rival: int | None = None
    rungs: tuple[RungRecord, ...] = ()
    samples_scored: int = 0
    samples_reused: int = 0
    timings_s: Mapping[str, float] = field(default_factory=dict)
    values: Mapping[str, float] = field(default_factory=dict)
    standard_errors: Mapping[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True)
class TrialRecord(TrialResult):
    """Trial of a study with its result, its recipe and its configuration (the values of the search space's parameters).

    The configuration is None for a trial whose recipe was not made from a configuration, such as a baseline.
    """

    recipe: Recipe | StoredRecipe
    configuration: Mapping[str, Any] | None = None

    def read_recipe(self) -> Recipe:
        """Return the trial's recipe.

        If the trial has the recipe's JSON text from the database, every call parses the text again.
        """
        return self.recipe if isinstance(self.recipe, Recipe) else self.recipe.read()

    def after_chunk(self, timings_s: Mapping[str, float], num_scored: int | None) -> Self:
        """Copy of this trial, updated for one more stored chunk (a group of samples that was scored in one request).

        The chunk's `timings_s` (seconds, keyed by name) and its number of newly scored samples are added. `num_scored`
        is None for holdout data and benchmarks, whose samples are not counted.
        """
        timings = {name: self.timings_s.get(name, 0.0) + seconds for name, seconds in timings_s.items()}
        found = replace(self, timings_s={**self.timings_s, **timings})
        if num_scored is None:
            return found
        state = TrialState.RUNNING if self.state is TrialState.WAITING else self.state
        return replace(found, samples_scored=self.samples_scored + num_scored, state=state)


class Scope(StrEnum):
    """Scope of a token: the kinds of requests for which the token may be used, from the fewest to the most.

    - `READ`: to read
    - `SUBMIT`: to read, and to submit and change jobs
    - `ADMIN`: to read, to submit and change jobs, and to manage accounts
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


class LoginRule(StrEnum):
    """Rule by which an identity of the identity provider can log in as a user.

    - `FIRST`: the first identity that logs in under the user's name, and then only this identity.
    - `KNOWN`: the identity that has logged in as the user before; nobody if there is none.
    - `NEVER`: nobody. The user is one of programs, which send tokens.
    """

    FIRST = "first"
    KNOWN = "known"
    NEVER = "never"


class Sharing(StrEnum):
    """Who may read a job besides its owner and administrators: nobody, the job's team, or every user of the server."""

    PRIVATE = "private"
    TEAM = "team"
    ALL = "all"


@dataclass(frozen=True)
class Account:
    """A user's rights on a server.

    `user` is the user's name, `is_admin` says whether the user administers the server, and `roles` has the user's role
    in each team. The administrators of a job are the server's administrators and the administrators of the job's team.
    `rates` has, for each team with a quota of requests, the number of requests that the team may send in a minute.
    """

    user: str
    is_admin: bool = False
    roles: Mapping[str, Role] = field(default_factory=dict)
    rates: Mapping[str, int] = field(default_factory=dict)

    def may_read(self, job: JobRecord) -> bool:
        """Whether the user may read the job and everything that belongs to it."""
        if self._administers(job) or job.owner == self.user or job.sharing is Sharing.ALL:
            return True
        return job.sharing is Sharing.TEAM and job.team in self.roles

    def may_use(self, job: JobRecord) -> bool:
        """Whether the user may have models of the job exported, and delete these exports."""
        return self._administers(job) or (self.may_read(job) and self.roles.get(job.team or "") is Role.MEMBER)

    def may_change(self, job: JobRecord) -> bool:
        """Whether the user may cancel, resume, extend, share and delete the job."""
        return self._administers(job)

    def has_left_team(self, job: JobRecord) -> bool:
        """Whether the user owns the job, and may no longer submit jobs for the job's team.

        Such a user still reads the job. The work on the job would use the team's quotas, so the user may not steer it.
        """
        return job.owner == self.user and job.team is not None and not self._submits_for(job.team)

    def _submits_for(self, team: str) -> bool:
        return self.roles.get(team) in (Role.MEMBER, Role.ADMIN)

    def _administers(self, job: JobRecord) -> bool:
        is_owner = job.owner == self.user and not self.has_left_team(job)
        return self.is_admin or is_owner or self.roles.get(job.team or "") is Role.ADMIN


@dataclass(frozen=True)
class UserRecord:
    """A stored user.

    `is_admin` says whether the user administers the server. A disabled user (`is_disabled`) has no rights. `roles` has
    the user's role in each team. `created_at` is in seconds since the epoch.

    `identity` is the identity at an identity provider with which the user has logged in: the issuer and the subject, in
    one text. No other identity may log in as the user. `identity` is None as long as the user has not logged in with a
    provider, and NO_IDENTITY if nobody can.
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
class TeamLimits:
    """Weight of a team in the queue of jobs, and its quotas; a quota that is None is no limit.

    - `weight`: share of the GPU-hours that the queue gives to the team's jobs, relative to the weights of other teams.
    - `max_running`: number of jobs that run at the same time.
    - `max_replicas`: number of replicas, and of workers of fine-tunings, of all running jobs together.
    - `max_served`: number of studies that are served at the same time.
    - `gpu_hours`: GPU-hours in a calendar month (UTC).
    - `artifact_bytes`: bytes of the experts and policies of the team's jobs.
    - `export_bytes`: bytes of the exported models of the team's jobs.
    - `requests_per_minute`: requests of the team's members in a minute, in the long run. Up to this number of requests
      may also be sent at once.
    """

    weight: float = 1.0
    max_running: int | None = None
    max_replicas: int | None = None
    max_served: int | None = 4
    gpu_hours: float | None = None
    artifact_bytes: int | None = None
    export_bytes: int | None = None
    requests_per_minute: int | None = None


@dataclass(frozen=True)
class TeamUsage:
    """GPU-hours that the jobs of a team have used.

    `recent` is a sum in which an hour counts less, the longer ago it was; `service.store.usage` has the half-life.
    `month` is the sum of the present calendar month (UTC).
    """

    recent: float = 0.0
    month: float = 0.0


@dataclass(frozen=True)
class Demand:
    """Replicas and GPUs that a running job occupies.

    For a fine-tuning, `replicas` is its number of training workers. A replica or a worker without a GPU counts as one
    GPU.
    """

    replicas: int = 1
    num_gpus: int = 1


@dataclass(frozen=True)
class TeamRecord:
    """A stored team: its weight, its quotas, and the role of each member, keyed by the member's name."""

    name: str
    created_at: float
    members: Mapping[str, Role] = field(default_factory=dict)
    limits: TeamLimits = field(default_factory=TeamLimits)


@dataclass(frozen=True)
class TokenRecord:
    """Record of an API token, without the hash by which the server recognizes the token.

    `user` is the token's user, and `name` is the name that the user gave the token. `prefix` is the token's beginning,
    by which users recognize it. `scope` says for which requests the token may be used. Times are in seconds since the
    epoch; None stands for never.
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
    session began. If the browser logged in with an API token, `token` is the token's id and `scope` is its scope, which
    the session has too. After a login with an identity provider, `token` and `scope` are None.
    """

    id: str
    user: str
    created_at: float
    expires_at: float
    last_used_at: float
    token: str | None = None
    scope: Scope | None = None

    def is_valid(self, *, now: float, idle_s: float) -> bool:
        """Whether the session may still be used at the time `now`, in seconds since the epoch.

        A session ends at its expiry, or earlier if it was not used for `idle_s` seconds.
        """
        return now < self.expires_at and now < self.last_used_at + idle_s

    @property
    def label(self) -> str:
        """Text that names the session in the audit log.

        For a request with an API token, the audit log has the beginning of the token instead.
        """
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
    """A user's request that changes how a job continues, such as a pause.

    `action` is the kind of request, such as "pause". `user` is the user's name, or None if the server has no accounts.
    `reason` is the reason that the user gave, or None. `changes` has, for the action "edit", the value of each edited
    option before and after. `trial` is the number of the trial that the request is about; None if the request is about
    no trial.
    """

    action: str
    user: str | None = None
    reason: str | None = None
    changes: Mapping[str, Any] | None = None
    trial: int | None = None

    @property
    def payload(self) -> dict[str, Any]:
        """This request as a JSON object, as it is stored in the job's event about it."""
        changes = {} if self.changes is None else {"changes": dict(self.changes)}
        trial = {} if self.trial is None else {"trial": self.trial}
        return {"action": self.action, "user": self.user, "reason": self.reason, **changes, **trial}

    def describe(self, done: str) -> str:
        """Text about this request, such as "paused by ann: the GPUs are needed".

        `done` is the first word of the text, here "paused".
        """
        text = f"{done} by {self.user or 'request'}"
        return f"{text}: {self.reason}" if self.reason else text


@dataclass(frozen=True)
class JobRecord:
    """A stored job: a study, a fine-tuning or a served study.

    Times are in seconds since the epoch; 0 or None means never.

    - `kind`: name of the kind of job, such as "search" for a study.
    - `document`: the submitted document in canonical form.
    - `accepted`: findings of the checks when the job was created, as JSON; for a study, a `ResolvedStudy`.
    - `reason`: reason for the current state.
    - `wall_clock_s`: total seconds that all drivers have worked on the job.
    - `attempt`: number of drivers that have taken over the job.
    - `progress`: the driver's latest progress, as JSON that is shown to users; None before the first report.
    - `submissions`: number of drivers that were submitted to a cluster.
    - `submitted_after`: value of `attempt` at the last submission.
    - `request_digest`: hash of the body of the request that created the job; None if no request created the job.
    - `progressed_at`: time at which the driver last made progress.
    - `patience_s`: seconds without progress after which the driver counts as hung; None if not known.
    - `waiting_for`: text that says what the driver waits for; None if the driver does not wait.
    - `owner`: name of the user who created the job; None if the server had no accounts at that time.
    - `team`: name of the team that the job belongs to; None for a job of its owner alone.
    - `sharing`: who may read the job besides its owner and administrators.
    - `is_paused`: whether the job was asked to pause. Its state is PAUSED once no driver works on it.
    - `stop_reason`: reason why the search was asked to end early; None if nobody asked for this.
    - `description`, `tags`, `notes`: texts of users about the job, which change nothing.
    - `priority`: of the jobs that wait because the server's limit of running jobs is reached, the job with the largest
      priority starts first.
    - `version`: number of edits of the job.
    - `edited_after`: value of `attempt` at the last edit that a driver must read; a driver of this attempt has the
      document from before the edit. None if there was no such edit.
    - `first_name`: name of the job when it was created, if it was renamed. Its Ray Jobs keep this name.
    - `yields_after`: value of `attempt` when the driver was asked to end because of a preemption (another job takes the
      place, or the quota of the team is used up). None if no driver was asked.
    - `moved_before`: id of the job before which an administrator moved this job while it waits, or "" for the front of
      the queue; None if the job was not moved. `moved_at` is the time of the move.
    - `traceparent`: OpenTelemetry trace and span of the request that created the job, in the form of the HTTP header
      `traceparent`; None if the request was not traced.
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
    yields_after: int | None = None
    moved_before: str | None = None
    moved_at: float | None = None
    traceparent: str | None = None

    @property
    def yields(self) -> bool:
        """Whether the present driver (the process that works on the job) was asked to end so that the job waits again.

        The job then waits for a place, the right to run.
        """
        return self.yields_after is not None and self.yields_after == self.attempt

    @property
    def is_outdated(self) -> bool:
        """Whether the driver that works on the job read the job's document before the document was last edited.

        A driver is a process that works on the job. The next driver reads the edited document. Edits that no driver
        needs to read do not count.
        """
        return self.edited_after is not None and self.edited_after == self.attempt

    def has_driver(self, *, now: float) -> bool:
        """Whether a driver (a process) works on the job.

        A driver works on the job if the job has not ended, and a heartbeat of a driver was stored shortly before the
        time `now`.
        """
        return not self.state.is_finished and self.heartbeat_at is not None and now - self.heartbeat_at < ALIVE_S


class NoticeKind(StrEnum):
    """Kind of change of a job of which users can be notified, by a webhook or by e-mail.

    - COMPLETE, FAILED, CANCELLED, PAUSED: the job has reached this state
    - WAITING: the job has waited for longer than a limit, and the reason why it waits has not changed in this time
    """

    COMPLETE = "complete"
    FAILED = "failed"
    WAITING = "waiting"
    PAUSED = "paused"
    CANCELLED = "cancelled"

    @classmethod
    def of_state(cls, state: str | None) -> NoticeKind | None:
        """Kind of the notification that is sent when a job reaches `state`; None if no notification is sent."""
        return _NOTICES.get(state or "")


_NOTICES = {
    JobState.COMPLETE.value: NoticeKind.COMPLETE,
    JobState.FAILED.value: NoticeKind.FAILED,
    JobState.PAUSED.value: NoticeKind.PAUSED,
    JobState.CANCELLED.value: NoticeKind.CANCELLED,
}


class SubscriptionKind(StrEnum):
    """How a user is notified of changes of jobs."""

    WEBHOOK = "webhook"
    MAIL = "mail"


class Coverage(StrEnum):
    """Jobs that a subscription covers: its owner's jobs, the jobs of a team, or all jobs."""

    OWN = "own"
    TEAM = "team"
    ALL = "all"


class DeliveryState(StrEnum):
    """State of a delivery: WAITING for its next try, DELIVERED, or FAILED at all tries."""

    WAITING = "WAITING"
    DELIVERED = "DELIVERED"
    FAILED = "FAILED"


@dataclass(frozen=True)
class SubscriptionRecord:
    """Subscription to changes of jobs: a webhook, or the e-mail address of a user.

    - `target`: the URL of the webhook, or the e-mail address.
    - `secret`: the key by which requests to a webhook are signed; None for an e-mail address.
    - `owner`: the user whose rights limit the messages; None if the server had no accounts.
    - `covers`, `team`: the jobs that are covered; the team is None unless `covers` is TEAM.
    - `events`: the kinds of changes that are sent.
    - `failing_since`: time of the first failure since the last success; None if nothing has failed since.
    - `disabled_at`, `disabled_reason`: time and reason of the end of sending; None while the subscription is in use.

    Times are in seconds since the epoch.
    """

    id: str
    kind: SubscriptionKind
    target: str
    owner: str | None
    covers: Coverage
    team: str | None
    events: tuple[NoticeKind, ...]
    created_at: float
    secret: str | None = field(default=None, repr=False)
    failing_since: float | None = None
    disabled_at: float | None = None
    disabled_reason: str | None = None


@dataclass(frozen=True)
class DeliveryRecord:
    """A notice for one subscription, which is sent until it arrives or has failed at all tries.

    - `id`: the id of the message, the same at each try.
    - `study`: id of the job, of any kind; None for a test.
    - `event`: the kind of notice, or "test".
    - `body`: the text that is sent, a JSON document.
    - `attempts`: the number of tries so far. `next_at` is the time of the next try, in seconds since the epoch.
    - `status`: the HTTP status of the last response; None without a response.
    - `error`: why the last try failed; None if it did not fail.
    """

    id: str
    subscription: str
    study: str | None
    event: str
    body: str
    state: DeliveryState
    attempts: int
    created_at: float
    next_at: float | None
    finished_at: float | None = None
    status: int | None = None
    error: str | None = None


@dataclass(frozen=True)
class DriverWait:
    """Latest wait of a job for a driver (a process that works on the job).

    The wait begins at `since`, when the job was created or last resumed, and ends at `until`, when a driver started.
    Both times are in seconds since the epoch. `until` is None if no driver has started since.
    """

    since: float
    until: float | None = None


@dataclass(frozen=True)
class ArtifactRecord:
    """A stored directory of files that a job made, such as a trained expert.

    The server stores each file under the hash of its content. `study` is the id of the job, which may be of any kind,
    and `name` is the artifact's name within the job. `digest` is the sha256 of the list of the artifact's files and
    their hashes. `num_bytes` is the total size of its files. `facts` are properties that the job stored with the
    artifact.
    """

    study: str
    name: str
    digest: str
    num_bytes: int
    created_at: float
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ExportRecord:
    """Record of an export: the merged model of a trial in the dtype `dtype`, which a user requested for download.

    `study` is the id of the study, and `trial` is the number of the trial. `reason` says why the model could not be
    written; None if the model was written, or is not written yet.
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
    """Values of one trial on the holdout data, and their differences from the values of a reference trial.

    The reference is the best trial on search data among the finalists (the trials of the Pareto front that are scored
    on holdout data).

    - `label`, `trial`: name and number of the trial
    - `values`: the estimate of each objective
    - `mean`: the mean over the accuracy objectives (values in [0, 1], larger is better); None without accuracy
      objectives
    - `differences`: for each objective, the trial's value minus the value of the reference, paired by sample. The key
      "mean" has the difference of the means. Empty without a reference.
    """

    label: str
    trial: int
    values: Mapping[str, Estimate]
    differences: Mapping[str, Estimate] = field(default_factory=dict)
    mean: Estimate | None = None

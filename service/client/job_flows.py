"""Client methods about jobs of any kind, as generators that yield HTTP requests and return results (see `flows`)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from service.client import views
from service.client.requests import Attempts, Call, Flow, Reference, delete_of, document_of, path_of, submitted, text_of
from service.client.views import Job, JobList
from service.errors import Conflict, NotFound, RequestRefused, ServiceError
from service.jobs.base import JobKind
from service.jobs.finetune.kind import FINETUNE
from service.jobs.registry import KINDS, kind_of
from service.jobs.search.kind import SEARCH

if TYPE_CHECKING:
    from service.schemas.api import ClusterDocument, JobDocument, MeDocument, QueueDocument

__all__ = [
    "cancel",
    "clone",
    "cluster",
    "delete",
    "edit",
    "find",
    "job",
    "jobs",
    "log",
    "me",
    "move",
    "overview",
    "pause",
    "queue",
    "resume",
    "share",
    "stop",
    "submit_job",
]

# Jobs of each kind in the display of a client.
NUM_NEWEST = 10
# Characters of a text by which the server lists jobs.
LONGEST_TEXT = 200

PRECONDITION_FAILED = 412
# Section and key of the study file for each option that `edit` changes; None: the whole section.
OPTION_PLACES = {"max_trials": ("search", "max_trials"), "replicas": ("engine", "replicas"), "limits": ("limits", None)}


def submit_job(
    kind: str,
    document: Path | str | Mapping[str, Any],
    *,
    idempotency_key: str | None = None,
    team: str | None = None,
    sharing: str | None = None,
) -> Flow[JobDocument]:
    """Submit a job of any kind: a study or a fine-tuning.

    Args:
        kind: Name of the kind: "search" for a study, "finetune" for a fine-tuning.
        document: Path of a file that describes the job, or the content of such a file. Relative paths in a file start
            at the file's directory.
        idempotency_key: 1 to 255 visible ASCII characters. The same key with the same document returns the job that the
            first call created. Without a key, each call creates a new job.
        team: Team that the job belongs to; None means the only team for which you may submit jobs.
        sharing: Who may read the job besides you and administrators: "private", "team" or "all"; None is "team".

    Returns:
        The server's JSON document that describes the job.

    Raises:
        LookupError: There is no such kind.
        InvalidStudy: The file is invalid.
        RequestRefused: The server refused the job; the error has every problem.

    Examples:
        >>> client.submit_job("search", "study.yaml")
    """
    declared = kind_of(kind)
    content = document if isinstance(document, Mapping) else declared.load(Path(document))
    query = {key: value for key, value in (("team", team), ("sharing", sharing)) if value is not None}
    created = yield from submitted(declared.path, content, idempotency_key, query)
    return cast("JobDocument", Job({"kind": kind, **created}))


def jobs(
    kind: str,
    *,
    state: str | None = None,
    name: str | None = None,
    text: str | None = None,
    sort: str | None = None,
    limit: int | None = None,
) -> Flow[list[JobDocument]]:
    """List the jobs of a kind, by default all of them, oldest first.

    Args:
        kind: Name of the kind: "search" for studies, "finetune" for fine-tunings.
        state: State of the jobs to list, such as "RUNNING"; None lists jobs in any state.
        name: Name of the jobs to list; None lists jobs with any name.
        text: Lists only jobs that have this text in their name, description or owner's name, or whose id begins with
            it; case is ignored. None lists jobs with any text.
        sort: Field to sort by: "created", "name", "state", "owner" or "priority". With "-" before the field, as in
            "-name", the largest value is first.
        limit: Maximum number of jobs, at most 1000; None lists all.

    Returns:
        The server's JSON documents that describe the jobs.

    Raises:
        LookupError: There is no such kind.

    Examples:
        >>> client.jobs("search", state="RUNNING")
    """
    declared = kind_of(kind)
    given = {"state": state, "name": name, "q": text, "sort": sort, "limit": None if limit is None else str(limit)}
    query = {key: value for key, value in given.items() if value is not None}
    document = yield from document_of(Call("GET", declared.path, query))
    # Servers of earlier versions do not say the kind.
    return JobList(cast("JobDocument", Job({"kind": kind, **found})) for found in document[declared.collection])


def job(job: Reference) -> Flow[JobDocument]:
    """Return the current state of a job, with its progress and links to its results.

    Args:
        job: Id of a study, or a document that the server returned for a job of any kind.

    Returns:
        The server's JSON document that describes the job.

    Raises:
        RequestRefused: The server has no such job (status 404).

    Examples:
        >>> client.job(client.find("family"))["state"]
    """
    kind = {} if isinstance(job, str) else {"kind": job["kind"]}
    return cast("JobDocument", Job({**kind, **(yield from document_of(Call("GET", path_of(job))))}))


def share(job: Reference, sharing: str, *, team: str | None = None) -> Flow[JobDocument]:
    """Change who may read a job.

    Args:
        job: Id of a study, or a document that the server returned for a job of any kind.
        sharing: Who may read the job besides its owner and administrators: "private", "team" or "all".
        team: Team to which the job is moved; None does not change the job's team.

    Returns:
        The server's JSON document that describes the job.

    Raises:
        RequestRefused: The server has no such job, or you may not change it (status 403).

    Examples:
        >>> client.share("5f0c...", "all")
    """
    content = json.dumps({"sharing": sharing, **({} if team is None else {"team": team})}).encode()
    kind = {} if isinstance(job, str) else {"kind": job["kind"]}
    call = Call("PUT", path_of(job, "sharing"), {}, {"Content-Type": "application/json"}, content)
    return cast("JobDocument", Job({**kind, **(yield from document_of(call))}))


def me() -> Flow[MeDocument]:
    """Return your user with its teams, and your token without its secret, as the server knows them.

    Returns:
        The server's document; its keys "user" and "token" are None if the server has no accounts.

    Raises:
        RequestRefused: The token is missing or not valid (status 401).

    Examples:
        >>> client.me()["user"]["name"]
    """
    return cast("MeDocument", (yield from document_of(Call("GET", "/v1/me"))))


def overview(url: str) -> Flow[str]:
    """Return the HTML that a notebook shows for a client: the newest studies and fine-tunings of the server at `url`.

    The method sends two requests. If the server refuses a request or does not answer, the HTML shows the reason.
    """
    found: dict[str, JobList] = {}
    try:
        for kind in (SEARCH, FINETUNE):
            found[f"{kind.plural}, newest first"] = JobList(
                (yield from _known(kind, sort="-created", limit=NUM_NEWEST))
            )
    except ServiceError as error:
        return views.overview(url, {}, error=str(error))
    return views.overview(url, found)


def _known(
    kind: JobKind, *, text: str | None = None, sort: str | None = None, limit: int | None = None
) -> Flow[list[JobDocument]]:
    """List the jobs of a kind; the result is empty if the server's version does not know this kind of job.

    The arguments are those of `jobs`.
    """
    try:
        return (yield from jobs(kind.name, text=text, sort=sort, limit=limit))
    except RequestRefused as error:
        if error.status != 404:
            raise
        return []


def find(reference: str) -> Flow[JobDocument]:
    """Find a job by its id, the beginning of its id, or its name.

    Args:
        reference: An id, the beginning of an id, or a name.

    Returns:
        The server's JSON document that describes the job. Its key "kind" has the kind of job.

    Raises:
        NotFound: No job matches.
        Conflict: Several jobs match; the message lists their ids.

    Examples:
        >>> client.find("5f0c")
        >>> client.find("math-text-lookup")
    """
    known: list[JobDocument] = []
    if text := reference.encode(errors="replace").decode():
        for kind in KINDS.values():
            known += yield from _known(kind, text=text[:LONGEST_TEXT])  # those whose id or name may match
    matches = [found for found in known if found["id"] == reference]
    matches = matches or [found for found in known if found["name"] == reference]
    matches = matches or [found for found in known if found["id"].startswith(reference)]
    if len(matches) > 1:
        ids = ", ".join(f"{found['id']} ({found['name']}, {found['state']})" for found in matches)
        raise Conflict(f"job {reference!r}: {len(matches)} jobs match, give a longer id: {ids}")
    if not matches:
        raise NotFound(f"job {reference!r}: the server has no job of that id or name")
    return matches[0]


def pause(job: Reference, *, reason: str | None = None) -> Flow[JobDocument]:
    """Pause a job until it is resumed.

    The driver, the process that works on the job, ends as soon as the samples that are being scored are stored; the job
    is then PAUSED. A fine-tuning that is resumed continues from its last checkpoint. A job that was asked to pause
    before is not changed.

    Args:
        job: Id of a study, or a document that the server returned for a job of any kind.
        reason: The reason, which the events of the job show; None states no reason.

    Returns:
        The server's JSON document that describes the job after the request.

    Raises:
        RequestRefused: The job has ended.

    Examples:
        >>> client.pause("5f0c...", reason="the GPUs are needed until noon")
    """
    return (yield from _steer(job, "pause", reason))


def stop(job: Reference, *, reason: str | None = None) -> Flow[JobDocument]:
    """Stop the search of a study early; held-out data and benchmarks are scored as always.

    Running evaluations finish, and the other unfinished trials are pruned. A search that was stopped already is not
    changed.

    Args:
        job: Id of a study, or a document that the server returned for a job of any kind.
        reason: The reason, which the events of the job show; None states no reason.

    Returns:
        The server's JSON document that describes the job after the request.

    Raises:
        RequestRefused: The study has ended, or the job has no search.

    Examples:
        >>> client.stop("5f0c...", reason="good enough")
    """
    return (yield from _steer(job, "stop", reason))


def cancel(job: Reference, *, reason: str | None = None) -> Flow[JobDocument]:
    """Cancel a job permanently and keep its results.

    The driver, the process that works on the job, ends now. A job that is already cancelled is not changed.

    Args:
        job: Id of a study, or a document that the server returned for a job of any kind.
        reason: The reason, which the events of the job show; None states no reason.

    Returns:
        The server's JSON document that describes the job after the request.

    Raises:
        RequestRefused: The job is COMPLETE or has FAILED.

    Examples:
        >>> client.cancel("5f0c...")
        >>> client.cancel(client.find("family"))
    """
    return (yield from _steer(job, "cancel", reason))


def resume(job: Reference, *, reason: str | None = None) -> Flow[JobDocument]:
    """Resume a job that has FAILED or is PAUSED, or let a job that waits try again now.

    A study continues from its stored results, and a fine-tuning continues from its last checkpoint. Stored samples are
    scored again only if they are void: the engine that scored them failed a check afterwards. A COMPLETE study that has
    void samples can be resumed too.

    Args:
        job: Id of a study, or a document that the server returned for a job of any kind.
        reason: The reason, which the events of the job show; None states no reason.

    Returns:
        The server's JSON document that describes the job after the request.

    Raises:
        RequestRefused: The job is CANCELLED, or it is COMPLETE and has no void samples.

    Examples:
        >>> client.resume("5f0c...")
    """
    return (yield from _steer(job, "resume", reason))


def cluster() -> Flow[ClusterDocument]:
    """Return the nodes of the Ray cluster and the use of their resources, the server's disk, and versions of packages.

    On a server with accounts only administrators may call this method.

    Returns:
        The server's document of the cluster.

    Raises:
        RequestRefused: You do not administer the server (status 403).

    Examples:
        >>> [node["host"] for node in client.cluster()["nodes"] if node["is_alive"]]
    """
    return cast("ClusterDocument", (yield from document_of(Call("GET", "/v1/cluster"))))


def queue() -> Flow[QueueDocument]:
    """Return the server's running jobs, and its waiting jobs in the order in which they start.

    A job that you may not read appears as an entry without details.

    Returns:
        The server's document of the queue.

    Examples:
        >>> [entry["position"] for entry in client.queue()["waiting"] if entry["job"]]
    """
    return cast("QueueDocument", (yield from document_of(Call("GET", "/v1/queue"))))


def move(job: Reference, *, before: Reference | None = None, reason: str | None = None) -> Flow[QueueDocument]:
    """Move a waiting job to the front of the jobs of its priority, or before another waiting job.

    The move holds until the job starts. Only administrators of the server may do this.

    Args:
        job: Id of a study, or the server's document of a job of any kind.
        before: The waiting job before which `job` is moved, of the same priority; None moves `job` to the front.
        reason: The reason, which the events of the job show.

    Returns:
        The server's document of the queue.

    Raises:
        RequestRefused: One of the jobs does not wait, or the priorities differ (status 409), or you are no
            administrator (403).

    Examples:
        >>> client.move("5f0c...", reason="a deadline")
    """
    content = json.dumps({"job": _id(job), "before": None if before is None else _id(before), "reason": reason})
    call = Call("POST", "/v1/queue:move", {}, {"Content-Type": "application/json"}, content.encode())
    return cast("QueueDocument", (yield from document_of(call)))


def _id(job: Reference) -> str:
    return job if isinstance(job, str) else job["id"]


def _steer(job: Reference, verb: str, reason: str | None) -> Flow[JobDocument]:
    query = {} if reason is None else {"reason": reason}
    return cast("JobDocument", Job((yield from document_of(Call("POST", f"{path_of(job)}:{verb}", query=query)))))


def edit(
    job: Reference, changes: Mapping[str, Any], *, version: int | None = None, reason: str | None = None
) -> Flow[JobDocument]:
    """Edit the labels of a job or, for a study, also some options of its study file.

    Labels are name, description, tags, notes and priority. Options of the study file take effect as soon as the samples
    that are being scored are stored.

    Args:
        job: Id of a study, or a document that the server returned for a job of any kind.
        changes: New values, keyed by name: "name", "description", "tags", "notes" and "priority"; for a study also
            "max_trials", "replicas" (the number of engines) and "limits". Options that are left out keep their values.
        version: The "version" of the job as you read it, so that edits by others are not lost; None edits the job
            whatever its version is.
        reason: The reason, which the events of the job show; None states no reason.

    Returns:
        The server's JSON document that describes the job after the edit.

    Raises:
        RequestRefused: The job was edited since `version` (status 412), the new value of a limit is below its present
            use (422), or the study has ended (409).

    Examples:
        >>> client.edit("5f0c...", {"max_trials": 120, "tags": ["math"], "limits": {"max_samples": None}})
    """
    if version is None:
        version = (yield from document_of(Call("GET", path_of(job))))["version"]
    headers = {"Content-Type": "application/json", "If-Match": f'"{version}"'}
    query = {} if reason is None else {"reason": reason}
    call = Call("PATCH", path_of(job), query, headers, json.dumps(dict(changes)).encode())
    attempts = Attempts()
    try:
        edited = yield from document_of(call, attempts=attempts)
    except RequestRefused as error:
        if error.status != PRECONDITION_FAILED or not attempts.may_have_arrived:
            raise
        found = yield from _if_edited(job, json.loads(json.dumps(dict(changes))))
        if found is None:
            raise
        edited = found
    kind = {} if isinstance(job, str) else {"kind": job["kind"]}
    return cast("JobDocument", Job({**kind, **edited}))


def _if_edited(job: Reference, changes: Mapping[str, Any]) -> Flow[dict[str, Any] | None]:
    """Return the server's document of a job that has the values `changes`; None if the job has other values.

    `changes` are plain data, as for the method `edit`.
    """
    labels = {name: value for name, value in changes.items() if name not in OPTION_PLACES}
    options: dict[str, Any] = {}
    for name in OPTION_PLACES.keys() & changes.keys():
        section, key = OPTION_PLACES[name]
        options[section] = changes[name] if key is None else {key: changes[name]}
    found = yield from document_of(Call("GET", path_of(job)))
    document: dict[str, Any] = {}
    if options:
        document = yield from document_of(Call("GET", path_of(job, _kind_of(job).document_link)))
    return found if _has(found, labels) and _has(document, options) else None


def _has(document: Any, values: Any) -> bool:
    """Whether `document` has the given `values`; objects may have further keys."""
    if isinstance(document, Mapping) and isinstance(values, Mapping):
        return all(key in document and _has(document[key], value) for key, value in values.items())
    return bool(document == values)


def _kind_of(job: Reference) -> JobKind:
    return SEARCH if isinstance(job, str) else kind_of(job["kind"])


def clone(
    job: Reference,
    changes: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
    *,
    team: str | None = None,
    sharing: str | None = None,
) -> Flow[JobDocument]:
    """Submit a copy of a job, with changes.

    The copy starts anew: it has the job's present study file or specification, but not its results.

    Args:
        job: Id of a study, or a document that the server returned for a job of any kind.
        changes: Changes of the file as a JSON merge patch (RFC 7396): values replace the values of the same keys,
            objects are merged, and None removes a key, so that the key's default holds. Several patches are applied in
            their order.
        team: Team of the copy; None means the only team for which you may submit jobs.
        sharing: Who may read the copy besides you and administrators: "private", "team" or "all"; None is "team".

    Returns:
        The server's JSON document that describes the copy.

    Raises:
        RequestRefused: The server refused the copy; the error has every problem.

    Examples:
        >>> client.clone("5f0c...", {"name": "seed-2", "search": {"seed": 2}})
    """
    kind = _kind_of(job)
    document = yield from document_of(Call("GET", path_of(job, kind.document_link)))
    for patch in [changes] if isinstance(changes, Mapping) else changes or ():
        document = _patched(document, patch)
    return (yield from submit_job(kind.name, document, team=team, sharing=sharing))


def _patched(document: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    patched = dict(document)
    for key, value in changes.items():
        if value is None:
            patched.pop(key, None)
        elif isinstance(value, Mapping):
            inner = patched.get(key)
            patched[key] = _patched(inner if isinstance(inner, Mapping) else {}, value)
        else:
            patched[key] = value
    return patched


def delete(job: Reference) -> Flow[None]:
    """Delete a job that has ended, with its results and exports (merged models for download).

    Args:
        job: Id of a study, or a document that the server returned for a job of any kind.

    Raises:
        RequestRefused: The job has not ended, or one of its models is being written or downloaded.

    Examples:
        >>> client.delete("5f0c...")
    """
    yield from delete_of(Call("DELETE", path_of(job)))


def log(job: Reference) -> Flow[str]:
    """Return the log of a job: the output of all drivers that worked on the job.

    A driver is a process that works on a job. After a failure, another driver continues the job.

    Args:
        job: Id of a study, or a document that the server returned for a job of any kind.

    Raises:
        RequestRefused: Ray, which keeps the logs, is unreachable (status 503).

    Examples:
        >>> print(client.log("5f0c..."))
    """
    return (yield from text_of(Call("GET", path_of(job, "log"))))

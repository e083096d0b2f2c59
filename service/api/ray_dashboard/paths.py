"""Rules on the requests that are forwarded to Ray's dashboard: only requests by which the dashboard's page gets data.

Every other path is refused, even if a later version of Ray adds it. Some GET requests have effects: they profile
processes, keep packages alive, or delay the dashboard. Other GET requests show secrets, such as runtime environments or
the logs of Ray's own processes. tests/service/api/ray_dashboard/test_paths.py sorts all routes of the installed Ray.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from urllib.parse import quote, urlencode

from service.api.problems import Refusal

__all__ = ["FORWARDED", "Target", "Treatment", "is_shown_entry", "is_shown_log", "target", "treatment"]


class Treatment(StrEnum):
    """Way in which the server passes on an answer of Ray's dashboard to a user.

    - PAGE: the answer is sent with the security policy of the dashboard's page
    - FILE: the answer is sent unchanged, and browsers may keep it
    - DATA: the answer is JSON, from which secrets are removed
    - LOG: the answer is the log of a job or of a worker, which is sent while it arrives
    - LOG_LIST: the answer is JSON with the names of logs, from which the names of logs that may not be read are removed
    """

    PAGE = "page"
    FILE = "file"
    DATA = "data"
    LOG = "log"
    LOG_LIST = "log list"


# Treatments by Ray's path templates. The requests of the page were read in the source of the client of Ray 2.60.
FORWARDED: Mapping[str, Treatment] = {
    "/": Treatment.PAGE,
    "/favicon.ico": Treatment.FILE,
    "/static/{folder}/{file}": Treatment.FILE,
    "/timezone": Treatment.DATA,
    "/nodes": Treatment.DATA,
    "/nodes/{node_id}": Treatment.DATA,
    "/logical/actors": Treatment.DATA,
    "/logical/actors/{actor_id}": Treatment.DATA,
    "/events": Treatment.DATA,
    "/api/cluster_status": Treatment.DATA,
    "/api/jobs/": Treatment.DATA,
    "/api/jobs/{job_or_submission_id}": Treatment.DATA,
    "/api/data/datasets/{job_id}": Treatment.DATA,
    "/api/serve/applications/": Treatment.DATA,
    "/api/train/v2/runs/v1": Treatment.DATA,  # no page of the dashboard shows runs of Ray Train
    "/api/v0/cluster_metadata": Treatment.DATA,
    "/api/v0/placement_groups": Treatment.DATA,
    "/api/v0/platform_events": Treatment.DATA,
    "/api/v0/tasks": Treatment.DATA,
    "/api/v0/tasks/summarize": Treatment.DATA,
    "/api/v0/tasks/timeline": Treatment.DATA,
    "/api/v0/logs": Treatment.LOG_LIST,
    "/api/v0/logs/file": Treatment.LOG,  # and not "stream", which never ends
}

# A part of a path. Dots alone would name another directory.
SEGMENT = r"(?!\.{1,2}(?:/|$))[^/\\\x00-\x1f\x7f]{1,200}"

_PATTERNS = tuple(
    (
        re.compile(
            "".join(SEGMENT if part.startswith("{") else re.escape(part) for part in re.split(r"(\{\w+\})", path))
        ),
        how,
    )
    for path, how in FORWARDED.items()
)

# Output of this server's Ray Jobs (drivers, and calls on nodes), of workers and of Ray Serve. Ray writes the command of
# a Ray Job into its log, and the commands of others may hold secrets. Ray's own processes log runtime environments.
_SHOWN_LOG = re.compile(
    r"job-driver-[^/\\]+-[0-9a-f]{8}-[0-9]+\.log|job-driver-check-[0-9a-f]{16}\.log|worker-[0-9a-f]+-[0-9a-f]+-[0-9]+\.(?:out|err)|serve/[^/\\]+\.log(?:\.[0-9]+)?"
)
_LOG_FOLDER = "serve/"

# Parameters of a request for a log; each may be given once.
_LOG_PARAMETERS = frozenset(
    ("node_id", "filename", "actor_id", "task_id", "suffix", "lines", "attempt_number", "filter_ansi_code")
)


def treatment(path: str) -> Treatment | None:
    """Find out how Ray's answer to a request for the dashboard's `path` is passed on to users.

    Returns None if the request is refused.

    `path` begins with a slash and is decoded: it has no escapes such as %2F.
    """
    return next((how for pattern, how in _PATTERNS if pattern.fullmatch(path)), None)


def is_shown_log(name: str) -> bool:
    """Whether users may read the file `name` in Ray's directory of logs.

    Users may read the output of Ray Jobs, of Ray's workers and of Ray Serve's replicas.
    """
    return _SHOWN_LOG.fullmatch(name) is not None and ".." not in name


def is_shown_entry(name: str) -> bool:
    """Whether users may see the log or directory `name` in a list of Ray's logs."""
    return name == _LOG_FOLDER or is_shown_log(name)


@dataclass(frozen=True)
class Target:
    """A request to forward to Ray's dashboard.

    - `place`: URL-encoded path and query of the request
    - `treatment`: how the dashboard's answer is passed on to the user
    """

    place: str
    treatment: Treatment


def target(path: str, parameters: Sequence[tuple[str, str]]) -> Target:
    """Make the request to forward to Ray's dashboard from the decoded path and query of a user's request.

    Raises Refusal (403) if this request may not be forwarded.
    """
    how = treatment(path)
    if how is None:
        raise Refusal(
            403,
            f"/ray{path!r:.200}: is not among the paths of Ray's dashboard that this server forwards; they are those "
            "that the dashboard's page requests to show something, and none that changes something",
        )
    if how is Treatment.LOG:
        _check_log(dict(parameters), num_given=len(parameters))
    query = f"?{urlencode(parameters)}" if parameters else ""
    return Target(quote(path, safe="/") + query, how)


def _check_log(parameters: Mapping[str, str], *, num_given: int) -> None:
    """Raise Refusal (403) unless users may read the log that the query `parameters` name.

    `num_given` is the number of parameters in the request's query. If `parameters` has fewer entries, a parameter was
    given twice; such a request is refused too.
    """
    unknown = sorted(set(parameters) - _LOG_PARAMETERS)
    if unknown or len(parameters) < num_given:
        accepted = ", ".join(sorted(_LOG_PARAMETERS))
        raise Refusal(403, f"{', '.join(unknown) or 'a parameter'}: is not accepted; accepted once are {accepted}")
    name = parameters.get("filename")
    if name is None and not {"actor_id", "task_id"} & set(parameters):
        raise Refusal(403, "the query names no log; it has filename, actor_id or task_id")
    if name is not None and not is_shown_log(name):
        raise Refusal(
            403,
            f"filename {name!r:.200}: is not a log that this server shows; it shows the output of its own drivers "
            "(job-driver-NAME-ID-NUMBER.log), of workers (worker-*.out, worker-*.err) and of Ray Serve (serve/*.log)",
        )

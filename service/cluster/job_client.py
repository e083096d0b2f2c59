"""Client of Ray's Jobs API, with a limit on the duration of a request.

Without the limit, Ray's client would wait forever for a dashboard that accepts connections but does not answer.
"""

from __future__ import annotations

from typing import Any

__all__ = ["job_client"]

# Seconds that the dashboard may take to answer. It answers a submission after its agent has started the job's process.
ANSWER_S = 60.0


def job_client(url: str) -> Any:
    """Create a client of Ray's Jobs API for the Ray cluster whose dashboard is at `url`.

    This function and the client's methods raise ConnectionError if the dashboard does not answer a request within
    ANSWER_S seconds.
    """
    import requests
    from ray.job_submission import JobSubmissionClient

    class Client(JobSubmissionClient):  # type: ignore[misc]
        def _do_request(self, *args: Any, **options: Any) -> Any:
            try:
                return super()._do_request(*args, **{"timeout": ANSWER_S, **options})
            except requests.exceptions.Timeout as error:
                raise ConnectionError(f"Ray's dashboard did not answer within {ANSWER_S:g} s") from error

    return Client(url)

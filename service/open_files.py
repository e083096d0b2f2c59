"""Limit on the number of files that the server's process may have open; each connection of a client is one."""

from __future__ import annotations

import resource

__all__ = ["ENOUGH", "raise_limit"]

# Open files for some thousand event watchers, requests and files. A higher limit is left as it is.
ENOUGH = 65_536
# Below this limit, the server says that it is low: 500 watchers with 200 reads a second had 800 open at a time.
FEW = 4096


def raise_limit() -> str | None:
    """Raise the soft limit on open files to the hard limit, but to no more than ENOUGH files.

    Many systems start programs with a soft limit of 1024. Processes that are started later inherit the limit. Returns a
    message for the operator if the limit is below FEW files; None otherwise.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    possible = ENOUGH if hard == resource.RLIM_INFINITY else min(hard, ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < possible:
        resource.setrlimit(resource.RLIMIT_NOFILE, (possible, hard))
    if possible >= FEW:
        return None
    return (
        f"this process may open {possible} files, and every connection of a client is one: more clients have to wait; "
        f"raise the hard limit to {FEW} or more (`ulimit -Hn`, LimitNOFILE= of systemd, --ulimit of a container)"
    )

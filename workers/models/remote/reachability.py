"""Check of whether the Hugging Face hub answers; without the check, its client retries requests for a minute."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["without_waiting"]

TIMEOUT_S = 5.0

# A hub that did not answer is not asked again for this long.
REMEMBERED_S = 30.0

# When each endpoint last did not answer (time.monotonic()).
_silent_at: dict[str, float] = {}


@contextmanager
def without_waiting() -> Iterator[None]:
    """Context manager that keeps the Hugging Face client from waiting for an unreachable hub.

    If the hub does not respond, the client uses only its cache, and a file that is not in the cache raises an error at
    once. If the hub responds, nothing is changed.
    """
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = before or not _answers()
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def _answers() -> bool:
    """Whether the Hugging Face hub responds at all."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    silent_at = _silent_at.get(constants.ENDPOINT)
    if silent_at is not None and time.monotonic() - silent_at < REMEMBERED_S:
        return False
    try:
        get_session().head(constants.ENDPOINT, timeout=TIMEOUT_S)
    except Exception:  # raised by its HTTP library, by TLS, or by the system
        _silent_at[constants.ENDPOINT] = time.monotonic()
        return False
    return True

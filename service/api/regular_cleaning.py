"""Regular removal, while the server runs, of data of ended jobs that exceed the limits of retention."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from service.retention.cleaning import Cleaner
from service.threads import Work, in_thread

__all__ = ["clean_regularly"]

logger = logging.getLogger(__name__)

# Seconds between two rounds.
ROUND_S = 3600.0


async def clean_regularly(cleaner: Cleaner, *, is_leader: Callable[[], bool], round_s: float = ROUND_S) -> None:
    """Remove the data of ended jobs that `cleaner` selects, every `round_s` seconds. Never returns.

    Nothing is removed while `is_leader` returns False: one of the servers that share the database, the leader, cleans
    for all servers.
    """
    while True:
        try:
            if await in_thread(Work.BACKGROUND, is_leader):
                await in_thread(Work.BACKGROUND, lambda: cleaner.carry_out(cleaner.plan()))
        except Exception:  # the next round tries again
            logger.exception("what exceeds the limits of --keep could not be removed")
        await asyncio.sleep(round_s)

"""Background conversion of samples that earlier versions stored, one database row per sample, to the current form."""

from __future__ import annotations

import asyncio
import logging

from sqlalchemy.exc import SQLAlchemyError

from service.store import Store
from service.threads import Work, in_thread

__all__ = ["move_old_samples"]

logger = logging.getLogger(__name__)

# Seconds between two recipes, so that drivers get the database's write lock in between.
PAUSE_S = 0.05

# Seconds before another attempt after the database has not responded.
RETRY_S = 30.0


async def move_old_samples(store: Store) -> None:
    """Convert all samples in `store` from the form of earlier versions to the form of this version.

    The samples of one recipe (merge) are converted at a time, with pauses in which other processes can write to the
    database. The function returns when no old sample is left. If the database does not answer, the function tries
    again.
    """
    number = 0
    while True:
        try:
            moved = await in_thread(Work.BACKGROUND, store.move_old_samples)
        except SQLAlchemyError:
            logger.exception("samples of an earlier version could not be moved; the next attempt is in %g s", RETRY_S)
            await asyncio.sleep(RETRY_S)
            continue
        if not moved:
            break
        number += moved
        await asyncio.sleep(PAUSE_S)
    if number:
        logger.info("moved %d samples of an earlier version", number)

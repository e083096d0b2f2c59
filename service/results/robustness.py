"""Performance drop rate of a model under adversarial prompts, with a paired bootstrap interval.

The rate is defined by Zhu et al., 2023, "PromptRobust", and used by M3 (appendix E, equation 7). The interval is the
percentile interval (Efron and Tibshirani, 1993, "An Introduction to the Bootstrap", chapter 13), because this interval
never reaches above the largest possible drop, 1.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike

from service.results.statistics import LEVEL
from service.types import Estimate

__all__ = ["performance_drop"]

# Resamples of the documents: the limits vary by about 2 % of the interval's width between seeds.
NUM_RESAMPLES = 2000

# Values that are drawn at once, which bounds the memory.
BLOCK = 1 << 22


def performance_drop(clean: ArrayLike, attacked: ArrayLike, *, seed: int = 0) -> Estimate | None:
    """Estimate the performance drop rate, (clean mean - attacked mean) / clean mean.

    A smaller rate means a more robust model. The rate is 0 if the mean does not drop, and 1 if it drops to 0. The rate
    is negative if the model is better with the attacked prompts. The bootstrap draws documents with replacement, the
    same documents for both means. Resamples whose clean mean is not positive have no rate and are left out. The
    interval does not account for the choice of the attacked template, which is the worst of the templates that were
    scored on these documents.

    Args:
        clean: Values with the original prompts [num_samples]; larger is better.
        attacked: Values with the attacked prompts, of the same documents in the same order.
        seed: The same seed gives the same interval.

    Returns:
        The rate, or None if the mean of `clean` is not positive.

    Raises:
        ValueError: The lengths differ, or there are no samples.
    """
    values = np.stack([np.asarray(clean, dtype=np.float64), np.asarray(attacked, dtype=np.float64)])
    if values.shape[1] == 0:
        raise ValueError("performance_drop: no samples; give at least 1")
    return _drop(values[0].tobytes(), values[1].tobytes(), seed)


@lru_cache(maxsize=512)  # a study's results are read again and again, and its samples do not change
def _drop(clean: bytes, attacked: bytes, seed: int) -> Estimate | None:
    """Estimate the performance drop rate, the share of a model's value that is lost with attacked prompts.

    The function does the work of `performance_drop`, and caches the result. `clean` and `attacked` are the sample
    values with original and attacked prompts, as bytes of float64 arrays. `seed` is the seed of the bootstrap.
    """
    values = np.stack([np.frombuffer(clean), np.frombuffer(attacked)])
    count = values.shape[1]
    means = values.mean(axis=1)
    if means[0] <= 0:
        return None
    draw = np.random.default_rng(seed)
    rates: list[np.ndarray] = []
    rows = max(1, BLOCK // count)
    for start in range(0, NUM_RESAMPLES, rows):
        places = draw.integers(count, size=(min(rows, NUM_RESAMPLES - start), count))
        first, second = values[0][places].mean(axis=1), values[1][places].mean(axis=1)
        rates.append((first[first > 0] - second[first > 0]) / first[first > 0])
    drawn = np.concatenate(rates)
    low, high = (float(limit) for limit in np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2]))
    return Estimate(float((means[0] - means[1]) / means[0]), float(drawn.std(ddof=1)), count, (low, high))

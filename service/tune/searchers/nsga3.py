"""Optuna's NSGA-III: NSGA-II with reference directions, which keep the front spread out in many objectives.

Deb and Jain, IEEE TEC 18(4), 2014. A generation is filled by the next trials in order; the generations are rebuilt for
every proposal.
"""

from service.tune.searchers.nsga2 import NsgaSearcher

__all__ = ["SEARCHER"]

SEARCHER = NsgaSearcher("NSGAIIISampler")

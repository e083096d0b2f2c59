"""Scored samples of one study: the known samples, and the checks before new samples are stored.

- `scored_chunks`: checks and stores the results of engines
- `sample_cache`: the samples that are scored, and the estimates of a rung
- `provenance`: whether a result belongs to the requested recipe, weights and prompts
- `rescoring`: samples of engines that failed a check, removed and scored again
"""

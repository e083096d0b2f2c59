"""Scored samples of one study: which are known, and what must hold before new ones are stored.

- `scored_chunks`: results on their way into the store
- `sample_cache`: which samples are scored, and the estimates of a rung
- `provenance`: whether a result belongs to the requested recipe, weights and prompts
- `rescoring`: samples of engines that failed a check, removed and scored again
"""

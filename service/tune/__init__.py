"""The search of one study.

- `schedulers`: which trial is evaluated at which rung, and which are promoted
- `searchers`: propose configurations
- `coordinator`: decides from stored results what to evaluate next, and stores new results
- `proposing`: proposals and the steps computed for them, on Ray
- `steps`: what a searcher computes for its proposals beside the scores of trials
- `crashes`: how often engines crashed with a chunk, and when that is its candidate's fault
- `plan`: what a study evaluates, fixed for all its attempts
- `feasibility`: whether trials keep to the constraints, rung by rung
- `evaluation`: the unit of work
- `sample_cache`: which samples are scored
- `rescoring`: samples of engines that failed a check, taken out and scored again
- `provenance`: whether a result belongs to the requested recipe, weights and prompts
- `ray_tune`: runs evaluations on Ray Tune
- `trainable`: the trial actor
"""

"""The search of one study.

- `schedulers`: decide which trial is evaluated at which rung, and which trials are promoted
- `searchers`: propose configurations
- `proposing`: proposals and the steps computed for them, on Ray
- `samples`: scored samples, and the checks before new samples are stored
- `plan`: the plan of a study's evaluations, which is the same in all attempts
- `coordinator`: hands out evaluations and stores their results
- `ask_and_tell`: what is proposed and evaluated next, and what follows from each evaluated rung
- `sample_limit`: the limit of a study's samples: how many are used, and what may still start
- `refinement_stage`: after the search, coefficients are learned along the paths of the front
- `holdout_stage`: after the search, finalists and baselines on the holdout data
- `benchmark_stage`: after that, chosen trials on the benchmarks
- `attacks`: attacks on the prompts of benchmarks
- `judging`: judgments of completions by the judges of benchmarks
- `judge_client`: requests to a judge over HTTP
- `trials`: the trials of one study, in memory and in the store
- `crashes`: counts engine crashes by chunk of samples, and decides whether the merge is the cause
- `feasibility`: whether trials satisfy the constraints, rung by rung
- `evaluation`: the unit of work
- `ray_tune`: runs evaluations on Ray Tune
- `trainable`: the trial actor
"""

"""The search loop of one study: scheduling, proposals, scoring, and the stages after the search.

- `schedulers`: decide which trial is evaluated at which rung, and which trials are promoted
- `searchers`: propose configurations
- `proposing`: proposals and the steps computed for them, on Ray
- `samples`: scored samples, and the checks before new samples are stored
- `plan`: the plan of a study's evaluations, which is the same in all attempts
- `coordinator`: decides which evaluation runs next, and stores the results
- `ask_and_tell`: asks the searcher for trials, and promotes or prunes them after each rung
- `sample_limit`: the limit of a study's samples: how many are used, and which trials and steps may still start
- `refinement_stage`: after the search, learns coefficients for the layer paths on the Pareto front by gradient descent
- `holdout_stage`: after the search, scores the front and the baselines on the holdout data
- `benchmark_stage`: after the held-out stage, scores chosen trials on the benchmarks
- `attacks`: searches for the prompt templates with which merges score worst on benchmarks
- `judging`: judgments of completions by LLM judges
- `judge_client`: HTTP client of an LLM judge
- `trials`: the trials of one study, in memory and in the store
- `crashes`: counts engine crashes by chunk of samples, and decides whether the merge is the cause
- `feasibility`: whether trials satisfy the constraints, rung by rung
- `evaluation`: the unit of work that Ray Tune runs: a trial, a rung, and the samples to score
- `ray_tune`: runs evaluations on Ray Tune
- `trainable`: the trial actor, which sends samples to the scorer
"""

"""Results of a study, computed only from stored records.

- `load`: reads everything about a run from the store
- `chunk_times`: times of scored chunks: how long engines worked, swapped and waited
- `record`: the record of a run, from which all results are computed
- `documents`: trials, held-out rows and the Pareto front as documents
- `columns`: trials as columns, CSV and Parquet files, and studies of Optuna
- `importance`: the importances of parameters, and their sums by part of the model
- `side_by_side`: samples of two trials, and their paired difference
- `timeline`: when each replica merged, swapped, scored or was idle
- `trial_table`: trials that satisfy conditions, sorted by a field
- `summary`: the summary of a run
- `files`: writes the result files
- `selection`: the best trial, the Pareto front and the finalists
- `feasibility`: violations of a study's constraints
- `holdout`: the held-out stage: rows, selection bias, hypervolume
- `robustness`: the performance drop under attacks on prompts
- `judgments`: win rates from the judgments of a benchmark's judge
- `benchmarks`: the tables of the benchmark stage: values, averages of groups, comparisons
- `comparison`: rows of the held-out table
- `finding`: tests of whether a merge is better than the best source model and the best published recipe
- `preference`: the trial of the Pareto front that weights of the objectives pick
- `phases`: the seconds that each phase of a search took
- `ranges`: samples outside the range of their objective
- `statistics`: means, differences and their 95 % intervals
- `format`: durations and counts as text, and the order of held-out rows
- `series`: the data series of charts
- `report`: report.html
- `training`: curves and report of fine-tunings
"""

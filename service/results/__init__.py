"""The results of a study, computed from stored records alone.

- `load`: reads everything about a run from the store
- `record`: the record of a run, from which all else is made
- `files`: the result files
- `selection`: which trials are best, on the front, or finalists
- `feasibility`: what trials violate of their study's constraints
- `holdout`: the held-out stage: rows, selection bias, hypervolume
- `finding`: whether a merge is better than the best source model and the best published recipe
- `preference`: the trial of the front that weights of the objectives pick
- `ranges`: samples outside the range of their objective
- `statistics`: means, differences and their 95 % intervals
- `format`: durations and counts as text, and the order of held-out rows
- `series`: the data series of charts
- `report`: report.html
- `training`: curves and report of fine-tunings
"""

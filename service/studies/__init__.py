"""Operations on studies other than the search: preflight checks, chained sources, reuse of policies, and exports.

`service.jobs.search` runs the search itself.

- `chains`: merged models of other studies as sources of a study
- `preflight`: every check that needs no engine
- `planning`: memory and seconds of a study on the machines of a profile
- `benchmarks`: benchmarks that are added to a study after its creation
- `enqueued`: checks of a merge that a user enqueues in a stored study
- `mergekit`: the mergekit configuration of a merge
- `quantised_export`: export in 4 or 8 bits, with held-out scores
- `export`: a trial's merged model
- `warm_start`: results of an earlier study that a searcher knows from the start
- `policies`: uses of trained policies beyond their own study
"""

"""A study from its file to its end.

- `chains`: merged models of other studies as sources
- `preflight`: every check that needs no engine
- `dry_run`: what a study would do and cost
- `attempt`: one attempt at a study, to its end
- `verification`: which trials are scored again by plain transformers, and what follows
- `heartbeat`: that an attempt is alive and makes progress
- `local_run`: a study in one directory, without a server
- `progress`: what an attempt reports
- `export`: a trial's merged model
- `policies`: what trained policies are used for beyond their own study
- `merge_documents`: reading the files of `merge`
- `merge_sources`: what the files of `merge` name: models, vocabulary, chat template
- `merge_series`: merges of a file with several documents
- `merge`: a merged model from a recipe's or mergekit's file
"""

"""Checks, sources, exports and policies of studies; `service.jobs.search` runs the search itself.

- `chains`: merged models of other studies as sources
- `preflight`: every check that needs no engine
- `export`: a trial's merged model
- `policies`: what trained policies are used for beyond their own study
"""

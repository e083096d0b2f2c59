"""Merges of studies that complete prompts: the kind of job that serves the trials of a study to users.

- `kind`: the declaration of the kind of job
- `request`: the request to serve a study, and its checks
- `models`: the models and the options of the engines of a study
- `engines`: the choice of the engine that completes prompts, so that no search is slowed
- `replicas`: the replicas on Ray Serve that complete prompts
- `trials`: the trials of a study by the names that requests give them
- `openai`: the HTTP application of the driver, with routes that are compatible with OpenAI's
- `errors`: errors in the form of OpenAI's API
- `disconnection`: requests whose client has gone
- `endpoint`: ports of the driver's application
- `work`: the driver's work
"""

from __future__ import annotations

__all__ = ["NAME"]

# Name of the kind of job, which jobs are stored with.
NAME = "serving"

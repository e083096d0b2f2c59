"""Logs and traces of processes: log lines that name the job, and spans of OpenTelemetry.

- `logs`: lines of text or JSON, with fields such as the job and the trial
- `tracing`: trace spans of OpenTelemetry, and their identifiers, which processes send to each other
- `span_ids`: ids of spans and traces
- `phases`: phases of a process's start, such as a download, which the process reports
- `environment`: environment variables by which drivers and replicas get their server's settings of logs and traces
"""

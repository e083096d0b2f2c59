"""Logs and traces of processes: log lines that name the job, and spans of OpenTelemetry.

- `logs`: lines of text or JSON, with fields such as the job and the trial
- `tracing`: spans of OpenTelemetry, and their places in traces, which pass between processes
- `span_ids`: ids of spans and traces
- `phases`: phases of a process's start, which the process reports
- `environment`: the variables with which drivers and replicas do both as their server does
"""

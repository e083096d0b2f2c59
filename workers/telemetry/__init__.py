"""What processes tell of their work: log lines with the job that they are about, and spans of traces.

- `logs`: lines of text or JSON, with fields such as the job and the trial
- `tracing`: spans of OpenTelemetry, and their places in traces, which pass between processes
- `span_ids`: ids of spans and traces
- `phases`: phases of a process's start, which the process reports
- `environment`: the variables with which drivers and replicas do both as their server does
"""

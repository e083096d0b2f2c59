"""Retention of jobs that have ended: a server removes parts of their data by age and size.

- `limits`: the option `--keep`
- `cleaning`: finds data that exceeds the limits, and removes it
"""

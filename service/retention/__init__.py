"""Retention of jobs that have ended: a server removes parts of them by age and size.

- `limits`: the option `--keep`
- `cleaning`: finds what exceeds the limits, and removes it
"""

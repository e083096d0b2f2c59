"""Retention: a server removes data of ended jobs that exceed limits of age and size.

- `limits`: the option `--keep`
- `cleaning`: finds data that exceeds the limits, and removes it
"""

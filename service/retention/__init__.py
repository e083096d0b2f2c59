"""What a server keeps of jobs that have ended, and what it removes by age and size.

- `limits`: the option `--keep`
- `cleaning`: finds what exceeds the limits, and removes it
"""

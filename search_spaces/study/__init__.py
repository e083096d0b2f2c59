"""The study file: what to merge, what to search and what it may cost.

- `file`: load and parse a study; its JSON Schema
- `sections`: the sections as validated models: types, ranges, defaults
- `checks`: contradictions between fields
- `validation`: pydantic's errors as messages for users
- `yaml`: strict reading of YAML and JSON
"""

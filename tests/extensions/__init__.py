"""The recipes in CONTRIBUTING.md, each followed literally in a copy of the repository."""

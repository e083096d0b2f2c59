"""CONTRIBUTING's recipes, each followed literally in a copy of the repository."""

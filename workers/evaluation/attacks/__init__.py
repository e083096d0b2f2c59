"""Attacks on prompt templates, by which a model's robustness is measured: PromptBench's, which M3 uses.

- `templates`: a template as words, which attacks change, and placeholders
- `stop_words`: words that no attack changes
- `edits`: changed characters, and the edit distance
- `masked_model`: words that a fill-mask model proposes
- `search`: the search for the template on which a model is worst
- `checks`: whether the prompts of a task can be attacked
"""

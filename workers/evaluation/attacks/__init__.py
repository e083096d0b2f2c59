"""Attacks on prompt templates, which measure a model's robustness; they follow PromptBench.

- `templates`: a template as words, which attacks change, and placeholders
- `stop_words`: words that no attack changes
- `edits`: changed characters, and the edit distance
- `masked_model`: words that a fill-mask model proposes
- `search`: the search for the template on which a model is worst
- `checks`: whether the prompts of a task can be attacked
"""

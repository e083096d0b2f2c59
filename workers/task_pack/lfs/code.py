"""lm-eval filters that extract the program from a completion, by the published rules of LFS, DIS and M3.

The filters run in the confined process of the task.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["functions", "programs"]

FENCED = re.compile(r"```python(.*?)(?:\n```|\Z)", re.DOTALL)

# Texts that begin a test or an example after a program.
ENDS = ('if __name__ == "__main__":', "# Example usage", "# Test examples")

# Texts around a program in answers that explain it: the first stands before the program, the second after it.
BEFORE, AFTER = ("The solution is:", "The answer is:"), "\n\nThe answer is:"


def programs(responses: Sequence[Sequence[str]], documents: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """lm-eval filter that extracts the program from each of a model's completions.

    `responses` has a list of completions for each of `documents`, lm-eval's samples. The result has a list of programs
    for each.
    """
    return [[_program(text) for text in texts] for texts in responses]


def functions(responses: Sequence[Sequence[str]], documents: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """lm-eval filter that extracts, from each completion, the function that its document asks for.

    `responses` has the completions of each of `documents`, lm-eval's samples. A completion without this function is
    taken to be the end of a program that begins with the document's prompt; the result is then this whole program.
    """
    found = []
    for texts, document in zip(responses, documents, strict=True):
        defines = f"def {document['entry_point']}("
        found.append([code if defines in (code := _program(text)) else document["prompt"] + text for text in texts])
    return found


def _program(text: str) -> str:
    text = text.split("### Response:")[-1].replace("\t", "    ").strip()
    if match := FENCED.search(text):
        text = match[1].strip()
    for end in ENDS:
        text = text.partition(end)[0].strip()
    for words in BEFORE:
        if words in text:
            text = text.split(words, 1)[1].partition(AFTER)[0].strip()
    return text

"""Option `judge` of a benchmark: a model behind an HTTP endpoint that compares completions with reference answers.

The protocol follows AlpacaEval (Li et al., 2023, "AlpacaEval: An automatic evaluator of instruction-following models"):
the judge reads the question, the completion and the reference answer, and says which of the two answers is better. Each
completion is judged in both orders, and the metric is the plain win rate; a tie counts as half a win.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from search_spaces.section import Line, Section

__all__ = ["PLACEHOLDER", "WIN_RATE", "JudgeSpec"]

# The metric of a benchmark with a judge: the mean, over samples, of the preferences for the completion.
WIN_RATE = "win_rate"

# Placeholders in a judge's prompt for the texts that are compared.
PLACEHOLDER = re.compile(r"\{\{\s*(question|first|second)\s*\}\}")

PROMPT = """\
Compare two answers to the same question. The better answer does what the question asks, is correct, and is easier to \
use for the person who asked. Its length and its position below do not matter.

[Question]
{{question}}
[End of the question]

[Answer 1]
{{first}}
[End of answer 1]

[Answer 2]
{{second}}
[End of answer 2]

First say in one or two sentences what decides between the answers. Then write the verdict alone on the last line: \
[[1]] if answer 1 is better, [[2]] if answer 2 is better, or [[tie]] if neither is better.
"""


class JudgeSpec(Section):
    """The judge of a benchmark: a model behind an endpoint with OpenAI's chat completions API, such as a vLLM server.

    If the driver's environment variable MERGESEARCH_JUDGE_KEY is set, the driver sends its value as the API key. The
    judge answers at temperature 0.
    """

    url: Line
    """The endpoint without `/chat/completions`, such as `http://127.0.0.1:8000/v1`."""
    model: Line
    """The name of the judge's model at this endpoint."""
    prompt: Annotated[str, Field(min_length=1)] = PROMPT
    """The text that the judge reads. It has `{{question}}`, `{{first}}` and `{{second}}`, and requests a verdict
    `[[1]]`, `[[2]]` or `[[tie]]`; the last one in the judge's answer counts. Default: a prompt that requests a short
    reason and the verdict.
    """
    max_tokens: Annotated[int, Field(ge=1)] = 512
    """The longest answer of the judge, in tokens."""
    concurrency: Annotated[int, Field(ge=1, le=256)] = 8
    """The number of requests that the judge answers at the same time."""
    timeout_s: Annotated[float, Field(gt=0)] = 120.0
    """Seconds after which a request without an answer is sent again."""
    wait_s: Annotated[float, Field(gt=0)] = 3600.0
    """Seconds for which the judge may answer nothing before the benchmark fails. The study's other results are kept,
    and `mergesearch evaluate` with the same benchmark requests the missing judgments later.
    """

    def problems(self) -> Iterator[tuple[str, str]]:
        """Errors in the options' values, as pairs of an option's name and a message."""
        if not re.fullmatch(r"https?://[^\s/?#@]+(/[^\s?#]*)?", self.url):
            yield "url", f"{self.url} is not the URL of an endpoint; give one such as http://127.0.0.1:8000/v1"
        missing = sorted({"question", "first", "second"} - set(PLACEHOLDER.findall(self.prompt)))
        if missing:
            yield "prompt", "has no " + " and no ".join(f"{{{{{name}}}}}" for name in missing) + "; add it"

"""HTTP client of an LLM judge with an OpenAI-compatible endpoint for chat completions."""

from __future__ import annotations

import os
import random
import threading
import time
from dataclasses import dataclass
from typing import Any

import httpx

from search_spaces.study.judge import JudgeSpec

__all__ = ["KEY_VARIABLE", "JudgeAnswer", "JudgeClient", "JudgeFailed"]

# Environment variable of the driver with the key that is sent to judges.
KEY_VARIABLE = "MERGESEARCH_JUDGE_KEY"

# Statuses after which the same request may succeed later; so may one after any status from 500.
LATER = frozenset({408, 409, 425, 429})

# Seconds between two tries of a request: the first pause, and the longest one unless the judge asks for more.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0

# Characters of a refusal that a message quotes.
QUOTED = 300


class JudgeFailed(Exception):
    """Raised if an LLM judge refuses a request, sends no valid chat completion, or does not answer in time.

    The option `wait_s` of the judge states the time in seconds.
    """


@dataclass(frozen=True)
class JudgeAnswer:
    """The answer of an LLM judge: its `text`, and the name of the `model` that the endpoint reported."""

    model: str
    text: str


class JudgeClient:
    """Thread-safe HTTP client of one LLM judge, with retries.

    The client gives up once no thread has got an answer for the time that the judge's option `wait_s` states in
    seconds. An answer to any thread restarts this time for all threads.
    """

    def __init__(self, judge: JudgeSpec) -> None:
        key = os.environ.get(KEY_VARIABLE)
        self.judge = judge
        self._url = f"{judge.url.rstrip('/')}/chat/completions"
        self._answered_at = float("-inf")
        self._given_up: str | None = None
        self._http = httpx.Client(
            timeout=judge.timeout_s,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            limits=httpx.Limits(max_connections=judge.concurrency),
        )

    def ask(self, prompt: str, *, is_cancelled: threading.Event) -> JudgeAnswer | None:
        """Send a prompt to the judge, an LLM, and retry until it answers; return None once `is_cancelled` is set.

        Raises JudgeFailed if the judge refuses the request, or if the judge has answered no thread for the time that
        its option `wait_s` states in seconds. After this error, further prompts raise the same error at once.
        """
        began_at, pause_s = time.monotonic(), FIRST_PAUSE_S
        while not is_cancelled.is_set():
            if self._given_up is not None:
                raise JudgeFailed(self._given_up)
            try:
                response = self._http.post(self._url, json=self._request(prompt))
            except httpx.TransportError as error:
                problem, asked_s = f"{type(error).__name__}: {error}", 0.0
            else:
                if response.is_success:
                    answer = self._answer(response)
                    self._answered_at = time.monotonic()
                    return answer
                problem, asked_s = f"status {response.status_code}: {response.text[:QUOTED]}", _retry_after(response)
                if response.status_code not in LATER and response.status_code < 500:
                    raise JudgeFailed(f"the judge at {self.judge.url} refused a request with {problem}")
            away_s = time.monotonic() - max(began_at, self._answered_at)
            if away_s >= self.judge.wait_s:
                self._given_up = (
                    f"the judge at {self.judge.url} has answered nothing for {away_s:.0f} s (judge.wait_s is "
                    f"{self.judge.wait_s:g}); its last problem: {problem}"
                )
                continue
            left_s = self.judge.wait_s - away_s
            is_cancelled.wait(min(left_s, max(asked_s, pause_s * random.uniform(0.8, 1.2))))
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        return None

    def close(self) -> None:
        """Close the connections; requests of other threads that are still unanswered then fail."""
        self._http.close()

    def _request(self, prompt: str) -> dict[str, Any]:
        text = prompt.encode("utf-8", "replace").decode()  # a completion may have half of a surrogate pair
        return {
            "model": self.judge.model,
            "messages": [{"role": "user", "content": text}],
            "temperature": 0,
            "max_tokens": self.judge.max_tokens,
        }

    def _answer(self, response: httpx.Response) -> JudgeAnswer:
        try:
            document = response.json()
            text = document["choices"][0]["message"]["content"]
            return JudgeAnswer(str(document.get("model", self.judge.model)), "" if text is None else str(text))
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise JudgeFailed(f"{self._url} gave no chat completion: {response.text[:QUOTED]!r}") from error


def _retry_after(response: httpx.Response) -> float:
    """Seconds that the `Retry-After` header of a response asks to wait; 0 without the header, or if it is a date."""
    value = response.headers.get("Retry-After", "")
    return float(value) if value.isascii() and value.isdecimal() else 0.0

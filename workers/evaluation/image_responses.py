"""The answer of an image classifier to one image, as it is stored with a sample."""

from __future__ import annotations

import json
from dataclasses import dataclass

__all__ = ["Response"]


@dataclass(frozen=True)
class Response:
    """A model's answer to an image: the classes with the largest logits, and their log-probabilities.

    The JSON form is {"top": [[class, log-probability], ...]}; the likeliest class is first.
    """

    top: tuple[tuple[str, float], ...]

    def to_json(self) -> str:
        return json.dumps({"top": [[name, round(value, 6)] for name, value in self.top]}, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> Response:
        """Read a response from its JSON text. Raises ValueError if the text is not a response."""
        try:
            return cls(tuple((str(name), float(value)) for name, value in json.loads(text)["top"]))
        except (KeyError, TypeError) as error:
            raise ValueError(f"not the response of an image classifier: {text[:80]!r}") from error

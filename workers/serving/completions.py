"""Completions of prompts with one merge: requests, parts of completions, and the batch that an engine generates.

The engine generates in steps, each of which adds a token to every completion of the batch. Requests for the same merge
join the batch between two steps. The classes here connect the thread of the engine with the event loop of the replica.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from search_spaces.recipe import Recipe

__all__ = ["CompletionBatch", "CompletionPart", "CompletionRequest", "LiveCompletion", "Message"]

Message: TypeAlias = Mapping[str, str]
"""A message of a chat, with the keys "role" and "content"."""

# Seconds after which no request joins a batch any more, so that other work gets its turn.
OPEN_S = 300.0


@dataclass(frozen=True)
class CompletionRequest:
    """A request to complete a prompt with the merge of `recipe`.

    - `prompt`: the prompt, as text or as token ids, unless there are `messages`
    - `messages`: the messages of a chat, which the model's chat template turns into a prompt
    - `max_tokens`: the largest number of tokens of the completion; None for the number for which the model's context
      has room
    - `stop`, `temperature`, `top_p`, `top_k`, `seed`: as in the class `workers.evaluation.prompts.Generation`
    - `yields`: whether the completion ends with EngineBusy as soon as a search uses the replica
    """

    recipe: Recipe
    prompt: str | tuple[int, ...] = ""
    messages: tuple[Message, ...] | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    yields: bool = True


@dataclass(frozen=True)
class CompletionPart:
    """A part of a completion: the text that a step added to it.

    - `text`: the added text, which may be empty
    - `num_tokens`: the number of tokens that were generated for the added text
    - `prompt_tokens`: the number of tokens of the prompt
    - `recipe_digest`: the digest of the recipe that the engine holds
    - `finish_reason`: "stop" or "length" in the last part, else None
    """

    text: str
    num_tokens: int
    prompt_tokens: int
    recipe_digest: str
    finish_reason: str | None = None


class LiveCompletion:
    """A completion that is being generated: the engine's thread adds its parts, and an event loop reads them.

    The object must be created in the event loop that reads its parts. `request` has the prompt and the options.
    """

    def __init__(self, request: CompletionRequest) -> None:
        self.request = request
        self.is_cancelled = False
        self._loop = asyncio.get_running_loop()
        self._parts: asyncio.Queue[CompletionPart | Exception] = asyncio.Queue()

    def add(self, part: CompletionPart) -> None:
        """Pass `part` on to the reader of the completion. The method may be called in any thread."""
        self._put(part)

    def fail(self, error: Exception) -> None:
        """End the completion: its reader gets `error` as an exception. The method may be called in any thread."""
        self._put(error)

    def cancel(self) -> None:
        """Make the engine end the completion before its next step. The method may be called in any thread."""
        self.is_cancelled = True

    async def parts(self) -> AsyncIterator[CompletionPart]:
        """Yield the parts of the completion up to the last part. Raises the error with which the completion ended."""
        while True:
            part = await self._parts.get()
            if isinstance(part, Exception):
                raise part
            yield part
            if part.finish_reason is not None:
                return

    def _put(self, part: CompletionPart | Exception) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._parts.put_nowait, part)


class CompletionBatch:
    """Completions with the same merge (`recipe`) that the engine generates together.

    Requests join the batch in the event loop. Between two steps, the engine's thread takes the completions that have
    joined since. The attribute `is_waiting` is True until the engine begins to work on the batch.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.is_waiting = True
        self._opened_at = time.monotonic()
        self._lock = threading.Lock()
        self._waiting: list[LiveCompletion] = []
        self._all: list[LiveCompletion] = []
        self._is_closed = False

    @property
    def is_abandoned(self) -> bool:
        """Whether the batch is closed, so that the engine need not begin it.

        A batch whose completions are all cancelled is closed when this property is read.
        """
        with self._lock:
            self._is_closed |= all(live.is_cancelled for live in self._all)
            return self._is_closed

    def join(self, live: LiveCompletion) -> bool:
        """Add the completion `live` to the batch, unless the batch is closed or has been open for too long.

        Returns:
            Whether the completion was added; if it was not added, the completion needs another batch.
        """
        with self._lock:
            if self._is_closed or time.monotonic() - self._opened_at > OPEN_S:
                return False
            self._waiting.append(live)
            self._all.append(live)
            return True

    def take(self, *, closes: bool) -> list[LiveCompletion]:
        """Remove and return the completions that wait in the batch for the engine, without cancelled ones.

        If `closes` is True and the result is empty, the batch is closed. The engine's thread passes True if the engine
        generates nothing at the moment.
        """
        with self._lock:
            taken = [live for live in self._waiting if not live.is_cancelled]
            self._waiting = []
            self._is_closed |= closes and not taken
            return taken

    def close(self, error: Exception | None = None) -> None:
        """Close the batch, so that no completion can join it.

        If `error` is given, all unfinished completions of the batch fail with `error`.
        """
        with self._lock:
            self._is_closed = True
            if error is not None:
                for live in self._all:
                    live.fail(error)

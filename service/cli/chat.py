"""The command `mergesearch chat`, which sends prompts to the merges of one or several trials of a study on a server."""

from __future__ import annotations

import select
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from service.cli.terminal import console, print_json
from service.client import Client
from service.errors import Conflict, NotFound, RequestRefused

if TYPE_CHECKING:
    from service.schemas.api import JobDocument, ServedTrialDocument

__all__ = ["Chat", "ChatOptions", "read_prompt"]

# Seconds that a program on the other end of standard input may take to send the first byte of a prompt.
STDIN_S = 5.0

POLL_S = 1.0
UNAVAILABLE = 503


@dataclass(frozen=True)
class ChatOptions:
    """Options of the command `mergesearch chat`.

    - `is_text`: whether the prompt is a text to complete, rather than a message of a chat
    - `system`: the system message; None for the system message of the study, if the study has one
    - `request`: further fields of requests, such as `max_tokens`
    - `idle_minutes`, `shares_engines`: as in the method `Client.serve`
    - `wait_s`: seconds to wait for an engine
    """

    is_text: bool = False
    system: str | None = None
    request: Mapping[str, Any] = field(default_factory=dict)
    idle_minutes: float | None = None
    shares_engines: bool = False
    wait_s: float = 600.0


@dataclass
class _Answer:
    """Answer of a trial's merge to a prompt, with the number and the label of the trial."""

    trial: int
    label: str
    recipe_digest: str = ""
    text: str = ""
    finish_reason: str | None = None


def read_prompt(prompt: str | None) -> str | None:
    """Read the prompt of a chat: `prompt` itself or, if it is None, the text on standard input.

    Returns None if standard input is a terminal, on which the user is then asked for prompts. Raises Conflict if the
    prompt is empty. A standard input that is open but gets no text counts as empty after a short time.
    """
    if prompt is not None:
        if not prompt.strip():
            raise Conflict("--prompt: is empty; give a text")
        return prompt
    if sys.stdin is None or sys.stdin.closed:
        raise Conflict("standard input is closed; give --prompt TEXT")
    if sys.stdin.isatty():
        return None
    try:
        is_there = bool(select.select([sys.stdin], [], [], STDIN_S)[0])
    except (OSError, ValueError):  # it is no file that can be waited for
        is_there = True
    text = sys.stdin.read() if is_there else ""
    if not text.strip():
        raise Conflict("there is no prompt: standard input is empty; give --prompt TEXT, or send a text to it")
    return text


class Chat:
    """Chat with trials of the study `study` on a server.

    `trials` are numbers of trials, labels of baselines, or "best".
    """

    def __init__(self, client: Client, study: JobDocument, trials: Sequence[str], options: ChatOptions) -> None:
        self._client = client
        self._options = options
        known = {trial["number"]: trial["label"] for trial in client.trials(study["id"])}
        numbers = [self._number(study, name, known) for name in trials]
        self._labels = {number: known[number] for number in numbers}
        self._served: ServedTrialDocument = client.serve(
            study["id"], numbers[0], idle_minutes=options.idle_minutes, shares_engines=options.shares_engines
        )
        self._history: dict[int, list[dict[str, str]]] = {number: [] for number in self._labels}

    def answer(self, prompt: str, *, as_json: bool) -> None:
        """Print the answer of each of the chat's trials to `prompt`, as text or as JSON."""
        if as_json:
            print_json([asdict(answer) for answer in self._answers(prompt)])
        elif len(self._labels) > 1 and sys.stdout.isatty():
            self._print_side_by_side(prompt)
        else:
            self._print_in_turn(prompt)

    def converse(self) -> None:
        """Ask for prompts on the terminal, and print the answers, until the input ends."""
        names = ", ".join(f"trial {number} ({label})" for number, label in self._labels.items())
        print(f"{names}; /reset forgets the chat, the end of the input (Ctrl-D) ends it", file=sys.stderr)
        while True:
            try:
                prompt = input("> ")
            except EOFError:
                print(file=sys.stderr)
                return
            if prompt.strip() == "/reset":
                self._history = {number: [] for number in self._labels}
            elif prompt.strip():
                try:
                    self.answer(prompt, as_json=False)
                except RequestRefused as error:
                    print(f"error: {error}", file=sys.stderr)

    def _number(self, study: JobDocument, name: str, known: Mapping[int, str]) -> int:
        """Find the number of the trial that the user calls `name`: its number, its label, or "best".

        `known` contains the labels of the study's trials, keyed by their numbers. Raises NotFound if the study has no
        such trial.
        """
        if name.isascii() and name.isdecimal() and int(name) in known:
            return int(name)
        if name == "best":
            best = self._client.summary(study["id"])["best"]
            if best is None:
                raise NotFound(f"study {study['name']}: has no best trial yet; give the number of a trial")
            return best["trial"]
        found = next((number for number, label in known.items() if label == name), None)
        if found is None:
            raise NotFound(
                f'trial {name!r:.80}: study {study["name"]} has no such trial; give "best", the label of a baseline '
                f"(see `mergesearch trials`), or one of the {len(known)} numbers from {min(known, default=0)} to "
                f"{max(known, default=0)}"
            )
        return found

    def _print_side_by_side(self, prompt: str) -> None:
        from rich.table import Table
        from rich.text import Text

        answers = list(self._answers(prompt))
        table = Table(show_lines=True, expand=True)
        for answer in answers:
            table.add_column(f"trial {answer.trial} ({answer.label}), recipe {answer.recipe_digest[:12]}")
        table.add_row(*(Text(answer.text) for answer in answers))
        console().print(table)

    def _print_in_turn(self, prompt: str) -> None:
        has_titles = len(self._labels) > 1
        for number in self._labels:
            answer = _Answer(number, self._labels[number])
            for text in self._text(answer, prompt):
                if has_titles and text is None:
                    print(f"==> trial {number} ({answer.label}), recipe {answer.recipe_digest[:12]} <==")
                elif text is not None:
                    print(text, end="", flush=True)
            print()

    def _answers(self, prompt: str) -> Iterator[_Answer]:
        for number, label in self._labels.items():
            answer = _Answer(number, label)
            for _ in self._text(answer, prompt):
                pass
            yield answer

    def _text(self, answer: _Answer, prompt: str) -> Iterator[str | None]:
        """Yield one trial's answer to `prompt` piece by piece, as the server streams it.

        `answer` names the trial, and receives the digest of the trial's recipe and the text. When `answer` has the
        digest, None is yielded once, so that the caller can print the heading. At the end, the prompt and the text are
        added to the trial's history, which later prompts continue.
        """
        history = self._history[answer.trial]
        messages = None
        if not self._options.is_text:
            system = self._options.system
            first = [] if system is None else [{"role": "system", "content": system}]
            messages = [*first, *history, {"role": "user", "content": prompt}]
        for chunk in self._chunks(answer.trial, prompt, messages):
            if not answer.recipe_digest:
                answer.recipe_digest = chunk["system_fingerprint"]
                yield None
            (choice,) = chunk["choices"]
            text = choice["text"] if messages is None else choice["delta"].get("content") or ""
            answer.text += text
            answer.finish_reason = choice["finish_reason"]
            yield text
        history += [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer.text}]

    def _chunks(
        self, trial: int, prompt: str, messages: Sequence[Mapping[str, str]] | None
    ) -> Iterator[Mapping[str, Any]]:
        """Yield the chunks of a completion by the trial with the number `trial`, as the server streams them.

        The trial answers the chat `messages` or, if they are None, continues the text `prompt`. While no engine can
        complete prompts, the function prints what the server waits for, and asks again.

        Raises:
            RequestRefused: The server refused the request, or no engine was ready within the seconds that the chat's
                option `wait_s` allows.
        """
        given: dict[str, Any] = {"prompt": prompt} if messages is None else {"messages": messages}
        deadline = time.monotonic() + self._options.wait_s
        has_begun, told = False, ""
        while True:
            try:
                for chunk in self._client.complete(self._served, trial, **given, **self._options.request):
                    has_begun = True
                    yield chunk
                return
            except RequestRefused as error:
                if has_begun or error.status != UNAVAILABLE or time.monotonic() > deadline:
                    raise
                if str(error) != told:
                    told = str(error)
                    print(told, file=sys.stderr)
            time.sleep(POLL_S)

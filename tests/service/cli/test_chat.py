"""`mergesearch chat`: prompts from options, standard input and a terminal; answers of one trial and of several."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from service.cli.main import main
from tests.service.api.harness import ApiServer, finished_study
from tests.service.jobs.serving.local import Served, served


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ApiServer]:
    with ApiServer(tmp_path) as server:
        yield server


@pytest.fixture
def talk(server: ApiServer) -> Iterator[Served]:
    with served(server.store, finished_study(server.store, num_trials=5, name="winner")) as talk:
        yield talk


def recipe(server: ApiServer, talk: Served, trial: int) -> str:
    return server.store.trial(talk.job.document["study"], trial).recipe.digest


def chat(server: ApiServer, *arguments: str) -> int:
    return main(["chat", "winner", *arguments, "--server", server.url])


def test_one_trial_answers(server: ApiServer, talk: Served, capsys: pytest.CaptureFixture[str]) -> None:
    """The answer of one trial is printed alone, as it comes; options go to the engine."""
    assert chat(server, "3", "--prompt", "one two", "--temperature", "0", "--seed", "7", "--max-tokens", "2") == 0
    assert capsys.readouterr().out == f"{recipe(server, talk, 3)[:8]} one\n"
    request = talk.completer.requests[-1]
    assert (request.temperature, request.seed, request.max_tokens) == (0.0, 7, 2)
    assert request.messages == ({"role": "user", "content": "one two"},)
    assert chat(server, "3", "--prompt", "one", "--text") == 0
    assert talk.completer.requests[-1].prompt == "one"
    assert chat(server, "3", "--prompt", "one", "--system", "be brief") == 0
    assert talk.completer.requests[-1].messages == (
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "one"},
    )


def test_trials_answer_side_by_side(server: ApiServer, talk: Served, capsys: pytest.CaptureFixture[str]) -> None:
    """Answers of several trials are labelled with trial and recipe; baselines have their labels as names."""
    assert chat(server, "3", "base", "--prompt", "one") == 0
    said = capsys.readouterr().out
    study = talk.job.document["study"]
    base = next(trial for trial in server.store.trials(study) if trial.label == "base")
    assert said.splitlines() == [
        f"==> trial 3 ({server.store.trial(study, 3).label}), recipe {recipe(server, talk, 3)[:12]} <==",
        f"{recipe(server, talk, 3)[:8]} one",
        f"==> trial {base.number} (base), recipe {base.recipe.digest[:12]} <==",
        f"{base.recipe.digest[:8]} one",
    ]
    assert chat(server, "3", "base", "--prompt", "one", "--json") == 0
    answers = json.loads(capsys.readouterr().out)
    assert [answer["trial"] for answer in answers] == [3, base.number]
    assert [answer["recipe_digest"] for answer in answers] == [recipe(server, talk, 3), base.recipe.digest]
    assert chat(server, "best", "--prompt", "one", "--json") == 0
    assert len(json.loads(capsys.readouterr().out)) == 1


def test_trials_that_are_not_there_are_named(
    server: ApiServer, talk: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    assert chat(server, "4711", "--prompt", "one") != 0
    assert "trial '4711': study winner has no such trial" in capsys.readouterr().err


def test_standard_input_is_the_prompt(
    server: ApiServer, talk: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without --prompt, standard input that is no terminal is the prompt; if it is empty, that is an error."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("from a file\n"))
    assert chat(server, "3") == 0
    assert capsys.readouterr().out.endswith(" from a file\n")
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert chat(server, "3") != 0
    assert "standard input is empty" in capsys.readouterr().err
    assert chat(server, "3", "--prompt", " ") != 0
    assert "--prompt: is empty" in capsys.readouterr().err


def test_system_message_needs_a_chat(server: ApiServer, talk: Served, capsys: pytest.CaptureFixture[str]) -> None:
    """A text is completed without a system message, so that --text and --system are refused together."""
    assert chat(server, "3", "--prompt", "one", "--text", "--system", "be brief") == 2
    assert "--system: --text completes the prompt alone, without a system message" in capsys.readouterr().err
    assert talk.completer.requests == []


def test_silent_standard_input_does_not_block() -> None:
    """A pipe that nobody writes to and nobody closes ends the command with an error within seconds."""
    reading, writing = os.pipe()
    code = (
        "from service.cli import chat; chat.STDIN_S = 0.5; from service.cli.main import main; raise SystemExit(main())"
    )
    started = time.monotonic()
    try:
        ended = subprocess.run(
            [sys.executable, "-c", code, "chat", "NAME", "3", "--server", "http://127.0.0.1:9"],
            stdin=reading,
            capture_output=True,
            text=True,
            timeout=60,
        )
    finally:
        os.close(reading)
        os.close(writing)
    assert ended.returncode != 0
    assert "standard input is empty" in ended.stderr
    assert time.monotonic() - started < 30


def test_terminal_is_asked(
    server: ApiServer, talk: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a terminal the command asks for prompts until the input ends, and sends the chat so far with each."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdin", Terminal("one\n\ntwo\n/reset\nthree\n"))
    assert chat(server, "3") == 0
    said = recipe(server, talk, 3)[:8]
    answer = {"role": "assistant", "content": f"{said} one"}
    first, second, third = [request.messages for request in talk.completer.requests]
    assert first == ({"role": "user", "content": "one"},)
    assert second == ({"role": "user", "content": "one"}, answer, {"role": "user", "content": "two"})
    assert third == ({"role": "user", "content": "three"},)
    assert f"{said} two" in capsys.readouterr().out


def test_command_waits_for_an_engine(
    server: ApiServer, talk: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where there is no engine, the command says what it waits for, goes on when there is one, and gives up in time."""
    talk.gate.close("study math to end")
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            talk.gate.open(talk.completer, yields=False)

    monkeypatch.setattr("service.cli.chat.time.sleep", pause)
    assert chat(server, "3", "--prompt", "one") == 0
    said = capsys.readouterr()
    assert said.err.count("waiting for study math to end") == 1
    assert said.out.endswith(" one\n")
    talk.gate.close("study math to end")
    assert chat(server, "3", "--prompt", "one", "--wait", "0") != 0
    assert "study math to end" in capsys.readouterr().err


def test_errors_of_a_stream_end_the_command(
    server: ApiServer, talk: Served, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong option and a merge that cannot complete prompts are errors of the command, with the server's reason."""
    assert chat(server, "3", "--prompt", "one", "--temperature", "9") != 0
    assert "temperature" in capsys.readouterr().err
    failing: Any = frozenset({recipe(server, talk, 3)})
    talk.completer.worker.failing = failing
    assert chat(server, "3", "--prompt", "one") != 0
    assert "the merge cannot complete prompts: fake: this recipe fails" in capsys.readouterr().err

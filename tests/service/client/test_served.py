"""Both clients serve a trial and complete prompts with it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from service.client import AsyncClient, Client, InvalidAnswer, RequestRefused
from service.client.completions import ChunkReader
from tests.service.api.harness import ApiServer, finished_study
from tests.service.jobs.serving.local import Served, served


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ApiServer]:
    with ApiServer(tmp_path) as server:
        yield server


@pytest.fixture
def talk(server: ApiServer) -> Iterator[Served]:
    with served(server.store, finished_study(server.store, num_trials=5), sample_delay_s=0.01) as talk:
        yield talk


def completed(kind: str, url: str, study: str, **request: Any) -> list[dict[str, Any]]:
    """Chunks of a completion by trial 3, requested with one of the clients."""
    if kind == "blocking":
        with Client(url) as client:
            return list(client.complete(client.serve(study, 3), 3, **request))

    async def ask() -> list[dict[str, Any]]:
        async with AsyncClient(url) as client:
            return [chunk async for chunk in client.complete(await client.serve(study, 3), 3, **request)]

    return asyncio.run(ask())


@pytest.mark.parametrize("kind", ["blocking", "awaited"])
def test_clients_complete_prompts(kind: str, server: ApiServer, talk: Served) -> None:
    """Chunks of a text and of a chat have the text and the recipe; what is refused is RequestRefused."""
    study = talk.job.document["study"]
    digest = server.store.trial(study, 3).recipe.digest
    chunks = completed(kind, server.url, study, prompt="one two", max_tokens=2, temperature=0)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == f"{digest[:8]} one"
    assert {chunk["system_fingerprint"] for chunk in chunks} == {digest}
    chunks = completed(kind, server.url, study, messages=[{"role": "user", "content": "one"}])
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks) == f"{digest[:8]} one"
    with pytest.raises(RequestRefused, match="temperature") as caught:
        completed(kind, server.url, study, prompt="one", temperature=9)
    assert caught.value.status == 400
    talk.gate.close("study math to end")
    with pytest.raises(RequestRefused, match="study math to end") as away:
        completed(kind, server.url, study, prompt="one")
    assert away.value.status == 503


def test_streams_are_read_in_any_pieces() -> None:
    """Chunks are complete whatever pieces arrive; errors within the stream and early ends are raised."""
    reader = ChunkReader("http://x")
    stream = b'data: {"a": "\xc3\xa9"}\n\n: comment\n\ndata: {"a": 2}\n\ndata: [DONE]\n\n'
    found = [chunk for byte in stream for chunk in reader.feed(bytes([byte]))]
    assert found == [{"a": "é"}, {"a": 2}]
    reader.check_end()
    early = ChunkReader("http://x")
    assert list(early.feed(b'data: {"a": 1}\n\n')) == [{"a": 1}]
    with pytest.raises(InvalidAnswer, match="was cut off"):
        early.check_end()
    with pytest.raises(RequestRefused, match="the engine left"):
        list(ChunkReader("http://x").feed(b'data: {"error": {"message": "the engine left"}}\n'))
    with pytest.raises(InvalidAnswer, match="no stream of chunks"):
        list(ChunkReader("http://x").feed(b"data: <html>\n"))

"""Tokens on the user's machine: the server that gets each token, and the rights on the file."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from service.client import AsyncClient, Client, RequestRefused
from service.client.credentials import forget_token, store_token, token_for, tokens_file
from service.errors import Conflict
from service.types import Scope
from tests.service.api.accounts import Company
from tests.service.api.harness import ApiServer, document


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("MERGESEARCH_TOKEN", raising=False)
    return tmp_path / "config"


@pytest.fixture
def company(tmp_path: Path) -> Iterator[Company]:
    (tmp_path / "data").mkdir()
    with ApiServer(tmp_path / "data") as server:
        yield Company.on(server)


def test_both_clients_send_the_token(company: Company, monkeypatch: pytest.MonkeyPatch) -> None:
    """A given token comes before that of the variable, and this one before the stored one."""
    url, tokens = company.server.url, company.tokens

    def users() -> list[str | None]:
        async def ask(token: str | None) -> str:
            async with AsyncClient(url, token=token) as client:
                return str((await client.me())["user"]["name"])  # type: ignore[index]

        found: list[str | None] = []
        for token in (tokens["owner", Scope.READ], None):
            with Client(url, token=token) as client:
                user = client.me()["user"]
            found.append(None if user is None else user["name"])
            assert asyncio.run(ask(token)) == found[-1]
        return found

    store_token(url, tokens["viewer", Scope.READ])
    assert users() == ["owner", "viewer"]
    monkeypatch.setenv("MERGESEARCH_TOKEN", tokens["member", Scope.READ])
    assert users() == ["owner", "member"]


def test_refusals_say_what_to_do(company: Company) -> None:
    """Without a token, with a wrong one, and with a scope or right that is too small, the message says why."""
    url = company.server.url
    cases = [
        (None, 401, "MERGESEARCH_TOKEN"),
        (company.expired, 401, "the token is not valid: it is unknown, revoked or expired"),
        (company.tokens["owner", Scope.READ], 403, "the token has the scope read; this request needs one"),
    ]
    for token, status, message in cases:
        with Client(url, token=token) as client, pytest.raises(RequestRefused, match=message) as refused:
            client.submit(document())
        assert refused.value.status == status
    with pytest.raises(Conflict, match="not printable ASCII") as unsent:
        Client(url, token="mst_\nx")
    assert "mst_" not in str(unsent.value)


def test_a_job_is_shared_by_the_client(company: Company) -> None:
    with Client(company.server.url, token=company.tokens["owner", Scope.SUBMIT]) as client:
        study = client.submit(document(), team="red", sharing="private")
        assert (study["owner"], study["team"], study["sharing"]) == ("owner", "red", "private")
        assert client.share(study["id"], "all")["sharing"] == "all"
        assert client.share(client.find(study["id"]), "team", team="red")["sharing"] == "team"


def test_stored_tokens_are_for_one_user(home: Path) -> None:
    """The file has mode 0600, its directory 0700; a file that others may read is refused."""
    file = store_token("http://a:1", "mst_first")
    store_token("http://b:2", "mst_second")
    assert file == tokens_file() == home / "mergesearch" / "tokens.json"
    assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    assert [token_for(url) for url in ("http://a:1", "http://b:2", "http://c:3")] == ["mst_first", "mst_second", None]
    assert forget_token("http://a:1")
    assert not forget_token("http://a:1")
    assert json.loads(file.read_text()) == {"http://b:2": "mst_second"}
    file.chmod(0o640)
    with pytest.raises(Conflict, match=r"tokens.json: other users may read it \(mode 0640\)"):
        token_for("http://b:2")
    file.chmod(0o600)
    for content in ("[", "[]", '{"http://b:2": 1}'):
        file.write_text(content)
        with pytest.raises(Conflict, match=r"tokens.json: .* log in again"):
            token_for("http://b:2")

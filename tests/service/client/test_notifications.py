"""Both clients manage webhooks and e-mail addresses of a server."""

from __future__ import annotations

from pathlib import Path

import pytest

from service.client import Client, RequestRefused, ServerUnreachable, notification_flows
from service.client.requests import Call, TransportError
from service.errors import Conflict
from service.types import Scope
from tests.service.api.accounts import Company
from tests.service.api.harness import ApiServer
from tests.service.api.test_notifications import SETTINGS
from tests.service.client.asker import Asker
from tests.service.notifications.receiver import receiver, wait_until
from tests.service.site import Site

pytestmark = pytest.mark.slow  # each starts an HTTP server


def test_webhooks_are_added_tested_and_removed(site: Site, ask: Asker) -> None:
    """A webhook is added with its secret, listed without, tested, and removed."""
    with receiver() as target:
        hook = ask("add_webhook", target.url(), events=["failed"])
        assert hook["secret"].startswith("whsec_")
        assert hook["events"] == ["failed"]
        assert "secret" not in ask("webhooks")[-1]
        sent = ask("send_test", hook["id"])
        wait_until(lambda: ask("deliveries", hook["id"])[0]["state"] == "DELIVERED")
        assert [each["id"] for each in ask("deliveries", hook["id"], limit=1)] == [sent["id"]]
        assert len(target.received) == 1
    ask("remove_webhook", hook["id"])
    with pytest.raises(RequestRefused, match="there is no such webhook"):
        ask("deliveries", hook["id"])
    with pytest.raises(RequestRefused, match=r"url: 'http://example.org/' is not https"):
        ask("add_webhook", "http://example.org/")
    with pytest.raises(RequestRefused, match="covers: 'own' is not accepted: the server has no accounts"):
        ask("add_webhook", target.url(), covers="own")
    with pytest.raises(Conflict, match="mail: the server has no accounts"):
        ask("mail")


def test_a_lost_request_adds_no_second_webhook() -> None:
    """The request that adds a webhook is sent once, whatever becomes of its response."""
    flow = notification_flows.add_webhook("https://example.org/")
    assert isinstance(next(flow), Call)
    with pytest.raises(ServerUnreachable):
        flow.send(TransportError("http://server/", "the connection was lost", was_cut=True))


def test_a_user_sets_an_address(tmp_path: Path) -> None:
    """Without a name, the address is that of the user of the token."""
    with ApiServer(tmp_path, notifications=SETTINGS) as server:
        company = Company.on(server)
        with Client(server.url, token=company.tokens["owner", Scope.SUBMIT]) as owner:
            assert owner.mail()["address"] is None
            assert owner.set_mail("o@example.org", events=["failed"])["events"] == ["failed"]
            assert owner.mail(user="owner")["address"] == "o@example.org"
            assert owner.set_mail(None)["address"] is None
            with pytest.raises(RequestRefused, match="there is no such user"):
                owner.set_mail("m@example.org", user="member")
        with Client(server.url, token=company.tokens["root", Scope.SUBMIT]) as root:
            assert root.set_mail("m@example.org", user="member")["user"] == "member"

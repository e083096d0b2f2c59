"""The specification's library verifies the signatures of webhooks."""

from __future__ import annotations

import base64
import re
import time
from pathlib import Path
from typing import Any

import pytest
from standardwebhooks import Webhook
from standardwebhooks.exceptions import WebhookVerificationError

from service.notifications.signatures import new_webhook_secret, signed_headers

BODY = b'{"type":"job.complete"}'


def test_the_library_verifies_a_signature() -> None:
    """A signed body is verified with the secret; another body, time, id or secret is not."""
    secret = new_webhook_secret()
    headers = signed_headers(secret, message_id="msg_1", timestamp=int(time.time()), body=BODY)
    assert Webhook(secret).verify(BODY, headers) == {"type": "job.complete"}
    changed = (
        (secret, BODY + b" ", headers),
        (secret, BODY, headers | {"webhook-id": "msg_2"}),
        (secret, BODY, headers | {"webhook-timestamp": str(int(time.time()) - 1)}),
        (new_webhook_secret(), BODY, headers),
    )
    for key, body, given in changed:
        with pytest.raises(WebhookVerificationError):
            Webhook(key).verify(body, given)


def test_examples_of_the_docs_verify_requests() -> None:
    """Both functions of the page accept a signed request; the one without a library refuses others."""
    page = Path(__file__).parents[3] / "docs" / "how-to" / "notifications.md"
    examples = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    secret = new_webhook_secret()
    headers = signed_headers(secret, message_id="msg_1", timestamp=int(time.time()), body=BODY)
    for example in examples:
        scope: dict[str, Any] = {}
        exec(example.replace("whsec_...", secret), scope)
        assert scope["receive"](headers, BODY) == {"type": "job.complete"}
    assert len(examples) == 2
    with pytest.raises(ValueError, match="the signature is wrong"):
        scope["receive"](headers, BODY + b" ")
    old = signed_headers(secret, message_id="msg_1", timestamp=int(time.time()) - 400, body=BODY)
    with pytest.raises(ValueError, match="the request is old"):
        scope["receive"](old, BODY)


def test_secrets_have_256_random_bits() -> None:
    """Each secret is another 32 bytes in the form of the specification."""
    secrets = {new_webhook_secret() for _ in range(100)}
    assert len(secrets) == 100
    assert all(len(base64.b64decode(secret.removeprefix("whsec_"), validate=True)) == 32 for secret in secrets)

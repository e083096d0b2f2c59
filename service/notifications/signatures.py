"""Secrets of webhooks, and signatures of requests after the Standard Webhooks specification.

Source:
    https://github.com/standard-webhooks/standard-webhooks/blob/main/spec/standard-webhooks.md (version 1)
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets

__all__ = ["new_webhook_secret", "signed_headers"]

PREFIX = "whsec_"
SECRET_BYTES = 32


def new_webhook_secret() -> str:
    """Make the secret of a webhook, of 256 random bits."""
    return PREFIX + base64.b64encode(secrets.token_bytes(SECRET_BYTES)).decode()


def signed_headers(secret: str, *, message_id: str, timestamp: int, body: bytes) -> dict[str, str]:
    """Make the HTTP headers that prove the sender of a request to the webhook's receiver: id, time and signature.

    The signature is an HMAC of id, time and `body` with the webhook's `secret`. `timestamp` is the time of the try in
    seconds since the epoch; receivers refuse times that are long past. The id `message_id` is the same at each try, so
    that receivers can ignore repetitions.
    """
    signed = b"%s.%d.%s" % (message_id.encode(), timestamp, body)
    key = base64.b64decode(secret.removeprefix(PREFIX))
    signature = base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode()
    return {
        "webhook-id": message_id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": f"v1,{signature}",
    }

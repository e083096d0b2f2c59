"""Tokens of servers on the user's machine: in the variable MERGESEARCH_TOKEN, or stored by `mergesearch login`."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

from service.errors import Conflict
from workers.directories import replacing

__all__ = ["TOKEN_VARIABLE", "forget_token", "store_token", "token_for", "tokens_file"]

TOKEN_VARIABLE = "MERGESEARCH_TOKEN"


def tokens_file() -> Path:
    """The file with the API tokens that `mergesearch login` has stored, in $XDG_CONFIG_HOME or ~/.config."""
    root = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(root) / "mergesearch" / "tokens.json"


def token_for(url: str) -> str | None:
    """The user's API token for the server at `url`, or None if there is none.

    The environment variable MERGESEARCH_TOKEN has precedence over the token that `mergesearch login` stored. Raises
    Conflict if the file of stored tokens cannot be read, or if other users of this machine may read it.
    """
    return os.environ.get(TOKEN_VARIABLE) or _stored().get(url)


def store_token(url: str, token: str) -> Path:
    """Store the API token for the server at `url`, in a file that only this user may read; return the file."""
    _write({**_stored(), url: token})
    return tokens_file()


def forget_token(url: str) -> bool:
    """Remove the stored API token for the server at `url`. Returns whether a token was stored."""
    known = _stored()
    if url not in known:
        return False
    _write({server: token for server, token in known.items() if server != url})
    return True


def _stored() -> dict[str, str]:
    """The API tokens in the file of stored tokens, keyed by the server's address; empty if there is no file."""
    file = tokens_file()
    try:
        with file.open() as opened:
            mode = stat.S_IMODE(os.fstat(opened.fileno()).st_mode)
            if mode & 0o077:
                raise Conflict(f"{file}: other users may read it (mode {mode:04o}); revoke its tokens, or chmod 600")
            document = json.load(opened)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise Conflict(f"{file}: cannot be read: {error}; remove it, and log in again") from error
    if not isinstance(document, dict) or not all(isinstance(token, str) for token in document.values()):
        raise Conflict(f"{file}: is not an object with a token for each server; remove it, and log in again")
    return document


def _write(tokens: dict[str, str]) -> None:
    file = tokens_file()
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with replacing(file) as new:
        new.touch(mode=0o600)
        new.write_text(json.dumps(tokens, indent=2) + "\n")

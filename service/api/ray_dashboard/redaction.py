"""Removal of secrets from answers of Ray's dashboard: environment variables, command lines, arguments of processes.

Ray itself removes the values of environment variables only if a request seems to be from a browser, and if no operator
has switched this off. This module always removes these values, and also command lines and arguments.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from service.api.ray_dashboard.paths import is_shown_entry

__all__ = ["REDACTED", "redacted", "shown_logs"]

# As Ray writes it, so that the page explains it.
REDACTED = "<redacted>"

# Drivers and calls of this server, whose arguments hold no secret.
OWN_COMMAND = re.compile(r"\S*python\S* -m service\.(?:jobs\.driver|cluster\.node_calls)(?: .*)?", re.DOTALL)

# Parts of the names of fields whose text is a secret.
SECRET_NAMES = ("password", "passwd", "secret", "token", "credential", "apikey", "accesskey", "privatekey")

# The password in a URL.
PASSWORD = re.compile(r"(?<=://)([^/\s:@]*):[^/\s@]*@")


def redacted(document: Any) -> Any:
    """Copy of a JSON document of Ray's dashboard from which possible secrets are removed.

    Values of environment variables, arguments of commands and of Ray Serve's applications, texts in fields whose name
    says that they are secret, and passwords in URLs are replaced by `<redacted>`. Names of variables stay.
    """
    if isinstance(document, Mapping):
        return {name: _field(name, value) for name, value in document.items()}
    if isinstance(document, list):
        return [redacted(each) for each in document]
    return PASSWORD.sub(rf"\1:{REDACTED}@", document) if isinstance(document, str) else document


def shown_logs(document: Any) -> Any:
    """Copy of Ray's list of logs that contains only the logs that users may read."""
    if isinstance(document, Mapping):
        return {name: shown_logs(value) for name, value in document.items()}
    if isinstance(document, list):
        return [each for each in document if isinstance(each, str) and is_shown_entry(each)]
    return document


def _field(name: str, value: Any) -> Any:
    # Ray writes the names of some fields in snake case, of others in camel case.
    plain = name.lower().replace("_", "")
    if (remove := FIELDS.get(plain)) is not None:
        return remove(value)
    if isinstance(value, str) and any(part in plain for part in SECRET_NAMES):
        return REDACTED
    return redacted(value)


def _whole(value: Any) -> Any:
    return REDACTED if value else value


def _values(value: Any) -> Any:
    return dict.fromkeys(value, REDACTED) if isinstance(value, Mapping) else _whole(value)


def _serialized(value: Any) -> Any:
    """Copy of a JSON document, given as text, in which `<redacted>` replaces possible secrets.

    A text that is not JSON is replaced as a whole.
    """
    if not isinstance(value, str) or not value:
        return _whole(value)
    try:
        return json.dumps(redacted(json.loads(value)))
    except ValueError:
        return REDACTED


def _command(value: Any) -> Any:
    """Copy of a command line with its program, and `<redacted>` in place of the arguments.

    `value` is the command line as a text or as a list of words. A command that this server wrote, such as the command
    of a driver, is not changed, because its arguments have no secret.
    """
    if isinstance(value, list):
        words = [str(word) for word in value if word]
        if OWN_COMMAND.fullmatch(" ".join(words)):
            return words
        return [*_program(words[0]), REDACTED] if len(words) > 1 else words and _program(words[0])
    if not isinstance(value, str):
        return _whole(value)
    return value if OWN_COMMAND.fullmatch(value) else " ".join(_program(value))


def _program(command: str) -> list[str]:
    first, _, rest = command.strip().partition(" ")
    return [first, REDACTED] if rest else [first]


def _message(value: Any) -> Any:
    """Copy of Ray's message about a Ray Job, without secrets and without the lines of the job's log that Ray adds."""
    return redacted(value.partition(", last available logs")[0]) if isinstance(value, str) else redacted(value)


FIELDS: Mapping[str, Callable[[Any], Any]] = {
    "envvars": _values,
    "serializedruntimeenv": _serialized,
    "cmdline": _command,
    "entrypoint": _command,
    "args": _whole,
    "initargs": _whole,
    "initkwargs": _whole,
    "userconfig": _whole,
    "message": _message,
}

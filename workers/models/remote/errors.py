"""Exception and one-line messages for a hub model that cannot be used."""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ["HubUnusable", "reason_of"]


class HubUnusable(Exception):
    """Raised if the Hugging Face hub answers but does not send the requested data."""


def reason_of(error: Exception, name: str, revision: str) -> str:
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    login = "log in with `hf auth login`, or set HF_TOKEN"
    for cause in _causes(error):
        match cause:
            case GatedRepoError():
                return f"it is gated: ask for access at {constants.ENDPOINT}/{name}, and {login}"
            case RepositoryNotFoundError():
                return f"it does not exist on the hub, or you have no access; if it is private, {login}"
            case RevisionNotFoundError():
                return f"it has no branch, tag or commit {revision!r}"
            case HfHubHTTPError():
                return f"the hub ({constants.ENDPOINT}) answers {cause.response.status_code}: {_line(cause)}"
            case OfflineModeIsEnabled():
                return "it is not completely in the hub's cache, and the hub cannot be reached: HF_HUB_OFFLINE is set"
            case HubUnusable():
                return str(cause)
    if isinstance(error, OSError) and error.errno and not isinstance(error, ConnectionError):
        return _line(error)
    return (
        f"it is not completely in the hub's cache, and the hub cannot be reached: {constants.ENDPOINT}: "
        f"{type(error).__name__}: {_line(error)}"
    )


def _causes(error: BaseException) -> Iterator[BaseException]:
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__cause__ or found.__context__


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__

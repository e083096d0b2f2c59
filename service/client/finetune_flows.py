"""Client methods about fine-tunings, as generators that yield HTTP requests and return results (see `flows.py`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import quote

from service.client.job_flows import jobs, submit_job
from service.client.requests import Call, Flow, document_of, path_of, path_of_link
from service.client.views import Job
from service.errors import Conflict, NotFound
from service.jobs.finetune.kind import FINETUNE

if TYPE_CHECKING:
    from service.schemas.api import AnalysisDocument, CurvesDocument, FinetuneDocument

__all__ = ["analysis", "curves", "expert_download", "finetune", "finetunes", "submit_finetune"]


def submit_finetune(
    specification: Path | str | Mapping[str, Any],
    *,
    idempotency_key: str | None = None,
    team: str | None = None,
    sharing: str | None = None,
) -> Flow[FinetuneDocument]:
    """Submit the fine-tuning of an expert, or of a fleet of experts (several experts that one specification defines).

    An expert is a fine-tuned model. The server reads models and data, so their paths must exist on its machine.

    Args:
        specification: Path of a specification file, or the content of such a file. Relative paths in a file start at
            the file's directory.
        idempotency_key: 1 to 255 visible ASCII characters. The same key with the same specification returns the
            fine-tuning that the first call created. Without a key, each call creates a new fine-tuning.
        team: Team that the fine-tuning belongs to; None means the only team for which you may submit jobs.
        sharing: Who may read the fine-tuning besides you and administrators: "private", "team" or "all"; None is
            "team".

    Returns:
        The server's JSON document that describes the fine-tuning.

    Raises:
        InvalidStudy: The file is invalid.
        RequestRefused: The server refused the specification; the error has every problem.

    Examples:
        >>> finetune = client.submit_finetune("fleet.yaml")
        >>> for event in client.events(finetune):
        ...     print(event.kind, event.payload)
        >>> client.download(finetune, "math", "experts/math")
    """
    submitted = yield from submit_job(
        FINETUNE.name, specification, idempotency_key=idempotency_key, team=team, sharing=sharing
    )
    return cast("FinetuneDocument", submitted)


def finetunes(
    *,
    state: str | None = None,
    name: str | None = None,
    text: str | None = None,
    sort: str | None = None,
    limit: int | None = None,
) -> Flow[list[FinetuneDocument]]:
    """List the fine-tunings, oldest first.

    Args:
        state: State of the fine-tunings to list, such as "RUNNING"; None lists fine-tunings in any state.
        name: Name of the fine-tunings to list; None lists fine-tunings with any name.
        text: Lists only fine-tunings that have this text in their name, description or owner's name, or whose id begins
            with it. None lists fine-tunings with any text.
        sort: Field to sort by: "created", "name", "state", "owner" or "priority". With "-" before the field, as in
            "-name", the largest value is first.
        limit: Maximum number of fine-tunings, at most 1000; None lists all.

    Returns:
        The server's JSON documents that describe the fine-tunings.

    Examples:
        >>> client.finetunes(state="RUNNING")
    """
    found = jobs(FINETUNE.name, state=state, name=name, text=text, sort=sort, limit=limit)
    return cast("list[FinetuneDocument]", (yield from found))


def finetune(finetune: str | FinetuneDocument) -> Flow[FinetuneDocument]:
    """Return the current state of a fine-tuning, with the progress of each expert (model that it trains).

    Args:
        finetune: Id of the fine-tuning, or a document that the server returned for it earlier.

    Raises:
        RequestRefused: The server has no such fine-tuning (status 404).

    Examples:
        >>> client.finetune("5f0c...")["experts"]["math"]["progress"]
    """
    return cast("FinetuneDocument", Job((yield from document_of(Call("GET", _finetune_path(finetune))))))


def curves(finetune: str | FinetuneDocument) -> Flow[CurvesDocument]:
    """Return the losses and evaluations of a fine-tuning so far, for each expert (model that it trains).

    Args:
        finetune: Id of the fine-tuning, or a document that the server returned for it.

    Examples:
        >>> [point["loss"] for point in client.curves("5f0c...")["experts"][0]["loss"]]
    """
    return cast("CurvesDocument", (yield from document_of(Call("GET", _finetune_path(finetune, "curves")))))


def analysis(
    finetune: str | FinetuneDocument, *, against: Sequence[str | FinetuneDocument] = ()
) -> Flow[AnalysisDocument]:
    """Return the analysis of a fine-tuning's experts, which exists if the specification has the key `analysis`.

    An expert is a model that the fine-tuning has trained.

    Args:
        finetune: Id of the fine-tuning, or a document that the server returned for it.
        against: Other fine-tunings of the same experts, whose analyses are returned too, for comparison.

    Returns:
        The distributions of the task vectors (differences between the weights of an expert and of its base), and the
        losses of merges of the experts.

    Raises:
        RequestRefused: The analysis is not computed yet (status 409).

    Examples:
        >>> client.analysis("5f0c...", against=["91aa..."])["fleets"][0]["merges"]
    """
    query = {"against": [other if isinstance(other, str) else other["id"] for other in against]}
    return cast("AnalysisDocument", (yield from document_of(Call("GET", _finetune_path(finetune, "analysis"), query))))


def expert_download(finetune: FinetuneDocument, expert: str) -> Call:
    """Build the request that downloads the files of an expert, a model that a fine-tuning has trained.

    `finetune` is the server's document of the fine-tuning, and `expert` is the expert's alias in it.

    Raises:
        NotFound: The fine-tuning has no such expert.
        Conflict: The expert is not trained yet.
    """
    experts = finetune["experts"]
    if expert not in experts:
        raise NotFound(f"expert {expert!r}: fine-tuning {finetune['name']!r} has {', '.join(experts)}")
    link = experts[expert]["links"].get("download")
    if link is None:
        raise Conflict(f"expert {expert!r} is not trained yet; fine-tuning {finetune['name']!r} is {finetune['state']}")
    return Call("GET", path_of_link(link), headers={"Accept": "application/x-tar"})


def _finetune_path(finetune: str | FinetuneDocument, *rest: str) -> str:
    if isinstance(finetune, str):
        if not finetune:
            raise NotFound("fine-tuning '': give the id of a fine-tuning")
        return "/".join([FINETUNE.path, quote(finetune, safe="", errors="replace"), *rest])
    return path_of(finetune, *rest)

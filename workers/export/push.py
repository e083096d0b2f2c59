"""Upload of an exported model to the Hugging Face hub, as a model repository."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from workers.models.modalities import MODALITIES
from workers.models.remote.errors import HubUnusable, reason_of

__all__ = ["Pushed", "check_name", "push"]

REPOSITORY = re.compile(r"\w[\w.-]*/\w[\w.-]*")

# Files that show that a repository is an export, or the hub made it; anything else in it is not overwritten.
OWN, MADE_BY_HUB = "recipe.json", frozenset({".gitattributes", "README.md"})


@dataclass(frozen=True)
class Pushed:
    """The commit of an upload: its repository (owner/name), its hash and its address."""

    repository: str
    commit: str
    url: str


def check_name(name: str) -> None:
    """Raise ValueError if `name` is not the name of a repository of the hub, owner/name."""
    if REPOSITORY.fullmatch(name) is None:
        raise ValueError(f"--push {name!r}: write the repository as owner/name")


def push(directory: str | Path, name: str, *, private: bool = False) -> Pushed:
    """Upload all files of `directory` to the model repository `name` (owner/name), in one commit.

    The repository is created if it does not exist; `private` says whether a new repository is private. Files of an
    earlier model in the repository, such as weights and the chat template, are removed if this model has no files of
    the same names; files that no export writes stay. The hub's client finds the user's token as for downloads
    (`hf auth login`, or $HF_TOKEN). Raises HubUnusable if the hub refuses the upload or cannot be reached. It is also
    raised if the repository has files of which none is an export, so that other content is not overwritten.
    """
    from huggingface_hub import HfApi, constants

    check_name(name)
    api = HfApi(endpoint=constants.ENDPOINT)
    try:
        api.create_repo(name, private=private, exist_ok=True)
        there = set(api.list_repo_files(name))
        if there - MADE_BY_HUB and OWN not in there:
            others = ", ".join(sorted(there - MADE_BY_HUB)[:3])
            raise HubUnusable(
                f"{name}: the repository has files that no export wrote ({others}); give the name of a new one"
            )
        commit = api.upload_folder(
            repo_id=name,
            folder_path=Path(directory),
            commit_message="Upload a merge made by mergesearch",
            delete_patterns=_files_of_some(),
        )
    except HubUnusable:
        raise
    except Exception as error:  # raised by the hub's client, by its HTTP library, or by the system
        reason = reason_of(error, name, "main").removeprefix("it is not completely in the hub's cache, and ")
        raise HubUnusable(f"{name}: {reason}") from error
    return Pushed(name, str(commit.oid), str(commit.commit_url))


def _files_of_some() -> list[str]:
    """Patterns of the files that some exports have and others lack."""
    from workers.models.merged_files import GENERATION_CONFIG
    from workers.models.task_heads import HEADS_DIR

    return [
        "*.safetensors",
        "*.safetensors.index.json",
        f"{HEADS_DIR}/heads.json",
        "modeling_aligned.py",
        "mergekit_config.yml",
        GENERATION_CONFIG,
        *sorted({file for modality in MODALITIES.values() for file in modality.files}),
    ]

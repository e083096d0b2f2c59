"""Models and task files on the hub and in object stores: located, checked without weights, and downloaded.

- `locations`: `locate`: the directory of a model; the commit of the hub model in a directory
- `snapshots`: metadata-only snapshots: small files, and headers in place of weights
- `model_files`: the files that a model consists of
- `downloads`: the weights that are missing, their disk space, and their download
- `hub`: the hub as the origin of models
- `objects`: object stores as the origin of models
- `files`: files in object stores, downloaded once
- `task_files`: `local_file`: task files and data in object stores
- `reachability`: checks whether the hub answers, to avoid long waits
- `errors`: messages with the reason why a hub model cannot be used
"""

from workers.models.remote.downloads import absent_bytes, fetched, lack_of_space
from workers.models.remote.hub import hub_cache
from workers.models.remote.locations import HUB_ID, commit_of, id_of, locate, source_name
from workers.models.remote.reachability import without_waiting
from workers.models.remote.snapshots import is_metadata_only, named, stated_hash
from workers.models.remote.task_files import local_file

__all__ = [
    "HUB_ID",
    "absent_bytes",
    "commit_of",
    "fetched",
    "hub_cache",
    "id_of",
    "is_metadata_only",
    "lack_of_space",
    "local_file",
    "locate",
    "named",
    "source_name",
    "stated_hash",
    "without_waiting",
]

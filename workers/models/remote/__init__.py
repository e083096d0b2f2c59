"""Models and task files on the hub and in object stores: location, checks before the download, and download.

- `locations`: finds the directory of a model on this machine; the commit of the hub model in a directory
- `snapshots`: metadata-only snapshots, which have a model's small files, and headers in place of its weights
- `model_files`: selects a model's files from a list of file names
- `downloads`: downloads missing weights, after a check of disk space
- `hub`: the hub as a place from which models are downloaded
- `objects`: object stores as a place from which models are downloaded
- `files`: downloads files from object stores, each file once
- `task_files`: downloads task files and their data from object stores
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

"""Models on the Hugging Face hub: located, checked without their weights, downloaded.

- `locations`: `locate`: the directory of a model or hub id; which commit a directory holds
- `metadata`: metadata-only snapshots: small files, and headers in place of weights
- `downloads`: the weights: what is missing, whether there is room, `fetched`
- `reachability`: no waiting for a hub that does not answer
- `errors`: why a hub model cannot be used, for messages
"""

from workers.models.hub.downloads import absent_bytes, fetched, hub_cache, lack_of_space
from workers.models.hub.locations import HUB_ID, commit_of, id_of, locate
from workers.models.hub.metadata import is_metadata_only, named, stated_hash
from workers.models.hub.reachability import without_waiting

__all__ = [
    "HUB_ID",
    "absent_bytes",
    "commit_of",
    "fetched",
    "hub_cache",
    "id_of",
    "is_metadata_only",
    "lack_of_space",
    "locate",
    "named",
    "stated_hash",
    "without_waiting",
]

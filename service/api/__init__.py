"""The HTTP side: FastAPI over the store, with the cluster behind it.

put together   `app`, of the `services` that it hands to `routes`; `types` has what it needs of the rest
a request      `requests` reads it, `examiner` checks a study, `problems` says what is wrong
an answer      `documents` of studies, events and exports; `records` and `plots` of results; `openapi` and `docs` of
               the interface itself; `metrics` of the server
longer work    `hub` tells watchers what happens, `exports` writes models; `side_process` is where examiner and
               exports do what must not run in the server
"""

from service.api.app import create_app
from service.api.protocols import Cluster

__all__ = ["Cluster", "create_app"]

"""The HTTP side: FastAPI over the store, with the cluster behind it."""

from service.api.app import create_app
from service.api.types import Cluster

__all__ = ["Cluster", "create_app"]

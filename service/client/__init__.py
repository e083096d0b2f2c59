"""A typed Python client of the server: `Client` blocks, `AsyncClient` is awaited; both have the same methods.

    from service.client import Client

    with Client("http://127.0.0.1:8080") as client:
        study = client.submit("study.yaml")
        for event in client.events(study["id"]):
            print(event.kind, event.payload)
        print(client.pareto(study["id"])["front"])
        client.export(study["id"], "best", "merged")

Importing this package loads neither httpx nor anything heavy.

- `clients`: the two clients, which send requests over HTTP
- `flows`: the requests of each call, without input or output
- `finetune_flows`: those of calls about fine-tunings
- `requests`: one request: retries, responses, refusals
- `events`: parses the stream of a study's events
- `download`: unpacks a merged model from its tar stream
"""

from __future__ import annotations

from service.client.clients import AsyncClient, Client
from service.client.events import Event
from service.errors import ExportFailed, InvalidAnswer, RequestRefused, ServerUnreachable

__all__ = ["AsyncClient", "Client", "Event", "ExportFailed", "InvalidAnswer", "RequestRefused", "ServerUnreachable"]

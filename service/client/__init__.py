"""Typed Python client of the server: `Client` blocks, `AsyncClient` is awaited; both have the same methods.

Importing this package loads neither httpx nor anything heavy.

- `blocking`: the client that blocks
- `awaited`: the client for asyncio
- `methods`: turns flows into methods of a client
- `job_flows`: flows of the calls about jobs of any kind; a flow is a generator of requests that sends nothing itself
- `flows`: flows of the calls about studies
- `finetune_flows`: flows of the calls about fine-tunings
- `notification_flows`: flows of the calls about webhooks and e-mail addresses
- `views`: documents as notebooks show them, and as data frames
- `requests`: makes a request, repeats it after a lost connection, and reads the response
- `transport`: converts requests and responses between the client's types and httpx
- `credentials`: tokens of servers on the user's machine
- `events`: parses the stream of a job's events
- `completions`: requests for completions, and the parser of their streams
- `download`: unpacks a merged model from its tar stream

Examples:
    >>> from service.client import Client
    >>> with Client("http://127.0.0.1:8080") as client:
    ...     study = client.submit("study.yaml")
    ...     for event in client.events(study["id"]):
    ...         print(event.kind, event.payload)
    ...     print(client.pareto(study["id"])["front"])
    ...     client.export(study["id"], "best", "merged")
"""

from __future__ import annotations

from service.client.awaited import AsyncClient
from service.client.blocking import Client
from service.client.events import Event
from service.errors import ExportFailed, InvalidAnswer, RequestRefused, ServerUnreachable

__all__ = ["AsyncClient", "Client", "Event", "ExportFailed", "InvalidAnswer", "RequestRefused", "ServerUnreachable"]

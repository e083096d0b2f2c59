"""The HTTP API: FastAPI on top of the store and the cluster.

- `app`: creates the application
- `protocols`: the interface to the cluster, and the sender of a request
- `permissions`: what each route needs, and who sends a request
- `dependencies`: services and path parameters that routes depend on
- `routes`: the routes, by topic
- `limits`: what requests may do
- `prefix`: serves the application below a path prefix
- `requests`: reads the body of a request, limited in size
- `problems`: errors as problem details (RFC 9457) with HTTP status codes
- `presenters`: stored records as documents
- `conditional`: results that a client may have already
- `record_cache`: run records and reports of recently requested studies
- `event_stream`: streams events to any number of watchers
- `export_queue`: merged models, written one at a time
- `regular_cleaning`: removes data that exceed the limits of retention
- `sample_mover`: samples of earlier versions, moved while the server runs
- `preflight_process`: checks of submitted jobs, outside the server's process
- `openapi`: the OpenAPI document, and Swagger UI at /docs
- `request_counter`: counts requests by route
- `metrics`: metrics for Prometheus
"""

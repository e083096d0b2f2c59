"""Prints the OpenAPI document of the server: `make web` generates the types of the web page from it."""

from __future__ import annotations

import json

from service.api.app import openapi_document

__all__ = ["main"]


def main() -> None:
    """Print the OpenAPI document of the server as JSON."""
    print(json.dumps(openapi_document(), indent=1))


if __name__ == "__main__":
    main()

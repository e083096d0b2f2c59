"""Ports of the HTTP applications of the drivers of served studies."""

from __future__ import annotations

__all__ = ["PORTS"]

# Ports of the applications; each driver takes the first one that is free. Rules of networks name them.
PORTS = range(8700, 8764)

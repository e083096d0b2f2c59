"""The SQL store."""

from service.store.sql import BracketRecord, EventRecord, Store, StudyWriter

__all__ = ["BracketRecord", "EventRecord", "Store", "StudyWriter"]

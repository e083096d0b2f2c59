"""The SQL store."""

from service.store.records import BracketRecord, EventRecord
from service.store.sql import Store
from service.store.writer import StudyWriter

__all__ = ["BracketRecord", "EventRecord", "Store", "StudyWriter"]

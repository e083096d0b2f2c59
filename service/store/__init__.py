"""The SQL store."""

from service.store.attempt_writer import StudyWriter
from service.store.records import BracketRecord, EventRecord
from service.store.sql import Store

__all__ = ["BracketRecord", "EventRecord", "Store", "StudyWriter"]

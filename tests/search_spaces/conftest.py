"""Property tests without a deadline: how long one example takes says more about the machine than about the code."""

from hypothesis import settings

settings.register_profile("mergesearch", deadline=None)
settings.load_profile("mergesearch")

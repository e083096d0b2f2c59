"""Property tests without a deadline: the time of one example depends more on the machine than on the code."""

from hypothesis import settings

settings.register_profile("mergesearch", deadline=None)
settings.load_profile("mergesearch")

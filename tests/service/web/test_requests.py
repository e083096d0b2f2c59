"""Number of requests to the API that a page sends while it is loaded."""

from __future__ import annotations

from collections import Counter

import pytest

from service.types import JobRecord
from tests.service.web.driving import HURRY, Visit, expect

# Address below that of a study, and the most requests to the API, the event stream aside. Most are sent again once the
# stream is live, since something may have changed meanwhile; what has not is answered without a body.
PAGES = {
    "": 14,
    "/trials": 8,
    "/trials/5": 14,
}


@pytest.mark.slow
@pytest.mark.parametrize("view", PAGES)
def test_a_page_sends_few_requests(hurried: Visit, searched: JobRecord, view: str) -> None:
    """A page of a study that has ended sends no request more than twice, and none once it is loaded."""
    page = hurried.goto(f"/studies/{searched.id}{view}")
    expect(page.get_by_role("heading", level=1)).to_be_visible()
    expect(page.get_by_text("Loading", exact=True)).to_have_count(0)
    page.wait_for_timeout(10_000 / HURRY)  # what the end of the stream makes outdated is requested within two seconds
    sent = Counter(path for path in hurried.requests if path.startswith("/v1/"))
    assert max(sent.values()) <= 2, sent
    assert 3 <= sent.total() <= PAGES[view], sent

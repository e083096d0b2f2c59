from __future__ import annotations

import pytest

from tests.service.client.asker import Asker
from tests.service.site import Site


@pytest.fixture(params=["blocking", "awaited"])
def ask(request: pytest.FixtureRequest, site: Site) -> Asker:
    return Asker(request.param, site.url)

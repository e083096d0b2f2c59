"""Processor time of the web page with 10,000 trials: loading the study page, and one step of each control.

Chromium shows a made-up study, and counts the time of its page's thread, without the time of other programs. The
calibration is the same thread's time for a fixed computation; it makes figures of different machines comparable.
Budgets: 800 ms for the study page, 16 ms for a move of the mouse over a chart, 30 ms for a step of a slider, 60 ms for
a step of an axis of the parallel coordinates, 150 ms for a jump in the table.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

from playwright.sync_api import CDPSession, Page, expect

from service.store import Store
from tests.benchmarks.bench_scale import serving
from tests.benchmarks.scale_study import Size, stored_study
from tests.service.web.driving import chromium, visit

NUM_TRIALS, NUM_LAYERS, RUNGS = 10_000, 8, (30, 90, 270)
STEPS = 20

# Milliseconds of processor time, by what is done.
BUDGETS = {"study page": 800.0, "mouse move": 16.0, "slider step": 30.0, "axis step": 60.0, "table jump": 150.0}

# A computation that takes some 100 ms: a sort of a million numbers from a linear congruential generator.
CALIBRATION = """() => {
  const numbers = new Float64Array(1e6)
  for (let i = 0, x = 1; i < numbers.length; i++) numbers[i] = x = (x * 1103515245 + 12345) % 2147483648
  numbers.sort()
}"""


def run() -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="mergesearch-bench-") as directory:
        store = Store(f"sqlite:///{directory}/page.db")
        try:
            study = stored_study(store, Size(NUM_TRIALS, NUM_LAYERS, RUNGS, num_holdout=100))
            with serving(store.url) as server, chromium() as browser:
                return _measure(browser, str(server.client.base_url).rstrip("/"), study)
        finally:
            store.close()


def show(result: dict[str, Any]) -> None:
    print(f"{NUM_TRIALS:,} trials; calibration {result['calibration_ms']:.0f} ms")
    print("processor time (ms)        budget")
    for name, budget in BUDGETS.items():
        print(f"  {name:<14} {result['ms'][name]:7.1f}  {budget:7.0f}")
    print(f"memory of the page {result['heap_mb']:.0f} MB")


def _measure(browser: Any, url: str, study: str) -> dict[str, Any]:
    found: dict[str, float] = {}
    with visit(browser, url) as opened:
        page = opened.page
        session = opened.context.new_cdp_session(page)
        session.send("Performance.enable", {"timeDomain": "threadTicks"})
        opened.goto("/studies")
        expect(page.get_by_role("table")).to_be_visible()
        calibration = min(_spent(session, page, lambda: page.evaluate(CALIBRATION)) for _ in range(3))

        def open_study() -> None:
            opened.goto(f"/studies/{study}")
            page.get_by_test_id("picked").wait_for(timeout=120_000)
            page.get_by_role("region", name="Values on held-out data").wait_for(timeout=120_000)

        found["study page"] = _spent(session, page, open_study, settle_ms=3000)
        heap = _metrics(session)["JSHeapUsedSize"] / 1e6
        slider = page.get_by_role("slider").first
        found["slider step"] = _spent(session, page, lambda: _press(slider, "ArrowRight")) / STEPS
        chart = page.get_by_role("img", name="Mean of the objectives of every trial")
        chart.scroll_into_view_if_needed()
        box = chart.bounding_box()
        assert box is not None

        def move() -> None:
            for step in range(STEPS):
                page.mouse.move(box["x"] + 80 + 20 * step, box["y"] + 60 + 29 * step % 180)

        found["mouse move"] = _spent(session, page, move) / STEPS
        opened.goto(f"/studies/{study}/parameters")
        axis = page.get_by_role("slider", name="lowest").first
        axis.wait_for(timeout=120_000)
        page.wait_for_timeout(1000)
        found["axis step"] = _spent(session, page, lambda: _press(axis, "ArrowUp")) / STEPS
        opened.goto(f"/studies/{study}/trials")
        table = page.get_by_role("region", name="Trials")
        expect(table.get_by_role("rowheader").first).to_have_text("0")

        def jump() -> None:
            table.evaluate("box => { box.scrollTop = 160000 }")
            expect(table.get_by_role("link", name="4850", exact=True)).to_be_visible()

        found["table jump"] = _spent(session, page, jump)
    return {"calibration_ms": calibration, "ms": found, "heap_mb": heap, "trials": NUM_TRIALS}


def _press(control: Any, key: str) -> None:
    for _ in range(STEPS):
        control.press(key)


def _spent(session: CDPSession, page: Page, action: Callable[[], object], *, settle_ms: int = 300) -> float:
    """Milliseconds of processor time of the page's thread for an action and all its effects."""
    before = _metrics(session)["TaskDuration"]
    action()
    page.wait_for_timeout(settle_ms)
    return 1e3 * (_metrics(session)["TaskDuration"] - before)


def _metrics(session: CDPSession) -> dict[str, float]:
    return {each["name"]: each["value"] for each in session.send("Performance.getMetrics")["metrics"]}

"""The monitor's page in a browser: values change, an alert appears and clears, at a phone's width, without errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests.observe.stand_ins import Chips, StandIn

from capibara.observe import TpuRealTimeMonitor
from capibara.observe.sensors import Reading
from capibara.observe.web.server import MonitorServer

PHONE = {"width": 360, "height": 640}


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    context = browser.new_context(viewport=PHONE)
    opened = context.new_page()
    opened.set_default_timeout(30_000)
    wrong: list[str] = []
    opened.on("pageerror", lambda error: wrong.append(str(error)))
    opened.on("console", lambda said: wrong.append(said.text) if said.type in ("error", "warning") else None)
    opened.on("dialog", lambda dialog: (wrong.append(f"a dialog: {dialog.message}"), dialog.dismiss()))
    yield opened
    opened.goto("about:blank")  # before its server goes
    context.close()
    assert not wrong


def _tile(page: Any, name: str) -> Any:
    return page.locator(f'.tile[data-name="{name}"] p')


def test_values_change_and_an_alert_comes_and_goes(page: Any) -> None:
    run = {"step": 1.0, "loss": 4.0, "step_time": 0.25, "tokens_per_second": 1200.0, "goodput": 0.93}
    gpus = Chips(
        4, "NVIDIA H200", "gpu", utilization=0.8, memory_used=40e9, memory_total=80e9, temperature=61.0, power=600.0
    )
    watched = StandIn(lambda: [Reading("runs/<b>dev</b>", "train", dict(run))], "run", accelerators=False)
    monitor = TpuRealTimeMonitor(50, {"memory_usage": 0.9, "temperature": 80.0}, sensors=[gpus, watched], deadline_s=10)
    with monitor, MonitorServer(monitor, port=0) as server:
        page.goto(server.address)
        page.locator('.tile[data-name="utilization"] p', has_text="80 %").wait_for()
        shown = {name: _tile(page, name).inner_text() for name in ("temperature", "step_time", "loss", "goodput")}
        assert shown == {"temperature": "61 °C", "step_time": "250 ms", "loss": "4", "goodput": "93 %"}
        assert _tile(page, "joules_per_token").inner_text() == "2", "four of 600 W, 1200 tokens a second"
        assert "$/M" in _tile(page, "dollars_per_token").inner_text()
        assert page.locator("#alerts li").count() == 0
        assert page.locator("#sources td", has_text="runs/<b>dev</b>").count() == 1, "names are text"
        run.update(step=2.0, loss=3.5)
        gpus.figures["memory_used"] = 76e9
        page.locator('.tile[data-name="loss"] p', has_text="3.5").wait_for()
        page.locator("#alerts li", has_text="memory_usage of gpu:3 is 0.95, above 0.9").wait_for()
        page.locator("#alerts li >> nth=3").wait_for()
        page.locator('.tile.alert[data-name="memory_usage"]').wait_for()
        points = page.locator('.tile[data-name="memory_usage"] polyline').get_attribute("points").split()
        assert len({point.split(",")[1] for point in points}) > 1, "the curve is none"
        gpus.figures["memory_used"] = 20e9
        page.locator("#alerts:empty").wait_for(state="attached")
        page.locator('.tile[data-name="memory_usage"] p', has_text="25 %").wait_for()
        overflow = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert overflow <= 0, "it scrolls sideways on a phone"


def test_a_token_in_the_address_and_a_sensor_that_fails(page: Any) -> None:
    def broken() -> list[Reading]:
        raise OSError("<img src=x onerror=alert(1)>")

    monitor = TpuRealTimeMonitor(50, sensors=[StandIn(broken, "bus")])
    with monitor, MonitorServer(monitor, port=0, token="s3cret") as server:
        page.goto(f"{server.address}/?token=s3cret")
        page.locator("#sensors .wrong", has_text="bus: failed (OSError: <img src=x").wait_for()
        assert page.url == f"{server.address}/"
        assert _tile(page, "utilization").inner_text() == "\N{EN DASH}"

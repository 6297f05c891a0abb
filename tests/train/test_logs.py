"""What a run says of a step while it goes on."""

from __future__ import annotations

import pytest

from capibara.train.logs import MetricsLog


@pytest.mark.quick
@pytest.mark.parametrize(("mfu", "said"), [(0.43, "MFU 43.0%"), (1.2, None), (None, None)])
def test_a_share_of_the_peak_is_told_where_it_is_one(mfu: float | None, said: str | None) -> None:
    told: list[str] = []
    with MetricsLog(None, tell=told.append, every=1) as log:
        log.write({"step": 1, "loss": 2.0, "tokens_per_second": 10.0, "mfu": mfu, "seconds": 0.1})
    (line,) = told
    assert ("MFU" in line) == (said is not None)
    assert said is None or said in line

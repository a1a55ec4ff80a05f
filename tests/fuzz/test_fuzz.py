"""A short burst of what `make fuzz` does at length."""

from __future__ import annotations

from tests.fuzz.campaign import run


def test_rubbish_neither_ends_nor_grows_the_hub_nor_hinders_who_is_honest() -> None:
    report = run(20_000, seed=1)
    refused = report.status["refused"]
    assert {"malformed", "protocol", "unknown-type", "field", "oversized", "unknown-actor", "fenced"} <= refused.keys()
    assert sum(refused.values()) > 15_000
    assert report.growth_mib < 32 and report.steps > 3 and report.status["ledger"]["closes"]

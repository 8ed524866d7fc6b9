"""Faults of GPUs in what an agent reports, and the preflight, before which it is not ready."""

from __future__ import annotations

from builders.agent import Driver, kinds
from concertina_agent.core import events as e


def test_the_first_fault_is_reported_by_the_agent_and_by_its_coordinator() -> None:
    driver = Driver()
    driver.begun("a", "b")
    assert "ReportChanged" in kinds(driver.tell(e.GpuFaultSeen("GPU 0 reports XID 79")))
    assert driver.tell(e.GpuFaultSeen("GPU 1 reports XID 48")) == [], "a failing GPU may report many XIDs a second"
    assert driver.report.gpu_fault == "GPU 0 reports XID 79"
    assert not driver.report.preflight_failed
    assert driver.report.members["a"].gpu_fault == "GPU 0 reports XID 79"
    assert driver.core.member_state().gpu_fault == "GPU 0 reports XID 79"


def test_an_agent_is_ready_after_its_preflight() -> None:
    driver = Driver()
    driver.core.preflight = True
    driver.tell(e.Warm())
    assert not driver.report.ready
    assert kinds(driver.tell(e.PreflightDone())) == ["ReportChanged"]
    assert driver.report.ready


def test_the_report_says_that_the_preflight_has_failed_even_after_an_error_of_the_driver() -> None:
    driver = Driver()
    driver.tell(e.GpuFaultSeen("GPU 0 reports XID 79"))
    driver.tell(e.GpuFaultSeen("GPU 0 computes wrongly", by_preflight=True))
    assert driver.report.preflight_failed
    assert driver.report.gpu_fault == "GPU 0 reports XID 79"

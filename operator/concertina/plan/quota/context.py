"""Facts about one job and its Kueue queue that the modules of this package use."""

from __future__ import annotations

from dataclasses import dataclass

from concertina.api.spec import JobSpec
from concertina.plan.facts.cached import cached
from concertina.plan.facts.lending import Size
from concertina.plan.kueue import QuotaView
from concertina.plan.observed import JobObservation
from concertina.plan.quota import request, workloads
from concertina.plan.quota.workloads import JobWorkloads


@dataclass(frozen=True)
class QuotaContext:
    observed: JobObservation
    spec: JobSpec
    quota: QuotaView
    now: float
    """Time of this pass in Unix seconds. All times of this package are in Unix seconds."""

    @cached
    def workloads(self) -> JobWorkloads:
        return JobWorkloads(self.quota)

    @cached
    def wanted(self) -> Size:
        """Numbers of replicas and standby replicas that the spec requests."""
        return request.full(self.spec)

    @cached
    def holding(self) -> int:
        """Count of the job's pods that use Kueue quota."""
        return workloads.holding(self.observed.pods)

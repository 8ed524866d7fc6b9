"""Planted bugs: each breaks one rule of the design, and the simulation has to detect it.

Each is pinned to a seed that shows it. If a code change alters the runs of the seeds, this command prints seeds that
show it now: `.venv/bin/python -m simulation.mutations NAME [NAME ...]` (with tests/ on PYTHONPATH).
"""

from __future__ import annotations

import dataclasses
import operator
import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import count, islice
from typing import Any, NamedTuple

import pytest

from concertina.agents import bounds
from concertina.plan.facts import sizes
from concertina.plan.facts.context import JobContext
from concertina.plan.facts.decision import Decision
from concertina.plan.facts.health import Health, Life
from concertina.plan.facts.round import Round
from concertina.plan.pods import bad_nodes
from concertina.plan.pods import pod_backoff as backoff
from concertina.plan.recovery import causes, escalation
from concertina.plan.rounds import claims, commits, growth, holders
from concertina.plan.state import restore
from concertina_agent.core import events as e
from concertina_agent.core import machine
from concertina_agent.core.agent_state import AgentState
from concertina_agent.core.round import stragglers, watchdog
from concertina_agent.core.steps import preparing, storage, worker_steps
from concertina_protocol import HeldSnapshot, Restore, SnapshotId
from simulation.parts import operators
from simulation.parts.cluster import Cluster, SimPod
from simulation.parts.collective import Collective
from simulation.parts.storage import Storage
from simulation.parts.survivors import Stay
from simulation.runs.schedule import Strike, twice
from simulation.runs.world import Failure, failure

Patch = pytest.MonkeyPatch


def agent_accepts_lower_rounds(patch: Patch) -> None:
    patch.setattr(AgentState, "is_current_or_higher", lambda self, round, claim: True)


def plan_mixes_snapshot_ids(patch: Patch) -> None:
    """Take shards of any step for the newest step."""
    _mix(patch, lambda id, newest: True)


def shards_one_step_apart_are_mixed(patch: Patch) -> None:
    """Take shards of the step before the newest one for the newest step."""
    _mix(patch, lambda id, newest: (id.round, id.shards, id.step + 1) == (newest.round, newest.shards, newest.step))


def _mix(patch: Patch, is_taken: Callable[[SnapshotId, SnapshotId], bool]) -> None:
    """Take shards of some snapshots for the newest step."""
    whole = restore.complete

    def mixed(replies: Any, status: Any) -> Any:
        ids = [held.id for reply in replies.values() for held in reply.snapshots]
        if not ids:
            return whole(replies, status)
        newest = max(ids, key=lambda id: (id.round, id.step))

        def relabelled(held: HeldSnapshot) -> HeldSnapshot:
            return dataclasses.replace(held, id=newest) if is_taken(held.id, newest) else held

        named = {
            name: dataclasses.replace(reply, snapshots=tuple(map(relabelled, reply.snapshots)))
            for name, reply in replies.items()
        }
        return whole(named, status)

    patch.setattr(restore, "complete", mixed)


def plan_assigns_before_the_commit(patch: Patch) -> None:
    commit = claims.commit

    def early(ctx: Any, *known: Any) -> Any:
        decision = commit(ctx, *known)
        return dataclasses.replace(decision, world=None) if decision.world and ctx.now % 1 < 0.5 else decision

    patch.setattr(claims, "commit", early)


def latest_has_no_fence(patch: Patch) -> None:
    patch.setattr(Storage, "refuses", lambda self, id: False)


def status_is_written_without_testing_the_claim(patch: Patch) -> None:
    write = Cluster.write_status
    patch.setattr(Cluster, "write_status", lambda self, who, observed, status: write(self, who, self.status, status))


def a_silent_coordinator_is_dead_when_another_answers(patch: Patch) -> None:
    word = Health._word_of_members

    def dead(self: Health) -> Any:
        verdict = word(self)
        return verdict and dataclasses.replace(verdict, life=Life.DEAD, sentence="is silent")

    patch.setattr(Health, "_word_of_members", dead)


def crash_loops_are_not_slowed_down(patch: Patch) -> None:
    patch.setattr(backoff, "_delay", lambda row: 0.0)


def rounds_are_made_of_whoever_answers(patch: Patch) -> None:
    """Form rounds of all replicas that answer, whether they can reach each other or not."""
    patch.setattr(sizes, "_without_cut_links", lambda seniority, replies, members: tuple(seniority))


def late_members_are_left_out(patch: Patch) -> None:
    """Leave out late members, whatever they hold."""
    patch.setattr(holders, "seconds_for_late", lambda ctx, made, answers: None)


def growing_is_tried_at_once_again(patch: Patch) -> None:
    patch.setattr(growth, "_delay", lambda ctx, failures: 0.0)


def reaching_one_way_is_enough(patch: Patch) -> None:
    whole = sizes.mutually_reachable

    def either_way(replies: Any, members: Any) -> Any:
        def near(a: str, b: str) -> bool:
            return b in replies[a].reachable or a in replies[b].reachable

        mutual = {
            name: dataclasses.replace(reply, reachable=tuple(other for other in replies if near(name, other)))
            for name, reply in replies.items()
        }
        return whole(mutual, members)

    patch.setattr(sizes, "mutually_reachable", either_way)


def hangs_are_not_looked_for(patch: Patch) -> None:
    patch.setattr(watchdog.Watchdog, "_hangs", lambda self, now: False)


def hangs_are_the_first_ranks_fault(patch: Patch) -> None:
    first = operator.attrgetter("rank")
    patch.setattr(watchdog, "suspects", lambda heartbeats, *_: sorted(heartbeats, key=first)[:1])


def somebody_is_always_a_straggler(patch: Patch) -> None:
    patch.setattr(stragglers, "late", lambda work, seconds, factor: sorted(work)[:1])


def what_was_undone_is_gone_on_from(patch: Patch) -> None:
    patch.setattr(restore, "is_undone", lambda round, step, status: False)


def the_last_rollback_alone_counts(patch: Patch) -> None:
    """Remember only the last rollback, and forget the earlier ones."""
    whole = restore.undone
    patch.setattr(restore, "undone", lambda status: whole(status)[-1:])


def samples_are_not_left_out(patch: Patch) -> None:
    patch.setattr(restore, "skipped_samples", lambda ctx: ctx.status.skipped)


def samples_left_out_are_trained_on_later(patch: Patch) -> None:
    """Keep skipped samples in the status only, so that no round is told of them."""
    choose = restore.choose

    def untold(*known: Any) -> Any:
        chosen = choose(*known)
        return dataclasses.replace(chosen, skipped=()) if isinstance(chosen, Restore) else chosen

    patch.setattr(commits.restore, "choose", untold)


def a_rollback_is_forgotten(patch: Patch) -> None:
    """Forget a rollback once the round that asked for it is over."""
    seen = restore.last_rollback
    patch.setattr(restore, "last_rollback", lambda ctx: seen(ctx) if ctx.round.report else None)


def bits_flip_where_the_coordinator_is(patch: Patch) -> None:
    restart = escalation.restart_entry

    def blames(ctx: Any, cause: Any) -> Any:
        entry = restart(ctx, cause)
        corrupted = entry is not None and entry.reason == "SilentCorruption"
        return entry.model_copy(update={"replica": ctx.round.coordinator.replica}) if corrupted else entry

    patch.setattr(escalation, "restart_entry", blames)


def latest_is_not_told_what_was_undone(patch: Patch) -> None:
    patch.setattr(storage, "undo", lambda agent, undone: [])


def latest_takes_what_it_says_was_undone(patch: Patch) -> None:
    patch.setattr(Storage, "voids", lambda self, id: False)


def losses_are_somebodys_fault(patch: Patch) -> None:
    patch.setattr(causes, "NOBODYS", frozenset())


def nodes_where_bits_flip_are_used_again(patch: Patch) -> None:
    patch.delitem(bad_nodes.VERDICTS, "SilentCorruption")  # type: ignore[arg-type]


def times_ahead_are_waited_for(patch: Patch) -> None:
    """Wait for times in the future: a clock that was set back has to get there again."""
    patch.setattr(JobContext, "since", lambda self, at: self.now - at)


def nobody_goes_on_while_pods_are_refused(patch: Patch) -> None:
    claim = claims.claim

    def not_refused(ctx: JobContext, *arguments: Any, **options: Any) -> Decision | None:
        return None if ctx.observed.refused else claim(ctx, *arguments, **options)

    patch.setattr(claims, "claim", not_refused)


def whoever_says_that_it_coordinates_is_believed(patch: Patch) -> None:
    report = Round.__dict__["report"]

    def anybodys(self: Round) -> Any:
        reports = (view.report for view in self.observed.agents.values())
        return next(
            (
                other_report
                for other_report in reports
                if other_report and other_report.coordinator and other_report.failures
            ),
            report.__get__(self, Round),
        )

    patch.setattr(Round, "report", property(anybodys), raising=False)


def what_agents_say_has_no_bounds(patch: Patch) -> None:
    patch.setattr(bounds, "bounded", lambda message: message)


def rounds_far_ahead_are_believed(patch: Patch) -> None:
    patch.setattr(claims, "LEAP", 2**60)


def survivors_train_on_with_their_weights(patch: Patch) -> None:
    """Let a survivor continue from the weights that it still has. They may be torn, or of another step."""
    restored = Collective._restored
    patch.setattr(Collective, "_restored", lambda self, process: process.live or restored(self, process))


def a_snapshot_counts_before_it_is_written(patch: Patch) -> None:
    """Take a shard for whole that a worker was about to write when it left its round."""
    patch.setattr(SimPod, "begin", SimPod.keep)


def messages_of_an_earlier_round_count(patch: Patch) -> None:
    _of_any_round(patch, e.WorkerMessage)


def ends_of_workers_of_an_earlier_round_count(patch: Patch) -> None:
    _of_any_round(patch, e.WorkerExited)


def snapshots_of_an_earlier_round_count(patch: Patch) -> None:
    patch.setattr(worker_steps, "is_of_round", lambda message, round: True)


def _of_any_round(patch: Patch, kind: type) -> None:
    """Let the agent handle such events of any round as if they were of the present one."""
    step = machine.HANDLERS[kind]

    def taken(agent: AgentState, event: Any, t: e.Moment) -> list[e.Effect]:
        return step(agent, dataclasses.replace(event, round=agent.seen[0]), t)

    patch.setitem(machine.HANDLERS, kind, taken)


def answers_do_not_wait_for_survivors(patch: Patch) -> None:
    """Let an agent that has prepared an earlier round answer for the next one before its workers are out."""
    anew = preparing._prepare_anew

    def at_once(agent: AgentState, *request: Any) -> Any:
        earlier = agent.preparation
        effects = anew(agent, *request)
        assert agent.preparation is not None
        agent.preparation.gone = earlier is not None and earlier.gone
        return effects

    patch.setattr(preparing, "_prepare_anew", at_once)


def an_answer_counts_for_a_later_call(patch: Patch) -> None:
    """Take a survivor's answer for an earlier round for one for the new round."""
    patch.setattr(operators, "is_same_call", lambda viewed, sent: viewed is not None)


def survivors_that_died_are_assigned(patch: Patch) -> None:
    """Commit a round with every replica that has answered, whether or not its agent still listens."""
    patch.setattr(Health, "may_answer", lambda self, replica: True)


def survivors_that_were_restarted_are_assigned(patch: Patch) -> None:
    patch.setattr(claims, "_forgotten", lambda ctx, replies: False)


class Planted(NamedTuple):
    mutation: Callable[[Patch], None]
    seed: int
    """Seed that shows the bug."""
    alone: tuple[str, ...] = ()
    """Faults that show the bug soonest, a second apart and without any others; empty if the seed draws the faults."""
    stay: Stay | None = None
    """Whether workers outlive their rounds, if the seed does not draw that. A worker is then killed, and one of the
    faults `alone` strikes at any moment of the recovery."""

    @property
    def name(self) -> str:
        return self.mutation.__name__

    def play(self, seed: int) -> Failure | None:
        if self.stay:
            return failure(seed, schedule=twice(seed, RECOVERY_SECONDS, self.alone), stay=self.stay)
        strikes = tuple(Strike(5.0 + i, name, seed) for i, name in enumerate(self.alone))
        return failure(seed, schedule=strikes or None)

    def shown_by(self, seeds: Iterable[int]) -> Iterator[int]:
        """Yield those of the seeds that pass with the code as it is, and break an invariant with the mutation."""
        for seed in seeds:
            with pytest.MonkeyPatch.context() as patch:
                self.mutation(patch)
                broken = self.play(seed)
            if broken and broken.invariant and not self.play(seed):
                yield seed


RECOVERY_SECONDS = 6.0
"""Seconds from the death of a worker within which its round's successor trains, even after a late answer."""
TWICE_UNSAID = ("storage_down", "glitch", "storage_down", "storage_down", "glitch", "kill_agent", "storage_down")
"""Faults after which only the status knows what LATEST must not name: training is undone twice while storage is away,
then the agent that remembers both is lost."""
LIES = ("lying_agent", "lying_agent", "kill_worker", "lying_agent", "kill_worker")
MUTATIONS = (
    Planted(agent_accepts_lower_rounds, 22),
    Planted(plan_mixes_snapshot_ids, 0),
    Planted(plan_assigns_before_the_commit, 2),
    Planted(latest_has_no_fence, 358),
    Planted(status_is_written_without_testing_the_claim, 0, ("slow_api", "second_operator", "kill_agent")),
    Planted(a_silent_coordinator_is_dead_when_another_answers, 1, ("cut_operator",)),
    Planted(crash_loops_are_not_slowed_down, 18),
    Planted(rounds_are_made_of_whoever_answers, 3, ("cut_from_peers",)),
    Planted(late_members_are_left_out, 25, ("starve", "kill_agent", "kill_worker", "kill_worker")),
    Planted(growing_is_tried_at_once_again, 3, ("cut_from_peers",)),
    Planted(reaching_one_way_is_enough, 1, ("closed_node", "kill_worker")),
    Planted(hangs_are_not_looked_for, 0, ("hang_worker",)),
    Planted(hangs_are_the_first_ranks_fault, 8, ("hang_worker",)),
    Planted(somebody_is_always_a_straggler, 12),
    Planted(what_was_undone_is_gone_on_from, 1, ("bad_samples",)),
    Planted(the_last_rollback_alone_counts, 51, TWICE_UNSAID),
    Planted(samples_are_not_left_out, 1, ("bad_samples",)),
    Planted(samples_left_out_are_trained_on_later, 1, ("glitch",)),
    Planted(a_rollback_is_forgotten, 1, ("glitch",)),
    Planted(bits_flip_where_the_coordinator_is, 0, ("flip_bits",)),
    Planted(latest_is_not_told_what_was_undone, 1, ("bad_samples",)),
    Planted(latest_takes_what_it_says_was_undone, 41, ("storage_down", "bad_samples", "api_down")),
    Planted(losses_are_somebodys_fault, 1, ("bad_samples",)),
    Planted(nodes_where_bits_flip_are_used_again, 0, ("flip_bits",)),
    Planted(times_ahead_are_waited_for, 36, ("refused_pods", "delete_pod", "set_clock")),
    Planted(nobody_goes_on_while_pods_are_refused, 0, ("refused_pods", "kill_agent", "kill_worker", "kill_worker")),
    Planted(whoever_says_that_it_coordinates_is_believed, 755, ("lying_agent", "lying_agent")),
    Planted(what_agents_say_has_no_bounds, 1, ("lying_agent",)),
    Planted(rounds_far_ahead_are_believed, 28, LIES),
    Planted(survivors_train_on_with_their_weights, 0, (), Stay.SOON),
    Planted(a_snapshot_counts_before_it_is_written, 3, (), Stay.SOON),
    Planted(shards_one_step_apart_are_mixed, 19, (), Stay.SOON),
    Planted(messages_of_an_earlier_round_count, 9, (), Stay.SOON),
    Planted(ends_of_workers_of_an_earlier_round_count, 12, (), Stay.SOON),
    Planted(snapshots_of_an_earlier_round_count, 0, (), Stay.SOON),
    Planted(late_members_are_left_out, 37, (), Stay.LATE),
    Planted(answers_do_not_wait_for_survivors, 0, ("kill_worker",), Stay.LATE),
    Planted(an_answer_counts_for_a_later_call, 1, ("kill_agent",), Stay.LATE),
    Planted(survivors_that_died_are_assigned, 0, ("kill_agent",), Stay.LATE),
    Planted(survivors_that_were_restarted_are_assigned, 21, ("restart_agent",), Stay.LATE),
)


if __name__ == "__main__":
    for planted in MUTATIONS:
        if planted.name in sys.argv[1:]:
            print(planted.name, *islice(planted.shown_by(count()), 3), flush=True)

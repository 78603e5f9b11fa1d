"""Looking before anything is changed: what an examination is told to do, and whom its findings name. Pure.

aggregate_stacks   stacks of all processes; the smallest parallel group that covers those that stand apart
diagnose           tests of the stopped machines
group_test         short replays of the job in groups, twice; the machine that both failing groups share
examine            an evicted machine, off the critical path
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from events.action import OutcomeRecorded
from events.decision import IntentIssued, MachineJudged, Verdict
from events.envelope import TEXT_MAX, Fact
from events.finding import CheckResult
from events.job import Mode
from processors import diagnosis, group_test, parallel_groups
from processors.decisions import Base, cut, decision, intent, restore_below
from processors.ladder import EXAMINATIONS, Situation
from processors.state import Fleet, Job, Plan, with_incident

SLOW, METRIC = Situation.SLOW.word, Situation.METRIC.word


class Found(NamedTuple):
    """Machines that are named, in words why; of stacks, the group (`pp 3`)."""

    nodes: tuple[str, ...]
    why: str
    group: str = ""


def look(fleet: Fleet, job: Job, plan: Plan, base: Base) -> IntentIssued:
    """The intent of an examination."""
    rules = fleet.policy.decider
    nodes = tuple(place.node for place in job.places if place.node not in job.evicted and place.node not in job.silent)
    verb = EXAMINATIONS[plan.rung][0]
    if verb == "capture_stacks":
        rounds, every_s = (rules.slow_rounds, rules.slow_every_s) if plan.situation == SLOW else (1, 0.0)
        return intent(
            fleet, job, plan, base, verb=verb, nodes=tuple(place.node for place in job.places), attempt=job.attempt, places=job.ranks,
            world_size=sum(place.count for place in job.ranks), rounds=rounds, every_s=every_s,
            cut=tuple(fleet.policy.stacks.model_dump(exclude_defaults=True).items()),
        )  # fmt: skip
    if verb == "diagnose":
        tests = rules.metric_tests if plan.situation == METRIC else rules.tests
        if plan.weighed:
            nodes, tests = _doubtful(fleet, job, plan.weighed), plan.weighed.tests
        return intent(
            fleet, job, plan, base, verb=verb, nodes=nodes, attempt=job.attempt, tests=tests, within_s=rules.tests_within_s
        )
    groups = groups_for(job)
    return intent(
        fleet, job, plan, base, verb=verb, nodes=nodes, attempt=job.attempt, within_s=rules.replay_within_s, steps=rules.replay_steps,
        groups=() if isinstance(groups, str) else groups, revision=job.revision, restore_below_step=restore_below(job),
    )  # fmt: skip


def concluded(fleet: Fleet, job: Job, plan: Plan, outcome: OutcomeRecorded) -> Job:
    """The job after an examination's outcome: the ladder goes on from what was found."""
    verb, rule = EXAMINATIONS[plan.rung]
    if verb == "diagnose" and outcome.result == "done":
        weighed = diagnosis.weighed(_answers(outcome), plan.weighed, fleet.policy.tests)
        plan = plan._replace(weighed=weighed)
        if _doubtful(fleet, job, weighed):  # with time anew
            return job._replace(plan=plan._replace(pending={}, stage="stopping", deadline=""))
    told = outcome.result == "done" or plan.weighed is not None  # what an earlier round of tests told stands
    if told:
        found = _FOUND[verb](fleet, job, plan, outcome)
    else:
        found = Found((), f"{plan.rung.replace('_', ' ')} came to nothing ({outcome.result}: {outcome.detail})")
    return with_incident(
        job._replace(plan=None),
        going_on=plan.situation, suspects=found.nodes, suspected_by=rule, finding=cut(found.why, 1500), group=found.group,
        in_vain=not told,
    )  # fmt: skip


# --- rules for each ------------------------------------------------------------------------------------------------------------


def is_whole(job: Job, nodes: tuple[str, ...]) -> bool:
    return len(nodes) >= len(job.places)


def _by_stacks(fleet: Fleet, job: Job, plan: Plan, outcome: OutcomeRecorded) -> Found:
    """Of a stall, the smallest group that covers all who stand apart; of a slow run, the one that most rounds flag."""
    declared = job.declared
    rounds = [round_.outliers for round_ in outcome.stacks]
    seen = "; ".join(outcome.stacks[-1].stuck_at[:4]) if outcome.stacks else ""
    told = f"ranks {', '.join(map(str, rounds[-1][:16]))} stand apart" if rounds and rounds[-1] else "no rank stands apart"
    told += f" ({seen})" if seen else ""
    try:
        layout = parallel_groups.Layout(declared.tp, declared.pp, declared.dp, declared.ranks_per_node, declared.rank_order)
        if plan.situation == SLOW:
            voted = parallel_groups.vote(layout, rounds, fleet.policy.stacks.flag_share_min)
            told = f"{voted.group.name} stands apart in {voted.flags} of {len(rounds)} rounds of stacks" if voted else told
            enough = fleet.policy.decider.slow_flags_share_min * len(rounds)
            group = voted.group if voted and voted.flags >= enough else None
        else:
            group = parallel_groups.smallest_cover(layout, rounds[-1]) if rounds else None
    except parallel_groups.BadLayout as error:
        return Found((), f"{told}, and the job's layout does not fit: {error}")
    if group is None:
        return Found((), told)
    nodes = tuple(job.places[machine].node for machine in group.machines if machine < len(job.places))
    return Found(nodes, f"{told}; {group.name} covers them: {', '.join(nodes[:8])}", group.name)


def _answers(outcome: OutcomeRecorded) -> list[CheckResult]:
    return [result for result in outcome.tests if result.test != "answers"]  # silence is judged elsewhere


def _doubtful(fleet: Fleet, job: Job, weighed: diagnosis.Weighed) -> tuple[str, ...]:
    rules = fleet.policy.decider
    return weighed.doubtful(len(job.places), rules.false_alarms_max, rules.test_rounds_max)


def _by_tests(fleet: Fleet, job: Job, plan: Plan, outcome: OutcomeRecorded) -> Found:
    """Whoever could not be tested once more stays named."""
    found = plan.weighed
    assert found is not None
    if found.named:
        return Found(tuple(found.named), "; ".join(found.named.values()))
    ran = len({result.test for result in _answers(outcome) if result.passed is not None})
    passed = f"{ran} tests passed" if ran else "no test could run"
    return Found((), "; ".join((passed, *found.doubts)))


def groups_for(job: Job) -> tuple[tuple[tuple[str, ...], ...], ...] | str:
    """The groups of both phases, or why the job can't be replayed in groups, in words that go on a sentence."""
    declared = job.declared
    machines = [place.node for place in job.places]
    planned = group_test.plan(
        machines,
        pp=declared.pp,
        dp=declared.dp,
        tp=declared.tp,
        ranks_per_node=declared.ranks_per_node,
        rank_order=declared.rank_order,
    )
    return f"no group test: {planned.because}" if isinstance(planned, group_test.NoPlan) else tuple(planned.groups)


def _by_replays(fleet: Fleet, job: Job, plan: Plan, outcome: OutcomeRecorded) -> Found:
    found = group_test.locate(group_test.groups_of(outcome.replays), outcome.replays)
    named = found.suspects if found.outcome in ("located", "located_once", "one_of_several") else found.certain
    return Found(named, f"replays in groups: {found.because}")


_FOUND: Mapping[str, Callable[[Fleet, Job, Plan, OutcomeRecorded], Found]] = {
    "capture_stacks": _by_stacks, "diagnose": _by_tests, "group_test": _by_replays,
}  # fmt: skip


# --- off the critical path -----------------------------------------------------------------------------------------------------


def examine(fleet: Fleet, job: Job, base: Base) -> list[Fact]:
    """Machines that were evicted are examined once nothing is open: the recovery comes first."""
    if not job.unexamined or job.incident is not None or job.plan is not None or fleet.held(job.name):
        return []
    node = next(
        (node for node in job.unexamined if fleet.owners.get(node, job.name) == job.name), ""
    )  # else it is another job's by now
    if not node:
        return []
    incident, rule, machines = job.unexamined[node]
    rules = fleet.policy.decider
    # It waits for no yes: nobody uses the machine.
    mode: Mode = "observe" if fleet.policy.mode_of("examine_evicted") == "observe" else "auto"
    because = f"{node} was evicted ({rule or 'by a person'}); is it bad?"
    made = decision(fleet, job, None, base, rung="diagnose", rule="examine_evicted", mode=mode, nodes=(node,), because=because)
    made = made.model_copy(update={"incident": incident})  # the one that it was evicted in, which is over
    if mode != "auto" or made.vetoed:
        return [made]
    asked = intent(
        fleet, job, made, base, verb="examine", node=node, nodes=(node,), attempt=job.attempt, tests=rules.metric_tests,
        within_s=rules.examine_s, text=rule, world_size=machines,
    )  # fmt: skip
    return [made, asked]


def judged(fleet: Fleet, job: Job, outcome: OutcomeRecorded, base: Base) -> list[Fact]:
    """What an examination of an evicted machine comes to."""
    of = job.examined.get(outcome.key)
    if of is None:  # or it was refused, and is to be examined still
        return []
    node, incident, rule, machines = of
    verdict: Verdict = "unproven"
    why = f"{outcome.result}: {outcome.detail}"
    if outcome.result == "done":
        verdict, why = diagnosis.verdict(outcome.tests, diagnosis.prior_of(rule, machines), fleet.policy.tests)
    back = verdict == "exonerated" or (verdict == "unproven" and fleet.policy.decider.unproven == "watch")
    back = back and outcome.result == "done" and node not in job.by_node
    return [
        MachineJudged(
            job=job.name,
            node=node,
            incident=incident,
            rule=rule,
            verdict=verdict,
            back=back,
            because=cut(why, TEXT_MAX),
            **base,
        )
    ]

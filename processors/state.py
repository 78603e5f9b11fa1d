"""What the decider knows: jobs, their incidents and recoveries, holds, evictions. Frozen values; processors.fleet (inputs) and
processors.decided (its own decisions) say how they change. Named tuples, since a change of one is the inner loop of replay. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Protocol

from events.decision import RankPlace, Rung
from events.job import JobDeclared, OverrideGiven, Place
from processors.attribution import Beside, Sighting
from processors.diagnosis import Weighed
from processors.ladder import Last
from processors.policy import Policy

#: Symptoms that, of high confidence, name a machine (ByteRobust section 4.1: skip the diagnostics; links that flap twice within 5
#: minutes are evicted for too). What the same symptom is of low confidence is recorded.
NAMING = frozenset(
    {
        "gpu_unavailable",
        "gpu_memory_error",
        "gpu_driver_hang",
        "nvlink_error",
        "nic_flap",
        "nic_down",
        "os_kernel_panic",
        "disk_fault",
        "fs_mount",
    }
)

#: Symptoms of a machine that ails while steps go on: it is replaced at the next restart, whatever brings that (DESIGN section 7).
AILING = frozenset({"gpu_memory_error", "gpu_thermal", "ib_error", "nvlink_error"})
#: So does, by these of high confidence, a machine under a job that goes on: a driver that hangs, or a link that is down and that the job
#: does without. Once the job stalls or crashes they name it.
IN_TROUBLE_ONLY = {"gpu_driver_hang": "the driver hangs", "nic_down": "a link is down"}
#: Symptoms that say that what the job computes is wrong.
METRICS = frozenset({"nan_value", "loss_spike"})


def ails(symptom: str, confidence: str) -> bool:
    """Whether a machine of which this is recorded is replaced at the next restart."""
    return symptom in AILING or (symptom in IN_TROUBLE_ONLY and confidence == "high")


#: Results of what was not tried: a hold stood, or it was read too late. That is no failure of what was decided.
REFUSED = ("refused_held", "refused_expired")


class Told(Protocol):
    """What the fold reads of an event: a whole one, or a fact that is being said."""

    @property
    def data(self) -> Any: ...
    @property
    def time(self) -> int: ...
    @property
    def job(self) -> str: ...
    @property
    def attempt(self) -> int: ...


#: What machines have in common: ("rack", name), ("nvlink_domain", name), ("switch", name) or ("fleet", "").
Scope = tuple[str, str]


def scopes(place: Place) -> list[Scope]:
    """What a machine shares with others."""
    found = [("fleet", "")]
    if place.rack:
        found.append(("rack", place.rack))
    if place.nvlink_domain:
        found.append(("nvlink_domain", place.nvlink_domain))
    if place.switch:
        found.append(("switch", place.switch))
    return found


def counted(counts: Mapping[Scope, int], places: Iterable[Place]) -> Mapping[Scope, int]:
    """The counts with these places added."""
    more = dict(counts)
    for place in places:
        for scope in scopes(place):
            more[scope] = more.get(scope, 0) + 1
    return more


class Trouble(NamedTuple):
    """A node in trouble: what it was, when it was seen, when the decider learnt of it."""

    symptom: str
    seen_ns: int
    learnt_ns: int


#: By node, all that stands of it, in the order in which it was learnt of.
Troubles = Mapping[str, tuple[Trouble, ...]]


def stands(troubles: Troubles, node: str, symptom: str) -> bool:
    return any(one.symptom == symptom for one in troubles.get(node, ()))


def with_trouble(troubles: Troubles, node: str, trouble: Trouble) -> Troubles:
    others = (one for one in troubles.get(node, ()) if one.symptom != trouble.symptom)
    return {**troubles, node: (*others, trouble)}


def without_trouble(troubles: Troubles, node: str, symptom: str = "") -> Troubles:
    """Without what is over of a node; no symptom: without the node."""
    left = tuple(one for one in troubles.get(node, ()) if symptom and one.symptom != symptom)
    return {key: left if key == node else value for key, value in troubles.items() if key != node or left}


class Poison(NamedTuple):
    """Steps that were computed wrongly, `first` to `last`, in `attempt` or before it: no checkpoint of them is restored until a later
    attempt is past them, or this one after all that showed it (`of`: symptom and metric) went away."""

    first: int
    last: int
    attempt: int
    of: frozenset[tuple[str, str]] = frozenset()


class Incident(NamedTuple):
    """A run of trouble on one job. `named`: nodes that high-confidence evidence names. `crash`, `stall`: unanswered ones.
    `root`: the crash's first failing rank is known, it is not all echoes. `crashed`: there was one at any time. `hung`: the
    present attempt made no progress, and was not seen to move since."""

    id: str
    epoch: int
    symptom: str
    opened_ns: int
    first_evidence_ns: int
    attempt: int
    step: int = -1
    named: Mapping[str, Trouble] = {}
    answered: Mapping[str, str] = {}
    #: Machines in trouble at any time, by what they share; and the shared causes that were named.
    troubled: Mapping[Scope, int] = {}
    shared: Mapping[Scope, int] = {}
    crash: bool = False
    crashed: bool = False
    root: bool = False
    stall: bool = False
    hung: bool = False
    last_evidence_ns: int = 0
    #: purpose -> timer that was set last for it; the purposes whose timer has fired; and how many were set.
    timers: Mapping[str, str] = {}
    due: frozenset[str] = frozenset()
    timers_set: int = 0
    #: What the culprit window waits for: '' (not set), root or echo.
    window: str = ""
    reattempts: int = 0
    recoveries: int = 0
    decided_ns: int = 0
    rung: Rung = "none"
    #: The symptom that the remedy answered, where it is a finer one than what opened the incident.
    cause: str = ""
    nodes_out: tuple[str, ...] = ()
    #: '' (open), 'held', 'no_standby' or 'handed_over': why nothing more is decided for now.
    blocked: str = ""
    #: It was handed over for want of standbys: it goes on when there are more.
    lacking: bool = False
    #: What was tried last, and came to nothing: the ladder goes on from there.
    last: Last = Last.NOTHING
    #: The present attempt computes wrong numbers, from this step on; is slow; died of an exception of its own code (quoted).
    metric: frozenset[tuple[str, str]] = frozenset()
    bad_step: int = -1
    slow: bool = False
    code: str = ""
    #: An examination is over, and the ladder goes on in this situation. Whom it named, for which rule, with what words; of stacks, the
    #: group.
    going_on: str = ""
    suspects: tuple[str, ...] = ()
    suspected_by: str = ""
    finding: str = ""
    group: str = ""
    #: It could not be carried out.
    in_vain: bool = False
    #: It is a relapse: the step that the job was to get beyond.
    relapse_of: int = -1

    def waits_for(self, purpose: str) -> bool:
        """Whether a timer for it is set and has not fired."""
        return purpose in self.timers and purpose not in self.due


class Lapse(NamedTuple):
    """An incident that ended in recovery: where its ladder stood, and the step that the job must get beyond before that counts. One
    that was a relapse itself goes on in it, so that trouble of another kind in between hides nothing."""

    last: Last
    reattempts: int
    recoveries: int
    step: int
    closed_ns: int


class Plan(NamedTuple):
    """What a decision set in motion. `stage`: awaiting (an approval), held (a planned one, under a hold), decided, stopping,
    examining, starting, confirming. `incident` is empty for what a person asked for. `pending`: key -> verb and machine, without an
    outcome yet. `situation`: of an examination, what it looks into."""

    decision: str
    incident: str
    epoch: int
    rung: Rung
    stage: str
    nodes: tuple[str, ...] = ()
    standbys: tuple[str, ...] = ()
    pending: Mapping[str, tuple[str, str]] = {}
    #: What actuators refused without a try (a hold stood, or it came too late), verb and machine: it is issued anew, all together; and how
    #: often that was.
    refused: tuple[tuple[str, str], ...] = ()
    refusals: int = 0
    #: Standbys that did not wake: others are taken where there are some.
    unwoken: frozenset[str] = frozenset()
    failed: str = ""
    stop_only: bool = False
    graceful: bool = False
    deadline: str = ""
    #: How many were set: one, and another after each that passed under a hold.
    deadlines: int = 0
    overdue: bool = False
    rule: str = ""
    situation: str = ""
    revision: str = ""
    restore_below_step: int = -1
    #: Machines that tests named, and that are tested once more: sound ones fail now and then.
    weighed: Weighed | None = None
    #: A person's yes to it is good until then (0: for as long as it takes).
    good_until_ns: int = 0

    @property
    def begun(self) -> bool:
        """Whether anything of it is being done, or was."""
        return self.stage in ("stopping", "examining", "starting", "confirming")

    @property
    def ends_attempt(self) -> bool:
        """Whether the attempt that runs is over with it: stacks alone are taken of a living job."""
        return self.rung != "aggregate_stacks"


class Job(NamedTuple):
    """One training run. `places`: its machines in rank order; `standbys`: spares, in order. `wanted`: running, stopped or finished.
    `request`: what a person asked for and is not decided yet."""

    declared: JobDeclared
    places: tuple[Place, ...]
    standbys: tuple[Place, ...]
    attempt: int = 0
    ended: bool = True
    #: The newest attempt of which every reachable rank is known to be stopped.
    stopped: int = 0
    epoch: int = 0
    ordinal: int = 0
    wanted: str = "running"
    request: str = "declared"
    #: What was asked for and waits for standbys; and how many could be used when last something was given up for want of them.
    lacking: str = ""
    too_few: int = 0
    incident: Incident | None = None
    lapse: Lapse | None = None
    plan: Plan | None = None
    #: node -> when its eviction was decided; of those, the ones whose eviction came to pass; and intents still open, key -> node.
    evicted: Mapping[str, int] = {}
    out: frozenset[str] = frozenset()
    evicting: Mapping[str, str] = {}
    #: Standbys that are not to be used, and why.
    unfit: Mapping[str, tuple[Trouble, ...]] = {}
    #: Nodes that are not heard, also after their incident closed.
    silent: Mapping[str, Trouble] = {}
    confirmed: int = 0
    last_progress_ns: int = 0
    last_step: int = -1
    #: The step that the current attempt was restored at.
    last_restored: int = -1
    #: Where the ranks of the attempt are.
    ranks: tuple[RankPlace, ...] = ()
    #: The code revision that runs, and the one that a person asked to run from the next start on; those that ever ran, in order, each with the step that its first attempt began at (-1: not known
    #: yet); and the newest that proved stable.
    revision: str = ""
    next_revision: str = ""
    #: The timer that ends the wait of a lazy update for a restart to go with.
    update_timer: str = ""
    revisions: Mapping[str, int] = {}
    stable: str = ""
    #: What of the checkpoints is not to be restored; and of those in folders that earlier declarations of the job named, by folder.
    poisoned: Poison | None = None
    poisoned_before: Mapping[str, Poison] = {}
    #: Machines that ail, to be replaced at the next restart; and those that a person keeps in, node -> until when (0: for good).
    ailing: Mapping[str, tuple[Trouble, ...]] = {}
    kept: Mapping[str, int] = {}
    #: What a person chose in place of the ladder, not yet decided.
    override: OverrideGiven | None = None
    #: It was decided once, and waits for a hold to be released.
    override_held: bool = False
    #: Evicted machines that are still to be examined, node -> (incident, rule, how many went together); and those that are, intent's key
    #: -> node and the same.
    unexamined: Mapping[str, tuple[str, str, int]] = {}
    examined: Mapping[str, tuple[str, str, str, int]] = {}
    #: Of the places: each by its node, and how many share what.
    by_node: Mapping[str, Place] = {}
    sizes: Mapping[Scope, int] = {}

    @property
    def name(self) -> str:
        return self.declared.job

    def at(self, places: tuple[Place, ...]) -> Job:
        """The job on these machines."""
        return self._replace(places=places, by_node={place.node: place for place in places}, sizes=counted({}, places))

    @property
    def quiet(self) -> bool:
        """Nothing is open and nothing is asked for: no rule has anything to say."""
        open_ = self.incident is not None or self.plan is not None or self.request or self.override or self.unexamined
        return not open_ and not self.stands_on_poison and (self.wanted != "finished" or self.ended)

    @property
    def stands_on_poison(self) -> bool:
        """The attempt that runs restored what an earlier one, as was learnt since, computed wrongly."""
        poison = self.poisoned
        if poison is None or poison.attempt >= self.attempt or self.ended or self.wanted != "running":
            return False
        return self.last_restored >= poison.first

    @property
    def borne(self) -> dict[str, Trouble]:
        """Of the machines that ail, those that name themselves once the job is in trouble."""
        found = ((node, one) for node, troubles in self.ailing.items() for one in troubles if one.symptom in IN_TROUBLE_ONLY)
        return {node: one for node, one in found if node in self.by_node}

    @property
    def gone(self) -> tuple[str, ...]:
        """Machines in the places that were evicted and not yet replaced: no attempt starts on them."""
        return tuple(place.node for place in self.places if place.node in self.evicted) if self.evicted else ()


class Eviction(NamedTuple):
    """`group`: the decision that evicted a whole parallel group, which counts as one in a budget; empty for a machine by itself."""

    at_ns: int
    job: str
    node: str
    rack: str
    group: str = ""


class Fleet(NamedTuple):
    """Everything. `now_ns`: the greatest broker time seen."""

    now_ns: int = 0
    code_version: str = ""
    policy: Policy = Policy()
    policy_digest: str = "default"
    catalogue_digest: str = ""
    jobs: Mapping[str, Job] = {}
    holds: Mapping[str, int] = {}
    evictions: tuple[Eviction, ...] = ()
    #: The last of what both code and machines cause, on whatever job and node, and of what tells for a machine beside it.
    sightings: tuple[Sighting, ...] = ()
    beside: tuple[Beside, ...] = ()
    bad_serials: Mapping[str, str] = {}
    #: Every machine that was declared, as a place or a standby: whose it is, where it stands, and how many share what. Evicted ones
    #: count: a budget whose denominator shrank with each eviction would tighten as it is spent.
    owners: Mapping[str, str] = {}
    machines: Mapping[str, Place] = {}
    sizes: Mapping[Scope, int] = {}

    def held(self, job: str) -> bool:
        """Whether a hold on the job or the fleet stands now."""
        return any(key in self.holds and (self.holds[key] == 0 or self.now_ns < self.holds[key]) for key in ("", job))

    def with_machines(self, job: str, places: Iterable[Place]) -> Fleet:
        """The fleet with these machines as the job's."""
        owners, machines, sizes = dict(self.owners), dict(self.machines), dict(self.sizes)
        for place in places:
            old = machines.get(place.node)
            for scope in scopes(old) if old else ():
                sizes[scope] -= 1
            for scope in scopes(place):
                sizes[scope] = sizes.get(scope, 0) + 1
            owners[place.node], machines[place.node] = job, place
        return self._replace(owners=owners, machines=machines, sizes=sizes)

    def put(self, job: Job) -> Fleet:
        return self._replace(jobs={**self.jobs, job.name: job})


def usable_standbys(fleet: Fleet, job: Job) -> list[Place]:
    """Spares that may be used, in order: not ailing, not evicted, not a machine (by serial number) that was evicted before, and not one
    that was given to another job since."""
    return [
        place
        for place in job.standbys
        if fleet.owners.get(place.node, job.name) == job.name
        and place.node not in job.unfit
        and place.node not in job.evicted
        and place.node not in job.silent
        and not (place.serial and place.serial in fleet.bad_serials)
    ]


def lost_standbys(fleet: Fleet, job: Job, plan: Plan) -> tuple[str, ...]:
    """Those of the plan that are not to be used any more, or did not wake."""
    usable = {place.node for place in usable_standbys(fleet, job)} - plan.unwoken
    return tuple(node for node in plan.standbys if node not in usable and node not in job.by_node)


def more_spares(fleet: Fleet, job: Job) -> Job:
    """There may be enough standbys now for what was given up for want of them: it is decided again, by what is known now. Not where there
    are no more than there were: one that comes and goes would call a person each time."""
    if len(usable_standbys(fleet, job)) <= job.too_few:
        return job
    if job.lacking and job.wanted == "running":
        return job._replace(request=job.request or job.lacking, lacking="")
    incident = job.incident
    if incident is None or not (incident.blocked == "no_standby" or incident.lacking):
        return job
    answered = {node: by for node, by in incident.answered.items() if by != "no_standby"}
    return with_incident(job, blocked="", lacking=False, answered=answered)


def with_incident(job: Job, **changes: Any) -> Job:
    """The job with its incident changed, if it has one."""
    return job._replace(incident=job.incident._replace(**changes)) if job.incident else job

"""The policy: every threshold and mode that judges, as one validated document. Its text is in the ledger, its digest in each
decision. Pure: text in, model out."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from events.job import Mode
from events.registry import canonical_json

Seconds = Annotated[float, Field(gt=0, le=30 * 24 * 3600, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0, le=1_000_000)]
Share = Annotated[float, Field(gt=0, lt=1)]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class PhaseLimits(_Section):
    """How long a job may make no progress in each phase before that is a hang. No phase is exempt: hangs live in evaluation and
    checkpoints too (BLOOM chronicles: 18 h and 11 h lost in evaluation)."""

    startup: Seconds = 1800.0
    step: Seconds = 600.0
    evaluation: Seconds = 1800.0
    checkpoint: Seconds = 1800.0
    undeclared: Seconds = 600.0


Limit = Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False)]


class Network(_Section):
    """Of the links that a job uses: when one that goes down flaps, and how fast its counters may rise (NVSentinel's thresholds)."""

    flap_count: Annotated[int, Field(ge=2, le=16)] = 2
    flap_window_s: Seconds = 300.0
    #: Samples on end that show a link down, after which it is dead rather than flapping.
    down_samples: Annotated[int, Field(ge=1, le=16)] = 2
    boot_grace_s: Annotated[float, Field(ge=0, le=24 * 3600, allow_inf_nan=False)] = 300.0
    #: What lasts is told again after this long; what was not seen again for so long is over.
    quiet_s: Seconds = 300.0
    #: A link that runs below this share of its first rate.
    rate_share_min: Annotated[float, Field(gt=0, le=1)] = 1.0
    symbol_errors_per_s: Limit = 10.0
    symbol_errors_per_h: Limit = 120.0
    link_recoveries_per_min: Limit = 5.0
    receive_errors_per_s: Limit = 10.0
    ack_timeouts_per_s: Limit = 1.0
    discards_per_s: Limit = 100.0
    slow_restarts_per_s: Limit = 10.0
    integrity_errors_max: Limit = 0.0


class Host(_Section):
    """What a machine's own samples are judged by. Percentages are the kernel's pressures over 10 s."""

    #: Until a machine has been up this long, what start-up brings (load, mounts that come late, a clock not yet set) is no trouble.
    boot_grace_s: Seconds = 300.0
    #: A folder's room runs out below either; the size counts only on file systems of at least `disk_size_factor` times as much.
    disk_free_share_min: Annotated[float, Field(ge=0, le=0.5)] = 0.02
    disk_free_gib_min: Annotated[float, Field(ge=0, le=100_000)] = 1.0
    disk_size_factor: Annotated[float, Field(ge=1, le=1_000_000)] = 50.0
    #: What was claimed for lack of room is over with so many times the limit; for lack of memory below this share of it.
    clear_factor: Annotated[float, Field(ge=1, le=100)] = 1.5
    memory_clear_share: Annotated[float, Field(gt=0, le=1)] = 0.5
    inodes_free_share_min: Annotated[float, Field(ge=0, le=0.5)] = 0.01
    #: A folder that answers nothing for this long hangs.
    folder_hung_s: Seconds = 20.0
    #: Tasks wait for a processor this much of the time, in so many samples in a row; without pressures: load by processor.
    cpu_pressure_max: Annotated[float, Field(gt=0, le=100)] = 90.0
    cpu_samples: Annotated[int, Field(ge=1, le=1000)] = 3
    load_per_cpu_max: Annotated[float, Field(gt=0, le=10_000)] = 8.0
    #: All tasks wait for memory this much of the time.
    memory_pressure_full_max: Annotated[float, Field(gt=0, le=100)] = 20.0
    #: A rank in uninterruptible sleep for this long is stuck.
    stuck_rank_s: Seconds = 60.0
    #: The clock is off by more than this, or nothing keeps it: times of this node say little.
    clock_offset_s_max: Annotated[float, Field(gt=0, le=3600)] = 0.5


class Drift(_Section):
    """When a node's set-up is held to differ from its job's."""

    #: So many nodes with a known value, and this share of them with the same one, make a majority.
    nodes_min: Annotated[int, Field(ge=3, le=100_000)] = 3
    majority_min: Annotated[float, Field(gt=0.5, le=1)] = 0.66
    #: After the last change: a roll-out is not told node by node.
    settle_s: Seconds = 90.0


class GpuLimits(_Section):
    """Of a node's GPUs. A sample comes every 10 s."""

    #: Nothing of low confidence is raised in the first minutes after a boot: links train, drivers settle.
    boot_grace_s: Annotated[float, Field(ge=0, le=24 * 3600, allow_inf_nan=False)] = 300.0
    #: Answers on end that did not come, together with a process in uninterruptible sleep or an Xid 119 or 120 within the window.
    driver_misses: Annotated[int, Field(ge=1, le=1000)] = 2
    hang_xid_window_s: Seconds = 300.0
    #: After the kernel told that the driver is loaded or unloaded, GPUs come one by one and whoever asks waits.
    load_grace_s: Annotated[float, Field(ge=0, le=24 * 3600, allow_inf_nan=False)] = 120.0
    #: What lasts is told again after this long; of memory errors that go on growing, and of an Xid of one GPU, sooner.
    repeat_s: Seconds = 600.0
    ecc_repeat_s: Seconds = 60.0
    xid_window_s: Seconds = 60.0
    #: Told of something that waited so long, it may have been taken for history: it is told again of the next that did not.
    late_s: Seconds = 30.0
    #: Samples further apart than so many intervals are not on end.
    on_end_intervals: Annotated[float, Field(ge=1, le=1000)] = 4.0
    #: Samples on end that show it: of what may flap (links, pending remaps), of heat, of a PCIe link that is too narrow.
    steady_samples: Annotated[int, Field(ge=1, le=1000)] = 2
    thermal_samples: Annotated[int, Field(ge=1, le=1000)] = 3
    pcie_samples: Annotated[int, Field(ge=1, le=1000)] = 3
    #: Below this utilisation a PCIe link may be narrow to save power.
    load_percent: Annotated[float, Field(ge=0, le=100)] = 50.0
    link_crc_per_s: Annotated[float, Field(gt=0, le=1e9)] = 100.0


class Hang(_Section):
    """Limits that a job's own times make shorter than the stated ones, and what its links' traffic changes about them."""

    #: A phase's limit (not start-up's) is this many times the longest stretch without progress in it, of `learn_count` at least.
    #: 0: always as stated.
    learn_factor: Annotated[float, Field(ge=0, le=1000, allow_inf_nan=False)] = 5.0
    learn_count: Annotated[int, Field(ge=1, le=1000)] = 3
    #: No learned limit is below this; none is above the stated one.
    learned_least_s: Seconds = 600.0
    #: Links of a node that carry less than this are idle.
    idle_bytes_per_s: Limit = 1e6
    #: Traffic that was seen so long ago is of now.
    traffic_s: Seconds = 75.0
    #: Phases that come and go are progress too, but not for longer than this without a finished step.
    stepless_s: Seconds = 21_600.0
    #: The limit's factor where all nodes' links are idle, and where some carry something.
    idle_factor: Annotated[float, Field(gt=0, le=1)] = 0.5
    traffic_factor: Annotated[float, Field(ge=1, le=100)] = 2.0


class Curves(_Section):
    """When a loss or gradient norm is wrong. Steps are those whose update was not skipped."""

    #: Above the rolling median, and by so many times the usual distance from it.
    jump_ratio: Annotated[float, Field(gt=1, le=1e6)] = 5.0
    spread_factor: Annotated[float, Field(ge=0, le=1e6)] = 10.0
    window_steps: Annotated[int, Field(ge=4, le=1024)] = 64
    learn_steps: Annotated[int, Field(ge=3, le=1024)] = 20
    #: Nothing is a jump in the first steps of a job, nor in the first of an attempt or after a change that the script told of.
    warmup_steps: Count = 100
    grace_steps: Count = 10
    #: So many steps of a trouble make it last; it is over after `calm_steps` without.
    loss_steps: Annotated[int, Field(ge=1, le=100_000)] = 5
    grad_norm_steps: Annotated[int, Field(ge=1, le=100_000)] = 50
    nan_steps: Annotated[int, Field(ge=1, le=100_000)] = 2
    nan_grad_norm_steps: Annotated[int, Field(ge=1, le=100_000)] = 20
    calm_steps: Annotated[int, Field(ge=1, le=1000)] = 3
    #: Of troubles that did not last, one is told in this time; the next telling counts them.
    told_every_s: Seconds = 60.0


class Pace(_Section):
    """When a job, or one of its nodes, has become slow."""

    #: Speed is judged in blocks of at least so many steps and seconds; the median of a block against that of the past ones.
    block_steps: Annotated[int, Field(ge=1, le=1000)] = 5
    block_s: Seconds = 10.0
    learn_blocks: Annotated[int, Field(ge=2, le=1000)] = 6
    past_blocks: Annotated[int, Field(ge=2, le=1000)] = 60
    #: Slower by this share, in so many blocks on end.
    decline_min: Share = 0.1
    decline_blocks: Annotated[int, Field(ge=1, le=1000)] = 3
    #: What is usual by now is slower by this share than what was usual at best.
    ramp_min: Share = 0.2
    #: The first steps of an attempt, and after a change that the script told of, are not judged.
    grace_steps: Count = 10
    #: A rank's own time in compute is held against its peers' so often; slower than they by this share, for so many rounds on end.
    round_s: Seconds = 10.0
    slow_min: Annotated[float, Field(gt=0, le=100)] = 0.2
    slow_rounds: Annotated[int, Field(ge=1, le=1000)] = 5
    #: Of fewer nodes, nobody can tell which is the slow one.
    peers_min: Annotated[int, Field(ge=2, le=1000)] = 3
    #: Rounds in which it is learned how a rank's work compares with its peers' by its place in the model, and the share by which what is
    #: usual follows later.
    learn_rounds: Annotated[int, Field(ge=1, le=1000)] = 3
    follow_share: Annotated[float, Field(ge=0, le=1)] = 0.02
    #: Messages whose middle is a rank's present work: one hiccup moves nothing.
    recent_messages: Annotated[int, Field(ge=1, le=100)] = 3
    #: Rounds on end in which one node alone was slower, that name it for a decline of the job.
    decline_rounds: Annotated[int, Field(ge=1, le=1000)] = 2
    #: Steps on end that lack what speed was told in so far, after which the next best does.
    lacks_steps: Annotated[int, Field(ge=1, le=100_000)] = 64
    #: Beside a decline: a node whose slowest GPU runs below its peers' clocks by this share, told within this time.
    clock_min: Share = 0.1
    clock_s: Seconds = 75.0


class Detectors(_Section):
    """What detectors judge by."""

    #: A node is silent after this long without any observation (three beats of a second; ByteRobust Table 3: kernel fault 2 s).
    silence_s: Seconds = 3.0
    #: Ticks further apart than this mean that the broker or its machine stood still; absence is not judged for `grace_s` after.
    tick_gap_s: Seconds = 3.0
    grace_s: Seconds = 10.0
    phase_limit_s: PhaseLimits = PhaseLimits()
    hang: Hang = Hang()
    curves: Curves = Curves()
    pace: Pace = Pace()
    #: The rank whose steps make a job's curves is replaced by another after it was not heard for this long while the job goes on.
    voice_silence_s: Seconds = 30.0
    #: An attempt is healthy after this many finished steps with finite loss.
    healthy_steps: Annotated[int, Field(ge=1, le=10_000)] = 2
    #: So many times as many where some ranks tell of no steps (scripts that only report on rank 0).
    healthy_sparse_factor: Annotated[int, Field(ge=1, le=1000)] = 10
    #: How often progress is noted in the ledger while steps go on.
    progress_note_s: Seconds = 10.0
    #: Exits of one attempt that become a signal each; the rest are counted into one.
    exits_each_max: Annotated[int, Field(ge=1, le=10_000)] = 64
    #: Kernel lines like a crash's echo (Xid 45, 13): signals a node and minute; the rest are counted.
    echoes_per_minute: Annotated[int, Field(ge=1, le=1000)] = 4
    host: Host = Host()
    drift: Drift = Drift()
    network: Network = Network()
    gpu: GpuLimits = GpuLimits()


class Budget(_Section):
    """Evictions allowed in a scope within `window_s`: the lower of `evictions_max` and `share_max` of its machines, at least 1."""

    evictions_max: Annotated[int, Field(ge=0, le=100_000)] = 4
    share_max: Annotated[float, Field(ge=0, le=1)] = 0.1
    window_s: Seconds = 3600.0


class Budgets(_Section):
    job: Budget = Budget(evictions_max=4, share_max=0.25)
    rack: Budget = Budget(evictions_max=2, share_max=0.5)
    fleet: Budget = Budget(evictions_max=8, share_max=0.1)


class SharedCauses(_Section):
    """Many nodes in trouble within `window_s` have one cause: at least `nodes_min` of one rack or switch, or `fleet_share` of all."""

    window_s: Seconds = 10.0
    nodes_min: Annotated[int, Field(ge=2, le=100_000)] = 3
    share_min: Annotated[float, Field(gt=0, le=1)] = 0.5
    fleet_share: Annotated[float, Field(gt=0, le=1)] = 0.5
    #: The page waits this long, so that it names every rack and switch of one event.
    settle_s: Seconds = 1.0


class Stacks(_Section):
    """Who stands apart in a round of stacks or flight recordings."""

    #: A stack is dominant if more than this share of the most frequent one's ranks have it.
    dominant_ratio: Share = 0.5
    #: If more of the ranks than this are outliers, most are not healthy, and the round says nothing.
    outliers_share_max: Share = 0.5
    #: Where so many of the ranks with a stack wait in communication, those that do not are its cause, however often they are at one place.
    waiting_share_min: Share = 0.5
    #: So many ranks' flight recordings are enough to go by.
    recorded_share_min: Share = 0.5
    #: A round of a slow job flags the smallest group that holds more than this share of its outliers.
    flag_share_min: Share = 0.5


class MachineTests(_Section):
    """What tests of machines say of them."""

    #: A link is slow with less than this share of what is usual for its kind, the middle of the fastest third; of fewer none is usual.
    slow_share: Share = 0.5
    slow_share_gloo: Share = 0.03
    links_min: Annotated[int, Field(ge=3, le=1000)] = 3
    #: An evicted machine that is bad with this probability is confirmed; below the other it is exonerated.
    confirmed_from: Share = 0.95
    exonerated_below: Share = 0.15


STACKS, TESTS = Stacks(), MachineTests()


class Attribution(_Section):
    """User code or infrastructure, of symptoms that both cause: what counts as evidence, and by how much it moves the odds."""

    #: What stands beside a symptom was seen so long before or after it.
    before_s: Seconds = 600.0
    after_s: Seconds = 300.0
    #: Nodes that show it within this time show it at once; so many of them, of one attempt, point at the job.
    together_s: Seconds = 60.0
    nodes_min: Annotated[int, Field(ge=2, le=100_000)] = 3
    #: So many jobs that met it on one node point at the node.
    jobs_min: Annotated[int, Field(ge=2, le=1000)] = 2
    #: Repeats in other attempts count within this time.
    repeat_window_s: Seconds = 86_400.0
    #: What strong and weak evidence multiplies or divides the odds by.
    strong_factor: Annotated[float, Field(gt=1, le=1000)] = 10.0
    weak_factor: Annotated[float, Field(gt=1, le=1000)] = 3.0
    #: It is judged infrastructure from this probability on, user code up to that; between them nobody knows.
    infra_min: Annotated[float, Field(gt=0.5, lt=1)] = 0.8
    user_max: Annotated[float, Field(gt=0, lt=0.5)] = 0.2


class Decider(_Section):
    """What the decider judges by."""

    #: A crash whose first failing rank is known waits this long for the line that names a machine (RSC: a cause is seen up to 5 min
    #: after; short here, since a machine that is named after the reattempt is evicted then).
    culprit_window_s: Seconds = 1.0
    #: A crash of which only echoes are known (peers reset, gloo and NCCL errors) waits this long for its root: an exit, a line, or
    #: a node found silent. More than silence_s and two ticks.
    root_window_s: Seconds = 8.0
    #: A silent node on its own is believed dead only if its job stalls within this time; else its monitor is lost.
    silence_window_s: Seconds = 30.0
    #: Evidence older than this when it arrives is recorded and opens nothing.
    evidence_age_max_s: Seconds = 60.0
    #: From decision to healthy: beyond it the recovery has failed and the ladder goes on.
    recovery_deadline_s: Seconds = 900.0
    #: For one action from intent to outcome.
    action_deadline_s: Seconds = 120.0
    #: Reattempts in place in one incident before a person is called.
    reattempts_max: Count = 1
    #: A job that is in trouble again before it got beyond the step of the last incident, or within this long of its recovery, did not
    #: recover: the ladder goes on where it stood.
    relapse_s: Seconds = 60.0
    #: All recoveries in one incident, of whatever rung.
    recoveries_max: Count = 6
    #: The ladder's rungs that may be taken; one left out is passed over.
    rungs: tuple[Literal["aggregate_stacks", "diagnose", "reattempt", "roll_back", "group_test"], ...] = (
        "aggregate_stacks", "diagnose", "reattempt", "roll_back", "group_test",
    )  # fmt: skip
    #: Stacks of a stalled job are taken once, of a slow one in so many rounds, so far apart.
    slow_rounds: Annotated[int, Field(ge=1, le=100)] = 5
    slow_every_s: Seconds = 10.0
    #: A group must stand apart in at least this share of the rounds.
    slow_flags_share_min: Annotated[float, Field(gt=0, le=1)] = 0.6
    #: A parallel group of more machines, or of more than this share of the job's, is not evicted on the word of stacks.
    group_machines_max: Count = 16
    group_share_max: Annotated[float, Field(ge=0, lt=1)] = 0.5
    #: Tests of stopped machines: which, after what; and the time they may take together.
    tests: tuple[Annotated[str, Field(max_length=64)], ...] = ("gpu_self_test", "dcgm", "all_to_all", "all_gather")
    metric_tests: tuple[Annotated[str, Field(max_length=64)], ...] = (
        "gpu_self_test", "dcgm", "all_to_all", "all_gather", "reference_step",
    )  # fmt: skip
    tests_within_s: Seconds = 300.0
    #: A machine that failed by itself what more than so many sound ones of the job would be expected to fail is tested once more; in all,
    #: so many times at most.
    false_alarms_max: Annotated[float, Field(ge=0, le=1e6)] = 0.01
    test_rounds_max: Annotated[int, Field(ge=1, le=10)] = 3
    #: A revision that ran so many steps is stable.
    stable_steps: Annotated[int, Field(ge=1, le=10_000_000)] = 100
    #: A lazy update waits this long for a restart to go with; then the job is restarted for it.
    update_window_s: Seconds = 86_400.0
    #: Where no checkpoint lies below the step that a restore must go back behind, up to this many steps are done again from the
    #: beginning; beyond it, the start fails and a person is called.
    from_the_beginning_steps_max: Count = 1000
    #: The steps of a group's replay, and the time of both rounds.
    replay_steps: Annotated[int, Field(ge=1, le=1000)] = 20
    replay_within_s: Seconds = 1800.0
    #: An evicted machine is examined for so long (0: not at all); one that is neither confirmed nor exonerated stays out or is watched.
    examine_s: Annotated[float, Field(ge=0, le=24 * 3600, allow_inf_nan=False)] = 600.0
    unproven: Literal["out", "watch"] = "out"
    #: An incident in which nothing was done closes after this long of progress without new evidence.
    quiet_s: Seconds = 60.0
    no_standby: Literal["hand_over", "hold"] = "hand_over"


#: Rules by name, and what each stands for.
RULES: Mapping[str, str] = {
    "evict_named": "high-confidence evidence names a machine: evict it at once",
    "evict_silent": "a node is silent and its job stalled, or its rank is gone: evict it",
    "reattempt_crash": "a crash without a culprit: reattempt in place",
    "reattempt_hang": "no progress past the phase's limit: kill and reattempt in place",
    "evict_ailing": "a machine ails while steps go on: replaced at the next restart",
    "aggregate_stacks": "a hang, or a slow run: take the stacks of all processes, and look who stands apart",
    "evict_group": "stacks name a parallel group: evict it",
    "diagnose": "a crash or a wrong metric without a culprit: stop, and test the machines",
    "evict_tested": "a test names a machine: evict it",
    "roll_back": "the code is newer than the last stable revision: go back to that",
    "group_test": "still failing: replay the job in groups, twice",
    "evict_replayed": "replays name a machine: evict it",
    "examine_evicted": "an evicted machine is examined, off the critical path",
    "shared_cause": "many nodes of one rack, switch or bus at once: one page, nobody evicted for it",
    "hand_over": "nothing left to try: a person",
}


class Policy(_Section):
    version: Literal[1] = 1
    #: What every rule does unless `rules` says otherwise.
    mode: Mode = "observe"
    rules: dict[str, Mode] = {}
    detectors: Detectors = Detectors()
    decider: Decider = Decider()
    budget: Budgets = Budgets()
    shared_causes: SharedCauses = SharedCauses()
    attribution: Attribution = Attribution()
    stacks: Stacks = STACKS
    tests: MachineTests = TESTS

    def mode_of(self, rule: str) -> Mode:
        return self.rules.get(rule, self.mode)


class BadPolicy(ValueError):
    """A policy that cannot be adopted. The text is a sentence or two for its author."""


class _Loader(yaml.SafeLoader):
    """YAML in which a key that stands twice is a fault: which of two modes is meant must not be guessed."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} stands twice", key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def parse(text: str) -> Policy:
    """A policy from its YAML (or JSON). Raises BadPolicy."""
    try:
        raw: Any = yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        place = getattr(error, "problem_mark", None)
        where = f" at line {place.line + 1}, column {place.column + 1}" if place else ""
        raise BadPolicy(f"the policy is not YAML{where}: {getattr(error, 'problem', None) or str(error)[:200]}") from None
    if raw is None:
        raw = {}
    if not isinstance(raw, dict):
        raise BadPolicy(f"the policy must be a mapping of sections, not {type(raw).__name__}")
    try:
        policy = Policy.model_validate(raw)
    except ValidationError as error:
        lines = [
            f"{'.'.join(map(str, e['loc'])) or 'policy'}: {e['msg']}"
            for e in error.errors(include_url=False, include_context=False)
        ]
        raise BadPolicy("the policy is not valid: " + "; ".join(lines[:5])) from None
    unknown = sorted(set(policy.rules) - set(RULES))
    if unknown:
        raise BadPolicy(f"the policy names unknown rules {', '.join(unknown)}; there are: {', '.join(RULES)}")
    return policy


def digest(text: str) -> str:
    """What decisions name: SHA-256 of the text, 16 hex digits."""
    return sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def detector_settings(policy: Policy) -> str:
    """The detectors' section as canonical JSON, as SettingsAdopted carries it."""
    return canonical_json(policy.detectors.model_dump(mode="json")).decode()

"""What operators say, and how a job is laid out. All of it is in LEDGER under the operator's role."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from events.envelope import NAME_MAX, TEXT_MAX, Fact

Mode = Literal["observe", "approve", "auto"]
#: How ranks are numbered by their places in tensor, pipeline and data parallelism, the fastest first (processors.parallel_groups).
RankOrder = Literal["tp-pp-dp", "tp-dp-pp"]


class Place(Fact):
    """Where a node stands. Empty: not known. `switch`: the leaf switch; `nvlink_domain`: the machines that NVLink joins to it.
    `serial` is the machine's own number: a standby whose serial was evicted is refused."""

    node: str = Field(min_length=1, max_length=NAME_MAX)
    rack: str = Field(default="", max_length=NAME_MAX)
    switch: str = Field(default="", max_length=NAME_MAX)
    serial: str = Field(default="", max_length=NAME_MAX)
    nvlink_domain: str = Field(default="", max_length=NAME_MAX)


class JobDeclared(Fact):
    """A training run: its machines, ranks and parallel layout (tp*pp*dp = nodes*ranks_per_node), how its processes are started
    and where its checkpoints lie. The first declaration of a job starts its first attempt."""

    TYPE: ClassVar[str] = "keepstep.job_declared.v1"
    job: str = Field(min_length=1, max_length=NAME_MAX)
    nodes: tuple[Place, ...] = Field(min_length=1)
    standbys: tuple[Place, ...] = ()
    ranks_per_node: int = Field(default=1, ge=1)
    tp: int = Field(default=1, ge=1)
    pp: int = Field(default=1, ge=1)
    dp: int = Field(default=1, ge=1)
    rank_order: RankOrder = "tp-pp-dp"
    command: tuple[str, ...] = Field(min_length=1)
    directory: str = ""
    environment: tuple[tuple[str, str], ...] = ()
    checkpoints: str = ""
    code_revision: str = ""
    backend: str = "local"
    author: str = ""


class PolicyAdopted(Fact):
    """The policy in force from here on: its whole YAML text and the digest that decisions name."""

    TYPE: ClassVar[str] = "keepstep.policy_adopted.v1"
    text: str = Field(max_length=200_000)
    digest: str
    author: str = ""


class CatalogueAdopted(Fact):
    """The catalogue of log lines in force: its whole text and digest."""

    TYPE: ClassVar[str] = "keepstep.catalogue_adopted.v1"
    text: str = Field(max_length=500_000)
    digest: str
    author: str = ""


class HoldPlaced(Fact):
    """The kill switch: no action starts while a hold on the job (or the fleet, `job` empty) stands. `expires_ns` 0: until released."""

    TYPE: ClassVar[str] = "keepstep.hold_placed.v1"
    job: str = Field(default="", max_length=NAME_MAX)
    reason: str = Field(min_length=1, max_length=TEXT_MAX)
    author: str = Field(min_length=1, max_length=NAME_MAX)
    expires_ns: int = Field(default=0, ge=0)


class HoldReleased(Fact):
    TYPE: ClassVar[str] = "keepstep.hold_released.v1"
    job: str = Field(default="", max_length=NAME_MAX)
    reason: str = Field(min_length=1, max_length=TEXT_MAX)
    author: str = Field(min_length=1, max_length=NAME_MAX)


class RestartRequested(Fact):
    """A planned restart. It is no incident; it ends one that is open. `symptom`: what the census counts it as. `at_next_restart`: nothing
    is restarted for it until the policy's window ends; it goes with the next restart of whatever reason."""

    TYPE: ClassVar[str] = "keepstep.restart_requested.v1"
    job: str = Field(min_length=1, max_length=NAME_MAX)
    reason: str = Field(min_length=1, max_length=TEXT_MAX)
    author: str = Field(min_length=1, max_length=NAME_MAX)
    symptom: Literal["code_update", "data_update", "operator_restart"] = "operator_restart"
    #: The code revision to run from here on (a commit of the job's repository); empty: the present one.
    revision: str = Field(default="", max_length=NAME_MAX)
    at_next_restart: bool = False


class StopRequested(Fact):
    """A planned stop. The job stays down until a restart is asked for."""

    TYPE: ClassVar[str] = "keepstep.stop_requested.v1"
    job: str = Field(min_length=1, max_length=NAME_MAX)
    reason: str = Field(min_length=1, max_length=TEXT_MAX)
    author: str = Field(min_length=1, max_length=NAME_MAX)


class StandbyAdded(Fact):
    """A spare machine joins a job's standbys."""

    TYPE: ClassVar[str] = "keepstep.standby_added.v1"
    job: str = Field(min_length=1, max_length=NAME_MAX)
    place: Place
    author: str = Field(min_length=1, max_length=NAME_MAX)


class ApprovalGiven(Fact):
    """A person's yes or no to a decision that waits for it."""

    TYPE: ClassVar[str] = "keepstep.approval_given.v1"
    decision: str = Field(min_length=1, max_length=64)
    job: str = Field(min_length=1, max_length=NAME_MAX)
    granted: bool
    reason: str = Field(min_length=1, max_length=TEXT_MAX)
    author: str = Field(min_length=1, max_length=NAME_MAX)
    #: A yes is good until then (0: as long as the decision waits); what was not begun by then is not done, and handed over.
    expires_ns: int = Field(default=0, ge=0)


class OverrideGiven(Fact):
    """A person's choice in place of the ladder's. evict (`node`), reattempt, roll_back (`revision`; empty: the last stable one): taken at
    once, in the job's incident or as a planned restart. keep (`node`): it is not evicted by any rule until the override expires."""

    TYPE: ClassVar[str] = "keepstep.override_given.v1"
    job: str = Field(min_length=1, max_length=NAME_MAX)
    remedy: Literal["evict", "reattempt", "roll_back", "keep"]
    node: str = Field(default="", max_length=NAME_MAX)
    revision: str = Field(default="", max_length=NAME_MAX)
    reason: str = Field(min_length=1, max_length=TEXT_MAX)
    author: str = Field(min_length=1, max_length=NAME_MAX)
    expires_ns: int = Field(default=0, ge=0)


class PageAcknowledged(Fact):
    """A person has a page: what was paged of it so far is not repeated. `decision`: that page alone; empty: all of the incident's, or
    with no `incident` either, all of what was planned for the job."""

    TYPE: ClassVar[str] = "keepstep.page_acknowledged.v1"
    job: str = Field(min_length=1, max_length=NAME_MAX)
    incident: str = Field(default="", max_length=64)
    decision: str = Field(default="", max_length=64)
    reason: str = Field(min_length=1, max_length=TEXT_MAX)
    author: str = Field(min_length=1, max_length=NAME_MAX)

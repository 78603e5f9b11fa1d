"""Every kind of event there is, by type name; how bytes become events and events canonical bytes; how old versions are read."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, Union

from pydantic import Field, TypeAdapter, ValidationError

from events import action, decision, gpu, hardware, host, incident, job, network, presence, rank_log, topology, training
from events.envelope import AnyEvent, Event, Fact

FACTS: tuple[type[Fact], ...] = (
    hardware.KernelLog, hardware.EvidenceGap,
    presence.Heartbeat, presence.AgentState, presence.Tick, presence.SettingsAdopted,
    training.TrainingProgress, training.RankStarted, training.RankExit,
    job.JobDeclared, job.PolicyAdopted, job.CatalogueAdopted, job.HoldPlaced, job.HoldReleased, job.RestartRequested,
    job.StopRequested, job.StandbyAdded, job.ApprovalGiven, job.OverrideGiven, job.PageAcknowledged,
    incident.Signal, incident.SignalCleared, incident.ProgressNoted, incident.JobFinished, incident.EvidenceMissing,
    incident.DetectorStarted,
    host.HostSample, host.LastBoot, host.Configuration, host.ConfigurationDrift, rank_log.RankLog,
    network.NicBaseline, network.LinkChanged, network.LinkTraffic, network.NicSample, topology.TopologyDeclared, topology.RankDevices,
    gpu.GpuSample, gpu.GpuClocks, gpu.GpuWatch, gpu.GpuXid,
    decision.DeciderStarted, decision.IncidentOpened, decision.EvidenceJudged, decision.SharedCause, decision.TimerSet,
    decision.TimerFired, decision.DecisionMade, decision.IntentIssued, decision.IncidentClosed, decision.AttemptEnded,
    decision.RevisionStable, decision.MachineJudged, decision.Diverged,
    action.TryStarted, action.OutcomeRecorded, action.PageRepeated, action.PageEnded, action.NodeCommand, action.CommandAnswered,
)  # fmt: skip

BY_TYPE: Mapping[str, type[Fact]] = {fact.TYPE: fact for fact in FACTS}
assert len(BY_TYPE) == len(FACTS)

#: type of an old version -> (type of the next, function from its data to the next one's). Followed until a current type is met.
UPCASTERS: dict[str, tuple[str, Callable[[dict[str, Any]], dict[str, Any]]]] = {}

EVENT_CLASSES: Mapping[str, type[AnyEvent]] = {fact.TYPE: Event[Literal[fact.TYPE], fact] for fact in FACTS}  # type: ignore[valid-type, name-defined]
_ADAPTER: TypeAdapter[AnyEvent] = TypeAdapter(
    Annotated[Union[tuple(EVENT_CLASSES.values())], Field(discriminator="type")]  # type: ignore[arg-type]  # noqa: UP007
)
#: The validator's own method: the adapter's would only pass its options on.
_VALIDATE_JSON: Callable[[bytes], AnyEvent] = _ADAPTER.validator.validate_json


class Malformed(ValueError):
    """Bytes that are no event of keepstep's. The text is one sentence, fit for a dead letter."""


def parse(raw: bytes) -> AnyEvent:
    """An event from its JSON; old versions come out as the current one. Raises Malformed."""
    try:
        return _VALIDATE_JSON(raw)
    except ValidationError as error:
        upcasted = _upcast(raw)
        if upcasted is not None:
            return upcasted
        raise Malformed(_sentence(error)) from None
    except (ValueError, RecursionError) as error:
        raise Malformed(f"not JSON that keepstep reads: {str(error)[:200]}") from None


def _upcast(raw: bytes) -> AnyEvent | None:
    try:
        value = json.loads(raw)
        type_ = value["type"]
        if type_ not in UPCASTERS:
            return None
        for _ in range(len(UPCASTERS)):
            if type_ not in UPCASTERS:
                break
            type_, change = UPCASTERS[type_]
            value = {**value, "type": type_, "data": change(value["data"])}
        return _ADAPTER.validate_python(value)
    except ValidationError as error:
        raise Malformed(f"an old version that does not upcast: {_sentence(error)}") from None
    except (ValueError, KeyError, TypeError, RecursionError, AttributeError):
        return None


def _sentence(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    where = ".".join(str(part) for part in first["loc"] if not str(part).startswith("keepstep.")) or "the whole"
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    return f"{where[:200]}: {first['msg'][:300]}{more}"


def canonical(event: AnyEvent) -> bytes:
    """The event's canonical bytes: sorted keys, UTF-8, no blanks, non-finite numbers as strings, defaults left out."""
    return event.__pydantic_serializer__.to_json(event, exclude_defaults=True)


_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def canonical_json(value: Any) -> bytes:
    """Canonical bytes of plain finite values (settings, digests' inputs)."""
    return _ENCODER.encode(value).encode("utf-8")


def make(fact: Fact, **envelope: Any) -> AnyEvent:
    """An event around a fact; the envelope's other fields by name. Validated."""
    return EVENT_CLASSES[fact.TYPE](specversion="1.0", type=fact.TYPE, data=fact, **envelope)

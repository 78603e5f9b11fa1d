"""Faust over JetStream: a transport for `nats://` with partition leases, fenced writes and frames (DESIGN section 5).

app = NatsApp(url="nats://127.0.0.1:4222", nats=NatsSettings(group="detector-node", worker="w1"))
topic = app.topic("telemetry_node", schema=FrameSchema())
"""

from infra.faust_transport.frames import Frame, FrameSchema
from infra.faust_transport.settings import NatsApp, NatsSettings, quiet_faust
from infra.faust_transport.transport import Transport

__all__ = ["Frame", "FrameSchema", "NatsApp", "NatsSettings", "Transport", "quiet_faust"]

"""The whole pipeline with real processes: a real bus, detectors, decider, actuators, agents and ranks, broken while they work."""

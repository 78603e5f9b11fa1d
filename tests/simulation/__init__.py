"""Whole fleets in one thread: real detectors, a real decider, and everything around them simulated; time passes by events alone."""

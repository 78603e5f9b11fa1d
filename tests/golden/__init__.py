"""Golden recordings: small ledgers that must replay without a difference, and some that must not. `python -m tests.golden.make`."""

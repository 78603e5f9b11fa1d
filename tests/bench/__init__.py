"""Benchmarks: how fast keepstep is, beside a peer or a bound measured in the same run. `make bench`, `make bench ONLY=replay`.

A module `bench_*.py` here has `NAMES`, the figures it can give (a figure's own name may carry a suffix: `back_at_work_killed`),
and `main()`, plain or async, which measures and calls `tests.bench.report.report` once a figure.
"""

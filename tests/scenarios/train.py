"""A training script without a model, so that a restart takes a moment: it steps, tells its steps to the hook, and writes each into a
file of its own, which tells what really happened whatever becomes of the pipeline. `train.py STEPS_FOLDER STEP_S [fail]`."""

import os
import sys
import time
from pathlib import Path

import keepstep

folder, step_s = Path(sys.argv[1]), float(sys.argv[2])
rank, attempt = int(os.environ["RANK"]), int(os.environ["KEEPSTEP_ATTEMPT"])
restored = keepstep.checkpoint_to_restore()
step = int(restored.name.rpartition("-")[2]) + 1 if restored else 0
with (folder / f"rank-{rank}.steps").open("a", buffering=1) as log:
    log.write(f"start {attempt} {step} {os.getpid()} {time.monotonic_ns()}\n")
    if sys.argv[3:] == ["fail"]:
        raise ValueError("this script always fails")
    while not (folder / "finish").exists():
        time.sleep(step_s)
        log.write(f"step {attempt} {step} {os.getpid()} {time.monotonic_ns()}\n")
        keepstep.step(step, loss=1.0, tokens=10)
        if step % 20 == 19:
            keepstep.save(step, {"state.json": b"{}"})
        step += 1
time.sleep(0.3 * rank)

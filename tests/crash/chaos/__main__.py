"""`make chaos`: jobs over three workers, while everything that can go wrong does.

    python -m crash.chaos --minutes 30 --seed 1 --report REPORT.md

Exit code 1 when anything did not hold.
"""

from __future__ import annotations

import argparse
import faulthandler
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

from .pool import build_models, make_pool
from .report import report
from .stage import Stage
from .storm import Plan, Storm

_FAULT_EVERY_S = 3.5
_LENGTHS = (200, 500, 900, 1500)
_PATIENCE_S = 150.0


def main() -> int:
    faulthandler.register(signal.SIGUSR1)
    # So that the workers and servers do not outlive it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    given = _arguments()
    seed = given.seed if given.seed is not None else int(time.time())
    faults = given.faults or max(1, round(given.minutes * 60 / _FAULT_EVERY_S))
    plan = Plan(seed, faults, given.minutes * 60 / faults, patience=_PATIENCE_S)
    print(f"seed {seed}: {faults} faults in {given.minutes:g} minutes", flush=True)
    with tempfile.TemporaryDirectory(prefix="tenuto-models-") as folder:
        models = build_models(Path(folder))
        pool = make_pool(models, _LENGTHS, random.Random(seed))
        with Stage(models) as stage:
            done = Storm(plan, stage, pool, lambda line: print(line, flush=True)).run()
            if done.violations and given.keep_logs:
                _keep_logs(stage, given.keep_logs)
    given.report.write_text(report(plan, done), encoding="utf-8")
    print(f"{done.hits.total()} faults, {len(done.violations)} violations: {given.report}")
    return bool(done.violations)


def _keep_logs(stage: Stage, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number, process in enumerate(stage.processes()):
        (folder / f"{number:03}.log").write_text(process.log(), encoding="utf-8")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--faults", type=int, help="how many (one in 3.5 seconds)")
    parser.add_argument("--seed", type=int, help="of the plan (the time)")
    parser.add_argument("--report", type=Path, required=True, help="where to write the report")
    parser.add_argument("--keep-logs", type=Path, help="folder for the workers' logs, on failure")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

"""Everything that may go wrong, in any order: a short storm. `make chaos` is the long one."""

from __future__ import annotations

import random

import pytest

from crash.chaos.faults import WEIGHTS
from crash.chaos.pool import make_pool
from crash.chaos.stage import Stage
from crash.chaos.storm import Plan, Storm
from exact_runs import Models


@pytest.mark.timeout(300)
def test_a_storm_of_faults_loses_nothing_doubles_nothing_and_changes_no_bit(models: Models) -> None:
    # Each kind of fault once.
    plan = Plan(seed=20261130, faults=len(WEIGHTS), every=0.8, open_jobs=8, calm=60)
    pool = make_pool(models, (60, 160), random.Random(plan.seed))
    with Stage(models) as stage:
        done = Storm(plan, stage, pool, print).run()
        if done.violations:
            print("\n".join(process.log() for process in stage.processes()))
        assert done.violations == []
        assert done.hits.total() == plan.faults

"""Everything that may go wrong, in any order: a short storm. `make chaos` is the long one."""

from __future__ import annotations

import random

import pytest

from crash.chaos.pool import make_pool
from crash.chaos.stage import Stage
from crash.chaos.storm import Plan, Storm
from exact_runs import Models


@pytest.mark.timeout(300)
def test_a_storm_of_faults_loses_nothing_doubles_nothing_and_changes_no_bit(models: Models) -> None:
    plan = Plan(seed=20261130, faults=20, every=1.5, open_jobs=12, calm=60)
    pool = make_pool(models, (150, 400), random.Random(plan.seed))
    with Stage(models) as stage:
        done = Storm(plan, stage, pool, print).run()
        if done.violations:
            print("\n".join(process.log() for process in stage.processes()))
        assert done.violations == []
        assert done.hits.total() == plan.faults

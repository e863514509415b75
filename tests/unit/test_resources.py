"""What the parts of a configuration take, and who refuses it."""

from __future__ import annotations

import pytest

from penstock.cli import main
from penstock.judger import NativeJudgerConfig, exact_match
from penstock.recipes.tiny import trainer as tiny
from penstock.resources import CPUResourcesConfig, actor_demands, actor_problems
from penstock.trainer.site import LocalSite


def test_a_run_on_this_machine_refuses_actors_wherever_they_are_asked_for():
    assert list(LocalSite().problems(tiny)) == []
    asking = tiny.replace("evaluator.tasks.0.agent_loop_config.num_ray_actors", 2)
    (problem,) = LocalSite().problems(asking)
    assert problem.startswith("evaluator.tasks.0.agent_loop_config.num_ray_actors is 2; that needs Ray")
    judger = NativeJudgerConfig(reward_handler=exact_match, num_ray_actors=1)
    judged = tiny.replace("manager.tasks.0.judger_config", judger)
    (problem,) = LocalSite().problems(judged)
    assert problem.startswith("manager.tasks.0.judger_config.num_ray_actors is 1")
    # An evaluation does not mind what training asks for.
    assert list(LocalSite().problems(judged, trains=False)) == []
    assert len(list(LocalSite().problems(asking, trains=False))) == 1


def test_an_actor_inside_a_mapping_of_judgers_is_found():
    by_source = {"a": exact_match, "b": NativeJudgerConfig(reward_handler=exact_match, num_ray_actors=3)}
    config = tiny.replace("manager.tasks.0.judger_config", by_source)
    (problem,) = actor_problems(config)
    assert problem.startswith("manager.tasks.0.judger_config.b.num_ray_actors is 3")
    (demand,) = actor_demands(config).values()
    assert (demand.num_workers, demand.num_cpus, demand.memory, demand.strategy) == (3, 1.0, 1 << 30, "SPREAD")


def test_the_defaults_are_the_same_with_and_without_a_placement_group():
    config = CPUResourcesConfig(num_workers=2)
    assert (config.num_cpus_per_worker, config.cpu_memory_per_worker) == (1.0, 1 << 30)
    assert config.pg_pack_strategy == "SPREAD"


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("num_cpus_per_actor=0", "greater than 0"),
        ("num_cpus_per_actor=-1", "greater than 0"),
        ("cpu_memory_per_actor=0", "greater than 0"),
        ("num_ray_actors=-1", "greater than or equal to 0"),
        ("num_ray_actors=1", "that needs Ray: give --address local"),
    ],
)
def test_no_actor_without_resources_and_none_without_ray(capsys, tmp_path, setting, said):
    run = ["train", "tiny", "--run-dir", str(tmp_path / "run"), "--set", f"manager.tasks.0.agent_loop_config.{setting}"]
    assert main(run) == 2
    assert said in capsys.readouterr().err

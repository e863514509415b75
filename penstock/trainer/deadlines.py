"""The deadlines of a run in one table, and the order they must have.

    inside, shorter                        around it, longer             or else
    rollout_timeout_s                      manager.stall_timeout_s       the run stops before a slow rollout is given up
    judge_timeout_s                        manager.stall_timeout_s       ... before a slow judge is
    pause_timeout_s                        manager.stall_timeout_s       ... before a slow drain is
    3 x controller.request_timeout_s       manager.stall_timeout_s       ... before a request was tried three times
    controller.control_timeout_s           pause_request_timeout_s       a pause ends before a deaf engine is fenced
    controller.load_timeout_s              sync_timeout_s                a slow engine is not told from a failed sync

An engine's own deadlines begin when it begins; waiting in line has none but `stall_timeout_s`, which looks at finished
groups and stands over everything.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from penstock.engine.config import REQUEST_TRIES
from penstock.produce import PooledStrategyConfig, TaskSpecConfig

if TYPE_CHECKING:
    from penstock.trainer.config import RLTrainerConfig


class Deadline(NamedTuple):
    name: str
    """As in the configuration."""
    seconds: float
    times: int = 1
    """How often it may be used up in a row."""

    @property
    def total(self) -> float:
        return self.seconds * self.times

    def __str__(self) -> str:
        return f"{f'{self.times} x ' if self.times > 1 else ''}{self.name} ({self.seconds:g} s)"


class Order(NamedTuple):
    inner: Deadline
    outer: Deadline
    otherwise: str

    @property
    def is_kept(self) -> bool:
        return self.inner.total < self.outer.total


def deadline_orders(config: RLTrainerConfig) -> Iterator[Order]:
    """The table above for one configuration."""
    controller = config.engines.controller
    stall = Deadline("manager.stall_timeout_s", config.manager.stall_timeout_s)
    for task in config.manager.task_list:
        yield from _task_orders(f"task {task.task_name!r}", task, stall)
    if config.evaluator is not None:
        manager = config.evaluator.manager_config()
        evaluation_stall = Deadline("the evaluation's stall_timeout_s", manager.stall_timeout_s)
        for task in manager.task_list:
            yield from _task_orders(f"evaluator: task {task.task_name!r}", task, evaluation_stall)
    yield Order(
        Deadline("engines.controller.request_timeout_s", controller.request_timeout_s, REQUEST_TRIES),
        stall,
        "the run would stop before a request was tried on another engine",
    )
    yield Order(
        Deadline("engines.controller.control_timeout_s", controller.control_timeout_s),
        Deadline("manager.pause_request_timeout_s", config.manager.pause_request_timeout_s),
        "a pause would be given up before an engine that does not hear it is fenced",
    )
    yield Order(
        Deadline("engines.controller.load_timeout_s", controller.load_timeout_s),
        Deadline("sync_timeout_s", config.sync_timeout_s),
        "one slow engine would fail the whole sync",
    )


def _task_orders(where: str, task: TaskSpecConfig, stall: Deadline) -> Iterator[Order]:
    loop, strategy = task.agent_loop_config, task.produce_strategy_config
    yield Order(
        Deadline(f"{where}: agent_loop_config.rollout_timeout_s", loop.rollout_timeout_s),
        stall,
        "the run would stop before a slow rollout is given up",
    )
    yield Order(
        Deadline(f"{where}: agent_loop_config.judge_timeout_s", loop.judge_timeout_s),
        stall,
        "the run would stop before a slow judge is given up",
    )
    if isinstance(strategy, PooledStrategyConfig):
        yield Order(
            Deadline(f"{where}: produce_strategy_config.pause_timeout_s", strategy.pause_timeout_s),
            stall,
            "the run would stop before a slow drain is cut short",
        )


def deadline_problems(config: RLTrainerConfig) -> Iterator[str]:
    for order in deadline_orders(config):
        if not order.is_kept:
            yield f"{order.inner} must be below {order.outer}; {order.otherwise}"

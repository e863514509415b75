"""Which loop plays a task, and with what sampling."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from typing import Any

import pydantic

from penstock.agent_loop.base import AgentLoop
from penstock.agent_loop.rendering import TemplateProblem
from penstock.config import dotted_name, import_name, nearest
from penstock.errors import ConfigError
from penstock.ports import Description, Engine, Judger, Local, OnPause, Placement, Tokenizer, TurnLog
from penstock.resources import ActorsConfig
from penstock.rollout import SampleParams

PORTS = ("engine", "tokenizer", "judger", "turn_log")
OURS = frozenset(inspect.signature(AgentLoop.__init__).parameters) - {"self"}
"""What Penstock gives every loop; the rest of a constructor is the user's."""


class AgentLoopConfig(ActorsConfig):
    """`loop` is a class or its dotted path."""

    loop: type[AgentLoop] | str
    """A subclass of `AgentLoop`, or its dotted path."""
    sample_params: SampleParams = SampleParams()
    """How tokens are drawn, how many at most, and what ends an answer."""
    arguments: dict[str, Any] = {}
    """Extra keyword arguments of the loop's constructor."""
    judge_timeout_s: float = pydantic.Field(default=700.0, gt=0, allow_inf_nan=False)
    """For all of judging one rollout or group, the judger's own queue and retries included."""
    rollout_timeout_s: float = pydantic.Field(default=800.0, gt=0, allow_inf_nan=False)
    """For all of `generate_sample` but its waits for the engine, whose deadlines are the controller's. Below the
    manager's `stall_timeout_s`: a loop that hangs costs a rollout, not the run."""

    @property
    def actors_name(self) -> str:
        name = self.loop if isinstance(self.loop, str) else self.loop.__name__
        return f"agent loop {name.replace(':', '.').rpartition('.')[2]}"

    def actors_home(self) -> str:
        """Without the sampling: an evaluation at temperature 0 is played where training is."""
        return json.dumps(self.describe() | {"sample_params": None}, sort_keys=True)

    def problems(self) -> Iterator[str]:
        try:
            loop = import_name(self.loop) if isinstance(self.loop, str) else self.loop
        except ConfigError as error:
            yield from (f"loop: {problem}" for problem in error.problems)
            return
        if not (isinstance(loop, type) and issubclass(loop, AgentLoop)):
            yield f"loop is {dotted_name(loop)}; it must be a subclass of penstock.agent_loop.AgentLoop"
            return
        if loop.generate_sample is AgentLoop.generate_sample and loop.generate_group is AgentLoop.generate_group:
            yield f"loop: {dotted_name(loop)} does not define generate_sample"
        yield from self._argument_problems(loop)

    def _argument_problems(self, loop: type[AgentLoop]) -> Iterator[str]:
        taken, required = _constructor(loop)
        for name in self.arguments:
            if name in OURS:
                yield f"arguments: {name!r} is given to every loop; it cannot be given again"
            elif taken is not None and name not in taken:
                yield f"arguments: {dotted_name(loop)} takes no {name!r}.{nearest(name, sorted(taken - OURS))}"
        for name in sorted(required - OURS - set(self.loop_arguments())):
            yield f"arguments: {dotted_name(loop)} needs {name!r}"

    @property
    def loop_class(self) -> type[AgentLoop]:
        loop: type[AgentLoop] = import_name(self.loop) if isinstance(self.loop, str) else self.loop
        return loop

    @property
    def sets_reward(self) -> bool:
        """Whether its loop may set the reward itself. False also where there is no such loop."""
        try:
            return self.loop_class.sets_reward
        except ConfigError:
            return False

    def prompt_tools(self) -> tuple[dict[str, Any], ...]:
        """Schemas of the tools that the model is told of in the prompts of rows that name none."""
        return ()

    def template_problems(self, tokenizer: Tokenizer) -> list[TemplateProblem]:
        """What is wrong with the model's chat template for this loop; asked before anything is loaded."""
        return []

    def loop_arguments(self) -> dict[str, Any]:
        """The keyword arguments that are the loop's own, as plain data: they may travel."""
        return self.arguments

    def build(
        self,
        *,
        engine: Engine,
        tokenizer: Tokenizer,
        judger: Judger | None,
        run_seed: int = 0,
        placement: Placement | None = None,
        namespace: str = "",
        on_pause: OnPause = "abort",
        turn_log: TurnLog | None = None,
        context: int = 0,
    ) -> AgentLoop:
        """Whoever builds it closes it. `context` is the model's limit; 0 where it is not known."""
        loop = self.loop_class
        description = Description(
            name=self.actors_name,
            port="agent_loop",
            build=loop,
            arguments={
                "sample_params": self.sample_params,
                "run_seed": run_seed,
                "judge_timeout_s": self.judge_timeout_s,
                "rollout_timeout_s": self.rollout_timeout_s,
                "namespace": namespace,
                "on_pause": on_pause,
                "context": context,
                **self.loop_arguments(),
            },
            ports=PORTS,
            num_actors=self.num_ray_actors,
            num_cpus=self.num_cpus_per_actor,
            memory=self.cpu_memory_per_actor,
            home=self.actors_home(),
        )
        ports = {"engine": engine, "tokenizer": tokenizer, "judger": judger, "turn_log": turn_log}
        placed: AgentLoop = (placement or Local()).place(description, ports)
        return placed


def _constructor(loop: type[AgentLoop]) -> tuple[set[str] | None, set[str]]:
    """The keyword arguments that a loop takes (None: any) and those it needs; `**rest` goes on to its base."""
    taken: set[str] = set()
    required: set[str] = set()
    for cls in loop.__mro__:
        if "__init__" not in vars(cls):
            continue
        rest = False
        for parameter in list(inspect.signature(vars(cls)["__init__"]).parameters.values())[1:]:
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                rest = True
            elif parameter.kind is not inspect.Parameter.VAR_POSITIONAL:
                taken.add(parameter.name)
                if parameter.default is inspect.Parameter.empty:
                    required.add(parameter.name)
        if not rest:
            return taken, required
    return None, required

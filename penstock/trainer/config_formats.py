"""A configuration that an earlier version of Penstock described, in the shape it has today.

    first format    `engine`, `num_engines` and `controller` stood in the trainer; an evaluation's task was one of
                    training; two default functions had other names
    second format   one class for all losses, with their name, and the cap of importance weights in it

So a run that an earlier version began can be compared with the configuration that resumes it.
"""

from __future__ import annotations

from typing import Any

RENAMED = {
    "penstock.produce.strategy.default_is_valid_sample": "penstock.produce.strategy.default_is_valid_sample_fn",
    "penstock.produce.strategy.default_should_continue": "penstock.produce.strategy.default_should_continue_fn",
}
DROPPED = {
    "AgentLoopConfig": "request_timeout_s",
    "SingleTurnAgentLoopConfig": "request_timeout_s",
    "SyncProduceStrategyConfig": "refill",
}
"""By class: a field that is gone and whose absence changes no token, reward or gradient."""
_FIRST_MAX_REQUESTS_PER_ENGINE = 256


def in_one_shape(saved: dict[str, Any], now: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Both as plain data that can be compared; what is of today's format already is returned as it is."""
    saved = _with_loss_of_its_own(saved)
    if "engine" not in saved or "engines" in saved:
        return saved, now
    return _evaluated_alike(_from_first_format(saved)), _evaluated_alike(now)


def _with_loss_of_its_own(saved: dict[str, Any]) -> dict[str, Any]:
    train = saved.get("train")
    loss = train.get("loss") if isinstance(train, dict) else None
    if not isinstance(train, dict) or not isinstance(loss, dict) or loss.get("class") != "LossConfig":
        return saved
    fields = {name: value for name, value in loss.items() if name not in ("class", "name", "importance_cap")}
    name, cap = loss.get("name", "ppo"), loss.get("importance_cap")
    kind = {"ppo": "PPOLossConfig", "policy_gradient": "PGLossConfig"}.get(name, "CustomLossConfig")
    if kind != "PPOLossConfig":
        fields = {field: value for field, value in fields.items() if field in ("aggregation", "constant_length")}
    if kind == "CustomLossConfig":
        fields["function"] = name
    changed = {"loss": {"class": kind, **fields}}
    if cap is not None:
        changed["correction"] = {"class": "CorrectionConfig", "rollout_is": "token", "rollout_is_threshold": cap}
    return saved | {"train": train | changed}


def _from_first_format(saved: dict[str, Any]) -> dict[str, Any]:
    brought: dict[str, Any] = _renamed(saved)
    engines: dict[str, Any] = {"class": "EnginesConfig"}
    engines |= {name: brought.pop(name) for name in ("engine", "num_engines", "controller") if name in brought}
    controller: dict[str, Any] = engines.get("controller") or {}
    if controller.get("max_requests_per_engine") == _FIRST_MAX_REQUESTS_PER_ENGINE:
        # The default of then; the default of today is the engine's own limit.
        del controller["max_requests_per_engine"]
    return brought | {"engines": engines}


def _evaluated_alike(config: dict[str, Any]) -> dict[str, Any]:
    evaluator = config.get("evaluator")
    if evaluator is None:
        return config
    return config | {"evaluator": evaluator | {"tasks": [_evaluated_task(task) for task in evaluator["tasks"]]}}


def _renamed(value: Any) -> Any:
    if isinstance(value, dict):
        dropped = DROPPED.get(str(value.get("class")))
        return {key: _renamed(item) for key, item in value.items() if key != dropped}
    if isinstance(value, list):
        return [_renamed(item) for item in value]
    return RENAMED.get(value, value) if isinstance(value, str) else value


def _evaluated_task(task: dict[str, Any]) -> dict[str, Any]:
    """Each prompt is asked in order, so that the sampler is its dataset and how often, and no strategy decides."""
    if task.get("class") != "TaskSpecConfig":
        return task
    sampler = task["sampler_config"]
    return {
        "class": "EvalTaskConfig",
        "task_name": task["task_name"],
        "dataset": sampler["dataset"],
        "agent_loop_config": task["agent_loop_config"],
        "judger_config": task["judger_config"],
        "samples_per_prompt": sampler["prompt_repeat_k"],
    }

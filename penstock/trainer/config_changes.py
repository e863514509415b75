"""What changed between the configuration of a checkpoint and that of the run that resumes it.

A change is harmless when it can alter neither which tokens are sampled, how they are scored and trained, nor what a
number in the metrics means. The harmless ones are listed with their reason; every other change is refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import msgspec

from penstock.config import Config, describe
from penstock.trainer.config_formats import in_one_shape

ABSENT = "(absent)"
"""The value of a field that one of the two does not have."""


class Difference(msgspec.Struct, frozen=True):
    path: str
    """Dotted, as for `--set`."""
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.path}: {self.old!r} -> {self.new!r}"


class Harmless(NamedTuple):
    reason: str
    unless: str | None = None
    """A field and a value, `field=value`: when either configuration has it, the change is refused after all."""
    only_if: str | None = None
    """Likewise, but both must have it."""


_ENDS = "it decides when the run ends, not what a step does"
_WATCHES = "it watches the run and changes nothing in it"
_WAITS = "how long to wait for something that may be broken"
_PLACES = "where and how wide the work runs, not what it computes"
_ROUNDING = "memory against speed; the results differ by rounding only"
_GIVES_UP = "when the run gives up, not what it learns"

HARMLESS: dict[str, Harmless] = {
    "total_steps": Harmless(_ENDS, only_if="train.schedule=constant"),
    "eval_interval": Harmless(_WATCHES),
    "hf_interval": Harmless(_WATCHES),
    "checkpoint_interval": Harmless("it decides how much is done again after a crash"),
    "keep_checkpoints": Harmless("it decides how far back a run can go"),
    "trackers": Harmless(_WATCHES),
    "trackers.*": Harmless(_WATCHES),
    "cpu_threads": Harmless(_ROUNDING, unless="deterministic=true"),
    "engines.engine.max_running": Harmless(_ROUNDING, unless="deterministic=true"),
    "engines.engine.packed": Harmless(_ROUNDING),
    "engines.engine.prefill_chunk_tokens": Harmless(_ROUNDING, unless="deterministic=true"),
    "train.max_tokens_per_micro_batch": Harmless(_ROUNDING, unless="deterministic=true"),
    "train.activation_checkpointing": Harmless(_ROUNDING, unless="deterministic=true"),
    "engines.num_engines": Harmless(_PLACES, unless="deterministic=true"),
    "engines.controller.max_requests_per_engine": Harmless(_PLACES, unless="deterministic=true"),
    "engines.controller.judge_places": Harmless(_PLACES, unless="deterministic=true"),
    "engines.channel": Harmless(_PLACES),
    "resources.engines.*": Harmless(_PLACES),
    "resources.train.num_workers": Harmless(_ROUNDING, unless="deterministic=true"),
    "resources.train.*": Harmless(_PLACES),
    "train.sharding": Harmless(_ROUNDING, unless="deterministic=true"),
    "train.ranks.max_restarts": Harmless(_GIVES_UP),
    "train.ranks.keep_state": Harmless("it decides what a lost rank costs"),
    "engines.channel_backend": Harmless(_PLACES),
    "engines.weights_dir": Harmless(_PLACES),
    "*timeout_s": Harmless(_WAITS),
    "*.max_wait_s": Harmless(_WAITS),
    "*.backoff_s": Harmless(_WAITS),
    "*.breaker_backoff_s": Harmless(_WAITS),
    "*.pause_resend_interval_s": Harmless(_WAITS),
    "manager.failures.infrastructure_retries": Harmless(_WAITS),
    "manager.failures.breaker_window": Harmless(_GIVES_UP),
    "manager.failures.breaker_share": Harmless(_GIVES_UP),
    "manager.failures.max_filtered_in_a_row": Harmless(_GIVES_UP),
    "*.judger_config*.breaker_failures": Harmless(_GIVES_UP),
    "*.judger_config*.max_retries": Harmless(_WAITS),
    "*.judger_config*.num_workers": Harmless(_PLACES),
    "*.judger_config*.max_concurrency": Harmless(_PLACES),
    "*.judger_config*.max_calls_per_worker": Harmless(_PLACES),
    "*.judger_config*.max_worker_memory": Harmless(_PLACES),
    "*.num_ray_actors": Harmless(_PLACES),
    "*.num_cpus_per_actor": Harmless(_PLACES),
    "*.cpu_memory_per_actor": Harmless(_PLACES),
}
"""By dotted path; `*` stands for anything."""
NEVER = {"replay_buffer.storage": "a run is resumed from its ledger, which only 'sqlite' has"}
"""Changes that nobody can allow."""


def config_differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[Difference]:
    """Between two `Config.describe()`, one of which may come from a file, and from an earlier version."""
    return list(_differences(*in_one_shape(_plain(saved), _plain(now)), ""))


def refused_differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[Difference]:
    """Those of `config_differences` with which a resumed run would not mean the same."""
    return [found for found in config_differences(saved, now) if why_harmless(found, saved, now) is None]


def why_harmless(difference: Difference, saved: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """The reason, or None for a difference that is refused."""
    if difference.path.startswith(("manager.tasks", "evaluator")) and ".arguments." in difference.path:
        # A user's own: what it means is not known here, whatever it is called.
        return None
    for pattern, rule in HARMLESS.items():
        if not fnmatchcase(difference.path, pattern):
            continue
        if rule.unless is not None and (_has(saved, rule.unless) or _has(now, rule.unless)):
            return None
        if rule.only_if is not None and not (_has(saved, rule.only_if) and _has(now, rule.only_if)):
            return None
        return rule.reason
    return None


def has_field(config: Mapping[str, Any], path: str) -> bool:
    """Whether a described configuration has a value at this dotted path."""
    return _at(config, path) is not ABSENT


def harmless_fields() -> dict[str, list[str]]:
    """The fields that may change, by the reason why; for people."""
    fields: dict[str, list[str]] = {}
    for path, rule in HARMLESS.items():
        condition = f" (not with {rule.unless})" if rule.unless else f" (with {rule.only_if})" if rule.only_if else ""
        fields.setdefault(rule.reason, []).append(path + condition)
    return fields


def _differences(old: Any, new: Any, path: str) -> Iterator[Difference]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*old, *(key for key in new if key not in old)]:
            if (key in old) != (key in new) and _is_default(old, new, key):
                # A field that one of the two versions does not have yet.
                continue
            yield from _differences(old.get(key, ABSENT), new.get(key, ABSENT), f"{path}.{key}" if path else key)
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for index, (before, after) in enumerate(zip(old, new, strict=True)):
            yield from _differences(before, after, f"{path}.{index}")
    elif json.dumps(old) != json.dumps(new):
        # As text: NaN is itself, and True is not 1.
        yield Difference(path, old, new)


def _is_default(old: dict[str, Any], new: dict[str, Any], key: str) -> bool:
    """Whether the one that has the field has the value that the other would have had without saying so."""
    described, name = (new if key in new else old), new.get("class")
    if name is None or old.get("class") != name:
        return False
    for found in _config_classes(Config):
        field = found.model_fields.get(key)
        if found.__name__ == name and field is not None and not field.is_required():
            default = _plain({key: describe(field.get_default(call_default_factory=True, validated_data={}))})
            if not list(_differences(default, {key: described[key]}, "")):
                return True
    return False


def _config_classes(base: type[Config]) -> Iterator[type[Config]]:
    for found in base.__subclasses__():
        yield found
        yield from _config_classes(found)


def _plain(config: Mapping[str, Any]) -> Any:
    """As it looks after it was in a file."""
    return json.loads(json.dumps(config, default=repr))


def _has(config: Mapping[str, Any], condition: str) -> bool:
    path, _, wanted = condition.partition("=")
    value = _at(config, path)
    return value == wanted or json.dumps(value, default=repr) == wanted


def _at(config: Mapping[str, Any], path: str) -> Any:
    value: Any = config
    for part in path.split("."):
        if isinstance(value, list) and part.isdecimal() and int(part) < len(value):
            value = value[int(part)]
        elif isinstance(value, Mapping) and part in value:
            value = value[part]
        else:
            return ABSENT
    return value

from __future__ import annotations

from typing import Any

import pytest

from penstock.produce import ProduceProgress


def two_then_one(batch_size: int, step: int) -> dict[str, int]:
    return {"a": 2, "b": batch_size - 2} if step % 2 else {"a": batch_size, "b": 0}


def test_a_run_begins_at_step_one_with_nothing_due() -> None:
    progress = ProduceProgress.build(["a", "b"])
    assert (progress.next_consumer_step, progress.producer_future_step, progress.target_upto_future_step) == (1, 1, 0)
    assert progress.target_samples == progress.consumed_samples == {"a": 0, "b": 0}


def test_making_steps_due_adds_each_once_and_answers_the_last() -> None:
    progress = ProduceProgress.build(["a", "b"])
    assert progress.ensure_target_upto(3, 3, allocate_batch_sizes=two_then_one) == {"a": 2, "b": 1}
    assert progress.ensure_target_upto(3, 2, two_then_one) == {"a": 3, "b": 0}
    assert progress.ensure_target_upto(3, 3, two_then_one) == {"a": 2, "b": 1}
    assert progress.target_samples == {"a": 7, "b": 2}
    assert progress.last_due_step == {"a": 3, "b": 3}
    progress.ensure_target_upto(3, 4, two_then_one)
    assert progress.last_due_step == {"a": 4, "b": 3}


def test_consuming_never_shrinks_the_target_and_a_returned_batch_is_subtracted() -> None:
    progress = ProduceProgress.build(["a", "b"])
    progress.ensure_target_upto(3, 1, two_then_one)
    progress.begin_consume(1)
    progress.mark_consumed({"a": 2, "b": 1})
    progress.finish_consume(1)
    assert progress.next_consumer_step == 2
    assert progress.target_samples == progress.consumed_samples == {"a": 2, "b": 1}
    progress.mark_returned({"a": 2, "b": 1})
    assert progress.target_samples == {"a": 2, "b": 1}
    assert progress.consumed_samples == {"a": 0, "b": 0}


def test_a_colocated_call_has_exactly_its_sizes_due() -> None:
    progress = ProduceProgress.build_local(["a", "b"], {"a": 2, "b": 1}, 7, {"a": 10, "b": 5})
    assert progress.target_samples == {"a": 12, "b": 6}
    assert progress.consumed_samples == {"a": 10, "b": 5}
    assert progress.next_consumer_step == progress.producer_future_step == progress.target_upto_future_step == 7


def test_the_window_is_read_once() -> None:
    progress = ProduceProgress.build(["a"])
    progress.windows["a"].produced_rollouts = 3
    progress.produce_time_s = 2.0
    windows, seconds = progress.take_window()
    assert (windows["a"].produced_rollouts, seconds) == (3, 2.0)
    assert (progress.windows["a"].produced_rollouts, progress.produce_time_s) == (0, 0.0)


def saved() -> dict[str, Any]:
    progress = ProduceProgress.build(["a", "b"])
    progress.ensure_target_upto(3, 3, two_then_one)
    progress.mark_consumed({"a": 2, "b": 1})
    progress.finish_consume(1)
    progress.advance_future_step()
    progress.windows["a"].raw_reward_sum = 1.5
    return progress.state_dict()


def test_a_saved_progress_is_loaded_in_place() -> None:
    progress = ProduceProgress.build(["a", "b"])
    target, consumed = progress.target_samples, progress.consumed_samples
    progress.load_state_dict(saved())
    assert progress.state_dict() == saved()
    assert progress.target_samples is target
    assert progress.consumed_samples is consumed


def test_missing_window_metrics_load_as_zero() -> None:
    state = saved()
    del state["windows"], state["produce_time_s"]
    progress = ProduceProgress.build(["a", "b"])
    progress.windows["a"].failed = 3
    progress.load_state_dict(state)
    assert progress.windows["a"].failed == 0


@pytest.mark.parametrize("key", ["target_samples", "consumed_samples"])
def test_a_missing_task_is_an_error(key: str) -> None:
    state = saved()
    del state[key]["b"]
    with pytest.raises(ValueError, match=key):
        ProduceProgress.build(["a", "b"]).load_state_dict(state)


def test_a_restart_goes_on_after_the_checkpoint_and_counts_what_waits_as_available() -> None:
    progress = ProduceProgress.build(["a", "b"])
    target = progress.target_samples
    progress.load_state_dict(saved())
    progress.restart(5, {"a": 12, "b": 3})
    assert progress.consumed_samples == progress.target_samples == {"a": 12, "b": 3}
    assert progress.target_samples is target
    assert progress.next_consumer_step == progress.producer_future_step == 6
    assert progress.target_upto_future_step == 5

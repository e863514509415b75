"""What a run computes in is found once and kept, also on another CPU."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from transformers import LlamaConfig

from penstock.engine import EmbeddedEngineConfig, EnginesConfig
from penstock.learn import TrainWorkerConfig
from penstock.models.arithmetic import cpu_name
from penstock.models.kernels import kernels, kinds
from penstock.recipes.tiny import trainer
from penstock.trainer.arithmetic import STATE, Arithmetic, find_arithmetic, kernels_note
from penstock.trainer.lines import arithmetic_line


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a model whose weights nobody reads."""
    directory = tmp_path_factory.mktemp("model")
    LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4).save_pretrained(
        directory
    )
    return directory


TINY = trainer.replace("deterministic", False)
BOTH = TINY.replace("train", TrainWorkerConfig(dtype="auto")).replace(
    "engines", EnginesConfig(engine=EmbeddedEngineConfig(dtype="auto"))
)


def test_a_configuration_that_says_what_it_wants_leaves_nothing_to_find(model_dir: Path) -> None:
    assert find_arithmetic(TINY, model_dir, None, trains=True) == (Arithmetic(), None)
    assert Arithmetic().settle(TINY) == TINY


def test_what_is_found_takes_the_place_of_auto_and_is_told(model_dir: Path) -> None:
    found, event = find_arithmetic(BOTH, model_dir, None, trains=True)
    assert event is not None and (event.train, event.engine, event.cpu) == (found.train, found.engine, cpu_name())
    settled = found.settle(BOTH)
    assert settled.train.dtype == found.train
    assert settled.engines.engine == EmbeddedEngineConfig(dtype=found.engine)  # type: ignore[arg-type]
    assert "auto" not in arithmetic_line(event) and cpu_name() in arithmetic_line(event)


@pytest.mark.parametrize("packed", [None, True, False])
def test_the_engine_is_tried_with_matrices_packed_as_they_were_asked_for_and_the_trainer_without(
    packed: bool | None, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []
    monkeypatch.setattr("penstock.models.arithmetic.try_out", lambda work: tried.append(work) or {"float32": 1.0})
    find_arithmetic(BOTH.replace("engines.engine.packed", packed), model_dir, None, trains=True)
    assert {work.trains: work.packed for work in tried} == {True: None, False: packed}


@pytest.mark.skipif(not kinds(), reason="nothing is compiled for this processor")
def test_a_run_says_that_its_engine_does_without_what_could_have_been_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("penstock.models.kernels.load", lambda kind: None)
    kernels.cache_clear()
    try:
        without = [kernels_note(config) for config in (TINY, BOTH)]
        unasked = [
            kernels_note(BOTH.replace("deterministic", True)),
            kernels_note(BOTH.replace("engines.engine.device", "cuda")),
        ]
    finally:
        kernels.cache_clear()
    assert all(note is not None and "install gcc" in note for note in without)
    assert unasked == [None, None]


def test_an_evaluation_asks_for_the_engine_alone(model_dir: Path) -> None:
    found, event = find_arithmetic(BOTH, model_dir, None, trains=False)
    assert found.train is None and found.engine is not None
    assert event is not None and "training" not in arithmetic_line(event)


def test_a_deterministic_run_computes_in_float32(model_dir: Path) -> None:
    found, event = find_arithmetic(BOTH.replace("deterministic", True), model_dir, None, trains=True)
    assert (found.train, found.engine) == ("float32", "float32")
    assert event is not None and not event.others_take


def test_a_run_goes_on_in_what_it_began_with_on_another_cpu(model_dir: Path) -> None:
    before = Arithmetic(train="bfloat16", engine="bfloat16", cpu="A Xeon (AMX)")
    found, event = find_arithmetic(BOTH, model_dir, {STATE: msgspec.to_builtins(before)}, trains=True)
    # Also the CPU is the first one: the next resume says it again.
    assert found == before
    assert event is not None
    assert arithmetic_line(event) == (
        f"arithmetic: training bfloat16, engine bfloat16, on {cpu_name()}; as the run began on A Xeon (AMX); "
        "what is fastest here was not asked"
    )


def test_a_part_that_says_auto_only_since_the_resume_is_tried_then(model_dir: Path) -> None:
    before = Arithmetic(train="bfloat16", cpu="A Xeon (AMX)")
    found, _ = find_arithmetic(BOTH, model_dir, {STATE: msgspec.to_builtins(before)}, trains=True)
    assert found.train == "bfloat16" and found.engine is not None


def test_a_checkpoint_of_an_earlier_version_names_none_and_it_is_found_anew(model_dir: Path) -> None:
    found, event = find_arithmetic(BOTH, model_dir, {}, trains=True)
    assert found.train is not None and event is not None and not event.began_on

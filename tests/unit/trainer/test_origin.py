"""A run goes on only with the model it was made from."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from penstock.errors import CheckpointError, StorageError
from penstock.trainer.origin import ModelOrigin, model_origin, require_same_model

FILES = ["model.safetensors", "config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja"]


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    for name in FILES:
        (tmp_path / name).write_text(name)
    return tmp_path


def state_of(origin: ModelOrigin) -> dict[str, object]:
    return {"made_from": msgspec.to_builtins(origin)}


def test_a_model_is_its_weights_its_tokenizer_and_its_configuration_and_nothing_else(model_dir: Path) -> None:
    before = model_origin(model_dir)
    assert list(before.weights) == ["model.safetensors"]
    assert list(before.tokenizer) == ["chat_template.jinja", "tokenizer.json"]
    assert list(before.config) == ["config.json", "generation_config.json"]
    (model_dir / "README.md").write_text("a note")
    (model_dir / "figures").mkdir()
    assert model_origin(model_dir) == before
    require_same_model(state_of(before), 7, before)


@pytest.mark.parametrize("name", FILES)
def test_a_changed_a_new_and_a_missing_file_are_named(model_dir: Path, name: str) -> None:
    state, file = state_of(model_origin(model_dir)), model_dir / name
    file.write_text("something else")
    with pytest.raises(CheckpointError, match=r"checkpoint 7 was made from another model") as changed:
        require_same_model(state, 7, model_origin(model_dir))
    assert changed.value.problems[1].endswith(f": {name} has another content")
    file.unlink()
    with pytest.raises(CheckpointError, match=f"{name} is gone"):
        require_same_model(state, 7, model_origin(model_dir))
    with pytest.raises(CheckpointError, match=f"{name} is new"):
        less = state_of(model_origin(model_dir))
        file.write_text("again")
        require_same_model(less, 7, model_origin(model_dir))


def test_the_same_model_in_another_directory_is_the_same_model(model_dir: Path, tmp_path: Path) -> None:
    moved = msgspec.structs.replace(model_origin(model_dir), directory="/elsewhere")
    require_same_model(state_of(moved), 7, model_origin(model_dir))
    other = msgspec.structs.replace(moved, config={})
    with pytest.raises(CheckpointError, match=r"\(it was in /elsewhere\)"):
        require_same_model(state_of(other), 7, model_origin(model_dir))


def test_a_checkpoint_of_an_earlier_version_is_compared_by_what_it_names(model_dir: Path) -> None:
    now = model_origin(model_dir)
    require_same_model({}, 7, now)
    require_same_model({"weights": now.weights}, 0, now)
    with pytest.raises(CheckpointError, match=r"its weights: model\.safetensors has another content"):
        require_same_model({"weights": {"model.safetensors": "other"}}, 0, now)


def test_a_model_that_cannot_be_read_is_a_storage_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot be read"):
        model_origin(tmp_path / "missing")


def test_a_reference_or_a_teacher_with_other_weights_is_named(
    model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    teacher = tmp_path_factory.mktemp("teacher")
    (teacher / "model.safetensors").write_text("wise")
    (teacher / "tokenizer.json").write_text("words")
    beside = {"the teacher": teacher}
    state = state_of(model_origin(model_dir, beside))
    require_same_model(state, 7, model_origin(model_dir, beside))
    (teacher / "model.safetensors").write_text("wiser")
    with pytest.raises(CheckpointError, match=r"the teacher: model\.safetensors has another content"):
        require_same_model(state, 7, model_origin(model_dir, beside))
    # One that the run no longer has is a change of its configuration, which is compared elsewhere.
    require_same_model(state, 7, model_origin(model_dir))

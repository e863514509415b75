from __future__ import annotations

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from penstock.errors import ModelError
from penstock.models import find_cached, model_context, resolve_model
from penstock.models.resolve import install


def write_model(directory: Path, **config: object) -> Path:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "model.safetensors").write_bytes(b"")
    (directory / "tokenizer.json").write_text("{}")
    return directory


def test_a_local_directory_is_taken_as_it_is(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "mine", max_position_embeddings=512)
    assert resolve_model(str(directory)) == directory
    assert model_context(directory) == 512


def test_a_directory_that_lacks_files_is_refused_with_all_their_names(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"lacks config\.json, \*\.safetensors, a tokenizer"):
        resolve_model(str(tmp_path))
    with pytest.raises(ModelError, match="does not exist"):
        resolve_model(str(tmp_path / "nowhere"))


@pytest.mark.parametrize("content", ["{", "[]", "{}"])
def test_a_config_without_a_context_length_is_refused_by_name(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError, match=r"config\.json"):
        model_context(tmp_path)


def test_an_unknown_name_is_refused_with_the_nearest_match() -> None:
    with pytest.raises(ModelError, match=r"Did you mean 'smollm2-135m'\?"):
        resolve_model("smollm-135m")


def test_an_interrupted_making_leaves_nothing(tmp_path: Path) -> None:
    target = tmp_path / "models" / "tiny-1"

    def interrupted(directory: Path) -> None:
        (directory / "config.json").write_text("{}")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        install(target, interrupted)
    assert list(target.parent.iterdir()) == []


def test_two_that_make_the_same_model_at_once_get_one_whole_model(tmp_path: Path) -> None:
    target = tmp_path / "models" / "tiny-1"
    both_are_at_it = Barrier(2, timeout=10)

    def make(directory: Path) -> None:
        (directory / "config.json").write_text("{}")
        both_are_at_it.wait()
        (directory / "model.safetensors").write_bytes(b"weights")

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda _: install(target, make), range(2))) == [target, target]
    assert sorted(path.name for path in target.iterdir()) == ["config.json", "model.safetensors"]
    assert list(target.parent.iterdir()) == [target]


def test_what_a_killed_process_left_is_removed_after_a_day(tmp_path: Path) -> None:
    old, recent = tmp_path / ".partial-old", tmp_path / ".partial-recent"
    for partial in (old, recent):
        (partial / "tiny-1").mkdir(parents=True)
    yesterday = time.time() - 25 * 3600
    os.utime(old, (yesterday, yesterday))
    install(tmp_path / "tiny-1", lambda directory: None)
    assert not old.exists()
    assert recent.exists()


def test_a_cache_that_cannot_be_written_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match=r"the model cache .*file/models cannot be written"):
        install(tmp_path / "file" / "models" / "tiny-1", lambda directory: None)


def test_a_half_made_model_is_not_found_in_the_cache(tmp_path: Path) -> None:
    (tmp_path / ".partial-x" / "tiny-1").mkdir(parents=True)
    assert find_cached("tiny", cache=tmp_path) is None

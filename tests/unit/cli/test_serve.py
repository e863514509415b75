from __future__ import annotations

from pathlib import Path

import pytest

from penstock.cli import main
from penstock.cli.serve import model_of
from penstock.errors import ConfigError


def test_of_a_run_the_newest_weights_are_served(tmp_path: Path) -> None:
    assert model_of("tiny") == "tiny"
    (tmp_path / "hf").mkdir()
    with pytest.raises(ConfigError, match="exported no weights yet"):
        model_of(str(tmp_path))
    for name in ("step-9", "step-10"):
        (tmp_path / "hf" / name).mkdir()
    assert model_of(str(tmp_path)) == str(tmp_path / "hf" / "step-10")
    (tmp_path / "hf" / "final").mkdir()
    assert model_of(str(tmp_path)) == str(tmp_path / "hf" / "final")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--host", "0.0.0.0", "--no-key"], "can be reached from other machines"),
        (["--host", "::", "--no-key"], "can be reached from other machines"),
        (["--key", "x", "--no-key"], "exclude each other"),
        (["--key", ""], "--no-key asks for none"),
        (["--port", "70000"], "ports go up to 65535"),
        (["--tool-parser", "hermse"], "Did you mean 'hermes'?"),
        (["--max-tokens", "0"], "max_tokens is 0"),
    ],
)
def test_what_cannot_be_served_is_refused_before_a_model_is_loaded(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "no-such-model", *options]) == 2
    assert said in capsys.readouterr().err


def test_what_people_put_beside_the_exported_weights_is_not_served(tmp_path: Path) -> None:
    for name in ("step-9", "step-10", "step-10-copy"):
        (tmp_path / "hf" / name).mkdir(parents=True)
    assert model_of(str(tmp_path)) == str(tmp_path / "hf" / "step-10")

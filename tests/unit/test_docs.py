"""What the documents name exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from penstock.cli.recipes import recipe_names

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_every_test_that_the_fault_matrix_names_exists():
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    named = re.findall(r"`(test_\w+)`", (ROOT / "docs" / "faults.md").read_text())
    assert len(named) > 20
    assert [name for name in named if f"def {name}(" not in tests] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_leads_to_a_file(document):
    links = re.findall(r"\]\(([^)#:]+)\)", document.read_text())
    assert [link for link in links if not (document.parent / link).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_recipe_and_make_target_that_is_named_exists(document):
    text = document.read_text()
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert set(re.findall(r"(?:`|^)make ([a-z-]+)", text, re.MULTILINE)) <= targets
    trained = set(re.findall(r"penstock train ([a-z0-9-]+)\b(?!\.py|_)", text))
    assert trained - {"my"} <= set(recipe_names())


def test_the_configuration_in_the_readme_is_a_configuration(tmp_path, monkeypatch):
    from penstock.cli.config_file import load_config

    code = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert code is not None
    (tmp_path / "readme_run.py").write_text(code.group(1))
    (tmp_path / "sums.jsonl").write_text(
        '{"prompt": "What is 2 + 3?", "reward_model": {"ground_truth": "5"}, "data_source": "sums"}\n'
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    load_config("readme_run.py").check()


def test_the_refusal_in_the_readme_is_what_is_printed(tmp_path, monkeypatch, capsys):
    from penstock.cli import main

    readme = (ROOT / "README.md").read_text()
    code = re.search(r"```python\n(.*?)```", readme, re.DOTALL)
    assert code is not None
    (tmp_path / "my_run.py").write_text(code.group(1).replace("prompt_repeat_k=8", "prompt_repeat_kk=8"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["train", "my_run.py"]) == 2
    assert f"```\n{capsys.readouterr().err}```\n" in readme

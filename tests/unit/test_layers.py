"""The allowed directions between the parts of Penstock, checked on the source."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "penstock"

# Each imports only from its left; parts between two bars do not import each other.
LAYERS = (
    "lazy, tokens, unbuffered | rollout, played | errors | config, environment, garbage, wire, child | events, ports"
    " | resources | data, replay, judger"
    " | agent_loop | produce | models | weights | learn, engine | trainer | testing | plan"
    " | cluster, view, recipes | cli"
)
RANK = {part.strip(): rank for rank, layer in enumerate(LAYERS.split("|")) for part in layer.split(",")}
WITHOUT_TORCH = RANK["produce"]
HEAVY = {"torch", "transformers", "tokenizers", "accelerate", "ray", "vllm"}


def imported_modules(tree: ast.AST, package: str) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import, wherever it stands; `from a import b` gives `a.b`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, base]) if base else ".".join(parents)
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}"


def violations(root: Path) -> list[str]:
    found = []
    vllm_files = set()
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        part = relative.parts[0].removesuffix(".py")
        if part == "__init__":
            continue
        if part not in RANK:
            found.append(f"{path}:1: penstock/{part} is in no layer; give it one")
            continue
        package = ".".join(["penstock", *relative.parts[:-1]])
        for line, name in imported_modules(ast.parse(path.read_text(encoding="utf-8")), package):
            top, _, rest = name.partition(".")
            if top == "vllm":
                vllm_files.add(relative)
            problem = _own_problem(part, rest.partition(".")[0]) if top == "penstock" else _foreign_problem(part, top)
            if problem:
                found.append(f"{path}:{line}: {problem}")
    if len(vllm_files) > 1:
        found.append(f"vllm is imported in {sorted(map(str, vllm_files))}; one file may")
    return found


def _own_problem(part: str, imported: str) -> str:
    if imported == part:
        return ""
    if imported not in RANK:
        # A name of penstock/__init__.py: it stands for the whole package, so only the last layers may use it.
        return "" if part in ("cli", "recipes") else f"{part} imports {imported!r} from the package itself"
    return "" if RANK[imported] < RANK[part] else f"{part} imports {imported}, which is not to its left"


def _foreign_problem(part: str, top: str) -> str:
    if top == "ray" and part != "cluster":
        return f"{part} imports ray; only cluster may"
    if top in HEAVY and RANK[part] <= WITHOUT_TORCH:
        return f"{part} imports {top}; nothing up to produce may"
    return ""


def test_every_import_goes_to_the_left() -> None:
    assert violations(PACKAGE) == []


def test_nothing_outside_cluster_knows_of_ray() -> None:
    """In the words of a search: what a file says about Ray to people is its own business."""
    words = re.compile(r"^\s*(import|from) ray\b|\.remote\(|ObjectRef", re.MULTILINE)
    found = [
        f"{path}: {match.group().strip()}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.relative_to(PACKAGE).parts[0] != "cluster"
        for match in words.finditer(path.read_text(encoding="utf-8"))
    ]
    assert found == []


@pytest.mark.parametrize(
    ("file", "source", "said"),
    [
        ("data/x.py", "import os\nfrom penstock.trainer import Trainer\n", "data/x.py:2: data imports trainer"),
        ("data/x.py", "from penstock.judger import exact_match\n", "data imports judger"),
        ("data/x.py", "from ..engine import config\n", "data imports engine"),
        ("data/x.py", "from .rows import read\n", ""),
        ("produce/x.py", "def build():\n    import torch\n", "produce/x.py:2: produce imports torch"),
        ("learn/x.py", "import torch\n", ""),
        ("learn/x.py", "import ray\n", "learn imports ray; only cluster may"),
        ("cluster/x.py", "import ray\n", ""),
        ("learn/x.py", "from penstock import SampleParams\n", "from the package itself"),
        ("misc/x.py", "", "penstock/misc is in no layer"),
    ],
)
def test_a_wrong_import_is_named_with_its_line(tmp_path: Path, file: str, source: str, said: str) -> None:
    target = tmp_path / file
    target.parent.mkdir()
    target.write_text(source)
    found = violations(tmp_path)
    assert said in found[0] if said else found == []


def test_vllm_is_allowed_in_one_file_only(tmp_path: Path) -> None:
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "a.py").write_text("import vllm\n")
    assert violations(tmp_path) == []
    (tmp_path / "engine" / "b.py").write_text("from vllm import LLM\n")
    assert "one file may" in violations(tmp_path)[0]


RECIPES = sorted(path.stem for path in (PACKAGE / "recipes").glob("*.py") if not path.stem.startswith("_"))


def test_neither_the_package_nor_a_recipe_nor_the_controller_imports_torch_or_ray() -> None:
    """One fresh process for all of them; each name is said as soon as a heavy module appears.

    The controller has an actor of its own, which everything waits for.
    """
    recipes = [f"penstock.recipes.{name}" for name in RECIPES]
    modules = ["penstock", "penstock.cli", *recipes, "penstock.engine.controller"]
    program = (
        "import importlib, sys\n"
        f"for name in {modules!r}:\n"
        "    importlib.import_module(name)\n"
        f"    heavy = sorted({HEAVY!r} & set(sys.modules))\n"
        "    assert not heavy, f'{name} imports {heavy}'\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr

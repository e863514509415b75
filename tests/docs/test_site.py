"""The documents as a site: it builds without a warning, and nothing in it leads nowhere or leaves the machine."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from doc_commands import ROOT

import penstock
from penstock.cli.config_file import load_config
from penstock.errors import ConfigError
from penstock.trainer.metric_names import meaning

LOADS = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}


class Page(HTMLParser):
    """What a page names: places in it, links to others, and what a browser fetches by itself."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.ids |= {found["id"]} if "id" in found else set()
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        if tag in LOADS and LOADS[tag] in found and found.get("rel") != "canonical":
            self.fetched.append(found[LOADS[tag]])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(directory)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment, timeout=120)
    assert built.returncode == 0 and "WARNING" not in built.stderr, built.stderr
    return directory


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {path: Page(path) for path in site.rglob("*.html")}


def test_every_document_is_a_page_of_the_site(site: Path) -> None:
    documents = {path.stem for path in (ROOT / "docs").glob("*.md")}
    assert documents <= {path.stem for path in site.glob("*.html")}


def test_every_link_leads_to_a_page_and_a_place_on_it(pages: dict[Path, Page]) -> None:
    lost = []
    for path, page in pages.items():
        for link in page.links:
            file, _, place = link.partition("#")
            if "://" in link or file.startswith("mailto:") or path.name == "404.html":
                continue
            target = (path.parent / file).resolve() if file else path
            if not target.exists() or (place and target in pages and place not in pages[target].ids):
                lost.append(f"{path.name}: {link}")
    assert lost == []


def test_a_browser_fetches_nothing_from_elsewhere(pages: dict[Path, Page], site: Path) -> None:
    fetched = {link for page in pages.values() for link in page.fetched}
    assert fetched and [link for link in fetched if "//" in link] == []
    styles = "\n".join(path.read_text() for path in site.rglob("*.css"))
    assert re.findall(r"url\([\"']?https?://[^)]*\)|@import[^;]*https?:", styles) == []


def test_every_new_name_of_an_old_one_exists() -> None:
    """The middle column of "Coming from": fields, classes, functions and options."""
    text = (ROOT / "docs" / "coming-from.md").read_text()
    rows = re.findall(r"^\| `(.*?)\| (.*?) \| (.*?) ?\|$", text, re.MULTILINE)
    reference = (ROOT / "docs" / "reference.md").read_text()
    known = set(re.findall(r"^\| `(\w+)` \|", reference, re.MULTILINE)) | set(penstock.__all__)
    named = {
        word
        for _, new, _ in rows
        for code in re.findall(r"`([^`]+)`", new)
        for word in re.findall(r"-*\b[a-zA-Z]\w*", code)
    }
    assert len(rows) > 100 and len(named) > 60
    assert named - known - {"--resume", "auto"} == set()


def test_every_metric_that_a_document_names_is_one() -> None:
    kinds = "reward|judger|length|staleness|tokens|train|share|eval|produce|turns|tools|distill"
    others = {"train/<name>", "eval/<name>", "eval/model_step", "eval/pass_at_4"}
    """A user's own, and what services call theirs."""
    lost = []
    for document in sorted((ROOT / "docs").glob("*.md")):
        for name in re.findall(rf"`((?:{kinds})/[\w/<>@]+)`", document.read_text()):
            known = meaning(re.sub(r"<\w+>", "x", name)) is not None
            if not known and not (ROOT / "penstock" / name).exists() and name not in others:
                lost.append(f"{document.name}: {name}")
    assert lost == []


@pytest.mark.parametrize("name", ["dataset.md", "trackers.md"])
def test_the_python_of_a_document_makes_configurations(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sums.jsonl").write_text(
        '{"prompt": "What is 2 + 3?", "reward_model": {"ground_truth": "5"}, "data_source": "sums"}\n'
    )
    (tmp_path / "questions.jsonl").write_text('{"question": "What is 2 + 3?", "answer": "5"}\n')
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / name).read_text(), re.DOTALL)
    assert blocks
    for number, block in enumerate(blocks):
        file = tmp_path / f"{Path(name).stem}_{number}.py"
        file.write_text(block)
        if "trainer =" in block:
            try:
                load_config(str(file))
            except ConfigError as refused:  # for a package of an extra that is not here, and for nothing else
                assert all(" is not installed" in problem for problem in refused.problems), refused
        else:
            found: dict[str, object] = {}
            exec(compile(block, str(file), "exec"), found)
            found["dataset"].check()  # type: ignore[attr-defined]

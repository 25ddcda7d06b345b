"""Links resolve, commands exist, no page mentions one person's machine."""

from __future__ import annotations

import ast
import re
import subprocess
import xml.etree.ElementTree as ET
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest

from baton.runtime.config import CoordinatorConfig, WorkerConfig
from launch.up_config import UpConfig
from tests.docs.generate import ROOT

PAGES = sorted(
    p
    for p in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").glob("*.md"))
    if not any(part.startswith(".") for part in p.relative_to(ROOT).parts)
)
IMAGES = sorted((ROOT / "docs/images").glob("*.svg"))
TEXT = {".py", ".md", ".h", ".cpp", ".proto", ".toml", ".sh", ".html", ".in", ".yaml"}
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_NAME_LINK = re.compile(r"\[`(\w+(?:\.\w+)?)`\]\((\S+\.py)\)")
_CODE = re.compile(r"^(```|~~~).*?^\1", re.DOTALL | re.MULTILINE)
_MACHINE = re.compile(r"/(?:work|root|home/\w+|tmp)/|/tmp\b(?!/)")


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", _CODE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", h).lower() for h in headings)
    return {re.sub(r"[^\w\- ]", "", h).replace(" ", "-") for h in plain}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_resolve(page: Path) -> None:
    for target in _LINK.findall(_CODE.sub("", page.read_text(encoding="utf-8"))):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{target} is not there"
        assert file.is_relative_to(ROOT), f"{target} leaves the repository"
        if anchor:
            assert anchor in anchors(file), f"{target}: no such heading"


def test_linked_functions_and_classes_are_in_the_files_that_the_links_name() -> None:
    links = [
        (page, text, (page.parent / target).resolve())
        for page in PAGES
        for text, target in _NAME_LINK.findall(_CODE.sub("", page.read_text(encoding="utf-8")))
    ]
    assert len(links) > 60
    missing = [f"{name_of(page)}: {text}" for page, text, file in links if text not in defined_in(file)]
    assert not missing, "\n".join(missing)


@cache
def defined_in(file: Path) -> frozenset[str]:
    """Functions and classes of a module, and the methods of its classes as Class.method."""
    defined: set[str] = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            defined.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = (each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef))
            defined.update(f"{node.name}.{each.name}" for each in methods)
    return frozenset(defined)


@pytest.mark.parametrize("file", [*PAGES, *IMAGES], ids=name_of)
def test_pages_contain_no_machine_specific_path(file: Path) -> None:
    found = _MACHINE.search(file.read_text(encoding="utf-8"))
    assert found is None, f"{found and found[0]} in {name_of(file)}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_make_targets_in_the_pages_exist(page: Path) -> None:
    verbs = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    text = page.read_text(encoding="utf-8")
    used = re.findall(r"^(?:    |`)make ([a-z-]+(?: [a-z-]+)*)", text, re.MULTILINE)
    used += re.findall(r"`make ([a-z-]+(?: [a-z-]+)*)", text)
    missing = {verb for words in used for verb in words.split()} - verbs
    assert not missing, f"the Makefile has no {missing}"


def test_readme_links_ten_existing_files() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    section = text.split("## The life of one request")[1].split("\n## ")[0]
    steps = re.split(r"^\d+\. ", section, flags=re.MULTILINE)[1:]
    files = [f for step in steps for f in re.findall(r"\]\(([\w/]+\.py)\)", step)]
    assert len(steps) == len(files) == len(set(files)) == 10
    assert all((ROOT / f).is_file() for f in files)


def test_readme_shows_make_up_and_make_test_first() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert 0 < text.index("    make up\n") < text.index("    make test\n") < text.index("## The system")


def test_flags_of_baton_in_the_pages_exist() -> None:
    from launch.cli import baton

    for page in PAGES:
        for command, rest in re.findall(r"\bbaton (up|bench|ps)\b([^\n`|]*)", page.read_text(encoding="utf-8")):
            known = {name for p in baton.commands[command].params for name in (*p.opts, *p.secondary_opts)}
            for flag in re.findall(r"(--[a-z][a-z-]*)", rest):
                assert flag in known, f"{name_of(page)}: baton {command} has no {flag}"


def test_variables_in_the_pages_exist() -> None:
    sources = (ROOT / folder for folder in ("baton", "benchmarks", "coordinator", "launch"))
    code = "".join(p.read_text(encoding="utf-8") for folder in sources for p in folder.rglob("*.py"))
    options = {f"BATON_{f.name.upper()}" for cls in (UpConfig, CoordinatorConfig, WorkerConfig) for f in fields(cls)}
    examples = {"BATON_PROT", "BATON_KEY"}  # a misspelt one, and one of another program
    for page in PAGES:
        for name in set(re.findall(r"\bBATON_[A-Z_]+", page.read_text(encoding="utf-8"))) - options - examples:
            assert f'"{name}"' in code, f"{name_of(page)}: nothing reads {name}"


@pytest.mark.parametrize("image", IMAGES, ids=name_of)
def test_image_is_svg_with_a_title(image: Path) -> None:
    root = ET.parse(image).getroot()
    assert root.tag.endswith("}svg")
    assert root.find("{http://www.w3.org/2000/svg}title") is not None


def test_scripts_are_executable_and_parse() -> None:
    scripts = sorted((ROOT / "launch").glob("*.sh"))
    started = [script.name for script in scripts if script.stat().st_mode & 0o111]
    assert started == ["coordinator.sh", "decode.sh", "prefill.sh"]  # the others are read by scripts
    for script in scripts:
        subprocess.run(["bash", "-n", script], check=True)


def test_decisions_are_numbered_and_listed() -> None:
    directory = ROOT / "docs/decisions"
    pages = sorted(p.name for p in directory.glob("[0-9]*.md"))
    assert [p[:4] for p in pages] == [f"{number:04}" for number in range(1, len(pages) + 1)]
    index = (directory / "README.md").read_text(encoding="utf-8")
    for page in pages:
        text = (directory / page).read_text(encoding="utf-8")
        assert f"]({page})" in index
        assert text.startswith(f"# {page[:4]}. ")
        assert [h for h in ("## Context", "## Decision", "## Consequences") if h not in text] == []


def decisions_named(text: str) -> set[str]:
    """Numbers of decision records, and file names of records in links."""
    numbers = re.findall(r"[Dd]ecisions?(?:\s+(?:#|//)?\s*)\[?(\d{4})\b", text)
    return {*numbers, *re.findall(r"\b(\d{4}-[a-z-]+\.md)\b", text)}


def test_decisions_that_the_repository_names_exist() -> None:
    pages = [page.name for page in (ROOT / "docs/decisions").glob("[0-9]*.md")]
    known = {*pages, *(page[:4] for page in pages)}
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("no repository")
    text_files = [name for name in listed.stdout.splitlines() if Path(name).suffix in TEXT and (ROOT / name).is_file()]
    named = {name: decisions_named((ROOT / name).read_text(encoding="utf-8")) for name in text_files}
    assert sum(map(bool, named.values())) > 30
    missing = [f"{name}: {number}" for name, numbers in named.items() for number in sorted(numbers - known)]
    assert not missing, "\n".join(missing)


def test_named_decisions_are_found_across_lines_and_comments() -> None:
    one, two, three = "0099", "0098", "0097"  # not beside the word: this file is read, too
    text = f"see decision {one}, [Decision\n{two}](x/{two}-some-name.md)\n# (decision\n# {three}); decision of {one}0"
    assert decisions_named(text) == {one, two, three, f"{two}-some-name.md"}


def test_python_in_the_pages_compiles() -> None:
    blocks = [
        b for p in PAGES for b in re.findall(r"^```python\n(.*?)^```", p.read_text(encoding="utf-8"), re.S | re.M)
    ]
    assert len(blocks) >= 2
    for block in blocks:
        compile(block, "page", "exec")

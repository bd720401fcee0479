"""The documentation is true: its examples run, its tables agree with the code, its links lead somewhere."""

import ast
import doctest
import importlib
import re
from pathlib import Path
from xml.etree import ElementTree

import attrs
import pytest

from vq_adapters import KVCacheConfig
from vq_functional import METHODS
from vq_functional.methods import Method

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
FENCE = re.compile(r"^```(?P<language>\w*)\n(?P<body>.*?)^```$", re.M | re.S)
LINK = re.compile(r"(?<!`)!?\[[^\]]*\]\((?P<target>[^)\s]+)\)")
BENCHMARK = "python examples/benchmarks/decode.py"
SECTIONS = [
    "Idea",
    "Formula",
    "Options",
    "Bytes",
    "When to use it",
    "Differences from the paper",
    "Queries",
    "Trim, batches and prefix reuse",
    "Example",
    "Measured",
    "Sources",
]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def read(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def line_of(text: str, at: int) -> int:
    return text.count("\n", 0, at) + 1


def examples_only(text: str) -> str:
    """The text with every line emptied that is no part of a Python block with examples, so line numbers stay."""
    kept = [""] * (text.count("\n") + 1)
    for fence in FENCE.finditer(text):
        if fence["language"] == "python" and ">>>" in fence["body"]:
            lines = fence["body"].splitlines()
            start = line_of(text, fence.start("body")) - 1
            kept[start : start + len(lines)] = lines
    return "\n".join(kept)


def plain_blocks() -> list:
    """Python blocks without examples: they need a real model or a network."""
    found = []
    for page in PAGES:
        text = read(page)
        for fence in FENCE.finditer(text):
            if fence["language"] == "python" and ">>>" not in fence["body"]:
                line = line_of(text, fence.start())
                found.append(pytest.param(page, line, fence["body"], id=f"{name_of(page)}:{line}"))
    return found


def section(text: str, title: str) -> str:
    """Body of the section `title`, up to the next heading of that level."""
    return re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", text, re.M | re.S)[1]


def slug(heading: str) -> str:
    """A heading's anchor as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def anchors(page: Path) -> set[str]:
    prose = FENCE.sub("", read(page))
    return {slug(heading) for heading in re.findall(r"^#+ (.*)$", prose, re.M)}


@pytest.mark.parametrize("page", [page for page in PAGES if ">>>" in read(page)], ids=name_of)
def test_examples_run(page):
    """All `>>>` examples of a page, in order and in one namespace."""
    globs = {"__name__": "__main__"}
    test = doctest.DocTestParser().get_doctest(examples_only(read(page)), globs, page.stem, str(page), 0)
    report: list[str] = []
    outcome = doctest.DocTestRunner(verbose=False).run(test, out=report.append)
    assert outcome.attempted > 0
    assert outcome.failed == 0, "".join(report)


@pytest.mark.parametrize(("page", "line", "code"), plain_blocks())
def test_plain_blocks_compile(page, line, code):
    """They compile, and what they import from this project is there."""
    tree = ast.parse("\n" * line + code, str(page))
    compile(tree, str(page), "exec")
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module.startswith("vq_"):
            module = importlib.import_module(node.module)
            assert [alias.name for alias in node.names if not hasattr(module, alias.name)] == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_fences_are_closed_and_examples_are_python(page):
    text = read(page)
    assert text.count("```") == 2 * len(FENCE.findall(text))
    assert ">>>" not in FENCE.sub(lambda fence: "" if fence["language"] == "python" else fence[0], text)
    for fence in FENCE.finditer(text):
        assert fence["language"] in ("python", "sh", "text"), f"line {line_of(text, fence.start())}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    for link in LINK.finditer(FENCE.sub("", read(page))):
        target = link["target"]
        if target.startswith(("https://", "http://")):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target


@pytest.mark.parametrize("drawing", sorted(DOCS.rglob("*.svg")), ids=name_of)
def test_drawings_are_well_formed_and_described(drawing):
    root = ElementTree.parse(drawing).getroot()
    space = "{http://www.w3.org/2000/svg}"
    assert root.tag == f"{space}svg"
    assert root.find(f"{space}title").text and root.find(f"{space}desc").text
    assert "prefers-color-scheme: dark" in read(drawing)
    assert any(drawing.name in read(page) for page in PAGES)


def test_every_method_has_a_page_and_every_page_a_method():
    assert {page.stem for page in (DOCS / "methods").glob("*.md")} == set(METHODS)


@pytest.mark.parametrize("name", METHODS)
def test_method_pages_have_the_same_sections_in_the_same_order(name):
    text = read(DOCS / "methods" / f"{name}.md")
    assert text.startswith(f"# {name}\n")
    assert re.findall(r"^## (.*)$", FENCE.sub("", text), re.M) == SECTIONS
    assert ">>>" in section(text, "Example") and ">>>" in section(text, "Bytes")
    measured = section(text, "Measured")
    assert BENCHMARK in measured and "| method |" in measured
    assert METHODS[name].paper in section(text, "Sources")


@pytest.mark.parametrize("name", METHODS)
def test_option_tables_agree_with_the_options(name):
    """Rows `| `field` | `default` | meaning |`, in the order of the options class."""
    table = section(read(DOCS / "methods" / f"{name}.md"), "Options")
    listed = re.findall(r"^\| `(\w+)` \| `([^`]+)` \| [^|]+ \|$", table, re.M)
    options = METHODS[name].options()
    held = [(field.name, getattr(options, field.name)) for field in attrs.fields(type(options))]
    assert [(field, ast.literal_eval(default)) for field, default in listed] == held


def test_common_fields_agree_with_the_configuration():
    table = section(read(DOCS / "python.md"), "A configuration")
    listed = re.findall(r"^\| `(\w+)` \| `([^`]+)` \| .+ \|$", table, re.M)
    assert len(listed) == table.count("\n| `")
    config = KVCacheConfig()
    assert [ast.literal_eval(default) for _, default in listed] == [getattr(config, field) for field, _ in listed]


def test_readme_has_results():
    assert BENCHMARK in read(ROOT / "README.md")


def test_the_index_lists_every_page_and_every_method_once():
    linked = [link["target"] for link in LINK.finditer(read(DOCS / "index.md"))]
    pages = [str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")]
    assert sorted(target for target in linked if target.endswith(".md")) == sorted({*pages} - {"index.md"})


def test_traits_are_documented_as_in_the_code():
    told = re.findall(r"^    (\w+) +(\S.*)$", Method.__doc__ or "", re.M)
    listed = re.findall(r"^\| `(\w+)` \| (.*) \|$", section(read(DOCS / "new_method.md"), "Traits"), re.M)
    assert listed == told
    assert {trait for method in METHODS.values() for trait in method.traits} == {trait for trait, _ in told}

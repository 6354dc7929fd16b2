"""What the documentation says is so: sessions run, commands and options exist, links lead somewhere, tables agree."""

import ast
import doctest
import re
import shlex
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from pydflash import _native, cli, errors

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + sorted(
    (ROOT / "docs").glob("*.md")
)
HEADER = (ROOT / "native" / "capi" / "dflash.h").read_text(encoding="utf-8")
C_ABI = (ROOT / "docs" / "c-abi.md").read_text(encoding="utf-8")
INSTALLED = Path(_native.__file__).parent
C_COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")

by_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def blocks(page: Path, language: str) -> Iterator[tuple[int, str]]:
    """Fenced blocks of a language: the line on which each begins, counted from 0, and its text."""
    text = page.read_text(encoding="utf-8")
    for found in re.finditer(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL):
        yield text.count("\n", 0, found.start(1)), found[1]


def section(text: str, title: str) -> str:
    """Text below a heading, up to the next one of the same or a higher rank."""
    found = re.search(rf"^(#+) {re.escape(title)}$", text, flags=re.MULTILINE)
    assert found is not None, f"no section {title!r}"
    rest = text[found.end() :]
    end = re.search(rf"^#{{1,{len(found[1])}}} ", rest, flags=re.MULTILINE)
    return rest[: end.start()] if end else rest


def table(text: str) -> list[list[str]]:
    """Cells of the rows of the first table, without its head."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def code(cell: str) -> str:
    return cell.strip("`")


# ---- sessions


@by_page
def test_python_sessions(page: Path) -> None:
    """The blocks of a page are one session."""
    names: dict[str, object] = {}
    runner = doctest.DocTestRunner(verbose=False)
    report: list[str] = []
    for line, text in blocks(page, "python"):
        session = doctest.DocTestParser().get_doctest(text, names, page.name, str(page), line)
        assert session.examples, f"line {line}: a block without prompts would not be run"
        runner.run(session, out=report.append, clear_globs=False)
        names = session.globs
    assert runner.summarize(verbose=False).failed == 0, "".join(report)


def test_the_sessions_are_where_they_are_promised() -> None:
    counts = {
        page.name: sum(line.startswith(">>>") for _, text in blocks(page, "python") for line in text.splitlines())
        for page in PAGES
    }
    assert counts["README.md"] >= 8
    assert counts["repl.md"] >= 40


@pytest.mark.skipif(C_COMPILER is None, reason="no C compiler")
@by_page
def test_c_blocks_compile(page: Path, tmp_path: Path) -> None:
    for line, text in blocks(page, "c"):
        source = tmp_path / f"block{line}.c"
        source.write_text(C_FUNCTION % text, encoding="utf-8")
        flags = ["-std=c99", "-pedantic", "-Wall", "-Werror", "-fsyntax-only", f"-I{INSTALLED / 'include'}"]
        done = subprocess.run([C_COMPILER or "", *flags, source], check=False, capture_output=True, text=True)
        assert done.returncode == 0, f"{page.name}, line {line}: {done.stderr}"


# What the blocks take for given. They declare what they want to be seen themselves, in a scope of their own.
C_FUNCTION = """
#include "dflash.h"
#include <stdio.h>
int request(dflash_target_model * model, dflash_target_cache * cache, dflash_decoder * decoder, const int32_t * ids,
            int64_t n_ids, int64_t budget) {
    dflash_step_result step = {0};
    dflash_error err = DFLASH_ERROR_INIT;
    {
%s
    }
    (void)model; (void)cache; (void)decoder; (void)ids; (void)n_ids; (void)budget; (void)step;
    return (int)err.status;
}
"""


# ---- commands


def commands(page: Path) -> Iterator[list[str]]:
    """Every `pydflash ...` of the shell blocks, as words."""
    for _, text in blocks(page, "sh"):
        for line in text.splitlines():
            words = shlex.split(line, comments=True)
            while "pydflash" in words:
                words = words[words.index("pydflash") :]
                end = next((i for i, word in enumerate(words) if word in ("&&", "|", ";")), len(words))
                yield words[:end]
                words = words[end:]


@by_page
def test_commands_and_their_options_exist(page: Path) -> None:
    known = typer.main.get_command(cli.app).commands  # type: ignore[attr-defined]
    for name, *words in (words[1:] for words in commands(page)):
        assert name in known, f"pydflash {name}"
        options = {text for parameter in known[name].params for text in parameter.opts}
        for word in words:
            assert not word.startswith("--") or word in options, f"pydflash {name} {word}"


def test_readme_begins_with_the_two_commands() -> None:
    first, second = [text.strip() for _, text in blocks(ROOT / "README.md", "sh")][:2]
    assert first == 'pip install . && pydflash generate "def quicksort(items):" --max-tokens 120'
    assert second == 'pip install ".[test]" && pytest'


def test_the_first_command_writes_python() -> None:
    [words, *_] = commands(ROOT / "README.md")
    program = shutil.which(words[0], path=sysconfig.get_path("scripts"))
    assert program is not None
    done = subprocess.run([program, *words[1:]], check=False, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^ +(return|for|if|while)\b", done.stdout, flags=re.MULTILINE), done.stdout


def test_every_command_is_in_the_readme() -> None:
    shown = {words[1] for words in commands(ROOT / "README.md")}
    assert shown == set(typer.main.get_command(cli.app).commands)  # type: ignore[attr-defined]


@by_page
def test_build_options_exist(page: Path) -> None:
    cmake = "".join(
        (ROOT / folder / "CMakeLists.txt").read_text(encoding="utf-8") for folder in (".", "native", "third_party")
    )
    for option in re.findall(r"(?:-D|cmake\.define\.)(DFLASH_\w+)", page.read_text(encoding="utf-8")):
        assert re.search(rf"^(?:option|set)\({option} ", cmake, flags=re.MULTILINE), option


def test_presets_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    presets = (ROOT / "CMakePresets.json").read_text(encoding="utf-8")
    [names] = re.findall(r"--preset debug +# or (.*)", text)
    for name in ["debug", *names.split(", ")]:
        assert f'"name": "{name}"' in presets


# ---- links and paths


def anchors(page: Path) -> set[str]:
    """Anchors of headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@by_page
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
    for link in links:
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_readme_links_every_page() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [page.name for page in PAGES[1:] if page.name not in text] == []


def paths_in(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_map_of_the_tree() -> None:
    """Each path exists, and no folder of source is left out."""
    rows = table(section((ROOT / "README.md").read_text(encoding="utf-8"), "Map of the tree"))
    named = {path for row in rows for path in paths_in(row[0])}
    assert [path for path in named if not (ROOT / path).exists()] == []
    folders = {f"native/{path.name}" for path in (ROOT / "native").iterdir() if path.is_dir() and path.name != "capi"}
    folders |= {f"pydflash/{path.parent.name}" for path in (ROOT / "pydflash").glob("*/__init__.py")}
    folders |= {"docs", "scripts", "tests", "third_party", "pydflash/models"}
    assert folders <= named


def test_tiers_of_tests() -> None:
    rows = table(section((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), "Tests"))
    named = {code(row[0]) for row in rows}
    there = {
        f"tests/{path.name}" for path in (ROOT / "tests").iterdir() if path.is_dir() and list(path.glob("test_*.[cp]*"))
    }
    assert sorted(there - named) == []


def test_layers() -> None:
    source = ast.parse((ROOT / "scripts" / "check_tree.py").read_text(encoding="utf-8"))
    [layers] = [
        ast.literal_eval(node.value)
        for node in source.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "NATIVE_LAYERS"
    ]
    text = section((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), "Layers")
    assert f"`native/`: {', '.join(layers)}." in text


# ---- the C interface


def without_comments(text: str) -> str:
    return re.sub(r"/\*.*?\*/", " ", text, flags=re.DOTALL)


def declared_functions() -> dict[str, int]:
    """Function -> ABI version of the section that declares it."""
    functions: dict[str, int] = {}
    parts = re.split(r"^/\* ---- .*? since: (\d+) \*/$", HEADER, flags=re.MULTILINE)
    for since, text in zip(parts[1::2], parts[2::2], strict=True):
        for name in re.findall(r"^DFLASH_API[^;(]*?\b(\w+)\(", without_comments(text), flags=re.MULTILINE):
            functions[name] = int(since)
    return functions


def test_function_table() -> None:
    rows = table(section(C_ABI, "Functions"))
    assert {code(name): int(since) for name, since, _ in rows} == declared_functions()
    assert [code(row[0]) for row in rows] == list(declared_functions())  # in the header's order


def test_thread_table() -> None:
    """Objects that the header gives to one thread at a time, and the functions it excepts."""
    flat = " ".join(re.sub(r"[/*]", " ", HEADER).split())
    nouns = re.findall(r"One thread at a time per handle for all functions on a (\w+ ?\w*?)(?: except cancel)?\.", flat)
    single = {{"cache": "target_cache", "mirror": "draft_feature_mirror"}.get(n, n.replace(" ", "_")) for n in nouns}
    assert single == {"target_cache", "draft_context", "draft_feature_mirror", "decoder"}
    # These take no handle, or are excepted. A free drops a reference, which any thread may do.
    excepted = ("_new", "_free", "_cancel", "_options_init", "_plan_bytes")
    for name, _, threads in table(section(C_ABI, "Functions")):
        on_handle = code(name).startswith(tuple(f"dflash_{noun}_" for noun in single))
        assert threads == ("one" if on_handle and not code(name).endswith(excepted) else "any"), name


def test_status_table() -> None:
    declared = {
        name: int(value) for name, value in re.findall(r"^    (DFLASH_STATUS_\w+) = (-?\d+)", HEADER, re.MULTILINE)
    }
    rows = table(section(C_ABI, "Status"))
    assert {code(name): int(value) for name, value, _, _ in rows} == declared
    classes = {int(value): code(python) for _, value, _, python in rows if python}
    assert classes == {status: error.__name__ for status, error in errors.STATUS_TO_ERROR.items()}


def test_ownership_table() -> None:
    handles = set(re.findall(r"^typedef struct (dflash_\w+) \1;$", HEADER, flags=re.MULTILINE))
    functions = declared_functions()
    rows = [[code(cell) for cell in row] for row in table(section(C_ABI, "Ownership")) if row[0].startswith("`dflash_")]
    assert {row[0] for row in rows} == handles
    for handle, made_by, freed_by, _ in rows:
        assert freed_by == f"{handle}_free"
        assert {made_by, freed_by} <= functions.keys()


def test_abi_version_is_in_the_changelog() -> None:
    [version] = re.findall(r"^#define DFLASH_ABI_VERSION (\d+)$", HEADER, flags=re.MULTILINE)
    changes = section((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), "[Unreleased]")
    assert f"- Version {version}:" in section(changes, "C ABI")

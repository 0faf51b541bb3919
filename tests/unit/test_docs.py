"""Pages: links and anchors that exist, files, tests and keys that exist, a site that builds and shows the same."""

import ast
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import MISSING, fields
from pathlib import Path

import pytest

from psrl.agents.env.base import ENVIRONMENTS
from psrl.agents.parameters import AgentParameters
from psrl.config import PSRLConfig
from psrl.integrations.verl.job.config import OrchestratorConfig
from psrl.rollout.settings import HFEngineSettings
from tests.helpers.pages import PAGES, REPOSITORY, anchors, code_spans, links, name_of, render

DOCS = REPOSITORY / "docs"
KEYS = {f.name for cls in (PSRLConfig, OrchestratorConfig) for f in fields(cls)}
each_page = pytest.mark.parametrize("page", PAGES, ids=name_of)


# ------------------------------------------------------------------------------------------------------------- links
def wrong_links(page: Path) -> list[str]:
    wrong = []
    for target in links(page):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if path.startswith("/") or not file.is_relative_to(REPOSITORY) or not file.exists():
            wrong.append(f"{target}: no such file")
        elif page.parent == DOCS and not file.is_relative_to(DOCS):
            wrong.append(f"{target}: not in docs/, so not on the site")
        elif anchor and (file.suffix != ".md" or anchor not in anchors(file)):
            wrong.append(f"{target}: no such heading")
    return wrong


@each_page
def test_links_and_anchors_exist(page):
    assert wrong_links(page) == []


def test_wrong_links_are_found(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "REPOSITORY", tmp_path)
    monkeypatch.setattr(sys.modules[__name__], "DOCS", tmp_path / "docs")
    (tmp_path / "docs").mkdir()
    (tmp_path / "top.md").write_text("# Top\n")
    page = tmp_path / "docs" / "page.md"
    page.write_text(
        "# A `psrl plan FILE…`, twice\n[right](#a-psrl-plan-file-twice) [right](page.md#a-psrl-plan-file-twice) "
        "[right](https://example.org) [gone](gone.md) [heading](page.md#gone) ![gone](img/gone.svg) "
        "[outside](../top.md) [absolute](/top.md) [plain](http://example.org)\n\n[by name][name]\n\n[name]: away.md\n"
    )
    assert [link.partition(":")[0] for link in wrong_links(page)] == [
        "gone.md", "page.md#gone", "img/gone.svg", "../top.md", "/top.md", "http", "away.md"
    ]  # fmt: skip


# ----------------------------------------------------------------------------------------- files, tests and keys named
FILE = re.compile(r"((?:tests|psrl|scripts|configs|benchmarks|docs|patches)/[\w./-]+\.\w+|test_\w+\.py)(?:::(\w+))?")


def wrong_names(page: Path) -> list[str]:
    wrong, file = [], None
    for span in code_spans(page):
        if found := FILE.fullmatch(span):
            beside = page.parent / found[1]
            file = REPOSITORY / ("" if "/" in found[1] else "tests/integration") / found[1]
            if not file.is_file() and not beside.is_file():
                wrong.append(f"{span}: no such file")
            elif found[2] and found[2] not in functions(file):
                wrong.append(f"{span}: no such test")
        elif span.startswith("::") and (file is None or span[2:] not in functions(file)):
            wrong.append(f"{span}: no such test in {file}")
        elif (found := re.fullmatch(r"psrl\.([\w.]+)(?:=.*)?", span)) and not is_key_or_module(found[1]):
            wrong.append(f"{span}: neither a key nor a module")
    return wrong


def functions(file: Path) -> set[str]:
    return {node.name for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)}


def is_key_or_module(name: str) -> bool:
    """Whether a name below ``psrl.`` is a key of the group, a package, a module, or a name in one of these."""
    if name in KEYS:
        return True
    path = REPOSITORY.joinpath("psrl", *name.split("."))
    module = path.parent.with_suffix(".py")
    return path.is_dir() or path.with_suffix(".py").is_file() or (module.is_file() and path.name in module.read_text())


@each_page
def test_files_tests_and_keys_exist(page):
    assert wrong_names(page) == []


def test_wrong_names_are_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "`tests/unit/test_docs.py` `test_exactness.py::test_critic` `::test_float32` `psrl.max_tokens=3` `psrl.tree` "
        "`psrl.config.PSRLConfig` `psrl/prefix_match_rate` `tests/unit/test_gone.py` `test_gone.py` "
        "`test_exactness.py::test_gone` `::test_lost` `psrl.gone=3` `psrl.gone.Gone` `psrl.config.Gone`"
    )
    assert [name.split(": ")[0] for name in wrong_names(page)] == [
        "tests/unit/test_gone.py", "test_gone.py", "test_exactness.py::test_gone", "::test_lost", "psrl.gone=3",
        "psrl.gone.Gone", "psrl.config.Gone",
    ]  # fmt: skip


# ------------------------------------------------------------------------------------------------ made by scripts
def load_script(name: str):
    spec = importlib.util.spec_from_file_location(name, REPOSITORY / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_configuration_is_what_the_script_makes():
    assert (DOCS / "configuration.md").read_text() == load_script("config_reference").write_page()


def test_pictures_are_what_the_script_makes():
    module = load_script("concept_pictures")
    for name, draw in module.PICTURES.items():
        assert (DOCS / "img" / f"{name}.svg").read_text() == draw().svg(), name


SETTINGS = [
    *((f"psrl.{f.name}", f.default) for cls in (PSRLConfig, OrchestratorConfig) for f in fields(cls)),
    *((f.name, f.default) for f in fields(HFEngineSettings)),
    *((f.name, f.default) for f in fields(AgentParameters)),
]


@pytest.mark.parametrize(("key", "default"), SETTINGS, ids=[key for key, _ in SETTINGS])
def test_every_key_has_a_default_and_a_sentence(key, default):
    page = (DOCS / "configuration.md").read_text()
    found = re.search(
        rf"^### `{re.escape(key)}`\n\n(.+), (?:default `(.+)`|has to be given)\.\n\n(.{{20,}}\.)\n", page, re.M
    )
    assert found
    written = {None: "null", True: "true", False: "false", (): "[]"}
    if default is MISSING:
        assert found[2] == ("{}" if key == "environment_options" else None)
    else:
        assert found[2] == (written[default] if isinstance(default, bool | tuple | None) else str(default))


def test_the_reference_refuses_what_is_not_described():
    module = load_script("config_reference")
    for text in ("", "most tokens", "most tokens of a micro-batch.", "Most tokens"):
        with pytest.raises(SystemExit, match=r"psrl\.max_tokens is not described"):
            module.sentence(text, "psrl.max_tokens")
    assert module.sentence("``auto`` or None: nothing.", "psrl.x") == "`auto` or `null`: nothing."


def test_every_environment_with_options_is_in_the_reference():
    found = Counter(name for name, _ in load_script("config_reference").environment_options())
    assert found == {"alfworld": 1, "search": 1, "textworld": 1, "webshop": 3}
    assert set(found) == set(ENVIRONMENTS)


# ---------------------------------------------------------------------------------------------------------- the site
TAGS = re.compile(r"<(li|tr|pre|img|h1|h2|h3|blockquote)\b")


def build_site(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """A strict build. Not with ``--quiet``: then warnings do not count."""
    pytest.importorskip("material", reason="mkdocs-material is not installed: pip install -e '.[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder), *options]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True)


def test_the_site_builds_and_shows_what_the_files_show(tmp_path):
    """As many lists, tables, pictures and code blocks as by GitHub's rules: the dialects differ in what they need."""
    result = build_site(tmp_path)
    assert result.returncode == 0, result.stderr
    for page in DOCS.glob("*.md"):
        built = tmp_path / ("index.html" if page.stem == "index" else f"{page.stem}/index.html")
        _, _, article = built.read_text().partition("<article")
        article, _, _ = article.partition("</article>")
        assert Counter(TAGS.findall(article)) == Counter(TAGS.findall(render(page))), page.name
        assert re.findall(r"<(?:link|script|img)\b[^>]*https?://[^>]*>", built.read_text()) == []  # nothing is fetched


def test_the_build_refuses_wrong_links_and_pages_outside_the_navigation(tmp_path):
    shutil.copytree(DOCS, tmp_path / "docs")
    shutil.copy(REPOSITORY / "mkdocs.yml", tmp_path)
    (tmp_path / "docs" / "stray.md").write_text("# Stray\n[a](gone.md) [b](concepts.md#gone) [c](../README.md)\n")
    result = build_site(tmp_path / "site", "--config-file", str(tmp_path / "mkdocs.yml"))
    assert result.returncode == 1
    warnings = [line for line in result.stderr.splitlines() if line.startswith("WARNING")]
    assert len(warnings) == 4
    for wrong in ('not included in the "nav"', "'gone.md'", "'concepts.md#gone'", "'../README.md'"):
        assert wrong in result.stderr

"""The documentation says what the code does: generated tables are current, links lead somewhere, examples read."""

import doctest
import importlib
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import quest_core
import quest_core.mechanisms
import quest_core.testing
from quest_core import AttentionConfig, cli

ROOT = Path(__file__).resolve().parent.parent
SITE = "https://quest-attention.github.io/quest/"
REPOSITORY = "https://github.com/quest-attention/quest/"
SHOWN_ELSEWHERE = [ROOT / "README.md", *sorted(ROOT.glob("plugins/quest-*/README.md"))]  # on PyPI and on the site
blocks = runpy.run_path(str(ROOT / "release" / "install_test.py"), run_name="install_test")["blocks"]
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "research/**/*.md", "examples/**/*.md", "plugins/quest-*/README.md")
    for path in ROOT.glob(pattern)
)


def test_generated_tables_are_current(capsys):
    """In this process, which has imported PyTorch."""
    pytest.importorskip("quest_bench", reason="quest-bench is not installed; the environment core has it")
    made = runpy.run_path(str(ROOT / "docs" / "generate.py"))
    assert made["main"](["--check"]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    targets = re.findall(r"""(?:\]\(|src(?:set)?=")([^)#"\s]+)""", page.read_text())
    local = [target for target in targets if "://" not in target]
    assert [target for target in local if not (page.parent / target).exists()] == []
    assert [target for target in targets if not exists(target)] == []
    files = [x for x in targets if x.startswith((SITE, f"{REPOSITORY}blob/")) and not x.endswith("/report/")]
    assert files == [] or ROOT / "examples" in page.parents, "link to the file, which a clone has too"


def test_what_is_installed_names_pages_by_their_address():
    """A wheel carries no docs/."""
    installed = [path for package in ("quest_core", "plugins/*/src") for path in ROOT.glob(f"{package}/**/*")]
    texts = {path: path.read_text() for path in installed if path.suffix in (".py", ".tmpl", ".yaml", ".md")}
    assert [str(path) for path, text in texts.items() if re.search(r"(?<![\w/.-])docs/[\w-]+\.md", text)] == []


def exists(url):
    """Whether an address of this project leads to a file of this clone; other addresses are not looked up."""
    path = url.removeprefix(SITE).strip("/")
    if url.startswith(f"{SITE}hosts/"):
        return (ROOT / "plugins" / f"quest-{path.removeprefix('hosts/')}" / "README.md").exists()
    if url.startswith(SITE):
        folder = ROOT / "research" if path.startswith("results") else ROOT / "docs"
        pages = (folder / path, folder / f"{path}.md", folder / path / "README.md")
        made = path.endswith("/report") and (folder / path).with_name("results.parquet").exists()
        return path in ("", "changelog") or made or any(page.exists() for page in pages)
    if url.startswith((f"{REPOSITORY}blob/main/", f"{REPOSITORY}tree/main/")):
        return (ROOT / url.removeprefix(REPOSITORY).split("/", 2)[2]).exists()
    return True


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_attentions_in_examples_are_valid(page):
    text = page.read_text()
    for spec in re.findall(r"attention[\"']?\s*[:=]\s*[\"']([^\"'\n]+)[\"']", text):
        AttentionConfig.parse(spec)
    for line in re.findall(r"^\s*attention: ([a-z][^\n{#]*)", text, re.MULTILINE):
        AttentionConfig.parse(line.strip())


# What stands before the first block of a page: the reader's own model and batch.
ENCODER = "from torch import nn\nmodel = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2), 1)\n"
CALLING = """
import quest_core, torch
from torch import nn

class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(16, 48)

    def forward(self, x):  # [B, N, 16]
        q, k, v = self.proj(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)  # [B, H, N, D] each
        return nn.functional.scaled_dot_product_attention(q, k, v)

model, batch = Own(), torch.randn(2, 5, 16)
"""
FROM_TOP_TO_BOTTOM = {
    "quick-start.md": "",
    "start.md": "",
    "watching.md": "",
    "concepts.md": "import torch, quest_core\n",
    "checkpoints.md": "import quest_core\n" + ENCODER,
    "universal.md": CALLING,
    "writing-a-mechanism.md": "",  # only its dialogue; the Python blocks are excerpts of a package
}
EXCERPTS = {
    "writing-a-mechanism.md": "tests/test_registry.py",
    "writing-an-adapter.md": "tests/test_new_plugin.py",
    "distributed.md": "integration_tests/distributed/test_docs.py",
}


@pytest.mark.parametrize("page", FROM_TOP_TO_BOTTOM)
def test_the_code_of_a_page_runs(page, capsys):
    language = "pycon" if page in EXCERPTS else "python"
    found = [block for block in blocks((ROOT / "docs" / page).read_text()) if block.language == language]
    assert found
    names = {}
    exec(FROM_TOP_TO_BOTTOM[page], names)
    for block in found:
        if language == "python":
            exec(compile(block.code, page, "exec"), names)
        else:
            example = doctest.DocTestParser().get_doctest(block.code, names, page, page, block.line)
            assert doctest.DocTestRunner().run(example).failed == 0
    printed = capsys.readouterr().out
    if not FROM_TOP_TO_BOTTOM[page]:
        said = re.findall(r"^print\(.*\)  # (.*)$", "".join(block.code for block in found), re.MULTILINE)
        assert [text for text in said if text.removesuffix("; ...") not in printed] == []


def test_every_block_of_the_pages_is_run_or_says_why_not():
    """In docs/, Python runs here or is compared by another test, and a command has its reason on the page."""
    for page in sorted((ROOT / "docs").glob("*.md")):
        for block in blocks(page.read_text()):
            run = page.name in (FROM_TOP_TO_BOTTOM if block.language == "python" else EXCERPTS)
            shown = block.language not in ("bash", "sh", "python", "pycon")
            assert run or shown or block.not_run or page.name in EXCERPTS, f"{page.name}, line {block.line}"
    for name, path in EXCERPTS.items():
        assert f'"{name}"' in (ROOT / path).read_text(), path


def test_what_code_says_about_addresses_is_true():
    """Messages and templates point to pages, too; a wheel carries no docs/."""
    files = [*(ROOT / "quest_core").rglob("*.py"), *ROOT.glob("plugins/*/src/**/*.py")]
    text = "".join(path.read_text() for path in files if path.is_file())
    urls = {url.rstrip(".,;:)") for url in re.findall(rf"(?:{SITE}|{REPOSITORY})[\w./-]*", text)}
    assert [url for url in urls if not exists(url)] == []


# --- README blocks that ./dev install-test runs -----------------------------------------------------------------------


@pytest.mark.parametrize("page", SHOWN_ELSEWHERE, ids=lambda p: p.parent.name)
def test_code_blocks_say_what_they_are(page):
    found = blocks(page.read_text())
    assert page.read_text().count("\n```") == 2 * len(found)
    assert {block.language for block in found} <= {"bash", "python", "yaml", "text", "json"}
    first = next(block for block in found if block.language == "bash" and block.not_run != "builds the packages")
    assert first.not_run is None
    for said in ("python3 -m venv", "pip install", "quest doctor"):
        assert said in first.code


def test_every_readme_says_how_to_build_what_is_not_on_pypi():
    main, *plugins = (page.read_text() for page in SHOWN_ELSEWHERE)
    (build,) = (block for block in blocks(main) if block.not_run == "builds the packages")
    build_said = re.compile(r"^Not on PyPI yet\..* run `(.*)` once, and in\neach shell `(.*)`\.$", re.MULTILINE)
    said = [build_said.findall(text) for text in plugins]
    assert {"\n".join(commands) for found in said for commands in found} <= {build.code.strip()}
    assert {len(found) for found in said} == {"Not on PyPI yet" in main}  # the release takes it out of all of them


# --- the site ---------------------------------------------------------------------------------------------------------


def build_site(folder, **variables):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", **variables}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    return build_site(tmp_path_factory.mktemp("site"))


@pytest.mark.slow
def test_addresses_of_the_site_exist_where_it_is_deployed(tmp_path):
    """Package pages on PyPI, project URLs and messages name whole addresses, some with an anchor."""
    assert 'OFFLINE: "false"' in (ROOT / ".github" / "workflows" / "docs.yml").read_text()
    deployed = build_site(tmp_path, OFFLINE="false")
    sources = [
        *PAGES,
        ROOT / "pyproject.toml",
        *ROOT.glob("plugins/*/pyproject.toml"),
        *(ROOT / "quest_core").rglob("*.py"),
    ]
    sources += ROOT.glob("plugins/*/src/**/*.py")
    addresses = re.compile(rf"{SITE}([\w./-]*(?:#[\w-]+)?)")
    found = [(path, address) for path in sources for address in addresses.findall(path.read_text())]
    assert len(found) > 50
    dead = set()
    for path, address in found:
        page, _, anchor = address.rstrip(".").partition("#")
        file = deployed / page / "index.html" if page.endswith("/") or not page else deployed / page
        if not file.is_file() or (anchor and f'id="{anchor}"' not in file.read_text()):
            dead.add(f"{path.relative_to(ROOT)}: {address}")
    assert dead == set()


def public_names():
    """What users import from the core and from the plugins."""
    found = {
        f"{module.__name__}.{name}"
        for module in (quest_core, quest_core.mechanisms, quest_core.testing)
        for name, value in vars(module).items()
        if not name.startswith("_") and str(getattr(value, "__module__", "")).startswith("quest_core")
    }
    for path in ROOT.glob("plugins/quest-*/src/*/__init__.py"):
        for name in re.findall(r"^from \.\S+ import \w+ as (\w+)", path.read_text(), re.MULTILINE):
            found.add(f"{path.parent.name}.{name}")
    return found


@pytest.mark.slow
def test_every_public_name_and_every_plugin_has_a_page(site):
    anchors = {
        anchor
        for page in (site / "reference").rglob("*.html")
        for anchor in re.findall(r'id="(quest_[\w.]+)"', page.read_text())
    }
    last = {anchor.rpartition(".")[2] for anchor in anchors}  # quest_core.errors.ConfigError is quest_core.ConfigError
    names = {name for name in public_names() if is_ours(name)}
    assert len(names) > 50
    assert [name for name in sorted(names) if name not in anchors and name.rpartition(".")[2] not in last] == []
    for readme in SHOWN_ELSEWHERE[1:]:
        assert (site / "hosts" / f"{readme.parent.name.removeprefix('quest-')}.html").exists()


def is_ours(name):
    """Whether a dotted name is neither a module nor torch's. Imports no plugin, because its host is absent."""
    module, _, attribute = name.rpartition(".")
    found = getattr(importlib.import_module(module), attribute) if module.startswith("quest_core") else None
    return not isinstance(found, ModuleType) and getattr(found, "__module__", "quest_").startswith("quest_")


def test_every_command_is_explained_on_a_page():
    pages = "".join(page.read_text() for page in PAGES)
    own = cli.parsers({})[1]
    assert [name for name in own if f"`quest {name}" not in pages and f"\nquest {name}" not in pages] == []


@pytest.mark.slow
def test_the_site_works_without_a_server(site):
    index = json.loads((site / "search" / "search_index.json").read_text())
    assert any("attention_is_not_standard" in page["text"] for page in index["docs"])
    assert "__index" in (site / "search" / "search_index.js").read_text()
    for page in site.rglob("*.html"):
        if page.name == "interactive.html":
            continue
        text = page.read_text()
        assert re.findall(r'<script[^>]+src="(https?:[^"]+)"', text) == []
        assert re.findall(r'<link[^>]+rel="stylesheet"[^>]+href="(https?:[^"]+)"', text) == []
        for target in re.findall(r'(?:href|src)="([^"#?]+)', text):
            if "://" not in target and not target.startswith(("mailto:", "data:", "/")):
                assert (page.parent / target).exists(), f"{page.relative_to(site)} links to {target}"

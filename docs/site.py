"""What ./dev docs adds to the pages in docs/: READMEs, the changelog, results with their reports, and the reference.

See mkdocs.yml.

A report is made from its results.parquet and kept in .cache/reports/ under a hash of what it is made from and with. A
page may link to any file of the repository by its path, to a page of the site by its address, or to a file on
GitHub. This hook turns the first two into links within the site where the site has the file.
"""

import ast
import hashlib
import inspect
import os
import re
import shutil
import time
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from devtools.environments import PLUGINS, plugins

ROOT = Path(__file__).resolve().parents[1]
SITE = "https://quest-attention.github.io/quest/"
REPOSITORY = "https://github.com/quest-attention/quest"
RESULTS = ROOT / "research" / "results"
CACHE = ROOT / ".cache" / "reports"
BASELINES = {"gqa": "gqa", "start-grid": "quest", "start-grid/points": "quest", "start-grid/bytes": "quest"}
BASELINES |= {"start-toy": "quest"}  # a folder of results -> what its report compares with; else standard
SHIM, LOCAL_SHIM = "https://unpkg.com/iframe-worker/shim", "assets/search-from-files.js"
VEGA, DRAW = "assets/vega.js", "assets/charts.js"
LINK = re.compile(r"""(?P<start>\]\(|src(?:set)?=")(?P<target>[^)"\s]+)(?P<end>[)"])""")
# Public is what these packages define or import as itself, and these names of other modules, which pages mention.
PACKAGES = ("quest_core", "quest_core.mechanisms", "quest_core.testing")
FURTHER = {
    "quest_bench.plan": ("Suite",),
    "quest_bench.worker": ("decode",),
    "quest_core.checkpoints": ("compare_before_loading", "set_attention_from"),
    "quest_core.mechanisms.aft_conv": ("position_entropy",),
    "quest_core.tools.parallel": ("HeadParallel",),
    "quest_core.tools.pictures": ("draw_maps",),
}


def public(path: Path) -> list[str]:
    """The public names of a package: in its `__init__`, what is imported from below as itself or defined."""
    names: list[str] = []
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.level:
            names += [alias.name for alias in node.names if alias.asname == alias.name]
        elif isinstance(node, ast.If):  # under TYPE_CHECKING
            names += [alias.name for below in node.body if isinstance(below, ast.ImportFrom) for alias in below.names]
        elif isinstance(node, (ast.ClassDef, ast.FunctionDef)) and not node.name.startswith("_"):
            names.append(node.name)
    return sorted(name for name in names if not name.startswith("_"))


def reference() -> dict[str, list[str]]:
    """Pages of the reference: path of a module's page -> its public names, dotted."""
    found = {module: public(ROOT / module.replace(".", "/") / "__init__.py") for module in PACKAGES} | FURTHER
    for name in plugins():
        package = name.replace("-", "_")
        found[package] = public(PLUGINS / name / "src" / package / "__init__.py")
    return {
        f"reference/{module}.md": [f"{module}.{name}" for name in names] for module, names in found.items() if names
    }


def sources() -> dict[str, Path]:
    """Pages whose source lies outside of docs/: path in the site -> file."""
    pages = {"index.md": ROOT / "README.md", "changelog.md": ROOT / "CHANGELOG.md"}
    pages |= {f"hosts/{name.removeprefix('quest-')}.md": PLUGINS / name / "README.md" for name in plugins()}
    return pages | {f"results/{path.relative_to(RESULTS)}": path for path in sorted(RESULTS.rglob("*.md"))}


def reports() -> dict[str, Path]:
    """The folder of each report in the site -> the folder of its results."""
    return {f"results/{path.parent.relative_to(RESULTS)}": path.parent for path in RESULTS.rglob("results.parquet")}


def mechanism_pages() -> dict[str, str]:
    """A page for each mechanism of quest-core and quest-zoo, in the order of their axes: path -> Markdown."""
    from devtools.support import zoo
    from quest_core.cli.mechanisms import AXIS_TITLES
    from quest_core.registry import mechanisms, owner

    sections = re.split(r"^## (.+)$", (ROOT / "docs" / "mechanisms" / "when.md").read_text(), flags=re.MULTILINE)[1:]
    when = {name: text.strip() for name, text in zip(sections[::2], sections[1::2], strict=True)}
    own = [kind for kind in mechanisms().values() if owner(kind) == "quest-core"]
    both = [(kind, "quest-core") for kind in own] + [(kind, "quest-zoo") for kind in zoo()]
    ordered = [(kind, package) for axis in AXIS_TITLES for kind, package in both if kind.axis == axis]
    return {f"mechanisms/{kind.name}.md": _mechanism_page(kind, package, when[kind.name]) for kind, package in ordered}


def _mechanism_page(kind: Any, package: str, when: str) -> str:
    attention = kind.name if kind.axis in ("score", "family") else f"quest+{kind.name}"
    attention += "(kv_heads=2)" if any(option.name == "kv_heads" for option in kind.options) else ""
    call = [] if kind.learnable else [f'out = quest_core.attention(q, k, v, "{attention}")']
    layer = f'layer = quest_core.Attention(256, 8, attention="{attention}")'
    options = [f"| `{o.name}` | {'null' if o.default is None else o.default} | {o.doc} |" for o in kind.options]
    facts = {
        "package": package,
        "causal": "yes" if kind.causal else f"no: {kind.causal_reason}",
        "other sequences as keys": "yes" if kind.cross else "no",
        "cache": "yes" if kind.cached else "no",
        "own parameters": "yes" if kind.learnable else "no",
        "cost": kind.complexity,
        "source": kind.source,
    }
    lines = [f"# {kind.name}", "", f"**{kind.formula()}** ({kind.axis})", "", when, ""]
    lines += ["```python", *call, layer, "```", ""]
    if options:
        lines += ["| option | default | meaning |", "|---|---|---|", *options, ""]
    lines += ["| | |", "|---|---|", *(f"| {fact} | {value} |" for fact, value in facts.items()), ""]
    lines += ["## Code", "", "```python", inspect.getsource(kind).rstrip(), "```", ""]
    return "\n".join(lines)


def drawn(folder: Path) -> Path:
    """The folder with a report's page, its charts and its pictures, which is made unless .cache/ has it."""
    import quest_bench
    from quest_bench.report import write_page

    name = str(folder.relative_to(RESULTS))
    code = Path(quest_bench.__file__).parent
    inputs = [folder / "results.parquet", folder / "run.json", *sorted(code.rglob("*.py")), *sorted(code.rglob("*.j2"))]
    made_from = b"".join(path.read_bytes() for path in inputs if path.is_file())
    out = CACHE / f"{name.replace('/', '-')}-{hashlib.sha256(made_from).hexdigest()[:16]}"
    if not out.is_dir():
        started, unfinished = time.monotonic(), out.with_suffix(".tmp")
        for old in CACHE.glob(f"{name.replace('/', '-')}-{'?' * 16}"):
            shutil.rmtree(old)
        shutil.rmtree(unfinished, ignore_errors=True)
        write_page(folder, unfinished, BASELINES.get(name, "standard"))
        unfinished.rename(out)
        print(f"report of {name}: {time.monotonic() - started:.1f} s", flush=True)
    return out


def studies() -> list[Any]:
    """One entry for each study: its own page, or its report where it has none. What belongs to it is below it."""
    names = sorted({path.relative_to(RESULTS).parts[0] for path in RESULTS.rglob("results.parquet")})
    pages = {path.stem: path.name for path in RESULTS.glob("*.md") if path.stem != "README"}
    pages |= {path.parent.name: f"{path.parent.name}/{path.name}" for path in RESULTS.glob("*/*.md")}
    pages |= {name: f"{name}/report.md" for name in names if name not in pages}
    return [{name: f"results/{page}"} for name, page in sorted(pages.items())]


def on_config(config: Any) -> Any:
    """Fill the sections of the navigation that list what there is."""
    for section in config["nav"]:
        if "Tutorials" in section:
            section["Tutorials"] = [{name: f"hosts/{name.removeprefix('quest-')}.md"} for name in plugins()]
        if "Reference" in section:
            section["Reference"] = [{Path(path).name.removesuffix(".md"): path} for path in reference()]
        if "Mechanisms" in section:
            section["Mechanisms"] += [{Path(path).stem: path} for path in mechanism_pages()]
        if "Results" in section:
            section["Results"] = ["results/README.md", *studies()]
    return config


def on_files(files: Files, *, config: Any) -> Files:
    """Add the pages from outside of docs/ and the reference."""
    for path, source in sources().items():
        files.append(File.generated(config, path, content=source.read_text()))
    for path, names in reference().items():
        title = f"# {Path(path).name.removesuffix('.md')}"
        files.append(File.generated(config, path, content="\n\n".join([title, *(f"::: {name}" for name in names)])))
    for path, text in mechanism_pages().items():
        files.append(File.generated(config, path, content=text))
    for picture in sorted(RESULTS.rglob("*.png")):
        files.append(File.generated(config, f"results/{picture.relative_to(RESULTS)}", abs_src_path=str(picture)))
    for uri, folder in reports().items():
        for path in sorted(path for path in drawn(folder).rglob("*") if path.is_file()):
            files.append(File.generated(config, f"{uri}/{path.relative_to(drawn(folder))}", abs_src_path=str(path)))
    from quest_bench.report import javascript

    files.append(File.generated(config, VEGA, content=javascript()))
    return files


def on_page_markdown(text: str, *, page: Any, config: Any, files: Files) -> str:
    """Make links lead to pages of the site where it has them, else to GitHub."""
    own = page.file.src_uri
    source = sources().get(own, ROOT / "docs" / own)
    inside = {str(path): uri for uri, path in sources().items()}

    def replace(match: re.Match[str]) -> str:
        target, _, anchor = match["target"].partition("#")
        if target.startswith(SITE):
            uri = page_of(target.removeprefix(SITE).strip("/"), files)
            new = os.path.relpath(uri, Path(own).parent)
            return f"{match['start']}{new}{'#' + anchor if anchor else ''}{match['end']}"
        elif target.startswith(f"{REPOSITORY}/blob/main/"):
            file = ROOT / target.removeprefix(f"{REPOSITORY}/blob/main/")
        elif "://" in target or not target:
            return match[0]
        else:
            file = Path(os.path.normpath(source.parent / target))
        uri = inside.get(str(file))
        for folder, at in ((ROOT / "docs", ""), (RESULTS, "results/")):
            if uri is None and file.is_relative_to(folder):
                uri = f"{at}{file.relative_to(folder)}"
        if uri is None or files.get_file_from_path(uri) is None:
            kind = "tree" if file.is_dir() else "blob"
            new = f"{REPOSITORY}/{kind}/main/{file.relative_to(ROOT)}" if file.exists() else target
        else:
            # MkDocs turns links of Markdown into addresses, but not those of HTML.
            new = os.path.relpath(uri, Path(own if match["start"] == "](" else page.file.dest_uri).parent)
        return f"{match['start']}{new}{'#' + anchor if anchor else ''}{match['end']}"

    return LINK.sub(replace, text)


def page_of(address: str, files: Files) -> str:
    """The source of the page at an address of this site; raises KeyError if there is none."""
    for uri in (f"{address}.md", f"{address}/README.md", address or "index.md"):
        if files.get_file_from_path(uri):
            return uri
    raise KeyError(f"{SITE}{address}: the site has no such page")


def on_post_page(output: str, *, page: Any, config: Any) -> str:
    """Let search need no network, and let a report's page draw its charts."""

    def here(uri: str) -> str:
        return os.path.relpath(uri, Path(page.file.dest_uri).parent)

    folder = page.file.src_uri.removesuffix("/report.md")
    if folder in reports():
        scripts = "".join(f'<script src="{here(uri)}"></script>' for uri in (f"{folder}/charts.js", VEGA, DRAW))
        output = output.replace("</body>", f"{scripts}</body>")
    return output.replace(SHIM, here(LOCAL_SHIM))


def on_post_template(output: str, *, template_name: str, config: Any) -> str:
    """The same for the page of errors."""
    return output.replace(SHIM, LOCAL_SHIM)

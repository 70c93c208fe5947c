"""What ./dev docs adds to the pages in docs/: READMEs, the changelog, a page for each public name. See mkdocs.yml.

A page may link to any file of the repository by its path, to a page of the site by its address, or to a file on
GitHub. This hook turns the first two into links within the site where the site has the file.
"""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
SITE = "https://quest-attention.github.io/quest/"
REPOSITORY = "https://github.com/quest-attention/quest"
RAW = "https://raw.githubusercontent.com/quest-attention/quest/main/"
INTERACTIVE = "interactive.html"  # a benchmark's report.html in the site
SHIM, LOCAL_SHIM = "https://unpkg.com/iframe-worker/shim", "assets/search-from-files.js"
LINK = re.compile(r"(?P<start>\]\()(?P<target>[^)\s]+)(?P<end>\))")
# Public is what these packages define or import as itself, and what the pages and templates of these patterns import or
# name in full.
PACKAGES = ("quest_core", "quest_core.mechanisms", "quest_core.testing", "quest_core.benchmarks")
AUTHORS = ("docs/*.md", "plugins/quest-*/README.md", "quest_core/**/*.tmpl")
NAMED = re.compile(r"\b(quest_(?:core|bench)(?:\.\w+)+)\.(\w+)")
IMPORT = re.compile(r"^\s*from (quest_core[\w.]*) import (?:\(([^)]+)\)|([\w, ]+))", re.MULTILINE)


def plugins() -> dict[str, Path]:
    """Every plugin by its name, in order."""
    return {p.parent.name: p.parent for p in sorted(ROOT.glob("plugins/quest-*/pyproject.toml"))}


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


def source_of(module: str) -> Path | None:
    """The file of a module of quest_core or of a plugin."""
    at = [folder / module.replace(".", "/") for folder in (ROOT, *(path / "src" for path in plugins().values()))]
    files = [file for path in at for file in (path.with_suffix(".py"), path / "__init__.py")]
    return next((file for file in files if file.exists()), None)


def reference() -> dict[str, str]:
    """Pages of the reference: path -> dotted name."""
    found = [(module, name) for module in PACKAGES if (path := source_of(module)) for name in public(path)]
    known = {name for _, name in found}
    texts = [path.read_text() for pattern in AUTHORS for path in sorted(ROOT.glob(pattern))]
    further = {
        (match[1], name)
        for text in texts
        for match in IMPORT.finditer(text)
        for name in re.findall(r"\w+", match[2] or match[3])
        if source_of(f"{match[1]}.{name}") is None  # a name, not a module
    }
    for module, name in {match.groups() for text in texts for match in NAMED.finditer(text)}:
        if (path := source_of(module)) and name in public(path):
            further.add((module, name))
    found += sorted((module, name) for module, name in further if name not in known and name != "Tensor")
    for name, folder in plugins().items():
        package = name.replace("-", "_")
        found += [(package, own) for own in public(folder / "src" / package / "__init__.py")]
    return {f"reference/{module}/{name}.md": f"{module}.{name}" for module, name in found}


def sources() -> dict[str, Path]:
    """Pages whose source lies outside of docs/: path in the site -> file."""
    pages = {"index.md": ROOT / "README.md", "changelog.md": ROOT / "CHANGELOG.md"}
    return pages | {f"hosts/{name.removeprefix('quest-')}.md": path / "README.md" for name, path in plugins().items()}


def on_config(config: Any) -> Any:
    """Fill the sections of the navigation that list what there is."""
    pages: dict[str, list[Any]] = {}
    for path, name in reference().items():
        pages.setdefault(path.split("/")[1].removeprefix("quest_core."), []).append({name.rpartition(".")[2]: path})
    for section in config["nav"]:
        if "Frameworks" in section:
            hosts = [{name: f"hosts/{name.removeprefix('quest-')}.md"} for name in plugins()]
            section["Frameworks"] = [*hosts, *section["Frameworks"]]
        if "Reference" in section:
            section["Reference"] = [{module: listed} for module, listed in pages.items()]
        if "Extending" in section:
            guides = sorted(path.name for path in (ROOT / "docs").glob("writing-*.md"))
            section["Extending"] = [*guides, *section["Extending"]]
        if "Results" in section:
            others = sorted(str(p.relative_to(ROOT / "docs")) for p in (ROOT / "docs" / "results").rglob("*.md"))
            section["Results"] = ["results/README.md"]
            for page in (p for p in others if p != "results/README.md"):
                report = page.endswith("/report.md")  # all of them have the same heading
                section["Results"].append({page.split("/")[1]: page} if report else page)
    return config


def on_files(files: Files, *, config: Any) -> Files:
    """Add the pages from outside of docs/ and the reference."""
    for path, source in sources().items():
        files.append(File.generated(config, path, content=source.read_text()))
    for path, name in reference().items():
        files.append(File.generated(config, path, content=f"::: {name}\n"))
    for report in sorted((ROOT / "docs" / "results").rglob("report.html")):
        # report.md becomes report.html, so the interactive report needs another name.
        uri = str(report.with_name(INTERACTIVE).relative_to(ROOT / "docs"))
        files.append(File.generated(config, uri, abs_src_path=str(report)))
    return files


def on_page_markdown(text: str, *, page: Any, config: Any, files: Files) -> str:
    """Make links lead to pages of the site where it has them, else to GitHub."""
    own = page.file.src_uri
    source = sources().get(own, ROOT / "docs" / own)
    inside = {str(path): uri for uri, path in sources().items()}

    def replace(match: re.Match[str]) -> str:
        target, _, anchor = match["target"].partition("#")
        if target.startswith(SITE):
            path = target.removeprefix(SITE).strip("/")
            file: Path | None = ROOT / "docs" / f"{path}.md" if path and "." not in path else ROOT / "docs" / path
            if path.startswith("hosts/"):
                file = sources().get(f"{path}.md")
        elif target.startswith(f"{REPOSITORY}/blob/main/"):
            file = ROOT / target.removeprefix(f"{REPOSITORY}/blob/main/")
        elif target.startswith(RAW):
            file = ROOT / target.removeprefix(RAW)
        elif "://" in target or not target:
            return match[0]
        else:
            file = Path(os.path.normpath(source.parent / target))
        assert file is not None, target
        uri = inside.get(str(file))
        if uri is None and file.is_relative_to(ROOT / "docs"):
            uri = str(
                file.with_name(INTERACTIVE if file.name == "report.html" else file.name).relative_to(ROOT / "docs")
            )
        if uri is None or files.get_file_from_path(uri) is None:
            kind = "tree" if file.is_dir() else "blob"
            new = f"{REPOSITORY}/{kind}/main/{file.relative_to(ROOT)}" if file.exists() else target
        else:
            new = os.path.relpath(uri, Path(own).parent)
        return f"{match['start']}{new}{'#' + anchor if anchor else ''}{match['end']}"

    return LINK.sub(replace, text)


def on_post_page(output: str, *, page: Any, config: Any) -> str:
    """Replace the script that the theme loads from another server, so that search needs no network."""
    return output.replace(SHIM, os.path.relpath(LOCAL_SHIM, Path(page.file.dest_uri).parent))


def on_post_template(output: str, *, template_name: str, config: Any) -> str:
    """The same for the page of errors."""
    return output.replace(SHIM, LOCAL_SHIM)

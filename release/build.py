"""Check and build every distribution: ./dev release --dry-run. See RELEASING.md.

1. Every distribution has the version of quest_core/__init__.py, and CHANGELOG.md has a section for it.
2. Each is built twice, as sdist and as a wheel, and both builds have the same bytes. In its README the links to files
   of the repository, which PyPI does not have, become addresses.
3. `twine check --strict` accepts what PyPI will render.

Without --dry-run the git tree must also be clean and tagged; the distributions stay in dist/ for the upload, which
.github/workflows/release.yml does.
"""

import argparse
import ast
import hashlib
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from email.parser import HeaderParser
from pathlib import Path
from urllib.parse import urljoin

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "quest_core" / "__init__.py"

UNRELEASED = "Not on PyPI yet"
FILES = "https://github.com/quest-attention/quest/blob/main/"
PICTURES = "https://raw.githubusercontent.com/quest-attention/quest/main/"
LINK = re.compile(r"""(\]\(|src(?:set)?=")(?![a-z]+:|#)([^)"\s]+)""")  # relative ones


class Failure(Exception):
    """Something that must not be released; the message explains it."""


def projects() -> list[Path]:
    """The folder of every distribution."""
    return [ROOT, *(path.parent for path in sorted(ROOT.glob("plugins/quest-*/pyproject.toml")))]


def version() -> str:
    """The version of quest_core/__init__.py, the only place where it is chosen."""
    for node in ast.parse(SOURCE.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__version__":
            return str(ast.literal_eval(node.value))
    raise Failure(f"{SOURCE.relative_to(ROOT)} has no __version__")


def set_version(new: str) -> None:
    """Write a version to its source and to the pyproject.toml of every plugin."""
    SOURCE.write_text(SOURCE.read_text().replace(f'__version__ = "{version()}"', f'__version__ = "{new}"'))
    for project in projects()[1:]:
        path = project / "pyproject.toml"
        path.write_text(
            re.sub(r'^version = ".*"$', f'version = "{new}"', path.read_text(), count=1, flags=re.MULTILINE)
        )


def check_versions() -> None:
    """Raise Failure if a distribution or the changelog has another version."""
    wanted = version()
    for project in projects()[1:]:
        found = tomllib.loads((project / "pyproject.toml").read_text())["project"]["version"]
        if found != wanted:
            raise Failure(
                f"{project.name} has version {found}, quest-core has {wanted}: ./dev release --version {wanted}"
            )
    if f"\n## {wanted}" not in (ROOT / "CHANGELOG.md").read_text():
        raise Failure(f"CHANGELOG.md has no section '## {wanted}'")


def for_pypi(text: str, folder: str) -> str:
    """Return a README of `folder` in the repository with addresses in place of paths."""
    return LINK.sub(lambda m: m[1] + urljoin((FILES if m[1] == "](" else PICTURES) + folder + "/", m[2]), text)


def build(project: Path, folder: Path) -> list[Path]:
    """Build an sdist and a wheel; returns both."""
    epoch = subprocess.run(["git", "log", "-1", "--format=%ct"], cwd=ROOT, capture_output=True, text=True, check=True)
    variables = {**os.environ, "SOURCE_DATE_EPOCH": epoch.stdout.strip()}
    before = set(folder.iterdir())
    with tempfile.TemporaryDirectory() as temporary:
        _run([sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", temporary], project, variables)
        (sdist,) = Path(temporary).iterdir()
        with tarfile.open(sdist) as archive:
            archive.extractall(temporary, filter="data")
        unpacked = Path(temporary, sdist.name.removesuffix(".tar.gz"))
        page = unpacked / "README.md"
        page.write_text(for_pypi(page.read_text(), project.relative_to(ROOT).as_posix()))
        for kind in ("sdist", "wheel"):
            _run([sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(folder)], unpacked, variables)
    return sorted(set(folder.iterdir()) - before, key=lambda path: path.suffix == ".whl")


def check_wheel(wheel: Path) -> None:
    """Raise Failure if a wheel lacks its licence, its types or its links, or if its page has a relative link."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        about = HeaderParser().parsestr(archive.read(metadata).decode())
    for wanted in ("/py.typed", "/licenses/LICENSE"):
        if not any(name.endswith(wanted) for name in names):
            raise Failure(f"{wheel.name} lacks {wanted.rpartition('/')[2]}")
    if len(about.get_all("Project-URL") or ()) < 4:
        raise Failure(f"{wheel.name} has {about.get_all('Project-URL')} for links")
    if relative := [target for _, target in LINK.findall(about.get_payload())]:
        raise Failure(f"{wheel.name}: its page on PyPI would have the dead links {', '.join(relative)}")


def _run(command: Sequence[str], folder: Path, variables: dict[str, str] | None = None) -> None:
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Failure(f"`{' '.join(command)}` in {folder} failed\n{done.stdout}{done.stderr}")


def release(dry: bool) -> None:
    check_versions()
    if not dry:
        for page in (project / "README.md" for project in projects()):
            if UNRELEASED in page.read_text():
                raise Failure(f"{page.relative_to(ROOT)} says '{UNRELEASED}': write 'From a clone', or leave it out")
        _run(["git", "diff", "--quiet", "HEAD"], ROOT)
        _run(["git", "describe", "--exact-match", "--match", f"v{version()}"], ROOT)
    dist = ROOT / "dist"
    dist.mkdir(exist_ok=True)
    for old in dist.iterdir():
        old.unlink()
    for project in projects():
        made = build(project, dist)
        with tempfile.TemporaryDirectory() as temporary:
            for first, second in zip(made, build(project, Path(temporary)), strict=True):
                if first.read_bytes() != second.read_bytes():
                    raise Failure(f"two builds of {first.name} differ")
        check_wheel(made[1])
        for path in made:
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            print(f"{digest}  {path.stat().st_size // 1024:5} KiB  {path.name}")
    _run([sys.executable, "-m", "twine", "check", "--strict", *map(str, sorted(dist.iterdir()))], ROOT)
    print("every distribution builds twice to the same bytes, and twine accepts it")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="./dev release", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dry-run", action="store_true", help="allow a tree with changes and without a tag")
    parser.add_argument("--version", metavar="VERSION", help="only write this version to every distribution")
    given = parser.parse_args()
    try:
        if given.version:
            set_version(given.version)
        else:
            release(given.dry_run)
    except Failure as failure:
        print(f"./dev release: {failure}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

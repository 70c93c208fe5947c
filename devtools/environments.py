"""The environments that tests run in, found by folder. Standard library only.

- "core": quest-core, quest-bench, quest-suites, research/ and the linters.
- One per plugin with an extra `host`: quest-suites, the plugins that it names, its constraints.txt, and if they exist
  requirements-nodeps.txt (installed without their dependencies) and environment/ of each of these plugins (files that
  are copied into site-packages).
- Further ones, <name>-<label>, for another version of PyTorch (environments/<label>/) or of a host
  (plugins/<name>/environments/<label>/), with files of the same names. A requirements.txt there takes the place of the
  extra `host`.

`python -m devtools.environments` prints the names as JSON; --all adds the further ones.
"""

import hashlib
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PLUGINS = ROOT / "plugins"
EXAMPLE = ROOT / "examples" / "third_party_mechanism"  # the conformance suite of every host runs it
BENCH, SUITES = "quest-bench", "quest-suites"
RESEARCH = ROOT / "research"
CORE = "core"


class Failure(Exception):
    """An error whose message is enough; it needs no traceback."""


@dataclass(frozen=True)
class Environment:
    """The contents of an environment: PyTorch and `requirements`, then `nodeps`, under `constraints`."""

    name: str
    constraints: Path
    requirements: tuple[str, ...]  # arguments of pip and uv
    nodeps: Path | None = None  # a requirements file, installed without dependencies
    shims: tuple[Path, ...] = ()  # files copied into site-packages

    def fingerprint(self, *more: str) -> str:
        """Return a text that changes when the environment has to be made again."""
        files = [self.constraints, *([self.nodeps] if self.nodeps else []), *self.shims]
        for requirement in self.requirements:
            path = Path(requirement.partition("[")[0])
            files += [path / "pyproject.toml"] if path.is_dir() else [path] if path.is_file() else []
        contents = [f"{path.name}\n{path.read_text()}" for path in files]
        text = "\0".join([sys.version, sys.base_prefix, str(ROOT), *self.requirements, *contents, *more])
        return hashlib.sha256(text.encode()).hexdigest()


def plugins() -> list[str]:
    """Return the name of every plugin: the folders below plugins/ with a pyproject.toml."""
    return sorted(path.parent.name for path in PLUGINS.glob("*/pyproject.toml"))


def hosts() -> list[str]:
    """Return the plugins that have a host, and so an environment."""
    return [name for name in plugins() if re.search(r"^host = ", (PLUGINS / name / "pyproject.toml").read_text(), re.M)]


def home(name: str) -> Path:
    """Return the folder of a plugin or of the core."""
    return ROOT if name == CORE else PLUGINS / name


def further() -> dict[str, Path]:
    """Return the environments for other versions: <base>-<label> -> .../environments/<label>."""
    return {
        f"{name}-{path.name}": path
        for name in (CORE, *hosts())
        for path in sorted(home(name).glob("environments/*/"))
        if path.is_dir()
    }


def base(name: str) -> str:
    """Return the environment that `name` is a variant of, or `name`."""
    if name not in further():
        return name
    folder = further()[name].parents[1]
    return CORE if folder == ROOT else folder.name


def environment(name: str) -> Environment:
    """Return the environment called `name`; raises Failure if there is none."""
    if name not in (CORE, *hosts(), *further()):
        raise Failure(f"unknown environment '{name}'; choose from: {', '.join([CORE, *hosts(), *further()])}")
    own, folder = base(name), home(base(name))
    files = further().get(name, folder)  # the folder of its constraints
    constraints, nodeps = files / "constraints.txt", files / "requirements-nodeps.txt"
    shims = [files]
    if own == CORE:
        requirements = ["-e", f"{ROOT}[test,dev,docs]"]
        if name == CORE:
            for path in (f"{PLUGINS / BENCH}[test]", PLUGINS / SUITES, RESEARCH):
                requirements += ["-e", str(path)]
            nodeps = RESEARCH / "requirements-nodeps.txt"
    else:
        requirements = ["-e", f"{ROOT}[test]"]
        if name != own and (files / "requirements.txt").exists():
            requirements += ["-e", f"{folder}[test]", "-r", str(files / "requirements.txt")]
        else:
            requirements += ["-e", f"{folder}[host,test]"]
        requirements += ["-e", str(PLUGINS / SUITES), "-e", str(EXAMPLE)]
        text = (folder / "pyproject.toml").read_text()
        named = [other for other in plugins() if other not in (own, SUITES) and re.search(rf'"{other}[>\[]', text)]
        for other in named:
            requirements += ["-e", str(PLUGINS / other)]
        shims += [PLUGINS / other for other in (SUITES, *named)]
    return Environment(
        name,
        constraints if constraints.exists() else ROOT / "constraints.txt",
        tuple(requirements),
        nodeps if nodeps.exists() else None,
        tuple(sorted(path for at in shims for path in at.glob("environment/*") if path.is_file())),
    )


# --- which tests run where ------------------------------------------------------------------------------------------


def owner(path: Path | str) -> str:
    """Return the environment that runs a test file or folder (pytest's `::` may follow).

    A file of integration_tests/ that needs a host declares it: environment = "quest-tsai".
    """
    path = Path(str(path).partition("::")[0]).resolve()
    parts = path.relative_to(ROOT).parts if path.is_relative_to(ROOT) else ()
    if parts[:1] == ("plugins",) and len(parts) > 1:
        return parts[1] if parts[1] in hosts() else CORE
    if parts[:1] == ("integration_tests",) and path.is_file():
        declared = re.search(r'^environment = "(.*)"$', path.read_text(), re.MULTILINE)
        if declared:
            return environment(declared[1]).name  # raises if there is none
    return CORE


def integration_tests(name: str) -> list[Path]:
    """Return the files below integration_tests/ that run in environment `name`."""
    return sorted(path for path in (ROOT / "integration_tests").rglob("test_*.py") if owner(path) == name)


def suites(name: str) -> dict[str, list[Path]]:
    """Return the paths of each pytest process of environment `name`, by what it tests."""
    tests = home(base(name)) / "tests"
    if name == CORE:  # modules of the same name cannot share a process
        core = [tests, *integration_tests(CORE)]
        return {CORE: core, BENCH: [PLUGINS / BENCH / "tests"], "research": [RESEARCH / "tests"]}
    return {name: [tests, *(integration_tests(base(name)) if base(name) != CORE else [])]}


def is_path(argument: str) -> bool:
    """Return whether an argument of pytest is a test file or folder."""
    file = argument.partition("::")[0]
    return not argument.startswith("-") and ("/" in file or file.endswith(".py")) and Path(file).exists()


def selection(arguments: list[str], everywhere: bool = False) -> dict[str, list[str]]:
    """Return the paths among `arguments` by the environment that runs them; if `everywhere`, by further ones too."""
    chosen: dict[str, list[str]] = {}
    for path in filter(is_path, arguments):
        chosen.setdefault(owner(path), []).append(path)
    for name in further() if everywhere else ():
        folder = ROOT / "tests" if base(name) == CORE else ROOT
        fitting = [path for path in chosen.get(base(name), ()) if Path(path).resolve().is_relative_to(folder)]
        if fitting:
            chosen[name] = fitting
    return chosen


if __name__ == "__main__":
    print(json.dumps([CORE, *hosts(), *(further() if "--all" in sys.argv else ())]))

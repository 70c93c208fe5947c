"""The commands of ./dev: `./dev test ARGUMENTS` is `nox --session test -- ARGUMENTS`.

uv makes the environments that devtools/environments.py lists. An environment is kept until its pyproject.toml,
constraints or Python change; delete .nox/<name> to have one made again.
"""

import argparse
import ast
import atexit
import fcntl
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import nox

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))
from devtools import environments, running  # noqa: E402
from devtools.environments import CORE, Failure  # noqa: E402

nox.needs_version = ">=2025.2"
nox.options.default_venv_backend = "none"  # `python` makes the environments, because sessions share them
nox.options.sessions = ["test"]
signal.signal(signal.SIGTERM, signal.default_int_handler)  # a cancelled job ends its children too

UV = Path(sys.executable).with_name("uv")
WORKERS = str(os.cpu_count() or 1)


# --- environments ---------------------------------------------------------------------------------------------------


def is_missing(source: str) -> bool:
    """Return whether an index or a folder of wheels is a local path that does not exist, which pip skips."""
    path = source.removeprefix("file://")
    return path.startswith("/") and not Path(path).exists()


def uv_settings(pip: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that let uv install from where pip does, because uv does not read pip's configuration.

    That is what `pip config list` prints. Settings of uv in the environment are kept.
    """
    found: dict[str, str] = {}
    for line in sorted(pip.splitlines(), key=lambda line: line.startswith(":env:")):  # variables win
        if match := re.match(r"(?:global|install|:env:)\.([\w-]+)=(.*)$", line):
            found[match[1]] = str(ast.literal_eval(match[2]))
    lists = {
        name: [source for source in found.get(name, "").split() if not is_missing(source)]
        for name in ("index-url", "extra-index-url", "find-links", "trusted-host")
    }
    settings = {
        "UV_DEFAULT_INDEX": " ".join(lists["index-url"]),
        "UV_INDEX": " ".join(lists["extra-index-url"]),
        "UV_FIND_LINKS": ",".join(lists["find-links"]),
        "UV_INSECURE_HOST": " ".join(lists["trusted-host"]),
        "UV_INDEX_STRATEGY": "unsafe-best-match",  # the best version of all indexes, as pip takes it
        "UV_HTTP_TIMEOUT": found.get("default-timeout") or found.get("timeout", ""),
        "SSL_CERT_FILE": found.get("cert", ""),
        "UV_PYTHON_DOWNLOADS": "never",
    }
    home = Path(environ.get("XDG_CACHE_HOME") or environ.get("HOME") or "/").resolve()
    if not home.exists() or home.stat().st_dev != ROOT.stat().st_dev:
        settings["UV_CACHE_DIR"] = str(running.STATE / "uv-cache")  # equal files are links to a cache on the same disk
    return {name: value for name, value in settings.items() if value and not environ.get(name)}


@contextmanager
def locked(name: str) -> Iterator[None]:
    """Hold the lock of an environment: two ./dev at once must not write into one."""
    running.LOGS.mkdir(parents=True, exist_ok=True)
    with (running.STATE / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def python(name: str) -> Path:
    """Return the python of environment `name`, which is made unless its stamp is up to date; raises Failure."""
    env, folder = environments.environment(name), running.STATE / name
    executable, stamp, log = folder / "bin" / "python", folder / "quest-stamp", running.LOGS / f"install-{name}.log"
    wanted = env.fingerprint()
    with locked(name):
        if stamp.exists() and stamp.read_text() == wanted:
            return executable
        print(f"...     {name}: installing (log: {log.relative_to(ROOT)})", flush=True)
        log.write_text("")
        pip = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True).stdout
        variables = running.clean_environment(**uv_settings(pip, os.environ))
        install = [UV, "pip", "install", "--python", executable, "--constraint", env.constraints]
        commands = [
            [UV, "venv", "--clear", "--python", sys.executable, folder],
            # mmcv is built with the PyTorch that is there; some tests call pip.
            [*install, "torch", "pip", "setuptools", "wheel"],
            [*install, "--no-build-isolation-package", "mmcv", *env.requirements],
            *([[*install, "--no-deps", "-r", env.nodeps]] if env.nodeps else []),
        ]
        for command in commands:
            if running.run(command, log, variables):
                raise Failure(f"{name}: `{shlex.join(map(str, command))}` failed\n{running.tail(log)}")
        (packages,) = folder.glob("lib/python*/site-packages")
        for path in env.shims:
            shutil.copy(path, packages)
        stamp.write_text(wanted)  # last: an interrupted installation is made again
    return executable


def call(session: nox.Session, command: Sequence[str | Path], **variables: str) -> None:
    """Run a command; the session fails with it."""
    if status := running.run(command, None, running.clean_environment(**variables)):
        session.error(f"`{shlex.join(map(str, command))}` ended with status {status}")


def need(session: nox.Session, name: str) -> Path:
    """Return the python of environment `name`; if there is none, the session fails with the reason."""
    try:
        return python(name)
    except Failure as failure:
        session.error(str(failure))


# --- sessions -------------------------------------------------------------------------------------------------------


@nox.session
def setup(session: nox.Session) -> None:
    """Make environments: those named, or the core's and every host's."""
    for name in session.posargs or [CORE, *environments.hosts()]:
        print(f"{name}: {need(session, name).relative_to(ROOT)}", flush=True)


def lint_stages(executable: Path) -> list[running.Stage]:
    """Run the linters, two at a time."""
    tools = executable.parent
    sources = [
        *(environments.PLUGINS / name / "src" for name in environments.plugins()),
        environments.RESEARCH / "quest_research",
    ]
    mypy, caches = [tools / "mypy", "--cache-dir"], ROOT / ".mypy_cache"  # one cache per set of options
    commands = {
        "mypy plugins": [*mypy, caches / "plugins", *sources],
        "mypy quest_core": [*mypy, caches / "core", "--strict", "quest_core"],
        "ruff check": [tools / "ruff", "check", "."],
        "ruff format": [tools / "ruff", "format", "--check", "."],
        "import contracts": [tools / "lint-imports"],
        "words": [executable, "docs/words.py"],
    }
    # Plugins are read from their sources, so that no host has to be installed.
    variables = running.clean_environment(PYTHONPATH=os.pathsep.join(map(str, [ROOT, *sources])))
    return running.side_by_side(lambda name: running.command_stage(name, commands[name], variables), commands)


def close(session: nox.Session, stages: Sequence[running.Stage], *lines: str) -> None:
    """Print the summary; its closing line is the last of the process. The session fails with a stage."""
    ok, closing = running.summary(stages)
    atexit.register(print, *lines, closing, sep="\n", flush=True)
    if not ok:
        session.error("failed: " + ", ".join(stage.name for stage in stages if not stage.ok))


@nox.session
def lint(session: nox.Session) -> None:
    """Run ruff, mypy, import-linter and the words of the docs; needs no host."""
    close(session, lint_stages(need(session, CORE)))


@nox.session
def test(session: nox.Session) -> None:
    """Run the linters, and the tests in the environments that they belong to."""
    parser = argparse.ArgumentParser(prog="./dev test", allow_abbrev=False)
    parser.add_argument("--full", action="store_true", help="also the tests marked slow")
    parser.add_argument("--all", action="store_true", help="in the further environments too")
    parser.add_argument("--only", metavar="NAME", help="in this environment")
    given, rest = parser.parse_known_args(session.posargs)
    seed = os.environ["QUEST_TEST_SEED"] = os.environ.get("QUEST_TEST_SEED") or str(random.getrandbits(32))
    chosen = environments.selection(rest, given.all)
    if chosen and given.only:
        session.error(f"--only {given.only} chooses an environment, and so do the paths")
    named = any("::" in path for paths in chosen.values() for path in paths)  # a test that is named runs
    tier = "not gpu" if given.full or named else "not gpu and not slow"
    options = ["-m", tier, *(argument for argument in rest if not environments.is_path(argument))]
    names = [given.only] if given.only else list(chosen)
    names = names or [CORE, *environments.hosts(), *(environments.further() if given.all else ())]
    stages: list[running.Stage] = []
    suites: list[tuple[str, Path, list[Path]]] = []
    for name in names:
        try:
            executable = python(name)
        except Failure as failure:
            print(f"FAILED  {failure}", flush=True)
            stages.append(running.Stage(f"{name} environment", ok=False))
            continue
        if name == CORE and not chosen:
            stages += lint_stages(executable)
        if chosen:
            stages.append(running.pytest_stage(f"{name} tests", executable, chosen[name], options, live=True))
            continue
        suites += [(f"{label} tests", executable, paths) for label, paths in environments.suites(name).items()]
    # The core's suite fills every core. The others run side by side, because each worker would import the host;
    # from the last, so that the shortest suites end the run.
    live, workers = bool(rest), ["-n", WORKERS, "--dist", "worksteal"]
    stages += [running.pytest_stage(*suite, [*workers, *options], live=live) for suite in suites[:1]]
    stages += running.side_by_side(
        lambda suite: running.pytest_stage(*suite, options, live=live), suites[:0:-1], 1 if live else int(WORKERS)
    )
    again = f"QUEST_TEST_SEED={seed} {shlex.join(['./dev', 'test', *session.posargs])}"
    close(session, stages, f"to draw the same random numbers again: {again}")
    if chosen and not any(stage.passed or stage.failed or stage.skips for stage in stages):
        session.error("no test was chosen by these paths and options; those marked slow run with --full")


@nox.session
def demo(session: nox.Session) -> None:
    """Compare QUEST with standard attention on real images."""
    call(session, [need(session, CORE), "-m", "quest_research.demo", "--out", "runs/demo", *session.posargs])


@nox.session
def docs(session: nox.Session) -> None:
    """Build the pages into site/, with warnings as errors; --serve shows them while you write."""
    if session.posargs not in ([], ["--serve"]):
        session.error(f"expected --serve or nothing, found {shlex.join(session.posargs)}")
    options = ["serve"] if session.posargs else ["build", "--strict", "--quiet", "--site-dir", ROOT / "site"]
    call(session, [need(session, CORE), "-m", "mkdocs", *options], NO_MKDOCS_2_WARNING="1")


@nox.session
def release(session: nox.Session) -> None:
    """Check versions, and build every distribution twice."""
    call(session, [need(session, CORE), "release/build.py", *session.posargs])

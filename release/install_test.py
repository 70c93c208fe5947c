"""Run the code blocks of a README in an empty environment: ./dev install-test [NAME ...].

The packages are built by the block of the main README that says how, in a copy of this clone. Everything else comes
from where pip is configured to look. The commands run in an empty folder with an empty HOME and an empty pip cache, in
the order of the README, in one shell:

- A bash block is typed as it stands.
- A Python block runs after the Python blocks before it, as in a notebook.
- A block with title="FILE" becomes that file.
- A block after the line `<!-- not run: REASON -->` is skipped, and the reason is printed.
- The block after the line `<!-- builds the packages -->` is run in a copy of this clone, before the others.
- A README with the line `<!-- slow: REASON -->` is left out by --quick.
- From the first `git clone` on, blocks need a checkout and run only with --online.

Only the standard library and devtools are imported.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from devtools import running
from devtools.environments import ROOT, Failure, plugins

RESULTS = ROOT / "runs" / "install"
FENCE = re.compile(r"^```(?P<language>\w*)(?: title=\"(?P<title>[^\"]+)\")?\s*$")
SLOW = re.compile(r"^<!-- slow: (.+) -->$", re.MULTILINE)
NOT_RUN = re.compile(r"^<!-- not run: (.+) -->$")
BUILD = "builds the packages"
RUN = ("bash", "python")
CLONE = re.compile(r"git clone (?:-\S+ )*(https://\S+)")


@dataclass
class Block:
    """One fenced code block of a page."""

    line: int  # of its first line of code
    language: str
    title: str | None
    code: str
    not_run: str | None = None  # the reason to skip it


def names() -> list[str]:
    """Every README: "core", and the plugins by folder."""
    return ["core", *(name.removeprefix("quest-") for name in plugins())]


def readme(name: str) -> Path:
    return ROOT / "README.md" if name == "core" else ROOT / "plugins" / f"quest-{name}" / "README.md"


def blocks(text: str) -> list[Block]:
    """Every fenced block of a page, in order."""
    found: list[Block] = []
    reason: str | None = None
    block: Block | None = None
    for number, line in enumerate(text.splitlines(), 1):
        if block is not None:
            if line.strip() == "```":
                found.append(block)
                block = None
            else:
                block.code += line + "\n"
        elif match := NOT_RUN.match(line):
            reason = match[1]
        elif line == f"<!-- {BUILD} -->":
            reason = BUILD
        elif match := FENCE.match(line):
            block = Block(number + 1, match["language"], match["title"], "", reason)
            reason = None
        elif line.strip():
            reason = None
    return found


def plan(found: Sequence[Block], online: bool) -> list[Block]:
    """The blocks that are commands or files, each with the reason if it cannot run here."""
    wanted = [block for block in found if block.language in RUN or block.title]
    missing: str | None = None
    for block in wanted:
        clone = CLONE.search(block.code)
        if clone and not online:
            missing = missing or f"needs a checkout of {clone[1]}: --online"
        block.not_run = block.not_run or missing
    return wanted


def script(wanted: Sequence[Block], folder: Path) -> str:
    """A bash script that runs the blocks, and says when each starts."""
    lines = ["set -eo pipefail", f"cd {folder / 'work'}"]
    python = ""
    for block in wanted:
        if block.not_run:
            continue
        lines.append(f'echo "== line {block.line}, after $SECONDS s"')
        if block.title:
            lines.append(f"cat > {block.title} <<'QUEST_END'\n{block.code}QUEST_END")
        elif block.language == "python":
            python += block.code
            lines.append(f"python - <<'QUEST_END'\n{python}QUEST_END")
        else:
            lines.append(block.code)
    lines.append(f"quest doctor 2>&1 | tee {folder / 'doctor'}")
    return "\n".join(lines) + "\n"


def build(folder: Path) -> None:
    """Build the wheel of every package as the main README says, into folder/clone/wheels."""
    clone = folder / "clone"
    for name in git("ls-files", "--cached", "--others", "--exclude-standard", "-z").split("\0"):
        if (ROOT / name).is_file():
            (clone / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, clone / name)
    (block,) = (block for block in blocks(readme("core").read_text()) if block.not_run == BUILD)
    done = subprocess.run(["bash", "-ec", block.code], cwd=clone, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Failure(f"the packages cannot be built\n{done.stdout}{done.stderr}")


def environment(folder: Path, home: Path, torch: str | None) -> dict[str, str]:
    """The variables of a new user's shell: our own packages from `folder`, nothing else from this clone."""
    dropped = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PIP_CONSTRAINT")
    variables = {k: v for k, v in os.environ.items() if k not in dropped and not k.startswith("QUEST_")}
    constraints = home / "constraints.txt"
    constraints.write_text(f"torch=={torch}\n" if torch else "")
    base = Path(getattr(sys, "_base_executable", sys.executable))
    return variables | {
        "HOME": str(home),
        "PATH": f"{base.parent}:{variables['PATH']}",
        "PIP_CONSTRAINT": str(constraints),
        "PIP_FIND_LINKS": f"{variables.get('PIP_FIND_LINKS', '')} {folder / 'clone' / 'wheels'}".strip(),
        "PIP_CACHE_DIR": str(folder / "cache"),
        "PYTHONNOUSERSITE": "1",
        "OMP_NUM_THREADS": variables.get("OMP_NUM_THREADS", "1"),
    }


def test(name: str, folder: Path, torch: str | None, online: bool) -> dict[str, object]:
    """Run one README; returns what came of it."""
    wanted = plan(blocks(readme(name).read_text()), online)
    home = folder / name
    (home / "work").mkdir(parents=True)
    (home / "run.sh").write_text(script(wanted, home))
    log = RESULTS / f"{name}.log"
    log.unlink(missing_ok=True)
    start = time.monotonic()
    status = running.run(["bash", home / "run.sh"], log, environment(folder, home, torch))
    seconds = time.monotonic() - start
    doctor = (home / "doctor").read_text() if (home / "doctor").exists() else ""
    package = "quest-core" if name == "core" else f"quest-{name}"
    # quest-core heads the list; a plugin for a framework has a line of its own, which says that it works.
    works = "quest-core" in doctor and (
        name in ("core", "bench", "suites") or re.search(rf"{package}\b.*\bok\b", doctor) is not None
    )
    return {
        "name": name,
        "ok": status == 0 and works,
        "why": f"exit status {status}, log: {log}" if status else "" if works else f"quest doctor says:\n{doctor}",
        "seconds": seconds,
        "not_run": [[block.line, block.not_run] for block in wanted if block.not_run not in (None, BUILD)],
    }


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def report(result: dict[str, object]) -> None:
    """Print what came of one README in one piece, because others run at the same time."""
    lines = [f"{'ok    ' if result['ok'] else 'FAILED'}  {result['name']:<12} {result['seconds']:6.0f} s"]
    lines += [f"        line {line} not run: {reason}" for line, reason in result["not_run"]]  # type: ignore[attr-defined]
    if not result["ok"]:
        lines += [f"        {result['why']}", running.tail(RESULTS / f"{result['name']}.log")]
    print("\n".join(lines), flush=True)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="./dev install-test", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(names())}; all by default")
    parser.add_argument("--quick", action="store_true", help="leave out READMEs that say that they are slow")
    parser.add_argument("--online", action="store_true", help="clone repositories from where the README says")
    parser.add_argument("--list", action="store_true", help="print the names as JSON and end")
    parser.add_argument("--torch", metavar="VERSION", help="constrain PyTorch, for example to a CPU build pip can find")
    given = parser.parse_args(arguments)
    if given.list:
        print(json.dumps(names()))
        return 0
    chosen = given.names or names()
    if unknown := [name for name in chosen if name not in names()]:
        parser.error(f"no README for {', '.join(unknown)}; choose from: {', '.join(names())}")
    for name in [name for name in chosen if given.quick]:
        if slow := SLOW.search(readme(name).read_text()):
            print(f"left out {name}: {slow[1]}")
            chosen = [other for other in chosen if other != name]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    RESULTS.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(prefix="quest-install-", ignore_cleanup_errors=True) as made:
            folder = Path(made)
            build(folder)

            def run(name: str) -> bool:
                print(f"...     {name} (log: {(RESULTS / f'{name}.log').relative_to(ROOT)})", flush=True)
                result = test(name, folder, given.torch, given.online)
                shutil.rmtree(folder / name)
                report(result)
                return bool(result["ok"])

            ok = all(running.side_by_side(run, chosen))  # pip installs with one core
    except Failure as failure:
        print(f"./dev install-test: {failure}", file=sys.stderr)
        return 1
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

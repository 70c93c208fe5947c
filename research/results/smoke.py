"""Time `quest bench run SUITE --smoke` for every suite that brings its data, and write the table of smoke.md.

QUEST_PYTHON_TSAI=.nox/quest-tsai/bin/python ... python research/results/smoke.py > research/results/smoke.md
"""

from __future__ import annotations

import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

from quest_bench.plan import catalogue
from quest_bench.worker import machine, utc

LIMIT_S = 60
HEAD = """# The time of `--smoke`

Seconds from the command to its end, and of the processor in all its processes: every task of a suite, one attention,
one seed, one process at a time. A run is meant to end within {limit} s; a test bounds the processor time of each cell.
On a loaded machine only the seconds of the processor say something. Suites that need your data are not in the table.

```bash
export QUEST_PYTHON_TSAI=.nox/quest-tsai/bin/python   # and so on, for each plugin
quest bench run SUITE --attention quest --seeds 0 --jobs 1 --smoke --out runs/smoke
```

All of them: `python research/results/smoke.py > research/results/smoke.md`.

{date}, {cpu}, {cores} cores, Python {python}; load average {before:.1f} at the start and {after:.1f} at the end.

| suite | tasks | seconds | processor seconds |
|---|---:|---:|---:|"""


def run(suite: str, plugin: str) -> tuple[float, float]:
    """Run a suite in a folder of its own; return elapsed seconds and those of the processor.

    Of the other environments nothing is asked, which takes a second each.
    """
    own = f"QUEST_PYTHON_{plugin.upper()}"
    environment = {key: value for key, value in os.environ.items() if key == own or not key.startswith("QUEST_PYTHON_")}
    words = ["run", suite, "--attention", "quest", "--seeds", "0", "--jobs", "1", "--smoke", "--out"]
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "quest_bench.cli", *words, folder]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    seconds, after = time.monotonic() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise SystemExit(f"{suite} failed:\n{done.stdout}")
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main(chosen: Sequence[str]) -> None:
    """Print the page of all suites, or of the chosen ones."""
    load, rows = os.getloadavg()[0], []
    for suite in catalogue().suites.values():
        if suite.data_required or (chosen and suite.name not in chosen):
            continue
        seconds, processor = run(suite.name, suite.needs)
        rows.append(f"| `{suite.name}` | {len(suite.tasks)} | {seconds:.0f} | {processor:.0f} |")
        print(rows[-1], file=sys.stderr, flush=True)
    facts = {"cpu": machine()["cpu"], "cores": machine()["cores"], "python": platform.python_version()}
    print(HEAD.format(limit=LIMIT_S, date=utc()[:10], before=load, after=os.getloadavg()[0], **facts))
    print("\n".join(rows))


if __name__ == "__main__":
    main(sys.argv[1:])

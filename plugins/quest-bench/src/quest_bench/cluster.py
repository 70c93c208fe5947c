"""Orchestrators as jobs of a cluster, by submitit: each runs the same command into the same folder.

The claims of cells divide the work, so that no job knows of another one, and a job that is preempted and queued again
resumes. submitit's local executor runs the same on one machine.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quest_core.errors import ConfigError, PluginError, one_of

CLUSTERS = ("slurm", "local")
DROPPED = ("--cluster", "--orchestrators", "--cluster-set")
PREEMPTION_S = 900.0
"""Slurm sends SIGTERM to a job that it preempts, ends it later, and requeues it unless it ended by itself before."""


class Orchestrate:
    """One job. submitit pickles it, calls it, and asks `checkpoint` what to queue when it is preempted."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self.arguments = list(arguments)

    def __call__(self) -> int:
        command = [sys.executable, "-m", "quest_bench.cli", *self.arguments]
        code = subprocess.run(command, stdin=subprocess.DEVNULL).returncode
        if code == 128 + signal.SIGTERM:
            time.sleep(PREEMPTION_S)
        return code

    def checkpoint(self) -> Any:
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


def submit(arguments: Sequence[str], out: Path, cluster: str, orchestrators: int, settings: Sequence[str]) -> list[Any]:
    """Submit `orchestrators` jobs that run `quest bench ARGUMENTS`, as one array on Slurm.

    Args:
        arguments: the command line; its cluster options are dropped.
        out: the run's folder; the logs of the jobs go to out/cluster.
        cluster: "slurm" or "local".
        settings: "key=value" for `update_parameters` of submitit, for example "slurm_partition=gpu".

    Returns:
        submitit's jobs.

    Raises:
        ConfigError: an unknown cluster, or a setting that is no "key=value".
        PluginError: submitit is not installed, or the cluster is not there.
    """
    if cluster not in CLUSTERS:
        raise ConfigError(f"--cluster is '{cluster}'; {one_of(cluster, CLUSTERS)}")
    try:
        import submitit
    except ImportError:
        raise PluginError(
            "--cluster needs submitit, which is not installed; pip install 'quest-bench[slurm]'"
        ) from None
    parameters: dict[str, Any] = {"timeout_min": 24 * 60}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals:
            raise ConfigError(f"--cluster-set {setting!r} is not key=value, such as slurm_partition=gpu")
        try:
            parameters[key] = json.loads(text)
        except ValueError:
            parameters[key] = text
    kept = strip(arguments)
    try:
        executor = submitit.AutoExecutor(folder=out / "cluster", cluster=cluster)
        executor.update_parameters(**parameters)
        with executor.batch():
            jobs = [executor.submit(Orchestrate(kept)) for _ in range(orchestrators)]
    except (RuntimeError, NameError, TypeError) as error:
        raise PluginError(f"--cluster {cluster}: submitit refused: {str(error).splitlines()[0]}") from None
    return jobs


def strip(arguments: Sequence[str]) -> list[str]:
    """The command line without the options of the cluster and their values."""
    kept: list[str] = []
    skip = False
    for word in arguments:
        name, equals, _ = word.partition("=")
        if skip:
            skip = False
        elif name in DROPPED:
            skip = not equals
        else:
            kept.append(word)
    return kept

"""`./dev gpu`: the CUDA tests, the table of measurements, and the wheels for a machine without a network.

Standard library only, because the machine may have nothing but PyTorch, and pip in place of uv.
"""

import argparse
import contextlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from devtools import environments, running
from devtools.environments import BENCH, CORE, PLUGINS, RESEARCH, Failure, is_path, owner
from devtools.running import Stage, clean_environment, run

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(__file__).parent
NO_DEVICE = 77  # exit status if nothing failed without a GPU; test harnesses read it as skipped
RESULTS = ROOT / "runs" / "gpu"  # where table.py looks for step times and test results
ATTENTIONS = ("standard", "quest", "qknorm-hs", "aft-simple", "standard+gqa(kv_heads=4)", "quest+gqa(kv_heads=4)")
LENGTHS = (197, 1024, 4096, 16384)
TASKS = "gpu/attention/" + ",".join(f"N={length}" for length in LENGTHS)
SUITE = f"run {TASKS} --attention {','.join(ATTENTIONS)} --seeds 0 --set rounds=11 --set slice_ms=10".split()
"""Arguments of `quest bench`, without the folder."""
CORE_REQUIREMENTS = ("-e", f"{ROOT}[test]", "-e", str(PLUGINS / BENCH), "-e", str(RESEARCH))


def gpu(arguments: Sequence[str]) -> int:
    """Run `./dev gpu` and return its exit status.

    Raises:
        Failure: the PyTorch, the wheels, pytest or an argument is missing.
    """
    if arguments[:1] == ["fetch"]:
        return fetch(arguments[1:])
    parser = argparse.ArgumentParser(
        prog="./dev gpu",
        usage="path/to/python dev gpu [--wheels FOLDER] [--table] [PYTEST ...]\n"
        "       path/to/python dev gpu fetch FOLDER [NAME ...]",
        description="The CUDA tests, with the PyTorch of the python that runs this. See docs/gpu.md.",
        epilog="Other arguments go to pytest: -k precision, a file. Exit status 77: a CUDA device is missing, and the "
        "part of the tests that a CPU can run has passed. fetch: with a network, download what --wheels installs.",
        allow_abbrev=False,
    )
    parser.add_argument("--table", action="store_true", help="then measure, and write research/results/gpu.md")
    help_ = "test every framework, in environments made from this folder of ./dev gpu fetch, without a network"
    parser.add_argument("--wheels", type=Path, metavar="FOLDER", help=help_)
    options, chosen = parser.parse_known_args(arguments)
    version, cuda = _pytorch()
    bench = Path(sys.executable) if options.wheels is None else running.STATE / "gpu" / CORE / "bin" / "python"
    if options.table and cuda and options.wheels is None and not _has_bench(bench):
        raise Failure(  # before the minutes that the tests take
            f"--table runs a suite of quest-bench, which {sys.executable} lacks; install it (pip install -e . -e "
            "plugins/quest-bench -e research), or carry it along: ./dev gpu fetch FOLDER, then "
            "./dev gpu --wheels FOLDER --table"
        )
    sources = [
        str(ROOT),
        *(str(PLUGINS / name / "src") for name in environments.plugins()),
        os.environ.get("PYTHONPATH", ""),
    ]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sources))}
    selection = ["-m", "gpu" if cuda else "not gpu", *(argument for argument in chosen if not is_path(argument))]
    paths: list[Path | str] = [argument for argument in chosen if is_path(argument)]
    if options.wheels is not None:
        stages = _stages(options.wheels, version, paths, selection)
    elif subprocess.run([sys.executable, "-c", "import pytest, pytest_timeout"], capture_output=True).returncode:
        raise Failure(
            f"{sys.executable} lacks pytest or pytest-timeout; install them, or carry them along: ./dev gpu fetch "
            "FOLDER where there is a network, and then ./dev gpu --wheels FOLDER"
        )
    else:
        # Plugins are read from their sources: this python need not have them installed, and may be offline.
        stages = [running.pytest_stage("gpu", sys.executable, paths or [FOLDER], selection, live=True, env=env)]
    if cuda and not chosen:
        keep_reports(stages, RESULTS)
    ok, closing = running.summary(stages)
    print(closing, flush=True)
    status = 0 if ok else 1
    if options.table and cuda:
        status = _table(bench, env) or status
    if not cuda:
        print(
            f"./dev gpu: no CUDA device: the PyTorch {version} of {sys.executable} sees none. What ran above is the "
            "part of the tests that a CPU can run; those marked gpu were not run.",
            file=sys.stderr,
        )
    return status if cuda or status else NO_DEVICE


def _has_bench(python: Path) -> bool:
    """Whether `quest bench` and its suites are installed for `python`; a source on its path has no entry points."""
    code = "import importlib.metadata as m; m.version('quest-bench'); import quest_bench.cli"
    return subprocess.run([str(python), "-c", code], capture_output=True).returncode == 0


def _table(bench: Path, env: dict[str, str]) -> int:
    """Run the suite of attention, and write research/results/gpu.md."""
    folder, python = RESULTS / "attention", [str(bench), "-m"]
    measured = run([*python, "quest_bench.cli", *SUITE, "--out", str(folder)], None, env)
    if measured > 1:  # 1: some cells failed, which the page shows
        return int(measured)
    return int(run([*python, "integration_tests.gpu.table", "--run", str(folder)], None, env))


def keep_reports(stages: Sequence[Stage], folder: Path) -> None:
    """Copy the reports of a whole run for the table, which counts all that it finds, and remove older ones."""
    folder.mkdir(parents=True, exist_ok=True)
    for older in folder.glob("*.xml"):
        older.unlink()
    for stage in stages:
        if stage.report is not None and stage.report.exists():
            shutil.copy(stage.report, folder)


def _pytorch() -> tuple[str, bool]:
    """Return the version of the running python's PyTorch, and whether it sees a CUDA device."""
    code = "import json, torch; print(json.dumps([torch.__version__, torch.cuda.is_available()]))"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if answer.returncode:
        why = (answer.stderr.strip().splitlines() or ["it printed no error"])[-1]
        raise Failure(f"{sys.executable} has no PyTorch ({why}); run the one that has: path/to/python dev gpu")
    version, cuda = json.loads(answer.stdout.splitlines()[-1])
    return version, cuda


# --- environments from wheels ---------------------------------------------------------------------------------------


def _stages(wheels: Path, torch: str, paths: Sequence[Path | str], selection: Sequence[str]) -> list[Stage]:
    """Run the tests of every environment; if one cannot be made, the others still run."""
    if not any(wheels.glob("*.whl")):
        raise Failure(f"--wheels is '{wheels}', where no wheels are; with a network: ./dev gpu fetch {wheels}")
    stages: list[Stage] = []
    owners = {path: owner(Path(str(path).partition("::")[0])) for path in paths}
    names = list(dict.fromkeys(owners.values())) or [CORE, *environments.hosts()]
    for name in names:
        try:
            python = _ensure(name, wheels.resolve(), torch)
        except Failure as failure:
            stages.append(Stage(f"{name} environment", ok=False))
            print(f"FAILED  {failure}", flush=True)
            continue
        own = [path for path, owner in owners.items() if owner == name]
        own = own or [path for path in environments.integration_tests(name) if path.parent == FOLDER]
        stages.append(running.pytest_stage(f"gpu {name}", python, own, selection, live=True, env=clean_environment()))
    return stages


def _ensure(name: str, wheels: Path, torch: str) -> Path:
    """Return the python of environment `name`: the running python's PyTorch `torch`, and the rest from `wheels`."""
    env, folder = environments.environment(name), running.STATE / "gpu" / name
    requirements = CORE_REQUIREMENTS if name == CORE else env.requirements
    stamp, executable = folder / "quest-stamp", folder / "bin" / "python"
    names = sorted(wheel.name for wheel in wheels.glob("*.whl"))
    wanted = env.fingerprint(sys.executable, torch, *names)
    if stamp.exists() and stamp.read_text() == wanted:
        return executable
    log = running.LOGS / f"install-gpu-{name}.log"
    print(f"...     {name}: installing (log: {log.relative_to(ROOT)})", flush=True)
    install([sys.executable, "-m", "venv", "--clear", folder], log)
    (packages,) = folder.glob("lib/python*/site-packages")
    links = folder.with_name(f"{name}-pytorch")
    if not link_pytorch(links):
        raise Failure(f"{sys.executable} does not say which files its PyTorch has; install PyTorch with pip")
    (packages / "quest-pytorch.pth").write_text(f"{links}\n")
    constraints = folder / "constraints.txt"
    constraints.write_text(f"{without_torch(env.constraints)}torch=={torch}\n")
    pip: list[str | Path] = [executable, "-m", "pip", "install", "--no-input", "--constraint", constraints]
    pip += ["--no-index", "--find-links", wheels]
    install([*pip, "torch", *requirements], log)
    if env.nodeps:
        install([*pip, "--no-deps", "-r", env.nodeps], log)
    for path in env.shims:
        shutil.copy(path, packages)
    stamp.write_text(wanted)
    return executable


def install(command: Sequence[str | Path], log: Path) -> None:
    """Run a command of pip or venv.

    Raises:
        Failure: it fails; the message has the end of the log.
    """
    if run(command, log):
        raise Failure(f"`{' '.join(map(str, command))}` failed\n{running.tail(log)}")


def without_torch(constraints: Path) -> str:
    """Return a constraints file without the lines on PyTorch and on Triton, of which every PyTorch has one version."""
    lines = constraints.read_text().splitlines(keepends=True)
    return "".join(line for line in lines if not re.match(r"(torch|triton)\s*[=<>!~]", line))


def link_pytorch(folder: Path) -> bool:
    """Link the running python's PyTorch, torchvision and what PyTorch requires into `folder`; True if it has PyTorch.

    The site-packages that hold them have other packages too, of versions that a framework may not support. Outside of
    the environment, pip takes what it finds for installed and does not replace it.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    names, seen = ["torch", "triton", "torchvision"], set()
    while names:
        name = names.pop()
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # for another platform
            found = importlib.metadata.distribution(name)
            for part in {file.parts[0] for file in found.files or () if file.parts[0] not in ("..", "__pycache__")}:
                if not (folder / part).exists():
                    (folder / part).symlink_to(str(found.locate_file(part)))
            required = [r for r in found.requires or () if "extra ==" not in r and name != "torchvision"]
            names += [n for r in required if (n := re.split(r"[^\w.-]", r, maxsplit=1)[0].lower()) not in seen]
            seen |= {name, *names}
    return (folder / "torch").exists()


# --- wheels ---------------------------------------------------------------------------------------------------------


def fetch(arguments: Sequence[str]) -> int:
    """Download the wheels of the environments to be tested, without PyTorch and Triton."""
    if not arguments or arguments[0].startswith("-"):
        raise Failure(
            "it needs the folder that the wheels go into: ./dev gpu fetch FOLDER [NAME ...]; without names it fetches "
            f"for {', '.join([CORE, *environments.hosts()])}"
        )
    folder, names = Path(arguments[0]).resolve(), arguments[1:] or [CORE, *environments.hosts()]
    chosen = [environments.environment(name) for name in names]  # a misspelt name fails before minutes of work
    folder.mkdir(parents=True, exist_ok=True)
    log = running.LOGS / "install-wheels.log"
    with tempfile.TemporaryDirectory() as temporary:
        python = Path(temporary, "python")
        install([sys.executable, "-m", "venv", python], log)
        # The machine with the GPU has a PyTorch and a Triton of its own.
        left_out = re.findall(r"^(?:torch|triton)==\S+", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
        for pinned in left_out:
            _stand_in(Path(temporary), *pinned.split("=="))
        pip = [str(python / "bin" / "python"), "-m", "pip", "wheel", "--no-input", "--wheel-dir", str(folder)]
        pip += ["--find-links", temporary]
        # What building the packages of this repository takes.
        install([*pip, "hatchling", "editables", "setuptools", "wheel"], log)
        for name, env in zip(names, chosen, strict=True):
            print(f"...     {name} (log: {log.relative_to(ROOT)})", flush=True)
            constraints = Path(temporary, "constraints.txt")
            stand_ins = "".join(f"{pinned}+left.out\n" for pinned in left_out)
            constraints.write_text(without_torch(env.constraints) + stand_ins)
            requirements = [r for r in (CORE_REQUIREMENTS if name == CORE else env.requirements) if r != "-e"]
            install([*pip, "-c", str(constraints), *requirements], log)
            if env.nodeps:
                install([*pip, "--no-deps", "-r", str(env.nodeps)], log)
    for path in folder.glob("*.whl"):
        if path.name.startswith("quest_") or "left.out" in path.name:
            path.unlink()
    found = list(folder.glob("*.whl"))
    size = sum(path.stat().st_size for path in found) / 2**20
    version = ".".join(map(str, sys.version_info[:2]))
    print(
        f"{len(found)} wheels, {size:.0f} MiB, for Python {version} on this kind of machine. Where PyTorch has CUDA, "
        f"nothing else is needed: path/to/python{version} dev gpu --wheels {folder.name} --table"
    )
    return 0


def _stand_in(folder: Path, name: str, version: str) -> None:
    """Write an empty wheel of this name, which satisfies what requires the package, without its gigabytes."""
    about = f"{name}-{version}+left.out.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}+left.out-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}+left.out\n")
        kind = "Wheel-Version: 1.0\nGenerator: dev\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        wheel.writestr(f"{about}/WHEEL", kind)
        wheel.writestr(f"{about}/RECORD", "")


if __name__ == "__main__":
    try:
        sys.exit(gpu(sys.argv[1:]))
    except Failure as failure:
        sys.exit(f"./dev gpu: {failure}")

"""`./dev gpu`: the CUDA tests, the table of measurements, and the wheels for a machine without a network.

Standard library only, because the machine may have nothing but PyTorch. The functions take the module `dev`, which
makes environments and runs pytest.
"""

from __future__ import annotations

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
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(__file__).parent
NO_DEVICE = 77  # exit status if nothing failed without a GPU; test harnesses read it as skipped
RESULTS = ROOT / "runs" / "gpu"  # where table.py looks for step times and test results
ATTENTIONS = (
    "standard",
    "quest",
    "qnorm",
    "qknorm-hs",
    "qknorm-ds",
    "qknorm",
    "aft-simple",
    "aft-local",
    "aft-full",
    "standard+gqa(kv_heads=4)",
    "quest+gqa(kv_heads=4)",
)
SUITE = ["run", "gpu/attention", "--attention", ",".join(ATTENTIONS), "--seeds", "0-2"]
"""Arguments of `quest bench`, without the folder."""


def gpu(dev: Any, arguments: Sequence[str]) -> int:
    """Run `./dev gpu` and return its exit status.

    Raises:
        Failure: of `dev`; the PyTorch, the wheels, pytest or an argument is missing.
    """
    if arguments[:1] == ["fetch"]:
        return fetch(dev, arguments[1:])
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
    version, cuda = _pytorch(dev)
    bench = Path(sys.executable) if options.wheels is None else dev.STATE / "gpu" / dev.CORE / "bin" / "python"
    if options.table and cuda and options.wheels is None and not _has_bench(bench):
        raise dev.Failure(  # before the minutes that the tests take
            f"--table runs a suite of quest-bench, which {sys.executable} lacks; install it (pip install -e . -e "
            "plugins/quest-bench), or carry it along: ./dev gpu fetch FOLDER, then ./dev gpu --wheels FOLDER --table"
        )
    sources = [
        str(ROOT),
        *(str(dev.PLUGINS / name / "src") for name in dev.plugins()),
        os.environ.get("PYTHONPATH", ""),
    ]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sources))}
    selection = ["-m", "gpu" if cuda else "not gpu", *(argument for argument in chosen if not dev.is_path(argument))]
    paths: list[Path | str] = [argument for argument in chosen if dev.is_path(argument)]
    dev.LOGS.mkdir(parents=True, exist_ok=True)
    if options.wheels is not None:
        stages = _stages(dev, options.wheels, version, paths, selection)
    elif subprocess.run([sys.executable, "-c", "import pytest, pytest_timeout"], capture_output=True).returncode:
        raise dev.Failure(
            f"{sys.executable} lacks pytest or pytest-timeout; install them, or carry them along: ./dev gpu fetch "
            "FOLDER where there is a network, and then ./dev gpu --wheels FOLDER"
        )
    else:
        # Plugins are read from their sources: this python need not have them installed, and may be offline.
        stages = [dev.run_tests("gpu", Path(sys.executable), paths or [FOLDER], selection, live=True, env=env)]
    if cuda and not chosen:
        keep_reports(stages, RESULTS)
    status: int = dev.summary(stages)
    if options.table:
        status = _table(dev, bench, cuda, env) or status
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


def _table(dev: Any, bench: Path, cuda: bool, env: dict[str, str]) -> int:
    """Run the suite of attention on a GPU and write research/results/gpu.md; without CUDA, what is to be measured."""
    writing = [sys.executable, "-m", "integration_tests.gpu.table"]
    if not cuda:
        return int(dev.run([*writing, "--not-measured"], None, env))
    run, quest = RESULTS / "attention", [str(bench), "-m", "quest_bench.cli"]
    measured = dev.run([*quest, *SUITE, "--out", str(run)], None, env)  # 1: some cells failed, which the report shows
    if measured > 1:
        return int(measured)
    return int(dev.run([*quest, "report", str(run)], None, env) or dev.run([*writing, "--run", str(run)], None, env))


def keep_reports(stages: Sequence[Any], folder: Path) -> None:
    """Copy the reports of a whole run for the table, which counts all that it finds, and remove older ones."""
    folder.mkdir(parents=True, exist_ok=True)
    for older in folder.glob("*.xml"):
        older.unlink()
    for stage in stages:
        if stage.report is not None and stage.report.exists():
            shutil.copy(stage.report, folder)


def _pytorch(dev: Any) -> tuple[str, bool]:
    """Return the version of the running python's PyTorch, and whether it sees a CUDA device."""
    code = "import json, torch; print(json.dumps([torch.__version__, torch.cuda.is_available()]))"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if answer.returncode:
        why = (answer.stderr.strip().splitlines() or ["it printed no error"])[-1]
        raise dev.Failure(f"{sys.executable} has no PyTorch ({why}); run the one that has: path/to/python dev gpu")
    version, cuda = json.loads(answer.stdout.splitlines()[-1])
    return version, cuda


# --- environments from wheels ---------------------------------------------------------------------------------------


def _stages(dev: Any, wheels: Path, torch: str, paths: Sequence[Path | str], selection: Sequence[str]) -> list[Any]:
    """Run the tests of every environment; if one cannot be made, the others still run."""
    if not any(wheels.glob("*.whl")):
        raise dev.Failure(f"--wheels is '{wheels}', where no wheels are; with a network: ./dev gpu fetch {wheels}")
    stages: list[Any] = []
    owners = {path: dev.owner(Path(str(path).partition("::")[0])) for path in paths}
    names = list(dict.fromkeys(owners.values())) or [dev.CORE, *dev.hosts()]
    for i, name in enumerate(names, 1):
        try:
            python = _ensure(dev, name, f"[{i}/{len(names)}]", wheels.resolve(), torch)
        except dev.Failure as failure:
            stages.append(dev.end(dev.Stage(f"{name} environment"), False))
            print(failure, flush=True)
            continue
        own = [path for path, owner in owners.items() if owner == name]
        own = own or [path for path in dev.integration_tests(name) if path.parent == FOLDER]
        stages.append(dev.run_tests(f"gpu {name}", python, own, selection, live=True, env=dev.clean_environment()))
    return stages


def _ensure(dev: Any, name: str, position: str, wheels: Path, torch: str) -> Path:
    """Return the python of environment `name`: the running python's PyTorch `torch`, and the rest from `wheels`."""
    env = dev.environment(name)
    path = dev.STATE / "gpu" / name
    core = ("-e", f"{ROOT}[test]", "-e", str(dev.PLUGINS / dev.BENCH))  # the table is a suite of quest-bench
    requirements = core if name == dev.CORE else env.requirements
    env = replace(env, name=f"{name} on a GPU", path=path, requirements=requirements)
    names = "\n".join(sorted(wheel.name for wheel in wheels.glob("*.whl")))

    def prepare(packages: Path) -> list[str]:
        links = path.with_name(f"{name}-pytorch")
        if not link_pytorch(links):
            raise dev.Failure(f"{sys.executable} does not say which files its PyTorch has; install PyTorch with pip")
        (packages / "quest-pytorch.pth").write_text(f"{links}\n")
        return ["--no-index", "--find-links", str(wheels)]

    wanted = dev.fingerprint(env, f"{sys.executable} {torch} {names}")
    made: Path = dev.make(env, wanted, position, torch=torch, prepare=prepare)
    return made


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
                    (folder / part).symlink_to(found.locate_file(part))
            required = [r for r in found.requires or () if "extra ==" not in r and name != "torchvision"]
            names += [n for r in required if (n := re.split(r"[^\w.-]", r, maxsplit=1)[0].lower()) not in seen]
            seen |= {name, *names}
    return (folder / "torch").exists()


# --- wheels ---------------------------------------------------------------------------------------------------------


def fetch(dev: Any, arguments: Sequence[str]) -> int:
    """Download the wheels of the environments to be tested, without PyTorch and Triton."""
    if not arguments or arguments[0].startswith("-"):
        raise dev.Failure(
            "it needs the folder that the wheels go into: ./dev gpu fetch FOLDER [NAME ...]; without names it fetches "
            f"for {', '.join([dev.CORE, *dev.hosts()])}"
        )
    folder, names = Path(arguments[0]).resolve(), arguments[1:] or [dev.CORE, *dev.hosts()]
    environments = [dev.environment(name) for name in names]  # a misspelt name is refused before minutes of work
    folder.mkdir(parents=True, exist_ok=True)
    dev.LOGS.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        maker = dev.Environment("wheels", Path(temporary, "python"), Path(os.devnull), (), ())
        maker.log.write_text("")
        dev.install(maker, [dev.base_python(), "-m", "venv", str(maker.path)])
        # The machine with the GPU has a PyTorch and a Triton of its own.
        left_out = re.findall(r"^(?:torch|triton)==\S+", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
        for pinned in left_out:
            _stand_in(Path(temporary), *pinned.split("=="))
        pip = [str(maker.python), "-m", "pip", "wheel", "--no-input", "--wheel-dir", str(folder)]
        pip += ["--find-links", temporary]
        # What building the packages of this repository takes.
        dev.install(maker, [*pip, "hatchling", "editables", "setuptools", "wheel"])
        for position, (name, env) in enumerate(zip(names, environments, strict=True), 1):
            print(f"[{position}/{len(names)}] {name} (log: {maker.log.relative_to(ROOT)})", flush=True)
            constraints = Path(temporary, "constraints.txt")
            stand_ins = "".join(f"{pinned}+left.out\n" for pinned in left_out)
            constraints.write_text(dev.without_torch(env.constraints) + stand_ins)
            core = [f"{ROOT}[test]", str(dev.PLUGINS / dev.BENCH)]
            requirements = core if name == dev.CORE else [r for r in env.requirements if r != "-e"]
            dev.install(maker, [*pip, "-c", str(constraints), *requirements])
            if env.nodeps:
                dev.install(maker, [*pip, "--no-deps", "-r", str(env.nodeps)])
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

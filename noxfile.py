"""The stages of ./dev as nox sessions: ``nox -l`` lists them, ``nox -s quest-tsai -- -k export`` runs one.

How an environment is made is written once, in ./dev; the sessions use those environments.
"""

from __future__ import annotations

import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

import nox

_loader = SourceFileLoader("dev", str(Path(__file__).with_name("dev")))
_spec = spec_from_loader("dev", _loader)
assert _spec is not None
dev = module_from_spec(_spec)
sys.modules["dev"] = dev
_loader.exec_module(dev)

nox.options.default_venv_backend = "none"


@nox.session
def lint(session: nox.Session) -> None:
    """ruff, mypy, import-linter."""
    if dev.lint():
        session.error("lint failed")


def _tests(name: str) -> None:
    @nox.session(name=name)
    def run(session: nox.Session) -> None:
        python = dev.ensure(name)
        for paths in dev.test_paths(name).values():
            command = dev.pytest_command(python, paths, session.posargs)
            session.run(*command, env=dev.test_environment(), include_outer_env=False, external=True)


for _name in (dev.CORE, *dev.hosts(), *dev.further()):
    _tests(_name)

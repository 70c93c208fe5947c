"""check_mechanism: whether a mechanism is right, and whether it keeps what its class declares."""

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import NamedTuple

import torch

from ..config import AttentionSpec
from ..errors import ConfigError, QuestError, one_of
from ..mechanism import Mechanism
from ..registry import Component
from . import checks as _checks
from .trial import Trial, Wrong, cause

CHECKS: dict[str, Callable[[Trial], None]] = {
    name: run for name, run in vars(_checks).items() if getattr(run, "__module__", "") == _checks.__name__
}
"""Every check by name, in order."""


class Outcome(NamedTuple):
    """The result of one check.

    Attributes:
        check: its name, such as "no_query_sees_the_future".
        passed: whether the mechanism keeps it.
        message: what is wrong, where, and how to mend or declare it; empty if it passed.
    """

    check: str
    passed: bool
    message: str


class MechanismError(AssertionError):
    """A mechanism that fails checks; the message has a paragraph for each."""


def check_mechanism(
    attention: AttentionSpec | type[Component] | Mechanism, *, checks: Collection[str] = (), raises: bool = True
) -> list[Outcome]:
    """Test a mechanism and everything that its parts declare.

    >>> check_mechanism("quest+gqa(kv_heads=2)")
    >>> check_mechanism(Power)  # a class with @register; its package need not be installed
    >>> for outcome in check_mechanism(Power, raises=False): print(outcome.check, outcome.passed)

    Args:
        attention: a specification, a registered class, or a Mechanism, of which the configuration counts.
        checks: the names of the checks to run, of CHECKS; all by default.
        raises: whether a failed check is an error.

    Returns:
        One outcome per check, in order.

    Raises:
        MechanismError: naming every failed check, what is wrong, and how to mend or declare it.
        ConfigError: unknown name, option or check.
    """
    for name in checks:
        if name not in CHECKS:
            raise ConfigError(f"check '{name}' does not exist; {one_of(name, CHECKS)}")
    trial, outcomes = Trial(attention), []
    for name in checks or CHECKS:
        try:
            with torch.random.fork_rng(devices=[]):
                CHECKS[name](trial)
            message = ""
        except Exception as error:
            message = str(error) if isinstance(error, Wrong | QuestError) else f"it raises {cause(error)}"
        outcomes.append(Outcome(name, not message, message))
    failed = [outcome for outcome in outcomes if not outcome.passed]
    if failed and raises:
        said = zip(failed, brief(failed), strict=True)
        lines = "\n".join(f"- {outcome.check}: {message}" for outcome, message in said)
        raise MechanismError(f"attention '{trial.config}' fails {len(failed)} of {len(outcomes)} checks:\n{lines}")
    return outcomes


def brief(outcomes: Iterable[Outcome]) -> Iterator[str]:
    """Yield the message of each outcome; a message that came before is not repeated."""
    said: dict[str, str] = {"": ""}
    for outcome in outcomes:
        yield said.get(outcome.message, outcome.message)
        said.setdefault(outcome.message, f"as {outcome.check.replace('_', ' ')}")

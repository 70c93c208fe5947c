"""Search for a wrong cell at random.

    python -m tests.grid.search --seconds 60 --seed 0

Every example has a seed of its own; `--only SEED` runs one again. The exit status is 1 if an example is wrong.
"""  # fmt: skip

from __future__ import annotations

import argparse
import functools
import random
import re
import sys
import time
import warnings
from collections import Counter

import pytest
import torch

from devtools import versions

from .cases import BY_NAME, Deviation, Raw, judge
from .draws import Example, Generator, MadeOf, example, run, simpler, text
from .transforms import TRANSFORMS

OFTEN = ("eager",) * 30
CHEAP = ("func.vmap", "func.grad", "func.jvp", "second derivative", "jit.trace", "FakeTensorMode", "make_fx")
SLOW = ("compile, one length", "compile, any length", "export", "ONNX")


def settle(one: Example) -> str | None:
    """What is wrong with an example, or None."""
    try:
        if one.transform == "eager":
            run(one)
        else:
            TRANSFORMS[one.transform](MadeOf(one))
    except Deviation as error:
        return str(error)
    except pytest.skip.Exception:  # this PyTorch does not have the transform
        return None
    except Exception as error:
        if versions.lacks(error) is not None:
            return None
        try:
            judge(BY_NAME["quest"], one.transform, error, one.spec)
        except Raw as raw:
            return str(raw)
    return None


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.grid.search", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=None, help="where the seeds of examples start; random by default")
    parser.add_argument("--only", type=int, default=None, help="run the example of this seed only")
    parser.add_argument("--eager", action="store_true", help="without transforms")
    parser.add_argument("--keep-going", action="store_true", help="report one finding a kind, do not stop at the first")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    start = options.seed if options.seed is not None else random.randrange(10**6) * 1000
    seeds = [options.only] if options.only is not None else range(start, sys.maxsize)
    transforms = ("eager",) if options.eager else (*OFTEN, *CHEAP * 3, *SLOW)
    tried: Counter[str] = Counter()
    found: set[str] = set()
    end = time.monotonic() + options.seconds
    for seed in seeds:
        if time.monotonic() > end:
            break
        one = example(Generator(seed), transforms)
        tried[one.transform] += 1
        wrong = settle(one)
        if wrong is None:
            continue
        kind = f"{_kind(wrong)}, {one.transform}"
        if kind in found:
            continue
        found.add(kind)
        smallest = simpler(one, functools.partial(_fails, _kind(wrong)))
        print(
            f"seed {seed}: {wrong}\n    drawn:    {text(one)}\n    smallest: {text(smallest)}\n    {settle(smallest)}"
        )
        if not options.keep_going:
            break
    counts = ", ".join(f"{name} {count}" for name, count in tried.most_common())
    print(f"tried {tried.total()} examples from seed {start}: {counts}")
    print(f"{len(found)} kinds of findings" if found else "found nothing")
    return 1 if found else 0


def _kind(wrong: str) -> str:
    """What is wrong, without its numbers and names."""
    return re.sub(r"[\d.e+-]+", "", wrong.partition(": ")[2] or wrong)[:40]


def _fails(kind: str, one: Example) -> bool:
    try:
        wrong = settle(one)
        return wrong is not None and _kind(wrong) == kind
    except Exception:  # an example that cannot be made is not a simpler one
        return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

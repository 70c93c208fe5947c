"""Runs the grid's transforms, and writes what is right and what is refused to outcomes.json for the documentation.

    python -m tests.grid.outcomes

docs/generate.py makes docs/transforms.md of it; tests/grid/test_transforms.py compares every cell with it.
"""

import functools
import json
import subprocess
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from devtools import versions
from quest_core.compat import VERSION

from .cases import DTYPES, KEY_MASKS, LAYOUTS, SUBJECTS, Cell, Deviation, Raw, Subject, judge, masks_of
from .transforms import TRANSFORMS

PATH = Path(__file__).with_name("outcomes.json")

# How many combinations of layout, type and mask a mechanism is run with; 4 where this does not say. Compilers take
# seconds each.
BREADTH = {
    "compile, one length": 1,
    "compile, any length": 1,
    "export": 1,
    "ONNX": 1,
    "make_fx, any length": 1,
    "func.jacrev": 2,
}


COMPILERS = ("compile, one length", "compile, any length", "export", "ONNX")
BLIND = ("sample without keys", "keys, -inf", "boolean with blind rows", "additive, -inf", "additive, finfo.min")
"""Masks with rows that see nothing: what a compiled graph is most likely to have wrong, in its one cell."""


@dataclass(frozen=True)
class Result:
    """What came of a cell: the text of its refusal, or what is wrong, or what this PyTorch lacks, or none of these."""

    cell: Cell
    refused: str = ""
    wrong: str = ""
    note: str = ""
    lacking: str = ""


def cells(subject: Subject, transform: str) -> list[Cell]:
    """A rotating choice of layout, type, mask and causality, and the layouts that have been wrong before."""
    row, column = SUBJECTS.index(subject), list(TRANSFORMS).index(transform)
    kinds, masks = list(LAYOUTS), masks_of(subject)
    if transform == "decode":
        masks = ["none", *KEY_MASKS]
    elif transform in COMPILERS:
        masks = [mask for mask in masks if mask in BLIND]
    found = []
    for i in range(BREADTH.get(transform, 4)):
        step = row + 3 * column + 5 * i
        layout = kinds[step % len(kinds)]
        if transform in BREADTH and layout == "one token":
            layout = "chunk"
        elif transform not in BREADTH and i < 2:
            layout = ("chunk", "one head")[i]
        # Its exporter rounds 1/√D to float32, and drawn cases in float64 allow for that. A CPU has no half types there.
        dtype = torch.float32 if transform == "ONNX" else DTYPES[step % 4]
        is_causal = subject.can("causal") and (row + column + i) % 2 == 0
        found.append(Cell(subject, layout, dtype, masks[(step // 2) % len(masks)], is_causal))
    return found


def run_one(cell: Cell, transform: str) -> Result:
    """Run a cell. Skips the test if this PyTorch does not have the transform."""
    try:
        note = TRANSFORMS[transform](cell.made())
    except Deviation as error:
        return Result(cell, wrong=str(error))
    except Exception as error:
        if (why := versions.lacks(error)) is not None:
            return Result(cell, lacking=why)
        try:
            return Result(cell, refused=judge(cell.subject, transform, error))
        except Raw as raw:
            return Result(cell, wrong=str(raw))
    return Result(cell, note=note or "")


def run_all(subject: Subject, transform: str) -> list[Result]:
    """The outcome of every cell of a mechanism and a transform."""
    return [run_one(cell, transform) for cell in cells(subject, transform)]


def recorded(results: Sequence[Result]) -> dict[str, str]:
    """The state of a mechanism under a transform, and the reason of a refusal."""
    refused = [one for one in results if one.refused]
    if any(one.wrong for one in results):
        return {"state": "wrong"}
    if not refused:
        note = next((one.note for one in results if one.note), "")
        return {"state": "right", **({"note": note} if note else {})}
    config = refused[0].cell.made().config
    reason = refused[0].refused.removeprefix(f"attention '{config}'").removeprefix(":").strip()
    if len(refused) == len(results):
        return {"state": "refused", "reason": reason}
    causal = all(one.cell.is_causal == bool(one.refused) for one in results)
    return {"state": "refused if causal" if causal else "partly refused", "reason": reason}


@functools.cache
def _committed() -> dict[str, Any]:
    found = json.loads(PATH.read_text())
    return found if found.get("torch") == ".".join(map(str, VERSION)) else {}


def committed(subject: Subject, transform: str) -> dict[str, str] | None:
    """Return the documented outcome, None if it is that of another PyTorch."""
    return _committed().get("rows", {}).get(subject.name, {}).get(transform)


def main() -> int:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rows: dict[str, dict[str, dict[str, str]]] = {}
    for subject in SUBJECTS:
        rows[subject.name] = {}
        for transform in TRANSFORMS:
            results = run_all(subject, transform)
            rows[subject.name][transform] = recorded(results)
            for one in results:
                if one.wrong:
                    print(f"WRONG {transform} | {one.cell} | {one.wrong}", flush=True)
    content = {"torch": ".".join(map(str, VERSION)), "rows": rows}
    PATH.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    print(f"wrote {PATH.name}")
    generate = Path(__file__).resolve().parents[2] / "docs" / "generate.py"
    return subprocess.run([sys.executable, generate], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())

"""``quest-fairseq average``: the mean of checkpoints; fairseq's scripts/average_checkpoints.py is in no wheel."""

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from quest_core.checkpoints import ENTRY, decode
from quest_core.errors import CheckpointError


def average(paths: Sequence[Path]) -> dict[str, Any]:
    """Return the first checkpoint with the mean of the weights of all.

    Means are taken in float32 and cast back. Tensors of whole numbers are those of the last.

    Raises:
        CheckpointError: the checkpoints differ in their attention or in their tensors.
    """
    first, *others = states = [torch.load(path, map_location="cpu") for path in paths]
    for path, state in zip(paths[1:], others, strict=True):
        one, other = map(_describe, (first, state))
        if differ := {name for name in one | other if one.get(name) != other.get(name)}:
            name = min(differ, key=lambda name: (not name.endswith(ENTRY), name))
            raise CheckpointError(
                f"expected checkpoints of one model; '{name}' is {one.get(name, 'missing')} in {paths[0]} and "
                f"{other.get(name, 'missing')} in {path}; average those of one run"
            )
    mean = {}
    for name, last in states[-1]["model"].items():
        if last.is_floating_point():
            last = torch.stack([state["model"][name].float() for state in states]).mean(0).to(last.dtype)
        mean[name] = last
    return {**first, "model": mean}


def _describe(state: dict[str, Any]) -> dict[str, str]:
    """Return the shape, or the attention that it names, of every tensor of a checkpoint's model."""
    named = {name: f"'{decode(x)}'" for name, x in state["model"].items() if name.endswith(ENTRY)}
    return {name: f"of shape {list(x.shape)}" for name, x in state["model"].items()} | named


def newest(folder: Path, count: int) -> list[Path]:
    """Return the `count` last checkpoints of single epochs in a folder."""
    numbers = {int(found[1]): p for p in folder.iterdir() if (found := re.fullmatch(r"checkpoint(\d+)\.pt", p.name))}
    if len(numbers) < count:
        raise CheckpointError(
            f"expected {count} checkpoints of epochs (checkpoint1.pt, ...) in {folder}, found {len(numbers)}"
        )
    return [numbers[epoch] for epoch in sorted(numbers)[-count:]]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the folder that fairseq wants as --user-dir, or average checkpoints."""
    parser = argparse.ArgumentParser(
        prog="quest-fairseq", description="Without a command: print the folder that fairseq wants as --user-dir."
    )
    command = parser.add_subparsers(dest="command").add_parser("average", help="write the mean of checkpoints")
    command.add_argument("--inputs", nargs="+", type=Path, required=True, help="checkpoints, or one folder of them")
    command.add_argument("--num-epoch-checkpoints", type=int, help="how many of the folder's last epochs")
    command.add_argument("--output", type=Path, required=True, help="file to write")
    given = parser.parse_args(arguments)
    if given.command is None:
        print(Path(__file__).parent)
        return
    paths = given.inputs
    if (given.num_epoch_checkpoints is None) == (len(paths) == 1 and paths[0].is_dir()):
        command.error("give --inputs files, or --inputs FOLDER --num-epoch-checkpoints N")
    if given.num_epoch_checkpoints is not None and given.num_epoch_checkpoints < 1:
        command.error(f"expected --num-epoch-checkpoints of at least 1, found {given.num_epoch_checkpoints}")
    try:
        if given.num_epoch_checkpoints is not None:
            paths = newest(paths[0], given.num_epoch_checkpoints)
        torch.save(average(paths), given.output)
    except (CheckpointError, OSError, RuntimeError) as error:  # PyTorch's for a torn file is a RuntimeError
        command.error(str(error))
    print(f"{given.output}: mean of {', '.join(str(path) for path in paths)}")

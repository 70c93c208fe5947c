"""The datasets of ts/uea: which ones a folder holds, whether they are valid, and their series.

A dataset NAME is NAME_TRAIN and NAME_TEST with the ending ``.ts`` (the UEA archive) or ``.parquet``, in the folder or
in its sub-folder NAME. A parquet file has one row a series: a column ``label``, and one column of lists of numbers for
each feature.
"""

import importlib.util
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import numpy as np

from quest_core.errors import ConfigError, InputError, PluginError

SPLITS = ("TRAIN", "TEST")
ENDINGS = (".ts", ".parquet")


def tasks(data: Path) -> dict[str, dict[str, Any]]:
    """Return every dataset of a folder: name -> its files and, if it is invalid, the problem in words."""
    found = {}
    names = {
        path.stem[: -len(split) - 1] for split in SPLITS for path in _files(data) if path.stem.endswith(f"_{split}")
    }
    for name in sorted(names):
        problem, files = None, []
        try:
            files = list(find(name, data))
            kinds = {split: _labels(path) for split, path in zip(SPLITS, files, strict=True)}
            if unknown := kinds["TEST"] - kinds["TRAIN"]:
                problem = f"labels {', '.join(sorted(unknown))} of {files[1]} do not occur in {files[0]}"
            elif len(kinds["TRAIN"]) < 2:
                problem = f"{files[0]} has fewer than two classes"
        except (ConfigError, InputError, PluginError) as error:
            problem = str(error)
        found[name] = {"files": [str(path) for path in files], "problem": problem}
    return found


def _files(data: Path) -> Iterator[Path]:
    for ending in ENDINGS:
        yield from data.glob(f"*{ending}")
        yield from (path for path in data.glob(f"*/*{ending}") if path.stem.startswith(f"{path.parent.name}_"))


def _labels(path: Path) -> set[str]:
    """The labels of a file. Of a .ts file only the header and the end of each line are read."""
    if path.suffix == ".parquet":
        return set(map(str, _read_parquet(path)[1]))
    declared: set[str] | None = None
    seen: set[str] = set()
    inside = False
    with path.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            text = line.strip()
            if not text or text.startswith(("#", "%")):
                continue
            if text.startswith("@"):
                key, *words = text.split()
                if key.lower() == "@classlabel":
                    declared = set(words[1:]) if words and words[0].lower() == "true" else set()
                inside = key.lower() == "@data"
            elif not inside:
                raise InputError(f"{path}:{number} stands before @data; the file is no .ts file of the archive")
            else:
                label = text.rpartition(":")[2].strip()
                seen.add(label)
                if declared is not None and label not in declared:
                    raise InputError(f"{path}:{number} has the label '{label}', which @classLabel does not declare")
    if not declared:
        raise InputError(f"{path} declares no class labels (@classLabel true ...); ts/uea classifies")
    if not seen:
        raise InputError(f"{path} has no series after @data; it may be cut off")
    return seen


def find(task: str, data: Path | None) -> tuple[Path, Path]:
    """Return the TRAIN and TEST file of a dataset; raises ConfigError that lists the folders searched."""
    if data is not None and not data.is_dir():
        raise ConfigError(f"data is '{data}', not a folder; give the folder with {task}_TRAIN.ts and {task}_TEST.ts")
    if data is None:
        _need_aeon()
        data = Path(str(distribution("aeon").locate_file("aeon/datasets/data")))
    for folder in (data, data / task):
        for ending in ENDINGS:
            train, test = (folder / f"{task}_{split}{ending}" for split in SPLITS)
            if train.is_file() and test.is_file():
                return train, test
    raise ConfigError(
        f"no {task}_TRAIN.ts and {task}_TEST.ts (or .parquet) in '{data}' nor in '{data / task}'; unpack the dataset "
        "from timeseriesclassification.com there, or name another folder as data"
    )


def read(path: Path) -> tuple[list[np.ndarray], list[str]]:
    """Return the series of a file, each [features, its length], and their labels."""
    if path.suffix == ".parquet":
        series, labels = _read_parquet(path)
    else:
        _need_aeon()
        from aeon.datasets import load_from_ts_file

        found, y = load_from_ts_file(str(path))
        series, labels = [np.asarray(one, dtype=np.float64) for one in found], [str(label) for label in y]
    if any(np.isnan(one).any() for one in series):
        raise InputError(f"{path} has missing values; ts/uea does not fill them in. Interpolate them first")
    return series, labels


def _read_parquet(path: Path) -> tuple[list[np.ndarray], list[str]]:
    import pandas as pd

    try:
        table = pd.read_parquet(path)
    except ImportError:
        raise PluginError(f"{path} needs pyarrow, which is not installed; pip install pyarrow") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read as parquet: {error}") from None
    features = [name for name in table.columns if name != "label"]
    if "label" not in table.columns or not features:
        raise InputError(f"{path} has the columns {list(table.columns)}; it needs label and one for each feature")
    try:
        series = [np.array([row[name] for name in features], dtype=np.float64) for row in table.to_dict("records")]
    except (TypeError, ValueError):
        raise InputError(f"{path}: the features of a series must be lists of numbers of one length") from None
    if any(one.ndim != 2 for one in series):
        raise InputError(f"{path}: a feature's column must hold lists of numbers")
    return series, [str(label) for label in table["label"]]


def _need_aeon() -> None:
    if importlib.util.find_spec("aeon") is None:
        raise PluginError("ts/uea reads .ts files with aeon, which is not installed; pip install --no-deps aeon")

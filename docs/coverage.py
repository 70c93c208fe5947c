"""Try QUEST on every model of the installed packages; write docs/coverage.csv and the page that shows it.

python docs/coverage.py                             # every model that the data lacks, and the page
python docs/coverage.py transformers                # of one package
python docs/coverage.py --again transformers/llama  # rows that exist already
python docs/coverage.py --page                      # the page only
python docs/coverage.py --clone FOLDER Time-Series-Library  # which is in no registry

Models are tiny, or built on the meta device where they cannot be, and have random weights. Each is tried in a process
of its own with a time limit. The exit status is 1 if a model is lost that the data had as taken.
"""

import argparse
import contextlib
import csv
import functools
import importlib
import importlib.metadata
import importlib.util
import io
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from multiprocessing.connection import Connection
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any, NamedTuple

DOCS = Path(__file__).parent
DATA, PAGE = DOCS / "coverage.csv", DOCS / "coverage.md"
LIMIT = 60
"""Seconds of processor time for one model."""
MOST = 600_000_000
"""Parameters of a model that is built with values; a larger one is built on the meta device."""
CLONE = "Time-Series-Library"
"""The package that is a folder, which `sys.path` begins with."""
LONGEST = 260
"""Characters of a reason."""

TINY = {
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layers", "n_layer", "depth"), 4),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers", "num_encoder_layers"), 2),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd"), 64),
    **dict.fromkeys(("intermediate_size", "encoder_ffn_dim", "decoder_ffn_dim", "ffn_dim", "d_ff", "n_inner"), 64),
    **dict.fromkeys(("num_attention_heads", "encoder_attention_heads", "decoder_attention_heads", "n_head"), 4),
    **dict.fromkeys(("num_heads", "n_heads"), 4),
    **{"num_key_value_heads": 2, "head_dim": 16, "num_queries": 8},
    **{"attn_layer_period": 2, "attn_layer_offset": 1},
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 8),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("chunk_size", "mamba_chunk_size"), 16),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k"), 2),
}
"""Sizes of a tiny model of transformers, by the attribute of a config that holds them."""
SMALL = re.compile("atto|femto|pico|nano|tiny|mini|xx?s|small")
"""Names of small models of timm."""
DEPTHS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer", "depth", "encoder_layers", "decoder_layers")


@dataclass(frozen=True)
class Row:
    package: str
    version: str
    name: str
    outcome: str  # "taken"; "none", which has no softmax attention; "not", with a reason; "unbuilt", also by the host
    ways: str = ""  # the adapters that replaced modules, each with their number, as "transformers 4, universal 1"
    kept: int = 0  # modules that look like attention and are none
    reason: str = ""  # of "not" and "unbuilt": the first line of the error


# --- one model --------------------------------------------------------------------------------------------------------


def judge(build: Callable[[], Any]) -> dict[str, Any]:
    """Return the outcome of building a model with quest: some fields of a `Row`."""
    from quest_core.errors import QuestError

    try:
        model = build()
    except QuestError as error:
        if "no softmax of q·k" in str(error):  # a run reached none
            return {"outcome": "none"}
        return {"outcome": "not", "reason": str(error)}
    except Exception as error:
        return {"outcome": "not", "reason": f"raw {type(error).__name__}: {error}"}
    report: Any = getattr(model, "attention_report", None)
    if report is None:
        return {"outcome": "not", "reason": "silent: nothing was replaced and nothing said"}
    ways = Counter(one.adapter for one in report.replacements)
    return {
        "outcome": "taken",
        "ways": ", ".join(f"{way} {count}" for way, count in sorted(ways.items())),
        "kept": len(report.left_alone),
    }


def configs(model_type: str) -> Iterator[tuple[Any, int]]:
    """Yield configs of a model type of transformers, the smallest first, each with the parameters of its model.

    Raises:
        Exception: AutoModel builds no model of any config; whatever the host raises.
    """
    import torch
    from transformers import AutoModel
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = CONFIG_MAPPING[model_type]
    widths = [name for name in TINY if name != "head_dim"]
    narrow = [name for name in TINY if name not in DEPTHS]  # of the host's depth
    tries, errors = (TINY, widths, narrow, DEPTHS, ()), []
    for names in tries:
        try:
            config = kind(**_sizes(kind(), names)) if names else kind()
            with torch.device("meta"):
                size = sum(p.numel() for p in AutoModel.from_config(config).parameters())
        except Exception as error:
            errors.append(error)
        else:
            yield config, size
    if len(errors) == len(tries):
        raise errors[-1]


def _sizes(config: Any, names: Any) -> dict[str, Any]:
    """Return the arguments that make a config small; those of its parts are mappings."""
    made: dict[str, Any] = {}
    for name, value in TINY.items():
        if name in names and type(getattr(config, name, None)) is int and getattr(config, name) > value:
            made[name] = value
    for name in getattr(config, "sub_configs", ()):
        part = getattr(config, name, None)
        if part is not None:
            kind = {"model_type": part.model_type} if part.model_type else {}
            made[name] = {**kind, **_sizes(part, names)}
    return made


def try_transformers(model_type: str) -> dict[str, Any]:
    """Return what `attn_implementation="quest"` does to a model type of transformers."""
    import torch
    from transformers import AutoModel

    import quest_transformers  # noqa: F401 - it makes transformers accept the name

    found: list[dict[str, Any]] = []
    try:
        for config, size in configs(model_type):
            with torch.device("meta") if size > MOST else contextlib.nullcontext():
                made = judge(lambda config=config: AutoModel.from_config(config, attn_implementation="quest"))  # type: ignore[misc]
            if made["outcome"] != "none" and "only a run of it finds" not in made.get("reason", ""):
                return made
            found.append(made)  # these sizes may not fit together, or be too small for a layer with attention
    except Exception as error:
        return {"outcome": "unbuilt", "reason": f"{type(error).__name__}: {error}"}
    return next((one for one in found if one["outcome"] == "none"), found[0])


def transformers_names() -> list[str]:
    """Return the model types that AutoModel builds."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES
    from transformers.models.auto.modeling_auto import MODEL_MAPPING

    def known(name: str) -> bool:
        try:
            return CONFIG_MAPPING[name] in MODEL_MAPPING
        except Exception:
            return False

    return sorted(filter(known, CONFIG_MAPPING_NAMES))


def timm_names() -> list[str]:
    """Return the modules of timm that register models."""
    import timm

    return sorted(name for name in timm.list_modules() if timm.list_models(module=name))


def try_timm(family: str) -> dict[str, Any]:
    """Return what `attention="quest"` does to a small model of a family of timm."""
    import timm
    import torch

    import quest_timm  # noqa: F401 - it makes timm accept the option

    for name in sorted(timm.list_models(module=family), key=lambda name: not SMALL.search(name)):
        with contextlib.suppress(Exception), torch.device("meta"):
            timm.create_model(name)
            break
    else:
        return {"outcome": "unbuilt", "reason": "no model of this family can be built on the meta device"}
    return judge(lambda: timm.create_model(name, attention="quest"))


def listed(package: str) -> Any:
    """Return what docs/coverage_models.py builds of a package, by name."""
    sys.path.insert(0, str(DOCS))
    models = importlib.import_module("coverage_models")
    del sys.path[0]
    return getattr(models, package.lower().replace("-", "_"))()


def try_listed(package: str, name: str) -> dict[str, Any]:
    """Return what `inject` with an example does to a model of docs/coverage_models.py."""
    from quest_core import inject
    from quest_core.hosts.sites import restoring, run_example

    try:
        model, example = listed(package)[name]()
        with restoring(model):
            run_example(model, example)
    except Exception as error:
        return {"outcome": "unbuilt", "reason": f"{type(error).__name__}: {error}"}
    return judge(lambda: inject(model, "quest", example=example)[0])


class Package(NamedTuple):
    """How the models of a package are tried."""

    names: Callable[[], list[str]]
    attempt: Callable[[str], dict[str, Any]]
    line: str  # the one line of a user, and which models are tried


def _listed(package: str, which: str) -> Package:
    line = f'`quest_core.inject(model, "quest", example=batch)`, {which}'
    return Package(lambda: list(listed(package)), functools.partial(try_listed, package), line)


PACKAGES = {
    "transformers": Package(
        transformers_names, try_transformers, '`AutoModel.from_config(config, attn_implementation="quest")`'
    ),
    "timm": Package(timm_names, try_timm, '`timm.create_model(name, attention="quest")`, a small model of each family'),
    "torchvision": _listed("torchvision", "the first model of each module"),
    "vit-pytorch": _listed("vit-pytorch", "the classes of attention"),
    "x-transformers": _listed("x-transformers", "a decoder by each flag"),
    "diffusers": _listed("diffusers", "models that users train most"),
    "segmentation-models-pytorch": _listed("segmentation-models-pytorch", "every architecture"),
    "torchaudio": _listed("torchaudio", "models with attention"),
    "speechbrain": _listed("speechbrain", "transformers and their layers"),
    "neuralforecast": _listed("neuralforecast", "every model that is built from sizes"),
    CLONE: _listed(CLONE, "every model without weights to load"),
}


# --- all models -------------------------------------------------------------------------------------------------------


def version_of(package: str) -> str:
    """Return the version of a package, or the commit of the clone."""
    if package != CLONE:
        return importlib.metadata.version(package)
    command = ["git", "-C", sys.path[0], "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def attempt(package: str, name: str) -> Row:
    """Return the row of one model, tried in this process."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        made = PACKAGES[package].attempt(name)
    reason = " ".join(made.pop("reason", "").split())
    reason = re.sub(r"(https?://\S+|/\S+/\S+)", "…", reason)  # no path of this machine
    return Row(package, version_of(package), name, **made, reason=reason[:LONGEST])


def _send(package: str, model: str, to: Connection) -> None:
    for which, name, factor in ((signal.ITIMER_PROF, signal.SIGPROF, 1), (signal.ITIMER_REAL, signal.SIGALRM, 20)):
        signal.signal(name, signal.SIG_DFL)  # ends this process
        signal.setitimer(which, LIMIT * factor)
    with contextlib.redirect_stdout(io.StringIO()):
        to.send(asdict(attempt(package, model)))


def apart(model: tuple[str, str]) -> Row:
    """Return the row of one model, tried in a process of its own, which may end without one."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(*model, sender))
    process.start()
    sender.close()
    try:
        return Row(**receiver.recv())
    except EOFError:
        process.join()
        slow = process.exitcode in (-signal.SIGPROF, -signal.SIGALRM)
        took = f"took more than {LIMIT} s" if slow else "its process ended"
        return Row(model[0], version_of(model[0]), model[1], "not", reason=took)


def read() -> dict[tuple[str, str], Row]:
    """Return the rows of the data by package and name."""
    if not DATA.exists():
        return {}
    with DATA.open(newline="") as lines:
        rows = [Row(**{**line, "kept": int(line["kept"])}) for line in csv.DictReader(lines)]
    return {(row.package, row.name): row for row in rows}


def write(rows: dict[tuple[str, str], Row]) -> None:
    """Write the data, sorted; an interruption leaves the old file."""
    new = DATA.with_suffix(".new")
    with new.open("w", newline="") as file:
        lines = csv.DictWriter(file, [one.name for one in fields(Row)], lineterminator="\n")
        lines.writeheader()
        lines.writerows(asdict(rows[key]) for key in sorted(rows))
    os.replace(new, DATA)


# --- the page ---------------------------------------------------------------------------------------------------------

HEAD = """<!-- Made by docs/coverage.py from docs/coverage.csv. -->
# Coverage

Which models take QUEST with one line, tried with random weights. **Taken**: all softmax attention of the model was
replaced. **No softmax attention**: the model holds none. **Not**: an error, with its first words. **Not built**: the
host itself builds no model from a default or tiny config.

`transformers`, `timm` and `torch` count classes that an adapter knows, `universal` calls of an attention function of
PyTorch, and `written out` attention that is written out. A run of the model found the last two.
"""


def render(rows: Iterable[Row]) -> str:
    rows = list(rows)
    counts = {package: Counter(row.outcome for row in rows if row.package == package) for package in PACKAGES}
    text = HEAD + "\n| package | taken | not | no softmax attention | not built |\n|---|---|---|---|---|\n"
    for package, count in counts.items():
        if count:
            version = next(row.version for row in rows if row.package == package)
            cells = (count[outcome] for outcome in ("taken", "not", "none", "unbuilt"))
            text += f"| [{package}](#{package.lower()}) {version} | {' | '.join(map(str, cells))} |\n"
    for package, count in counts.items():
        if not count:
            continue
        text += f"\n## {package}\n\n{PACKAGES[package].line}\n"
        own = [row for row in rows if row.package == package]
        for outcome, title in (("not", "Not"), ("unbuilt", "Not built")):
            if count[outcome]:
                text += f"\n{title}:\n\n| model | reason |\n|---|---|\n"
                text += "".join(f"| {row.name} | {_cell(row.reason)} |\n" for row in own if row.outcome == outcome)
        if count["none"]:
            text += f"\nNo softmax attention: {', '.join(row.name for row in own if row.outcome == 'none')}.\n"
        if count["taken"]:
            text += "\nTaken:\n\n| model | modules |\n|---|---|\n"
            text += "".join(
                f"| {row.name} | {row.ways}{f'; {row.kept} are none' if row.kept else ''} |\n"
                for row in own
                if row.outcome == "taken"
            )
    return text


def _cell(text: str) -> str:
    """Return a text as one that Markdown shows as it is."""
    return re.sub(r"([\\`*_{}<>|\[\]])", r"\\\1", text)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("which", nargs="*", help="packages, or models as package/name; all by default")
    parser.add_argument("--again", action="store_true", help="also rows that the data has")
    parser.add_argument("--page", action="store_true", help="only write the page")
    parser.add_argument("--clone", type=Path, help=f"folder of a clone of {CLONE}")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    given = parser.parse_args()
    if given.clone:
        sys.path.insert(0, str(given.clone))
    rows, lost = read(), []
    if not given.page:
        import torch

        torch.set_num_threads(1)
        for package in PACKAGES:
            chosen = [one.partition("/")[2] for one in given.which if one.partition("/")[0] == package]
            found = given.clone if package == CLONE else importlib.util.find_spec(package.replace("-", "_"))
            if (given.which and not chosen) or not found:
                continue
            # before the first fork, so that no model's process imports it again
            importlib.import_module("quest_transformers" if package == "transformers" else "quest_core")
            version = version_of(package)
            is_all = "" in chosen or not chosen
            names = PACKAGES[package].names() if is_all else chosen
            models = [(package, name) for name in names]
            if not given.again:
                models = [key for key in models if key not in rows or rows[key].version != version]
            with ThreadPool(given.jobs) as pool:
                for row in pool.imap_unordered(apart, models):
                    before = rows.get((package, row.name))
                    if before is not None and before.outcome == "taken" and row.outcome != "taken":
                        lost.append(f"{package}/{row.name}")
                    rows[row.package, row.name] = row
                    write(rows)
                    print(json.dumps(asdict(row), ensure_ascii=False), flush=True)
            if is_all:  # forget models that the installed version no longer has
                rows = {key: row for key, row in rows.items() if key[0] != package or key[1] in names}
                write(rows)
    PAGE.write_text(render(read().values()))
    if lost:
        print(f"no longer taken: {', '.join(lost)}")
    return int(bool(lost))


if __name__ == "__main__":
    del sys.path[0]  # this folder: a package that imports `coverage` means another one
    if importlib.util.find_spec("transformers"):
        import transformers

        transformers.logging.set_verbosity(transformers.logging.CRITICAL + 10)
    sys.exit(main())

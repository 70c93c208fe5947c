"""`quest new-mechanism` and `quest new-plugin`: copy an example distribution under another name."""

import keyword
import re
import shlex
import shutil
import tempfile
from importlib import metadata
from pathlib import Path

from ..errors import ConfigError, PluginError
from ..hosts.torch import TorchAdapter
from ..registry import mechanisms

_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
_LEFT_OUT = shutil.ignore_patterns("__pycache__", ".*", "dist")
_OURS = re.compile("core|bench|suites|zoo|fairseq|graphgps|mmdet|mmengine|mmseg|pointcept|timm|transformers|tsai")
EXAMPLES = {"mechanism": "power", "plugin": "toy"}  # examples/third_party_KIND is the distribution quest-NAME


def new(kind: str, name: str, out: Path) -> int:
    """Copy the example of a mechanism or a plugin under another name, and print what to do next."""
    exists = _OURS.fullmatch(name) or any(metadata.distributions(name=f"quest-{name}"))
    taken = f"the distribution quest-{name}" if exists else ""
    if name in (mechanisms() if kind == "mechanism" else [TorchAdapter.name]):
        taken = f"the {kind} '{name}'"
    if taken:
        raise ConfigError(f"name is {name!r}, and there is {taken} already; choose another")
    folder = copy_example(f"third_party_{kind}", EXAMPLES[kind], name, out)
    print(f"wrote {folder}; next:")
    extras, look = "test", "quest list      # it is there"
    if kind == "plugin":
        extras, look = "host,test", "quest doctor    # lacks stand_in, a host in tests/"
    print(f"  pip install -e {shlex.quote(f'{folder}[{extras}]')}")
    print(f"  python -m pytest {shlex.quote(str(folder))}")
    print(f"  {look}")
    return 0


def copy_example(example: str, old: str, name: str, out: Path) -> Path:
    """Copy a folder of examples/ to the new folder ``out/quest-NAME``: all of it or, on any error, nothing.

    In files and in their names ``quest_old``, ``Old`` and ``old`` become ``quest_name``, ``Name`` and ``name``; `old`
    must occur in no other meaning.

    Raises:
        ConfigError: the name is not valid, or the new folder exists or cannot be written.
    """
    snake, camel = name.replace("-", "_"), "".join(word.capitalize() for word in name.split("-"))
    if not _NAME.fullmatch(name) or name.startswith("quest-") or keyword.iskeyword(camel):
        raise ConfigError(
            f"name is {name!r}; expected lower-case letters, digits and single hyphens, starting with a letter, "
            "without 'quest-', and no keyword of Python, such as 'my-lab'"
        )
    target = out / f"quest-{name}"
    if target.exists():
        raise ConfigError(f"'{target}' exists; remove it, or choose another name or --out")

    names = {f"quest_{old}": f"quest_{snake}", old.capitalize(): camel, old: name}

    def rename(text: str) -> str:
        return re.sub("|".join(names), lambda found: names[found[0]], text)  # in one pass: a name may contain `old`

    try:
        with tempfile.TemporaryDirectory(dir=out) as scratch:
            made = Path(scratch, target.name)
            shutil.copytree(_source(example), made, ignore=_LEFT_OUT)
            for path in sorted(made.rglob("*"), reverse=True):  # a folder is renamed after what it contains
                if path.is_file():
                    path.write_text(rename(path.read_text(encoding="utf-8")), encoding="utf-8")
                path.rename(path.with_name(rename(path.name)))
            made.rename(target)
    except OSError as error:
        raise ConfigError(f"'{target}' cannot be written: {error.strerror}") from error
    return target


def _source(example: str) -> Path:
    """Return the folder of an example: inside an installed quest_core, or next to it in a checkout."""
    core = Path(__file__).parents[1]
    for folder in (core / "examples" / example, core.parent / "examples" / example):
        if folder.is_dir():
            return folder
    raise PluginError(f"quest-core lacks the example '{example}'; fix: pip install --force-reinstall quest-core")

"""`quest new-mechanism`: a distribution that is rendered whole and works at once.

Every file of a template is a :class:`string.Template` whose name ends in ``.tmpl``, and the folder ``PACKAGE`` takes
the name of the Python package. The template of mechanisms lies in ``mechanism_template``, one folder for each axis.
"""

from __future__ import annotations

import keyword
import re
import tempfile
from pathlib import Path
from string import Template

from ..catalogue import parts
from ..errors import ConfigError, one_of
from ..mechanisms.part import AXES

TAKEN = ("bench", "core", "torch")
"""Names that quest-core and its own distributions use."""
SUFFIX = ".tmpl"
PACKAGE = "PACKAGE"

_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
_QUEST_IMPORTS = re.compile(r"(?:^from quest_.*\n)+", re.MULTILINE)


def new_mechanism(name: str, *, axis: str = "score", out: Path = Path()) -> Path:
    """Write a mechanism of one's own into the new folder ``quest-NAME`` of `out`; all of it or, on any error, nothing.

    The distribution holds a worked example, its reference and its tests, which pass at once.

    Args:
        name: lower-case letters, digits and single hyphens; what users will write.
        axis: score, normalizer, grouping or family.
        out: an existing folder.

    Returns:
        The folder that was written.

    Raises:
        ConfigError: a name that cannot be one or is taken, an unknown axis, or a folder that exists already or does
            not.
    """
    _check_name(name)
    if name in parts():
        raise ConfigError(f"name is '{name}', which is a mechanism already; choose another")
    if axis not in AXES:
        raise ConfigError(f"axis is '{axis}'; {one_of(axis, AXES)}")
    values = {
        "name": name,
        "axis": axis,
        "distribution": f"quest-{name}",
        "package": _package(name),
        "class": "".join(word.capitalize() for word in name.split("-")),
        "function": name.replace("-", "_"),
        "spec": f"{name}(kv_heads=2)" if axis == "grouping" else name,
    }
    if keyword.iskeyword(values["class"]) or keyword.iskeyword(values["function"]):
        raise ConfigError(f"name is '{name}', which is a keyword of Python; choose another, such as 'my-{name}'")
    common, package = _MECHANISM / "common", Path("src", PACKAGE)
    return _write(name, out, values, [(common, Path()), (_MECHANISM / axis, package)])


_MECHANISM = Path(__file__).parent / "mechanism_template"


def _write(name: str, out: Path, values: dict[str, str], templates: list[tuple[Path, Path]]) -> Path:
    """Render templates, each a file or folder, into places of the new folder ``quest-NAME`` of `out`."""
    if not out.is_dir():
        raise ConfigError(f"out is '{out}', which is not a folder; make it first or choose another")
    target = out / f"quest-{name}"
    if target.exists() or target.is_symlink():
        raise ConfigError(f"'{target}' exists already and is left as it is; remove it, or choose another name or out")
    try:
        with tempfile.TemporaryDirectory(prefix=f".quest-{name}-", dir=out) as scratch:
            made = Path(scratch, target.name)
            for template, place in templates:
                _render(template, made, place, values)
            made.rename(target)
    except OSError as error:
        raise ConfigError(f"'{target}' cannot be written: {error.strerror}") from error
    return target


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        near = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
        hint = f" (did you mean '{near}'?)" if _NAME.fullmatch(near) else ""
        raise ConfigError(
            f"name is {name!r}; it is lower-case letters, digits and single hyphens, starting with a letter, such as "
            f"'timm' or 'my-lab'{hint}"
        )
    if name.startswith("quest-"):
        raise ConfigError(f"name is '{name}', but 'quest-' is put before it; write '{name.removeprefix('quest-')}'")
    if name in TAKEN:
        raise ConfigError(f"name is '{name}', which quest-core uses itself (as it does {', '.join(TAKEN)})")


def _render(template: Path, target: Path, place: Path, values: dict[str, str]) -> None:
    sources = [template] if template.is_file() else sorted(template.rglob(f"*{SUFFIX}"))
    for source in sources:
        inside = Path(source.name) if source == template else source.relative_to(template)
        names = [values["package"] if part == PACKAGE else part for part in (place / inside).parts]
        path = target.joinpath(*names).with_suffix("")
        path.parent.mkdir(parents=True, exist_ok=True)
        text = Template(source.read_text(encoding="utf-8")).substitute(values)
        path.write_text(_QUEST_IMPORTS.sub(_sort_lines, text) if path.suffix == ".py" else text, encoding="utf-8")


def _sort_lines(match: re.Match[str]) -> str:
    """Sort imports: the place of the plugin's own among those of quest_core depends on its name."""
    return "".join(sorted(match[0].splitlines(keepends=True), key=lambda line: line.split()[1]))


def _package(name: str) -> str:
    return f"quest_{name.replace('-', '_')}"

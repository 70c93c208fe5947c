"""Shows `>>>` lines of a docstring as code, wherever they stand; Markdown would take them for quotations."""

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"(?:^>>> .*\n?(?:^(?!>>> |\s*$).*\n?)*)+", re.MULTILINE)


class Examples(griffe.Extension):
    """Wraps each run of `>>>` lines, with the output below it, in a fenced block."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            fenced = EXAMPLE.sub(lambda match: f"```pycon\n{match[0].rstrip()}\n```\n", obj.docstring.value)
            obj.docstring.value = fenced

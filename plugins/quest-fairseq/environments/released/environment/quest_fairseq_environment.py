"""Lets fairseq 0.12.2 import under Python 3.11 and later, in environments made for tests.

Its configuration classes have instances of each other as defaults. Since 3.11, dataclasses refuse a default without a
hash, as it may be mutable, and a dataclass has none. fairseq never hashes nor changes them, so the hash of an object
does. The .pth file next to this module imports it at start-up; only classes of fairseq are touched.
"""

import dataclasses

_process_class = dataclasses._process_class


def _with_hash(cls, *arguments, **options):
    made = _process_class(cls, *arguments, **options)
    if made.__hash__ is None and made.__module__.partition(".")[0] == "fairseq":
        made.__hash__ = object.__hash__
    return made


dataclasses._process_class = _with_hash

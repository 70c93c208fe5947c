"""Keys of a host's configuration that are wrong in every host, and what the one error says (a regular expression)."""

from typing import Any

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"attention": "quset"}, "did you mean 'quest'"),
    ({"attention": ""}, "cannot be read"),
    ({"attention": "quest(init=5"}, "cannot be read"),
    ({"attention": 3}, r"attention is 3 \(int\); write a name such as 'quest'"),
    ({"attention": True}, r"attention is True \(bool\); write a name"),
    ({"attention": ["quest"]}, r"attention is \['quest'\] \(list\); write a name"),
    ({"attention": {}}, "has no 'name'"),
    ({"attention": {"nme": "quest"}}, "has no 'name'"),
    ({"attention": {"name": "quest", "scal": 2}}, "'quest' has no option 'scal'.*did you mean 'scale'"),
    ({"attention": {"name": "quest(scale=1)", "scale": 2}}, "given twice"),
    ({"attention": "quest(inti=5)"}, "did you mean 'init'"),
    ({"attention": "quest(init=no)"}, "option 'init' is 'no', but takes a number"),
    ({"attention": "quest(init=5;init=6)"}, "given twice"),
    ({"attention": "quest(window=3)"}, "'window' belongs to"),
    ({"attention": "quest+qnorm"}, "two choices for the score: 'quest' and 'qnorm'"),
    ({"attention": "linear+gqa(kv_heads=1)"}, "is not combined"),
    ({"attention": "quest+gqa(kv_heads=0)"}, "option 'kv_heads' is 0"),
    ({"attention": "quest", "attention_from": "standrad"}, "did you mean 'standard'"),
    ({"attention": "quest", "allow_partial": "yes"}, "allow_partial='yes' must be true or false"),
    ({"attention_from": "standard"}, "attention_from='standard' is given without attention"),
    ({"allow_partial": True}, "allow_partial=True is given without attention"),
]

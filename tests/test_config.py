"""One grammar everywhere: accepted texts, their meaning, and the errors of mistakes."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quest_core import AttentionConfig, ConfigError
from quest_core.mechanisms import Normalizer, Option, Score
from quest_core.registry import mechanisms, register, temporary

SAME = [
    "quest+gqa(kv_heads=4)",
    "gqa(kv_heads=4)+quest",
    " quest + gqa ( kv_heads = 4 ) ",
    {"name": "quest+gqa", "kv_heads": 4},
    {"name": "quest", "kv_heads": 4},
    {"name": "quest", "kv_heads": 4.0},
    {"name": "quest(kv_heads=4)"},
    "quest+gqa(kv_heads=4;)",
    '{"name": "quest", "kv_heads": 4}',
]


@pytest.mark.parametrize("spec", SAME)
def test_all_spellings_mean_the_same(spec):
    assert AttentionConfig.parse(spec) == AttentionConfig.parse("quest+gqa(kv_heads=4)")


def test_defaults_are_standard_softmax_mha():
    config = AttentionConfig.parse("standard")
    assert (config["score"], config["normalizer"], config["grouping"]) == ("standard", "softmax", "mha")
    assert config.name == str(config) == "standard"
    assert AttentionConfig.parse("gqa(kv_heads=2)").name == "gqa"
    assert AttentionConfig.parse("quest+softmax+mha") == AttentionConfig.parse("quest")


@st.composite
def configs(draw):
    chosen, own = [], [p for p in mechanisms().values() if p.__module__.startswith("quest_core.")]
    for axis in ("score", "normalizer", "grouping"):  # options of other packages have bounds of their own
        chosen.append(draw(st.sampled_from([p for p in own if p.axis == axis])))
    options = {}
    for option in (o for part in chosen for o in part.options):
        value = {int: st.integers(1, 64), float: st.floats(1e-3, 1e3), bool: st.booleans(), str: None}[option.kind]
        value = st.sampled_from(option.choices) if value is None else value
        if draw(st.booleans()):
            options[option.name] = draw(st.none() | value if option.nullable else value)
    return AttentionConfig.parse({"name": "+".join(p.name for p in chosen), **options})


@given(configs())
def test_text_and_mapping_read_back(config):
    assert AttentionConfig.parse(str(config)) == config
    assert AttentionConfig.parse(config.to_dict()) == config
    assert AttentionConfig.parse(json.dumps(config.to_dict())) == config
    assert hash(AttentionConfig.parse(str(config))) == hash(config)


@given(st.sampled_from(["6", "1e3", "true", "None", "'6'", "", " a", "[6]"]) | st.text())
def test_every_text_of_an_option_reads_back_or_is_refused(text):
    """A checkpoint spells its attention as text, which the model that wrote it must read."""
    spec = {"name": "aft-conv", "grid": text}
    if set(text) & set("(),;"):
        with pytest.raises(ConfigError, match=r"takes a text without \( \) , ; or null"):
            AttentionConfig.parse(spec)
    else:
        config = AttentionConfig.parse(spec)
        assert AttentionConfig.parse(str(config)) == config
        assert config.option("grid") == text


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("QUEST", r"did you mean 'quest'"),
        ("qest", r"'qest' is not a mechanism; did you mean 'quest'\? Choose from: .*quest.*"),
        ("quest(kvheads=3)", r"'quest' has no option 'kvheads'; choose from: init, key_init, scale"),
        ("quest+gqa(kvheads=3)", r"no option 'kvheads'; did you mean 'kv_heads'\? Choose from: .*kv_heads"),
        ({"name": "standard", "init": 2.0}, r"no option 'init'.*'init' belongs to elliptical-quest, .*qknorm"),
        ({"name": "quest", "kv_head": 2}, r"no option 'kv_head'.*'kv_heads' belongs to dgqa, gqa"),
        ("quest+gqa(kv_heads=two)", "'kv_heads' is 'two', but takes a whole number of at least 1 or null"),
        ("quest(scale=-1)", "'scale' is -1, but takes a number of at least 1e-06 or null"),
        ("quest(init=0)", "'init' is 0, but takes a number of at least"),
        ("quest(scale=true)", "'scale' is True, but takes a number"),
        ("quest(scale=nan)", "'scale' is 'nan', but takes a number"),
        ({"name": "quest", "scale": 10**400}, "'scale' is 10+, but takes a number"),
        (f"quest(scale={'-' * 10**5}1)", "'scale' is '-+1', but takes a number"),
        ("quest(scale=1)+gqa(scale=2)", "option 'scale' is given twice"),
        ("quest gqa", "'quest gqa' cannot be read; .* names joined by '\\+'"),
        ("quest+", "cannot be read"),
        ("quest(gqa.kv_heads=2)", r"'quest' has no option 'gqa\.kv_heads'"),
        ("quest(scale)", "'scale' is not key=value"),
        ('{"name": "quest"', "starts like JSON but is not"),
        (None, "attention is None"),
    ],
)
def test_mistakes_are_named(spec, message):
    """Those of devtools.wrong too, which test_inject and the plugins read."""
    with pytest.raises(ConfigError, match=message):
        AttentionConfig.parse(spec)


def test_an_option_of_two_parts_says_whose_it_is():
    class Raised:
        def __init__(self, dims, *, p):
            super().__init__(dims)
            self.p = p

    class One(Raised, Score): ...

    class Other(Raised, Normalizer): ...

    def built(spec):
        config = AttentionConfig.parse(spec)
        assert AttentionConfig.parse(str(config)) == AttentionConfig.parse(config.to_dict()) == config
        return [config.build(part, None).p for part in (One, Other)]

    with temporary():
        register("one", source="", options=(Option("p", float, 2.0, ""),))(One)
        register("other", source="", options=(Option("p", float, 1.5, ""),))(Other)
        assert AttentionConfig.parse("one(p=3)").option("p") == 3
        assert built("one+other") == [2.0, 1.5]
        assert built("one(p=3)+other") == built("one+other(one.p=3)") == [3.0, 1.5]
        assert built("one+other(p=4)") == built({"name": "one+other", "other.p": 4}) == [2.0, 4.0]
        assert built("one(p=3)+other(p=4)") == [3.0, 4.0]
        assert AttentionConfig.parse("one+other(p=1.5)").means("one+other")
        assert not AttentionConfig.parse("one+other(p=2)").means("one+other")
        with pytest.raises(ConfigError, match=r"option 'p' belongs to 2 parts; write 'one\.p' or 'other\.p'"):
            AttentionConfig.parse({"name": "one+other", "p": 3})
        with pytest.raises(ConfigError, match=r"option 'one\.p' is given twice"):
            AttentionConfig.parse({"name": "one(p=3)+other", "one.p": 3})


def test_only_the_score_sets_initial_norms():
    with temporary():

        @register("hot", source="", options=(Option("init", float, 1.0, "its own start", starts="own"),))
        class Hot(Normalizer): ...

        config = AttentionConfig.parse("quest(init=5)+hot(init=3)")
        assert config.initial_norms == {"q": 5.0}
        assert str(config.without_initial_norms()) == "quest+hot(hot.init=3.0)"
        assert AttentionConfig.parse("quest+hot").initial_norms == {}


def test_semicolons_separate_options_on_command_lines_that_split_at_commas():
    assert AttentionConfig.parse("quest(init=12;scale=2)") == AttentionConfig.parse("quest(init=12, scale=2)")

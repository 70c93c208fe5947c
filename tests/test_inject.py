"""inject: replaced, untouched and refused modules."""

import copy
import logging
import re
import weakref
from dataclasses import replace
from typing import ClassVar

import models
import pytest
import torch
from torch import nn

import quest_core
from devtools.wrong import WRONG
from quest_core import ConfigError, InjectionError, MultiheadAttention, UnsupportedError
from quest_core.drafts import assign, draft, restore
from quest_core.hosts.request import Request
from quest_core.hosts.torch import TorchAdapter
from quest_core.notices import LOGGER, say


class OddAttention(nn.Module):
    pass


def encoder(layers=2):
    torch.manual_seed(0)
    return models.encoder(8, layers=layers, dropout=0.1)


@pytest.mark.parametrize("attention", ["quest", "quest+gqa(kv_heads=2)", "quest+kdgqa(kv_heads=2)", "mqa"])
@pytest.mark.parametrize("key_dim", [8, 6])  # one packed projection, or three
@pytest.mark.parametrize("share", [{"weight"}, {"bias"}, {"weight", "bias"}], ids=sorted)
def test_attentions_that_share_projections_go_on_sharing_them(attention, key_dim, share):
    model = nn.ModuleList(nn.MultiheadAttention(8, 4, kdim=key_dim, vdim=key_dim) for _ in range(3))
    shared = [name for name, _ in model[0].named_parameters() if name.rpartition("_")[2].rpartition(".")[2] in share]
    for name in shared:
        path, _, leaf = name.rpartition(".")
        setattr(model[1].get_submodule(path), leaf, model[0].get_parameter(name))
    quest_core.inject(model, attention)
    for name, parameter in model[0].named_parameters():
        assert (model[1].get_parameter(name) is parameter) == (name in shared), name
        assert model[2].get_parameter(name) is not parameter


@pytest.mark.parametrize(
    ("attention", "kernel"),
    [
        ("quest+gqa(kv_heads=2)", "scaled_dot_product_attention"),
        ("quest+sigmoid", "written out"),
        ("quest+pgqa(kv_heads=2)", "written out"),
        ("linear", "written out"),
    ],
)
def test_a_report_says_what_computes_the_attention(attention, kernel):
    report = quest_core.inject(nn.Sequential(nn.MultiheadAttention(8, 4)), attention)[1]
    assert f"; kernel={kernel}" in str(report)


def test_initial_values_of_a_mechanism_leave_the_random_state_alone():
    model, state = nn.MultiheadAttention(8, 2), torch.get_rng_state()
    quest_core.inject(model, "aft-full(max_length=9)")
    assert torch.equal(torch.get_rng_state(), state)


def test_grouped_projections_shrink_and_cannot_grow_back():
    model, report = quest_core.inject(encoder(), "quest+gqa(kv_heads=2)")
    assert report.replacements[0].parameters_after < report.replacements[0].parameters_before
    assert "->" in str(report)
    model(torch.randn(2, 5, 8)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    with pytest.raises(quest_core.InputError, match="its keys and values were reduced already"):
        quest_core.inject(model, "quest")


def test_a_report_of_a_second_injection_compares_with_the_host():
    model = nn.MultiheadAttention(8, 2)
    for attention, size in (("qknorm-hs", "288 -> 290"), ("qknorm-hs", "288 -> 290"), ("quest", "288 parameters")):
        assert size in str(quest_core.inject(model, attention)[1])


def test_training_mode_type_and_frozen_parameters_are_kept():
    model = encoder().eval().bfloat16()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    model, _ = quest_core.inject(model, "qknorm-ds+gqa(kv_heads=2)")
    assert not any(m.training for m in model.modules())
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert not any(p.requires_grad for p in model.parameters())  # those of the mechanism too


@pytest.mark.parametrize("frozen", [True, False])
def test_an_attention_without_parameters_follows_the_module_around_it(frozen):
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8).requires_grad_(not frozen), models.Call()))
    x = torch.randn(2, 1, 5, 8)
    quest_core.inject(model, "qknorm-ds", example=x)
    own = [p for name, p in model.named_parameters() if "mechanism" in name]
    assert own
    assert all(p.requires_grad != frozen for p in own)


def test_a_model_without_attention_is_an_error():
    said = r"Sequential has no attention that an adapter .* look like attention: OddAttention; say .*example=batch"
    with pytest.raises(InjectionError, match=said):
        quest_core.inject(nn.Sequential(nn.Linear(2, 2), OddAttention()), "quest")


def test_a_subclass_with_a_forward_of_its_own_is_left_alone():
    class Changed(nn.MultiheadAttention):
        def forward(self, *args, **kwargs):
            raise AssertionError

    with pytest.raises(InjectionError, match="Changed"):
        quest_core.inject(Changed(8, 2), "quest")
    both = nn.ModuleList([nn.MultiheadAttention(8, 2), Changed(8, 2)])
    with pytest.raises(InjectionError, match=r"leave 1 as they are.*'1' \(Changed\).*example=batch.*allow_partial"):
        quest_core.inject(both, "quest")


def test_wrapped_models_are_refused():
    compiled = torch.compile(encoder(), backend="eager")
    with pytest.raises(InjectionError, match="wrapped in OptimizedModule already"):
        quest_core.inject(compiled, "quest")
    for given in (type(compiled), [encoder()], "model"):
        with pytest.raises(InjectionError, match=r"is not a torch\.nn\.Module; give the model itself"):
            quest_core.inject(given, "quest")


@pytest.mark.parametrize(
    ("width", "heads", "attention", "note"),
    [
        (4, 8, "quest", "k_norm gives keys one norm already"),
        (32, 8, "quest", "k_norm normalizes keys over all heads"),
        (0, 8, "quest", "heads have 4 features; on text, .*results/widths/"),
        (0, 4, "quest", "heads have 8 features; on text"),
        (0, 2, "quest", ""),
        (0, 8, "standard", ""),
        (4, 8, "standard", ""),
    ],
)
def test_the_report_says_where_unit_keys_change_little_or_heads_are_narrow(width, heads, attention, note):
    layer = nn.TransformerEncoderLayer(32, heads, 32)
    if width:
        layer.self_attn.k_norm = nn.RMSNorm(width)
    text = str(quest_core.inject(layer, attention)[1])
    assert re.search(note, text)
    assert note or not {"norm", "features"} & set(text.split())


def test_the_report_names_the_norm_of_keys_that_a_run_showed():
    def normed(_, x):
        q = x.unflatten(-1, (4, 4)).transpose(1, 2)
        return nn.functional.scaled_dot_product_attention(q, nn.functional.rms_norm(q, (4,)), q)

    report = quest_core.inject(models.Host(normed), "quest", example=torch.randn(2, 5, 16))[1]
    assert "the host's keys have norm 2 already" in str(report)


class Failing(TorchAdapter):
    def __init__(self, at):
        self.at = at

    def replace(self, site, config):
        if self.at == "replace" and "1" in site.path:
            raise RuntimeError("failed")
        return super().replace(site, config)

    def connect(self, model, drafts):
        if self.at == "connect":
            assert len(drafts) == 2
            assert not any(isinstance(module, MultiheadAttention) for module in model.modules())
            raise RuntimeError("failed")

    def projections(self, module):
        if self.at == "projected":
            raise RuntimeError("failed")
        return super().projections(module)


@pytest.mark.parametrize("at", ["replace", "connect", "projected"])
@pytest.mark.parametrize("attention", ["quest(init=5)", "qknorm-hs+gqa(kv_heads=2)"])
def test_an_adapter_that_fails_leaves_the_model_as_it_was(at, attention):
    model = encoder()
    state = torch.get_rng_state()
    with models.unchanged(model), pytest.raises(RuntimeError, match="failed"):
        quest_core.inject(model, attention, adapter=Failing(at), fresh=True)
    assert torch.equal(torch.get_rng_state(), state)
    assert quest_core.inject(model, attention, fresh=True)[0] is model


def test_an_error_leaves_the_model_as_it_was():
    model = encoder()
    model.layers[1].self_attn = nn.MultiheadAttention(8, 2, batch_first=True)  # 4 heads fit kv_heads=4, 2 do not
    said = "kv_heads is 4, which does not divide the 2 heads"
    with models.unchanged(model), pytest.raises(quest_core.ConfigError, match=said):
        quest_core.inject(model, "quest+gqa(kv_heads=4)")
    with torch.no_grad():
        model.layers[1].self_attn.in_proj_weight.zero_()  # heads without a norm cannot be scaled
    with models.unchanged(model), pytest.raises(UnsupportedError, match="are zeros"):
        quest_core.inject(model, "quest(init=5)", fresh=True)


@pytest.mark.parametrize("attention", ["quest", "qknorm-hs", "quest(init=5)", "elliptical"])
def test_uninject_restores_the_host(attention):
    model = nn.Sequential(encoder(), Keeping("list")).eval()
    kinds, hooks = [type(m) for m in model.modules()], [{**vars(m)} for m in model.modules()]
    x, modules = torch.randn(2, 5, 8), [*model.modules()]
    quest_core.inject(model, attention, fresh=True)
    quest_core.inject(model, "sigmoid")
    assert not {nn.MultiheadAttention} & {type(m) for m in model.modules()}
    assert quest_core.uninject(model) is model
    assert [*model.modules()] == modules
    assert [type(m) for m in model.modules()] == kinds
    assert all(vars(m).keys() == before.keys() for m, before in zip(model.modules(), hooks, strict=True))
    model.load_state_dict(nn.Sequential(encoder(), Keeping("list")).state_dict(), strict=True)
    assert torch.equal(model(x), nn.Sequential(encoder(), Keeping("list")).eval()(x))
    with pytest.raises(InjectionError, match="has no attention that inject replaced"):
        quest_core.uninject(model)


def test_uninject_refuses_smaller_projections_before_anything_changes():
    model = nn.ModuleList([nn.MultiheadAttention(8, 4), nn.MultiheadAttention(8, 4, kdim=6, vdim=6)])
    quest_core.inject(model, "quest+gqa(kv_heads=2)")
    said = r"projections of '0' were made smaller.*build the model again"
    with models.unchanged(model), pytest.raises(InjectionError, match=said):
        quest_core.uninject(model)


def test_inject_and_uninject_refuse_a_model_that_a_monitor_watches():
    model = encoder()
    quest_core.inject(model, "quest")
    with quest_core.Monitor(model) as monitor:
        for change in (lambda: quest_core.uninject(model), lambda: quest_core.inject(model, "standard")):
            with pytest.raises(
                InjectionError, match=r"'layers.0.self_attn.mechanism' is observed by a Monitor.*call remove"
            ):
                change()
        model(torch.randn(2, 5, 8))
        assert monitor.collect()
    quest_core.uninject(model)


def test_uninject_refuses_weights_that_were_parametrized_since():
    model, _ = quest_core.inject(encoder(), "quest")
    nn.utils.parametrizations.weight_norm(model.layers[0].self_attn, "in_proj_weight")
    said = "parametrized .* after inject; undo that first"
    with models.unchanged(model), pytest.raises(InjectionError, match=said):
        quest_core.uninject(model)
    nn.utils.parametrize.remove_parametrizations(model.layers[0].self_attn, "in_proj_weight")
    assert type(quest_core.uninject(model).layers[0].self_attn) is nn.MultiheadAttention


def test_a_module_stays_the_same_object_and_so_do_its_hooks():
    model = encoder()
    attention, seen = model.layers[0].self_attn, []
    handle = attention.register_forward_hook(lambda *_: seen.append(1))
    parameters, modules = attention._parameters, attention._modules
    quest_core.inject(model, "quest")
    assert model.layers[0].self_attn is attention
    assert (attention._parameters, attention._modules) == (parameters, modules)
    model(torch.randn(2, 5, 8))
    handle.remove()
    model(torch.randn(2, 5, 8))
    assert seen == [1]


def test_a_host_that_cannot_honor_a_mechanism_refuses_it_by_name():
    class Fixed(TorchAdapter):
        def sites(self, model):
            for site in super().sites(model):
                yield replace(site, capabilities=quest_core.Capabilities(regroups=False))

    model = encoder()
    with pytest.raises(UnsupportedError, match=r"'gqa' is not possible here: .*shape.*Possible here: .*quest"):
        quest_core.inject(model, "quest+gqa(kv_heads=2)", adapter=Fixed())
    quest_core.inject(model, "quest", adapter=Fixed())


def test_a_module_with_two_names_is_replaced_under_both():
    one = nn.MultiheadAttention(8, 2)
    model, report = quest_core.inject(nn.ModuleDict({"one": one, "two": one}), "quest")
    assert len(report.replacements) == 1
    assert model["one"] is model["two"]
    assert isinstance(one, MultiheadAttention)


KEEPING = {
    "list": (lambda attention: [attention], lambda kept: kept[0]),
    "closure": (lambda attention: lambda *x, **options: attention(*x, **options), lambda kept: kept),
    "weak reference": (weakref.ref, lambda kept: kept()),
}


class Keeping(nn.Module):
    """Calls its attention by what it keeps outside of the tree of modules."""

    def __init__(self, way):
        super().__init__()
        torch.manual_seed(0)
        keep, self.found = KEEPING[way]
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.kept = keep(self.attention)

    def forward(self, x):
        return self.found(self.kept)(x, x, x, need_weights=False)[0]


@pytest.mark.parametrize("way", KEEPING)
def test_an_attention_that_is_called_outside_of_the_tree_is_replaced_there_too(way):
    model, _ = quest_core.inject(Keeping(way), "quest")
    x = torch.randn(2, 5, 8)
    assert torch.equal(model(x), model.attention(x, x, x, need_weights=False)[0])
    assert not torch.equal(model(x), Keeping(way)(x))
    model, _ = quest_core.inject(model, "sigmoid")  # also what the first injection has put there
    assert torch.equal(model(x), model.attention(x, x, x, need_weights=False)[0])


def test_a_method_that_would_be_another_is_refused():
    model = encoder()
    model.layers[0].attend = model.layers[0].self_attn.forward
    with pytest.raises(quest_core.InjectionError, match=r"'layers.0.attend' is the method forward of a Multihead"):
        quest_core.inject(model, "quest")
    del model.layers[0].attend
    quest_core.inject(model, "quest")
    model.layers[0].attend = model.layers[0].self_attn.forward
    with pytest.raises(quest_core.InjectionError, match="which MultiheadAttention in its place does not have"):
        quest_core.uninject(model)


class Table(nn.Module):
    """Attention that looks its function up, and takes keys and values of another one if it has one."""

    def __init__(self, *others):
        super().__init__()
        self.qkv, self.others, self.table = nn.Linear(8, 24), [*others], {"dot product": self.dot_product}

    def dot_product(self, q):
        k, v = (self.others[0] if self.others else self).kv
        return nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=0.5 if self.training else 0)

    def forward(self, x):
        q, *self.kv = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return self.table["dot product"](q).transpose(1, 2).flatten(2)


def test_what_attentions_keep_of_themselves_and_of_each_other_is_replaced():
    torch.manual_seed(0)
    first, x = Table(), torch.randn(2, 5, 8)
    stock = nn.Sequential(first, Table(first)).eval()
    with torch.no_grad():
        expected = stock(x)
    model, report = quest_core.inject(copy.deepcopy(stock).train(), "standard", example=x[:1])
    assert len(report.replacements) == 2
    assert model[1].others == [model[0]]
    assert model[0].table["dot product"].__self__ is model[0]
    assert torch.equal(model.eval()(x), expected)


def test_a_model_that_takes_no_attributes_can_be_injected():
    class Sealed(Keeping):
        def __setattr__(self, name, value):
            if "kept" in vars(self):
                raise AttributeError(name)
            super().__setattr__(name, value)

    model, report = quest_core.inject(Sealed("list"), "quest")
    assert model.attention_report is report


@pytest.mark.parametrize(
    "attend",
    [nn.functional.scaled_dot_product_attention, lambda q, k, v: (q @ k.mT * 0.5).softmax(-1) @ v],
    ids=["called", "written out"],
)
def test_a_class_that_wraps_its_modules_runs_the_mechanism(attend):
    class Wrapping(nn.Linear):
        def __setattr__(self, name, value):  # as layers of Keras do
            super().__setattr__(name, nn.Sequential(value) if isinstance(value, nn.Module) else value)

        def forward(self, x):
            return attend(*super().forward(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4))

    model, x = Wrapping(8, 24), torch.randn(2, 5, 8)
    stock = copy.deepcopy(model)
    q, k, v = nn.functional.linear(x, model.weight, model.bias).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
    quest_core.inject(model, "quest", example=x)
    torch.testing.assert_close(model(x), quest_core.attention(q, k, v, "quest"))
    torch.testing.assert_close(quest_core.uninject(model)(x), stock(x))


@pytest.mark.parametrize("flag", ["fresh", "allow_partial"])
def test_flags_are_no_texts(flag):
    with pytest.raises(ConfigError, match=rf"{flag} is 'false'; write True or False"):
        quest_core.inject(encoder(), "quest", **{flag: "false"})


def test_a_partial_replacement_must_be_meant():
    model = nn.Sequential(nn.MultiheadAttention(8, 2), OddAttention())
    with pytest.raises(quest_core.InjectionError, match=r"leave 1 .*'1' \(OddAttention\).*allow_partial"):
        quest_core.inject(model, "quest")
    assert type(model[0]) is nn.MultiheadAttention
    report = quest_core.inject(model, "quest", allow_partial=True)[1]
    assert [*report.left_alone] == ["1"]
    assert "; not replaced: 1;" in str(report)


def test_an_adapter_says_what_stays_by_design():
    class Declaring(TorchAdapter):
        leaves_alone: ClassVar = {"OddAttention": "it only gates"}

    model = nn.Sequential(nn.MultiheadAttention(8, 2), OddAttention(), OddAttention())
    report = quest_core.inject(model, "quest", adapter=Declaring())[1]
    assert [*report.left_alone] == ["1", "2"]
    assert "; not replaced (it only gates): 1, 2" in str(report)


def test_a_function_chooses_the_attention_of_each_module():
    model, x = encoder().eval(), torch.randn(2, 5, 8)
    stock = copy.deepcopy(model)
    model, report = quest_core.inject(model, lambda site: "qknorm-ds" if site.path.startswith("layers.1.") else None)
    assert [(row.path, row.attention) for row in report.replacements] == [("layers.1.self_attn", "qknorm-ds")]
    assert report.left_alone["layers.0.self_attn"] == "no attention was chosen for it"
    assert type(model.layers[0].self_attn) is nn.MultiheadAttention
    assert torch.equal(model.layers[0](x), stock.layers[0](x))
    assert not torch.equal(model.layers[1](x), stock.layers[1](x))
    names = {"layers.0.self_attn": "quest", "layers.1.self_attn": "quest+sigmoid"}
    report = quest_core.inject(quest_core.uninject(model), lambda site: names[site.path])[1]
    assert str(report).startswith("attention=quest, quest+sigmoid in 2 modules")
    assert [line.split()[1] for line in report.table().splitlines()] == ["attention", *names.values()]


def test_a_function_that_chooses_nothing_or_a_start_of_trained_weights_is_refused():
    with pytest.raises(InjectionError, match="no attention was chosen for any of 'layers.0.self_attn', "):
        quest_core.inject(encoder(), lambda _: None)
    with pytest.raises(ConfigError, match="say fresh=True"):
        quest_core.inject(encoder(), lambda _: "quest(init=5)")
    with pytest.raises(ConfigError, match="attention is <class"):
        quest_core.inject(encoder(), MultiheadAttention)


def test_what_has_an_attention_of_ours_is_chosen_again_or_refused():
    model, _ = quest_core.inject(encoder(), "quest")
    with pytest.raises(
        InjectionError, match="no attention was chosen for 'layers.1.self_attn', which has one of quest"
    ):
        quest_core.inject(model, lambda site: "qnorm" if "0" in site.path else None)
    assert str(model.layers[0].self_attn.mechanism.config) == "quest"


@pytest.mark.parametrize("other", ["quest", None])
def test_layers_that_compare_themselves_are_a_whole_stack(other):
    with pytest.raises(UnsupportedError, match=r"'layers.1.self_attn' of this stack has another attention"):
        quest_core.inject(encoder(3), lambda site: other if "1" in site.path else "elliptical")


def test_a_model_with_quest_in_some_layers_takes_no_file_with_more():
    whole = quest_core.inject(encoder(), "quest")[0].state_dict()
    some, _ = quest_core.inject(encoder(), lambda site: "quest" if "0" in site.path else None)
    said = "'layers.1.self_attn.mechanism.* trained with attention 'quest'"
    with models.same_state(some), pytest.raises(quest_core.CheckpointError, match=said):
        some.load_state_dict(whole, strict=False)
    some.load_state_dict(some.state_dict())


# --- what a host's configuration asks for -----------------------------------------------------------------------------


def test_a_configuration_is_read_before_anything_is_built():
    assert Request.read({"heads": 4, "attention": None}, "Model") is None
    given = {"attention": "quest+gqa(kv_heads=2)", "attention_from": "standard", "allow_partial": True}
    request = Request.read(given, "Model")
    assert (str(request.attention), str(request.attention_from)) == ("quest+gqa(kv_heads=2)", "standard")
    assert request.allow_partial


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *WRONG,
        ({"atention": "quest"}, "Model has no option 'atention'; did you mean 'attention'"),
        ({"attention": "quest+gqa", "kv_heads": 2}, "Model has no option 'kv_heads'; write attention={'name': .*2}"),
    ],
)
def test_a_configuration_that_means_nothing_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        Request.read(options, "Model", options)


def test_attention_from_is_read_before_anything_is_built():
    with pytest.raises(ConfigError, match="'nope' is not a mechanism"):
        quest_core.inject(encoder(), "quest", attention_from="nope", adapter=Failing("replace"))


@pytest.mark.parametrize("registered", [True, False])
def test_a_sub_module_in_the_place_of_none_is_taken_out_again(registered):
    host = nn.Linear(1, 1)
    if registered:
        host.register_module("extra", None)
    else:
        host.extra = None
    made = draft(host)
    made.extra = nn.Linear(1, 1)
    assign(made)
    assert "extra.weight" in host.state_dict()
    restore(host)
    assert host.extra is None
    assert list(host.state_dict()) == ["weight", "bias"]


def test_notices_reach_the_hosts_own_log_until_the_plugin_is_uninstalled():
    class Hosted(TorchAdapter):
        pass

    found = []
    own, heard = logging.Logger("host"), logging.Handler(logging.INFO)
    heard.emit = lambda record: found.append(record.getMessage())
    adapter, before, level = Hosted(), list(LOGGER.handlers), LOGGER.level
    for _ in range(2):
        adapter.forward_notices(lambda: own)
    say("too early")
    own.addHandler(heard)
    say("once")
    adapter.uninstall()
    assert LOGGER.handlers == before
    say("not there")
    LOGGER.setLevel(level)
    assert found == ["once"]


class Stages(nn.Module):
    """Layers of several numbers of heads, as in a pyramid."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.MultiheadAttention(24, heads, batch_first=True) for heads in (2, 4, 12))


def test_a_ratio_shares_keys_alike_in_stages_of_any_number_of_heads():
    model, _ = quest_core.inject(Stages(), "quest(ratio=2)")
    assert [layer.kv_heads for layer in model.layers] == [1, 2, 6]
    x = torch.randn(2, 5, 24)
    for layer in model.layers:
        assert layer(x, x, x)[0].isfinite().all()
    again, _ = quest_core.inject(Stages(), "quest+gqa(ratio=2)")
    again.load_state_dict(model.state_dict())


@pytest.mark.parametrize(
    ("attention", "said"),
    [
        ("quest(kv_heads=4)", "does not divide the 2 heads.*layers of 2, 4, 12 heads.*kv_heads=1, 2 .* or ratio=1, 2 "),
        ("quest(ratio=3)", "ratio is 3, which does not divide the 2 heads.*ratio=1, 2 "),
        ("quest(ratio=2, kv_heads=2)", "kv_heads=2 and ratio=2 say the same; keep one"),
        ("quest+gqa", "needs 'kv_heads' or 'ratio'"),
    ],
)
def test_heads_that_do_not_fit_are_an_error_that_says_which_do(attention, said):
    model = Stages()
    with models.unchanged(model), pytest.raises(quest_core.ConfigError, match=said):
        quest_core.inject(model, attention)

"""Packed and Separate projections: cut, loaded, scaled, and shown by rows."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import prune
from torch.testing._internal.two_tensor import TwoTensor

import quest_core
from quest_core import InputError, UnsupportedError
from quest_core.drafts import assign, draft
from quest_core.mechanism import head_sizes
from quest_core.projections import HeadSizes, Packed, Projected, Separate, pool_heads

E = 5  # features of a token

LAYOUTS = {
    "packed": Packed("qkv"),
    "separate": Separate("W_Q", "W_K", "W_V"),
    "keys and values packed": Separate(q="to_q") + Packed("to_kv", roles="kv"),
    "parameters": Packed("in_proj_weight", "in_proj_bias") + Separate(k="bias_k", v="bias_v"),
    "further biases": Packed("qkv") + Separate(q="q_bias", v="v_bias") + Separate(q="r_w_bias"),
}
"""The layouts of the hosts."""

PARAMETERS = {  # name -> shape, from its number of rows and the query heads
    "in_proj_weight": lambda rows, heads: (rows, E),
    "in_proj_bias": lambda rows, heads: (rows,),
    "bias_k": lambda rows, heads: (1, 1, rows),
    "bias_v": lambda rows, heads: (1, 1, rows),
    "q_bias": lambda rows, heads: (rows,),
    "v_bias": lambda rows, heads: (rows,),
    "r_w_bias": lambda rows, heads: (heads, rows // heads),
}


class Host(Projected):
    """Projections of any layout; those of a role in W_V may come from another source."""

    def __init__(self, layout, sizes, *, bias=True, dtype=torch.float32, frozen=False):
        super().__init__()
        self.projections, self.head_sizes = layout, sizes
        for name, roles in layout.entries:
            rows = sizes.rows(roles)
            if name in PARAMETERS:
                setattr(self, name, nn.Parameter(torch.randn(PARAMETERS[name](rows, sizes.num_heads), dtype=dtype)))
            else:
                setattr(self, name, nn.Linear(E, rows, bias, dtype=dtype))
        self.requires_grad_(not frozen)
        self.train(not frozen)

    def by_role(self, role):
        """The rows of a role, cut out without the code that is tested: name -> [rows, ...]."""
        found = {}
        for name, roles in self.projections.entries:
            if role in roles:
                value = getattr(self, name)
                parts = dict(value.named_parameters(name)) if isinstance(value, nn.Module) else {name: value}
                for key, parameter in parts.items():
                    rows = parameter.detach()
                    if name in PARAMETERS and not name.startswith("in_proj"):
                        rows = rows.flatten()
                    widths = dict(zip("qkv", self.head_sizes.widths, strict=True))
                    found[key] = dict(zip(roles, rows.split([widths[r] for r in roles]), strict=True))[role].clone()
        return found


GROUPED = HeadSizes(4, 2, 2, 2, 2)


@st.composite
def hosts(draw, narrow=True):
    """A host with all heads, and the sizes that an attention wants."""
    groups, share = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    head_dim, value_dim = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    key_dim = 1 if narrow and draw(st.booleans()) else head_dim
    wanted = HeadSizes(groups * share, groups, head_dim, key_dim, value_dim)
    torch.manual_seed(draw(st.integers(0, 99)))
    host = Host(
        LAYOUTS[draw(st.sampled_from(list(LAYOUTS)))],
        wanted.full,
        bias=draw(st.booleans()),
        dtype=draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16])),
        frozen=draw(st.booleans()),
    )
    return host, wanted


def reduced(host, sizes, *, fresh):
    """Return a draft with smaller projections, as a replacement does."""
    made = draft(host)
    made.head_sizes = sizes
    made.projections.shrink(made, sizes, fresh=fresh)
    return made


def want(rows, role, sizes, *, fresh):
    """The reference: groups of heads and of key features, averaged or the first kept."""
    if role == "q":
        return rows
    key = role == "k"
    width, kept = (sizes.head_dim, sizes.key_dim) if key else (sizes.value_dim, sizes.value_dim)
    groups = rows.reshape(sizes.kv_heads, -1, width, *rows.shape[1:])  # [G, H/G, D, ...]
    heads = groups[:, 0] if fresh else groups.mean(1)  # [G, D, ...]
    features = heads.reshape(sizes.kv_heads, kept, -1, *rows.shape[1:])  # [G, Dk, D/Dk, ...]
    return (features[:, :, 0] if fresh else features.mean(2)).flatten(0, 1)


def same_tensors(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


# --- smaller projections ------------------------------------------------------------------------------------------


@given(hosts(), st.booleans())
def test_shrinking_equals_the_reference_and_leaves_the_host(case, fresh):
    host, sizes = case
    before = copy.deepcopy(host)
    made = reduced(host, sizes, fresh=fresh)
    for role in "qkv":
        theirs = {key: want(rows, role, sizes, fresh=fresh) for key, rows in before.by_role(role).items()}
        same_tensors(made.by_role(role), theirs)
    same_tensors(host.state_dict(), before.state_dict())
    assert repr(host) == repr(before)
    for old, new in zip(host.parameters(), made.parameters(), strict=True):
        assert (old.dtype, old.requires_grad, old.device) == (new.dtype, new.requires_grad, new.device)
        assert (old is new) == (old.shape == new.shape)
    for path, child in made.named_children():
        assert isinstance(child, nn.Linear)
        assert child.training == host.get_submodule(path).training
        assert child(torch.ones(2, E, dtype=child.weight.dtype)).shape == (2, child.out_features)


@given(hosts())
def test_shrinking_again_changes_nothing_and_other_sizes_are_refused(case):
    host, sizes = case
    made = reduced(host, sizes, fresh=False)
    again = reduced(made, sizes, fresh=False)
    assert all(a is b for a, b in zip(made.parameters(), again.parameters(), strict=True))
    if sizes != sizes.full:
        with pytest.raises(InputError, match=r"of this Host is .*rows: its keys and values were reduced already"):
            reduced(made, sizes.full, fresh=False)


def test_key_rows_that_fit_by_chance_are_not_taken_for_reduced_ones():
    """aft-conv's keys of 4 heads with 1 feature have as many rows as 2 heads of 2 features."""
    narrow, grouped = HeadSizes(4, 4, 2, 1, 2), HeadSizes(4, 2, 2, 2, 2)
    host = Host(LAYOUTS["separate"], narrow.full)
    for first, second in ((narrow, grouped), (grouped, narrow)):
        with pytest.raises(InputError, match="were reduced already"):
            reduced(reduced(host, first, fresh=True), second, fresh=True)


def test_a_smaller_layer_is_the_same_object_with_the_same_hooks():
    host = Host(LAYOUTS["packed"], HeadSizes(4, 4, 2, 2, 2))
    seen = []
    layer = host.get_submodule("qkv")
    handle = layer.register_forward_hook(lambda module, args, out: seen.append(out.shape[-1]))
    made = reduced(host, HeadSizes(4, 2, 2, 2, 2), fresh=False)
    layer(torch.ones(E))
    assign(made)
    assert host.get_submodule("qkv") is layer
    layer(torch.ones(E))
    handle.remove()
    layer(torch.ones(E))
    assert seen == [24, 16]


def test_head_sizes_of_an_attention():
    assert head_sizes("quest", 4, 8) == HeadSizes(4, 4, 8, 8, 8)
    assert head_sizes("quest+gqa(kv_heads=2)", 4, 8, 6) == HeadSizes(4, 2, 8, 8, 6)
    assert head_sizes("aft-conv", 4, 8) == HeadSizes(4, 4, 8, 1, 8)
    assert HeadSizes(4, 2, 8, 8, 6).widths == (32, 16, 12)
    with pytest.raises(quest_core.ConfigError, match="kv_heads is 3"):
        head_sizes("gqa(kv_heads=3)", 4, 8)


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(InputError, match="the 4 heads of a projection with 8 rows cannot be pooled into 3"):
        pool_heads(torch.zeros(8, E), 4, 3)
    with pytest.raises(InputError, match="with 10 rows"):
        pool_heads(torch.zeros(10, E), 4, 2)


# --- checkpoints --------------------------------------------------------------------------------------------------


@given(hosts())
def test_loading_all_heads_equals_shrinking_them(case):
    host, sizes = case
    made = reduced(host, sizes, fresh=False)
    other = copy.deepcopy(made)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    state = host.state_dict()
    given_shapes = {key: value.shape for key, value in state.items()}
    other.load_state_dict(state, strict=True)
    same_tensors(dict(other.state_dict()), dict(made.state_dict()))
    assert {key: value.shape for key, value in state.items()} == given_shapes  # the caller's own stays
    nested = nn.ModuleDict({"layer": copy.deepcopy(other)})
    nested.load_state_dict({f"layer.{key}": value for key, value in state.items()}, strict=True)
    same_tensors(dict(nested["layer"].state_dict()), dict(made.state_dict()))


@given(hosts())
def test_loading_reduced_heads_changes_nothing(case):
    host, sizes = case
    made = reduced(host, sizes, fresh=False)
    other = reduced(copy.deepcopy(host), sizes, fresh=True)
    other.load_state_dict(made.state_dict(), strict=True)
    same_tensors(dict(other.state_dict()), dict(made.state_dict()))


@given(hosts(), st.integers(1, 3), st.sampled_from([0, -1]))
def test_a_wrong_size_is_reported_by_name(case, more, axis):
    host, sizes = case
    made = reduced(host, sizes, fresh=False)
    for key, value in host.state_dict().items():
        wrong = torch.cat([value, *[value.narrow(axis, 0, 1)] * more], dim=axis)
        if wrong.shape == made.state_dict()[key].shape:
            continue
        with pytest.raises(RuntimeError, match=f"size mismatch for {key}: .*{list(wrong.shape)}".replace("[", r"\[")):
            made.load_state_dict({**made.state_dict(), key: wrong}, strict=True)


@pytest.mark.parametrize("entry", [3, None, "text"])
def test_an_entry_that_is_no_tensor_is_left_to_pytorch(entry):
    host = Host(LAYOUTS["packed"], GROUPED.full)
    with pytest.raises(RuntimeError, match="qkv.weight"):
        reduced(host, GROUPED, fresh=True).load_state_dict({**host.state_dict(), "qkv.weight": entry})


# --- rows ---------------------------------------------------------------------------------------------------------


@given(hosts())
def test_rows_are_views_of_every_weight_and_bias(case):
    host, sizes = case
    made = reduced(host, sizes, fresh=False)
    for role in "qkv":
        found = made.projections.rows(made, sizes, role)
        wanted = made.by_role(role)
        same_tensors({name: rows.view(wanted[name].shape) for name, rows in found.items()}, wanted)
        for rows in found.values():
            rows.fill_(7)
        assert all(bool((values == 7).all()) for values in made.by_role(role).values())


@given(hosts(), st.sampled_from("qkv"), st.integers(0, 99))
def test_scaling_multiplies_the_rows_of_each_head_and_nothing_else(case, role, seed):
    host, sizes = case
    made = copy.deepcopy(reduced(host, sizes, fresh=False))
    heads = sizes.num_heads if role == "q" else sizes.kv_heads
    factor = torch.rand(heads, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 3
    before = {r: made.by_role(r) for r in "qkv"}
    made.projections.scale(made, sizes, role, factor)
    for other in "qkv":
        for name, rows in made.by_role(other).items():
            old = before[other][name]
            if other == role:
                wide = torch.promote_types(old.dtype, torch.float32)
                each = factor.to(wide).repeat_interleave(len(old) // heads).view(-1, *[1] * (old.dim() - 1))
                old = (old.to(wide) * each).to(old.dtype)
            assert torch.equal(rows, old), name


def test_sizes_that_do_not_fit_are_refused_before_anything_changes():
    host = Host(LAYOUTS["packed"] + LAYOUTS["separate"], GROUPED)
    host.W_Q = nn.Linear(E, 9)
    before = copy.deepcopy(host.state_dict())
    with pytest.raises(InputError, match=r"'W_Q' is a Linear\(in_features=5, out_features=9.*num_heads=4.* 8 rows"):
        host.projections.scale(host, GROUPED, "q", torch.ones(4))
    with pytest.raises(InputError, match=r"the factors have shape \[3\]; 'k' has 2 heads"):
        host.projections.scale(host, GROUPED, "k", torch.ones(3))
    same_tensors(dict(host.state_dict()), dict(before))


# --- weights that are not parameters -------------------------------------------------------------------------------


class _Adapted(nn.Linear):
    """A Linear with a low-rank correction."""

    def __init__(self):
        super().__init__(E, 24)
        self.lora = nn.Linear(E, 24)


def _holding(weight):
    """As torchao.quantization.quantize_ leaves a Linear."""
    made = nn.Linear(E, 24)
    made.weight = nn.Parameter(weight, requires_grad=weight.is_floating_point())
    return made


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(E, 24)),
        lambda: prune.l1_unstructured(nn.Linear(E, 24), "weight", 0.5),
        _Adapted,
        lambda: _holding(torch.zeros(60, 1, dtype=torch.uint8)),
        lambda: _holding(TwoTensor(torch.randn(24, E), torch.randn(24, E))),
    ],
    ids=["weight_norm", "pruned", "adapted", "quantized", "tensor subclass"],
)
def test_weights_made_from_others_are_refused_by_name_where_rows_would_change(make):
    host = Host(LAYOUTS["packed"], GROUPED.full)
    host.qkv = layer = make()
    host.projections.shrink(host, GROUPED.full, fresh=False)  # nothing to do
    assert host.qkv is layer
    with pytest.raises(UnsupportedError, match="the weights of 'qkv' .* are parametrized"):
        host.projections.shrink(host, GROUPED, fresh=False)
    with pytest.raises(UnsupportedError, match="the weights of 'qkv' .* are parametrized"):
        host.projections.scale(host, GROUPED.full, "q", torch.ones(4))
    assert host.qkv is layer


def test_a_parametrized_parameter_is_refused_by_name():
    host = Host(LAYOUTS["parameters"], GROUPED.full)
    nn.utils.parametrize.register_parametrization(host, "in_proj_weight", nn.Identity())
    for change in (
        lambda: host.projections.shrink(host, GROUPED, fresh=False),
        lambda: host.projections.scale(host, GROUPED.full, "q", torch.ones(4)),
    ):
        with pytest.raises(UnsupportedError, match="the weights of 'in_proj_weight' .* are parametrized"):
            change()


def test_only_the_layers_of_a_role_must_be_plain():
    sizes = HeadSizes(4, 4, 2, 2, 2)
    host = Host(LAYOUTS["separate"], sizes, bias=False)
    host.W_V = nn.utils.parametrizations.weight_norm(nn.Linear(E, 8))
    assert list(host.projections.rows(host, sizes, "q")) == ["W_Q.weight"]


def test_a_description_that_misses_a_role_is_refused_by_name():
    host = Host(LAYOUTS["packed"], GROUPED.full)
    with pytest.raises(UnsupportedError, match=r"projections of Host .* 'k' should be in 'qvk', of which .* none"):
        Packed("qvk").shrink(host, GROUPED, fresh=True)
    with pytest.raises(UnsupportedError, match="'q' should be in no name at all"):
        Packed("qkv", roles="kv").scale(host, GROUPED, "q", torch.ones(4))

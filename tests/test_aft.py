"""The attention-free family against its float64 reference: values, gradients, extremes, memory, decoding."""

import math
from contextlib import nullcontext

import pytest
import torch
from allocations import Largest
from grid.draws import small_blocks
from hypothesis import given
from hypothesis import strategies as st

import quest_core
from quest_core import ops as blocks
from quest_core.mechanisms import aft_conv, aft_ops
from quest_core.testing.truth import exact as by_reference

ORDERED = ["aft-full", "aft-local", "aft-full(rank=null)", "aft-local(rank=null)"]
SEQUENCE = ["aft-simple", *ORDERED]


@pytest.mark.parametrize("attention", ["aft-simple", "aft-full", "aft-local", "aft-conv(window=3,dims=1)"])
def test_an_empty_batch_gives_every_parameter_a_gradient(attention):
    """DistributedDataParallel waits for each of them."""
    layer = quest_core.Attention(16, 4, attention)
    layer(torch.zeros(0, 3, 16)).sum().backward()
    assert [name for name, p in layer.named_parameters() if p.grad is None] == []


@pytest.fixture(params=["one tile", "many tiles"])
def tiles(request):
    """Whether short sequences fill one tile or, with small ones, cross their borders in every way."""
    with small_blocks(3) if request.param == "many tiles" else nullcontext():
        yield


def build(spec, heads=2, dim=3, *, spread=1.0, seed=0):
    """A mechanism whose biases have deviation `spread`, in float64."""
    config = quest_core.AttentionConfig.parse(spec).to_dict()
    if config["name"] in ("aft-full", "aft-local"):
        config.setdefault("max_length", 40)
        if config.get("rank", 3) is not None:
            config["rank"] = 3
    if config["name"] == "aft-local":
        config.setdefault("window", 3)
    made = quest_core.Mechanism(config, num_heads=heads, head_dim=dim).double().eval()
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            factor = math.sqrt(spread / math.sqrt(3)) if name.endswith("positions") else spread
            parameter.copy_(torch.randn(parameter.shape, generator=noise, dtype=torch.float64) * factor)
    return made


def tensors(spec, batch, heads, n, m, dim, seed=0):
    made = torch.Generator().manual_seed(seed)
    key_dim = 1 if spec.startswith("aft-conv") else dim
    return tuple(
        torch.randn(batch, tokens, heads, width, generator=made, dtype=torch.float64).transpose(1, 2)
        for tokens, width in ((n, dim), (m, key_dim), (m, dim))
    )


def truth(made, q, k, v, *, mask=None, is_causal=False, grid=()):
    """The reference's output [B, H, N, D]; mask [B or 1, 1, 1, M]."""
    if made.config.family == "aft-conv" and grid:
        assert made.family._extents(k.shape[2] - made.family.prefix) == list(grid)
    return by_reference(made, q, k, v, attn_mask=mask, is_causal=is_causal)[0]


def key_mask(kind, batch, m, seed):
    """[B, 1, 1, M]."""
    made = torch.Generator().manual_seed(seed + 1)
    if kind == "none":
        return None
    kept = torch.rand(batch, 1, 1, m, generator=made) > 0.4
    if kind == "boolean":
        return kept
    return torch.randn(batch, 1, 1, m, generator=made, dtype=torch.float64).masked_fill(~kept, -math.inf)


def compare(made, q, k, v, mask, small, **how):
    """Output and gradients, of biases too, equal those of the reference, in one tile and in small ones."""
    leaves = [*(x.requires_grad_() for x in (q, k.detach(), v)), *made.parameters()]
    with small_blocks(3) if small else nullcontext():
        got = made(*leaves[:3], attn_mask=mask, is_causal=how.get("is_causal", False))
        found = torch.autograd.grad(got.sin().sum(), leaves, materialize_grads=True, allow_unused=True)
    want = truth(made, *leaves[:3], mask=mask, **how)
    right = torch.autograd.grad(want.sin().sum(), leaves, materialize_grads=True, allow_unused=True)
    torch.testing.assert_close((got, *found), (want, *right), rtol=1e-9, atol=1e-9)


@given(st.data())
def test_outputs_equal_the_reference(data):
    """With larger numbers than tests/grid draws, and on grids with unequal sides."""

    def pick(*options):
        return data.draw(st.sampled_from(options))

    spec = pick(*SEQUENCE, "aft-simple(query=false)", "aft-full(query=false)", *["aft-conv"] * 4)
    is_causal, grid = spec != "aft-conv" and pick(False, True), ()
    n, m = pick(*range(1, 15)), pick(*range(1, 15))
    if spec.startswith("aft-local") and not is_causal:
        m = n
    if spec == "aft-conv":
        grid, prefix = pick((7,), (1,), (3, 4), (4, 4), (2, 3, 2), (2, 2, 2)), pick(0, 1, 2)
        options = pick("", ", query=false", ", gumbel=true")
        spec = f"aft-conv(dims={len(grid)}, window={pick(1, 3, 5)}, prefix={prefix}{options})"
        n = m = prefix + math.prod(grid)
    batch, heads, dim, seed = pick(1, 2, 3), pick(1, 2), pick(1, 2, 3), pick(*range(1000))
    made = build(spec, heads, dim, spread=pick(0.1, 3.0, 80.0) if grid else pick(0.1, 3.0, 80.0, 2000.0), seed=seed)
    if len(set(grid)) > 1:
        made.family.grid = grid
    q, k, v = tensors(spec, batch, heads, n, m, dim, seed)
    mask = key_mask(pick("none", "boolean", "additive"), batch, m, seed)
    compare(made, q, k * pick(1.0, 80.0, 2000.0), v, mask, pick(False, True), is_causal=is_causal, grid=grid)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("window", [0, 2])
@pytest.mark.parametrize("path", ["float32", "float64", "features"])
def test_every_path_of_a_block_is_exact(path, window, is_causal, monkeypatch):
    """A product in the type of the inputs, in float64, or sums feature by feature."""
    limit = {"float32": [1e9, 0], "float64": [-1.0, 1e9], "features": [-1.0, -1.0]}[path]
    monkeypatch.setattr(aft_ops, "safe_range", lambda dtype: limit[dtype == torch.float64])
    made = build(f"aft-local(window={window})" if window else "aft-full", 2, 3)
    q, k, v = tensors("aft-local", 2, 2, 9, 9, 3)
    probe = torch.randn_like(q)
    results = []
    for run in (truth, lambda made, *x, is_causal: made.float()(*(y.float() for y in x), is_causal=is_causal)):
        inputs = [*(x.clone().requires_grad_() for x in (q, k, v)), *made.parameters()]
        with small_blocks(3):
            out = run(made, *inputs[:3], is_causal=is_causal)
            results.append([out, *torch.autograd.grad((out * probe).sum(), [*inputs[:3], *made.parameters()])])
    want, got = ([x.double() for x in each] for each in results)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("spec", ["aft-full(rank=null)", "aft-local(rank=null)", "aft-conv(dims=1, window=5)"])
def test_keys_and_biases_of_eighty_mixed(spec, dtype):
    made = build(spec, 1, 4)
    noise = torch.Generator().manual_seed(3)
    signs = [torch.randint(0, 2, shape, generator=noise) * 160.0 - 80 for shape in ((40, 40), (2, 1, 24, 4))]
    with torch.no_grad():
        if spec.startswith("aft-conv"):
            for name, value in (("weight", [-1.0, 1, 0, 1, -1]), ("gain", [80.0]), ("shift", [0.0])):
                getattr(made.family, name).copy_(torch.tensor(value))
        else:
            made.family.table.copy_(signs[0])
    q, _, v = tensors(spec, 2, 1, 24, 24, 4)
    k = signs[1][..., :1] if spec.startswith("aft-conv") else signs[1]
    for is_causal in [False] if spec.startswith("aft-conv") else [False, True]:
        want = truth(made.double(), q, k, v, is_causal=is_causal, grid=(24,))
        leaves = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
        got = made.to(dtype)(*leaves, is_causal=is_causal)
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-5)
        got.square().sum().backward()
        assert all(x.grad is not None and x.grad.isfinite().all() for x in (*leaves, *made.parameters()))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("spec", SEQUENCE)
@pytest.mark.usefixtures("tiles")
def test_a_huge_future_key_changes_nothing_in_the_past(spec, dtype):
    made = build(spec, 2, 3).to(dtype)
    q, k, v = (x.to(dtype) for x in tensors(spec, 2, 2, 16, 16, 3))
    before = made(q, k, v, is_causal=True)
    loud = k.clone()
    loud[:, :, 9] += 120
    loud[:, :, 12] -= 120
    loud.requires_grad_()
    after = made(q, loud, v, is_causal=True)
    # The same but for rounding: a tile's maximum is another.
    past = {torch.float64: 1e-13, torch.float32: 1e-6}.get(dtype, 1e-2)
    torch.testing.assert_close(after[:, :, :9], before[:, :, :9], rtol=past, atol=past)
    assert after.isfinite().all()
    exact = truth(made, q, loud, v, is_causal=True)
    tolerance = {torch.float16: 2e-3, torch.bfloat16: 2e-2, torch.float32: 1e-5, torch.float64: 1e-11}[dtype]
    torch.testing.assert_close(after.double(), exact, rtol=tolerance, atol=tolerance)
    after[:, :, :9].float().square().sum().backward()
    assert loud.grad[:, :, :9].isfinite().all()
    assert loud.grad[:, :, :9].abs().sum() > 0
    assert (loud.grad[:, :, 9:] == 0).all()


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("spread", [0.1, 200.0])
@pytest.mark.parametrize("spec", ["aft-simple", "aft-local", "aft-full", "aft-conv(dims=1, window=5)"])
@pytest.mark.drawn(3)
def test_no_intermediate_grows_faster_than_the_sequence(spec, spread, is_causal, monkeypatch):
    """Eight times as many tokens make no tensor more than eight times as large; a tile's worth is allowed."""
    if spec.startswith("aft-conv") and is_causal:
        return
    for name in ("ROWS", "NARROW"):
        monkeypatch.setattr(aft_ops, name, 16)
    for module, name, value in ((aft_ops, "ELEMENTS", 256), (blocks, "PLAIN_WEIGHTS", 0), (blocks, "BLOCK_WEIGHTS", 1)):
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(blocks, "BLOCK_ROWS", 1)
    config = quest_core.AttentionConfig.parse(spec).to_dict()
    if config["name"] in ("aft-local", "aft-full"):
        config.update(max_length=256, rank=2)
    largest = []
    for tokens in (32, 256):
        made = quest_core.Mechanism(config, num_heads=1, head_dim=2)
        torch.manual_seed(0)  # the biases decide whether aft-conv convolves
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.normal_(std=spread**0.5)
        q, k, v = (x.float().requires_grad_() for x in tensors(spec, 1, 1, tokens, tokens, 2))
        with Largest() as mode:
            made(q, k, v, is_causal=is_causal).sum().backward()
        largest.append(mode.elements)
    assert largest[1] <= 8.5 * largest[0]
    assert largest[1] < 256 * 256 / 8


@pytest.mark.parametrize(("window", "table"), [(0, True), (3, False)])
def test_operators_keep_their_contracts(window, table):
    k, v, left, right = (torch.randn(shape, requires_grad=True) for shape in ((6, 4), (6, 4), (6, 2), (6, 2)))
    bias = (torch.randn(6, 6, requires_grad=True), None) if table else (left, right)
    torch.library.opcheck(aft_ops.aft_biased, (k, v, *bias, True, window))
    none = torch.empty(6, 0)
    torch.library.opcheck(aft_ops.aft_biased, (k, v, none, none, True, 1))


def test_starting_values_are_those_of_the_specification():
    full = quest_core.Mechanism("aft-full", num_heads=2, head_dim=4).family
    assert full.query_positions.shape == full.key_positions.shape == (1024, 128)
    assert full.query_positions.std().item() == pytest.approx(0.01, rel=0.02)
    table = quest_core.Mechanism("aft-local(rank=null, max_length=64)", num_heads=2, head_dim=4).family
    assert table.table.shape == (64, 64)
    assert table.window == 32
    conv = quest_core.Mechanism("aft-conv", num_heads=2, head_dim=4).family
    assert conv.weight.shape == (2, 11, 11)
    assert (conv.bias() == 0).all()
    with torch.no_grad():
        conv.gain.fill_(3.0)
        conv.shift.fill_(0.5)
    torch.testing.assert_close(conv.bias().flatten(1).mean(1), torch.full((2,), 0.5))
    torch.testing.assert_close(conv.bias().flatten(1).std(1, correction=0), torch.full((2,), 3.0))


def test_the_entropy_regularizer_equals_its_formula_and_falls():
    made = build("aft-conv(window=3)", spread=2.0)
    family = made.family
    p = family.bias().flatten(1).softmax(1)
    want = -(p * p.log()).sum()
    torch.testing.assert_close(family.entropy(), want)
    other = build("aft-conv(window=3)").family
    model = torch.nn.Sequential(made, other, torch.nn.Linear(2, 2))
    torch.testing.assert_close(aft_conv.position_entropy(model), want + other.entropy())
    assert aft_conv.position_entropy(torch.nn.Linear(2, 2)) == 0
    step = torch.autograd.grad(aft_conv.position_entropy(family), tuple(family.parameters()))
    with torch.no_grad():
        for parameter, gradient in zip(family.parameters(), step, strict=True):
            parameter -= gradient
    assert family.entropy() < want


def test_gumbel_positions_are_sampled_in_training_and_hard_in_evaluation():
    made = build("aft-conv(dims=1, window=5, gumbel=true)", spread=2.0)
    q, k, v = tensors("aft-conv", 2, 2, 7, 7, 3)
    torch.testing.assert_close(made(q, k, v), truth(made, q, k, v, grid=(7,)))
    made.train()
    torch.manual_seed(1)
    first = made(q, k, v)
    torch.manual_seed(1)
    assert torch.equal(first, made(q, k, v))
    assert not torch.allclose(first, made(q, k, v))
    made(q, k, v).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() and p.grad.any() for p in made.parameters())


def test_gumbel_samples_have_the_temperature_of_the_paper():
    made = build("aft-conv(dims=1, window=3, gumbel=true)").train()
    family = made.family
    w = family.bias().detach()
    torch.manual_seed(2)
    got = family._positions().detach()
    torch.manual_seed(2)
    noise = -torch.empty_like(w).exponential_().log()
    torch.testing.assert_close(got, w * ((w + noise) / 0.5).softmax(1))


def test_a_bias_that_cancels_the_loudest_key_is_exact(monkeypatch):
    """exp(w) − 1 is nearly −1 where the global sum is nearly that key: their difference would be noise."""
    monkeypatch.setattr(blocks, "PLAIN_WEIGHTS", 0)
    made = build("aft-conv(dims=1, window=3)", 2, 4, spread=0.0)
    with torch.no_grad():
        made.family.shift.fill_(-25.0)
    q, k, v = tensors("aft-conv", 1, 2, 32, 32, 4)
    k[:, :, 10] = 12
    got = made.float()(q.float(), k.float(), v.float())
    torch.testing.assert_close(got.double(), truth(made, q, k, v, grid=(32,)), rtol=1e-5, atol=1e-5)


def test_large_grids_take_the_convolution(monkeypatch):
    taken = []
    real = aft_conv._convolve
    monkeypatch.setattr(aft_conv, "_convolve", lambda k, *more: taken.append(k.shape[2]) or real(k, *more))
    monkeypatch.setattr(blocks, "PLAIN_WEIGHTS", 2 * 25**2)
    made = build("aft-conv(window=5)", 2, 16, spread=0.3)
    for side in (3, 12):
        q, k, v = tensors("aft-conv", 1, 2, side**2, side**2, 16)
        torch.testing.assert_close(made(q, k, v), truth(made, q, k, v, grid=(side, side)))
    assert taken == [144]


def test_crops_of_several_shapes_share_one_layer():
    made = build("aft-conv(window=3, prefix=1, grid=*x4)")
    for height in (2, 5):
        q, k, v = tensors("aft-conv", 1, 2, 1 + 4 * height, 1 + 4 * height, 3)
        torch.testing.assert_close(made(q, k, v), truth(made, q, k, v, grid=(height, 4)))
    square = build("aft-conv(window=3)")
    for side in (2, 5):
        q, k, v = tensors("aft-conv", 1, 2, side**2, side**2, 3)
        torch.testing.assert_close(square(q, k, v), truth(square, q, k, v, grid=(side, side)))


@pytest.mark.parametrize(
    ("spec", "n", "m", "message"),
    [
        ("aft-full(max_length=8)", 9, 9, "9 tokens are more than max_length=8.*aft-simple"),
        ("aft-local(max_length=8)", 9, 9, "'aft-local': 9 tokens are more than max_length=8"),
        ("aft-local", 4, 5, "4 queries and 5 keys of two sequences.*'aft-simple' or 'aft-full'"),
        ("aft-conv", 4, 9, "4 queries and 9 keys; use 'aft-simple' or 'aft-full'"),
        ("aft-conv", 5, 5, r"5 tokens less 0 prefix tokens are 5, which do not fill a square.*prefix=1"),
        ("aft-conv(dims=3)", 9, 9, "do not fill a cube"),
        ("aft-conv(grid=*x4)", 6, 6, r"do not fill the grid \*x4"),
        ("aft-conv(dims=1, prefix=3)", 3, 3, "3 tokens less 3 prefix tokens are 0"),
    ],
)
def test_wrong_lengths_are_refused(spec, n, m, message):
    made = quest_core.Mechanism(spec, num_heads=2, head_dim=3).double()
    with pytest.raises((quest_core.InputError, quest_core.UnsupportedError), match=message):
        made(*tensors(spec, 1, 2, n, m, 3))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("aft-conv(window=4)", "window is 4; it needs a center.* 3 or 5"),
        ("aft-conv(dims=4)", "dims is 4; a grid has 1, 2 or 3 axes"),
        ("aft-conv(grid=axb)", r"grid is 'axb'; with dims=2 write '14x14'"),
        ("aft-conv(grid=*x*)", r"at most one extent as \*"),
        ("aft-conv(grid=²x2)", "grid is '²x2'; with dims=2"),
        ("aft-full(rank=0)", "option 'rank' is 0, but takes a whole number of at least 1 or null"),
        ("quest+aft-simple", "'aft-simple' never forms attention weights, so it is not combined"),
    ],
)
def test_wrong_options_are_refused(spec, message):
    with pytest.raises(quest_core.ConfigError, match=message):
        quest_core.Mechanism(spec, num_heads=2, head_dim=3)


def test_values_of_another_width_cannot_be_gated():
    q, k, v = tensors("aft-simple", 1, 2, 4, 4, 3)
    with pytest.raises(quest_core.InputError, match="v has head_dim 2; attention-free gates need that of q, 3"):
        quest_core.attention(q, k, v[..., :2], "aft-simple")


@pytest.mark.parametrize("spec", ["aft-simple", "aft-full", "aft-local", "aft-conv(window=3)"])
def test_autocast_computes_in_the_wider_type(spec):
    made = build(spec).float()
    q, k, v = (x.float() for x in tensors(spec, 2, 2, 9, 9, 3))
    exact = made(q, k, v)
    with torch.autocast("cpu", torch.bfloat16):
        out = made(q, k, v)
    torch.testing.assert_close(out, exact.bfloat16(), rtol=1e-5, atol=1e-5)


SPECS = ["linear", "cosine", "aft-simple", "aft-full(max_length=96)", "aft-local(max_length=96)", "aft-conv(dims=1)"]
CASES = [(spec, causal) for spec in SPECS for causal in (False, True) if not (causal and "conv" in spec)]


@pytest.mark.parametrize(("n", "m"), [(0, 0), (0, 5), (5, 0), (1, 5), (5, 1)])
@pytest.mark.parametrize(("spec", "is_causal"), CASES)
def test_no_tokens_on_one_side(spec, is_causal, n, m):
    """Of linear attention too, whose sums are empty as well."""
    made = build(spec, dim=4)
    q, k, v = (x.requires_grad_() for x in tensors(spec, 2, 2, n, m, 4))
    if "conv" in spec or ("local" in spec and n != m and not is_causal):
        with pytest.raises(quest_core.QuestError, match="'aft-(conv|local)'"):
            made(q, k, v, is_causal=is_causal)
        return
    for mask in (None, torch.ones(2, 1, 1, m, dtype=torch.bool), torch.zeros(2, 1, 1, m, dtype=torch.float64)):
        out = made(q, k, v, attn_mask=mask, is_causal=is_causal)
        if m:
            torch.testing.assert_close(out, truth(made, q, k, v, mask=mask, is_causal=is_causal))
        assert out.shape == (2, 2, n, 4)
        assert m or not out.any()
        out.sum().backward()


def test_a_large_grid_has_a_second_derivative():
    made = build("aft-conv(dims=1)", dim=4)
    inputs = [x.requires_grad_() for x in tensors("aft-conv", 1, 2, 5, 5, 4)]
    with small_blocks(3):
        assert torch.autograd.gradgradcheck(made, inputs)


def test_a_dynamic_square_is_refused():
    made, n = build("aft-conv(window=3)", dim=4), torch.export.Dim("n", min=2, max=96)
    inputs = dict(zip(("q", "k", "v"), tensors("aft-conv", 2, 2, 36, 36, 4), strict=True))
    with pytest.raises(quest_core.UnsupportedError, match="'aft-conv' does not support torch.export with a dynamic"):
        torch.export.export(made, (), inputs, dynamic_shapes={name: {2: n} for name in inputs})

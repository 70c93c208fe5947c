"""Conversion of pretrained weights: calibration from standard attention to quest."""

import copy
import math

import pytest
import torch
from models import Around, Host, encoder, unchanged
from torch import nn

import quest_core
from quest_core import ConfigError, InjectionError, InputError, UnsupportedError
from quest_core.hosts.torch import TorchAdapter

E, H, D = 12, 3, 4


def even_keys(**settings):
    """Attention and tokens where all keys of a head have one norm: 3, 0.5 and 8."""
    module = nn.MultiheadAttention(E, H, batch_first=True, **settings)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()
        rotations = [c * torch.linalg.qr(torch.randn(D, D))[0] for c in (3.0, 0.5, 8.0)]
        w_k = module.in_proj_weight[E : 2 * E] if module.in_proj_weight is not None else module.k_proj_weight
        w_k.copy_(torch.block_diag(*rotations))
        if module.in_proj_bias is not None:
            module.in_proj_bias[E : 2 * E] = 0
    tokens = nn.functional.normalize(torch.randn(2, 5, H, D), dim=-1).flatten(2)  # [B, N, E]
    return module, tokens


def model(layers=2):
    made = encoder(E, H, layers, dropout=0.1)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "in_proj" in name:
                parameter.normal_(0, 0.8)
    return made


SETTINGS = {"packed": {}, "separate": {"vdim": 6}, "no bias": {"bias": False}}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_even_keys_leave_the_output_as_it_was(settings):
    stock, x = even_keys(**settings)
    value = torch.randn(2, 5, stock.vdim)
    wanted = stock(x, x, value)[0]
    ours, report = quest_core.calibrate(stock, [(x, x, value)])
    assert str(ours.config) == "quest"
    torch.testing.assert_close(ours(x, x, value)[0], wanted, rtol=1e-4, atol=1e-4)
    assert report.layers[0].key_norms == pytest.approx((3, 0.5, 8), rel=1e-5)
    assert report.layers[0].factors == pytest.approx((1.5, 0.25, 4), rel=1e-5)
    assert report.calibrated < 1e-5 < 1e-2 < report.uncalibrated
    assert str(report).startswith("attention=quest calibrated in 1 module")


def test_uneven_keys_get_their_mean_and_the_report_says_what_that_gives():
    stock = model()
    batches = [torch.randn(2, 5, E), torch.randn(1, 9, E)]
    reference = copy.deepcopy(stock).eval()
    ours, report = quest_core.calibrate(stock, batches)

    norms = []
    first = reference.layers[0].self_attn
    for x in batches:
        k = nn.functional.linear(x, first.in_proj_weight[E : 2 * E], first.in_proj_bias[E : 2 * E])
        norms.append(k.unflatten(-1, (H, D)).norm(dim=-1).flatten(0, 1))
    mean = torch.cat(norms).mean(0)  # over tokens of both batches
    assert report.layers[0].key_norms == pytest.approx(mean.tolist())
    assert report.layers[0].factors == pytest.approx((mean / math.sqrt(D)).tolist())
    scaled = first.in_proj_weight[:E].unflatten(0, (H, D)) * (mean / math.sqrt(D))[:, None, None]
    torch.testing.assert_close(ours.layers[0].self_attn.in_proj_weight[:E], scaled.flatten(0, 1))
    torch.testing.assert_close(ours.layers[0].self_attn.in_proj_weight[E:], first.in_proj_weight[E:])

    def change(converted):
        new, old = (torch.cat([m(x).flatten() for x in batches]) for m in (converted.eval(), reference))
        return ((new - old).norm() / old.norm()).item()

    assert report.calibrated == pytest.approx(change(ours), rel=1e-3)
    assert report.uncalibrated == pytest.approx(
        change(quest_core.inject(copy.deepcopy(reference), "quest")[0]), rel=1e-3
    )


def test_parameters_mode_and_random_state_are_kept():
    stock = model().bfloat16()
    stock.layers[0].eval()
    parameters, modes = dict(stock.named_parameters()), [m.training for m in stock.layers]
    state = torch.get_rng_state()
    ours, _ = quest_core.calibrate(stock, (torch.full((2, 5, E), c, dtype=torch.bfloat16) for c in (0.1, 0.7)))
    assert torch.equal(torch.get_rng_state(), state)
    assert ours is stock
    assert all(parameters[name] is p and p.requires_grad for name, p in ours.named_parameters())
    assert [m.training for m in ours.layers] == modes
    assert all(layer.self_attn.mechanism.monitor is None for layer in ours.layers)


def test_an_injected_model_starts_from_its_own_scale_and_normalizer():
    stock, x = even_keys()
    ours, _ = quest_core.inject(stock, "standard+sigmoid(scale=0.3)")
    wanted = ours(x, x, x)[0]
    ours, report = quest_core.calibrate(ours, [(x, x, x)], "quest+sigmoid(scale=2)")
    torch.testing.assert_close(ours(x, x, x)[0], wanted, rtol=1e-4, atol=1e-4)
    assert report.layers[0].factors == pytest.approx([norm * 0.3 / 2 for norm in (3, 0.5, 8)])


def test_a_grouping_that_changes_nothing_is_allowed():
    stock, x = even_keys()
    wanted = stock(x, x, x)[0]
    ours, _ = quest_core.calibrate(stock, [(x, x, x)], {"name": "quest", "kv_heads": H})
    torch.testing.assert_close(ours(x, x, x)[0], wanted, rtol=1e-4, atol=1e-4)


def test_batches_are_run_as_the_example_of_inject():
    stock = Host(lambda m, x, *, scale=1.0: m.encoder(x * scale), encoder=model())
    x = torch.randn(2, 5, E)
    batches = [{"x": x, "scale": 2.0}, (2 * x,), 2 * x, lambda module: module(x, scale=2.0)]
    reports = [quest_core.calibrate(copy.deepcopy(stock), [batch])[1] for batch in batches]
    assert all(report == reports[0] for report in reports)


def test_batches_are_run_as_told_and_outputs_may_be_nested():
    def nested(m, x, *, twice):
        y = m.encoder(x)
        return {"hidden": [y, (y * 2 if twice else y,)], "length": x.shape[1], "ids": torch.arange(3)}

    stock, batches = Host(nested, encoder=model()), [{"x": torch.randn(2, 5, E), "label": 3}]
    _, report = quest_core.calibrate(stock, batches, forward=lambda m, batch: m(batch["x"], twice=True))
    assert [layer.path for layer in report.layers] == ["encoder.layers.0.self_attn", "encoder.layers.1.self_attn"]
    assert 0 < report.calibrated != report.uncalibrated > 0


class Deaf(TorchAdapter):
    """An adapter whose queries cannot be scaled."""

    name = "deaf"

    def scale_queries(self, module, factor):
        super().scale_queries(nn.Linear(2, 2), factor)


def with_an_unused_layer():
    return Host(lambda m, x: m.used(x), used=model(1), unused=model(1))


def shared():
    made = model()
    made.layers[1].self_attn.in_proj_weight = made.layers[0].self_attn.in_proj_weight
    return made


X = [torch.zeros(2, 5, E)]
FAILURES = {  # a model, options of calibrate, and its error
    "another score": (model, {"attention": "qknorm"}, ConfigError, "'qknorm' cannot be .* not quest; calibrate takes"),
    "a family": (model, {"attention": "linear"}, ConfigError, "'linear' cannot be .* not quest; calibrate takes"),
    "fewer key heads": (
        model,
        {"attention": "quest+gqa(kv_heads=1)"},
        ConfigError,
        r"'layers.0.self_attn' was trained with 3 key heads; .* all key heads of the trained model",
    ),
    "wandering key heads": (
        model,
        {"attention": "quest+kdgqa(kv_heads=3)"},
        ConfigError,
        "'kdgqa' gives query heads other key heads",
    ),
    "scale 0": (model, {"attention": "quest(scale=0)"}, ConfigError, "'scale' is 0"),
    "an unknown name": (model, {"attention": "qest"}, ConfigError, "did you mean 'quest'"),
    "not standard": (lambda: quest_core.inject(model(), "quest")[0], {}, ConfigError, "this one has: quest"),
    "no attention": (lambda: nn.Linear(E, E), {}, InjectionError, "has no attention"),
    "no batches": (model, {"batches": []}, InputError, "no batches"),
    "one batch": (model, {"batches": {"src": X[0]}}, InputError, r"found one dict; write \[batch\]"),
    "no tensors": (model, {"forward": lambda m, batch: m(batch).sum().item()}, InputError, "forward="),
    "an unused layer": (with_an_unused_layer, {}, InputError, "'unused.layers.0.self_attn' saw no key"),
    "nan": (model, {"batches": [X[0] + math.nan]}, InputError, "none with a finite norm"),
    "shared weights": (shared, {}, UnsupportedError, "'layers.0.self_attn' and 'layers.1.self_attn' share"),
    "an adapter that cannot": (
        model,
        {"adapter": Deaf()},
        UnsupportedError,
        "Linear of the adapter 'deaf' has 0 parts with `projections`; expected one",
    ),
    "a model that fails": (model, {"batches": [torch.zeros(2, 5, E + 1)]}, Exception, "."),
}


@pytest.mark.parametrize(("make", "options", "kind", "text"), FAILURES.values(), ids=FAILURES)
def test_an_error_leaves_the_model_untouched(make, options, kind, text):
    made = make()
    with unchanged(made), pytest.raises(kind, match=text):
        quest_core.calibrate(made, options.pop("batches", X), **options)


def written_out(q, k, v):
    return (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v


@pytest.mark.parametrize("attend", [nn.functional.scaled_dot_product_attention, written_out])
def test_a_site_that_an_example_found_is_refused(attend):
    stock = nn.Sequential(Around(attend, width=E, heads=H))
    ours, _ = quest_core.inject(stock, "standard", example=torch.randn(2, 5, E))
    with pytest.raises(UnsupportedError, match=r"'0': it was found by an example, which does not show"):
        quest_core.calibrate(ours, [torch.randn(2, 5, E)])

"""The options, refusals and reports that users of tsai see."""

import copy
import inspect
from contextlib import nullcontext
from unittest import mock

import numpy as np
import pytest
import torch
import tsai.basics
import tsai.learner
import tsai.models.utils
import tsai.tslearner
from conftest import ENVIRONMENT, SIZES, SPLITS, X, Y, classifier
from tsai.basics import TSClassification, TSClassifier, TSForecaster, TSRegressor, TSTensor, get_ts_dls, ts_learner
from tsai.learner import all_arch_names, get_arch
from tsai.models import TST, PatchTST, RNNAttention, RNNAttentionPlus, TabFusionTransformer, TabTransformer
from tsai.models.layers import MultiheadAttention
from tsai.models.TSTPlus import TSTPlus

import quest_core
import quest_tsai
from devtools.running import python
from devtools.wrong import WRONG as COMMON
from quest_core import CheckpointError, ConfigError, UnsupportedError
from quest_tsai import surfaces
from quest_tsai.layers import Replacement


def mechanisms(model):
    return [m for m in model.modules() if isinstance(m, quest_core.Mechanism)]


def losses(learn):
    """Train for an epoch; return the losses of training and validation."""
    with learn.no_bar(), learn.no_logging():
        learn.fit(1, 1e-3)
    return learn.recorder.values[0][:2]


# --- surfaces -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("learner", "arch", "options", "targets", "count"),
    [
        (TSRegressor, "TSiTPlus", {"depth": 1, "d_model": 16, "n_heads": 4}, X.mean((1, 2)), 1),
        (TSForecaster, "PatchTST", {**SIZES, "patch_len": 4, "stride": 2}, X[:, :, 16:], 2),
    ],
)
def test_other_learners(learner, arch, options, targets, count, tmp_path):
    chosen = {**options, "attention": "quest"}
    learn = learner(
        X[:, :, :16].copy(), targets.copy(), splits=SPLITS, bs=8, arch=arch, path=tmp_path, arch_config=chosen
    )
    assert len(mechanisms(learn.model)) == count
    assert np.isfinite(losses(learn)).all()


@pytest.fixture
def loaders():
    return get_ts_dls(X.copy(), Y, splits=SPLITS, tfms=[None, TSClassification()], bs=8)


def test_learner_function(loaders):
    assert len(mechanisms(ts_learner(loaders, TSTPlus, attention="quest", **SIZES).model)) == 2
    assert len(mechanisms(ts_learner(loaders, "TST", attention="quest", **SIZES).model)) == 2
    assert len(mechanisms(ts_learner(loaders, TSTPlus, init=None, arch_config={"attention": "quest"}).model)) == 3


def test_the_initialization_of_a_learner_keeps_the_start_of_the_attention():
    model = tsai.models.utils.build_ts_model(
        TSTPlus, 3, 5, 12, init=torch.nn.init.xavier_uniform_, attention="quest(init=12)", **SIZES
    )
    for layer in (m for m in model.modules() if isinstance(m, Replacement)):
        norms = layer.projections.norms(layer, layer.head_sizes, "q")
        torch.testing.assert_close(norms, torch.full_like(norms, 12))
        assert not layer.W_Q.bias.any()  # as tsai initializes it


def test_trained_weights_of_tsai_refuse_a_start_by_name(tmp_path):
    for attention in (None, "quest(init=12)"):
        torch.save(TSTPlus(3, 5, 12, attention=attention, **SIZES).state_dict(), tmp_path / "weights.pth")
        model = TSTPlus(3, 5, 12, attention="quest(init=12)", **SIZES)
        refused = nullcontext() if attention else pytest.raises(CheckpointError, match="has trained ones of")
        with refused:
            tsai.models.utils.transfer_weights(model, tmp_path / "weights.pth")


def test_weights_of_another_model_are_not_transferred(tmp_path):
    torch.save(torch.nn.Linear(3, 5).state_dict(), tmp_path / "weights.pth")
    with pytest.raises(CheckpointError, match="no weights in common"):
        tsai.models.utils.transfer_weights(TSTPlus(3, 5, 12, attention="quest", **SIZES), tmp_path / "weights.pth")


def test_an_excluded_head_keeps_its_attention(tmp_path):
    def build(seed):
        torch.manual_seed(seed)
        return TSTPlus(3, 5, 12, custom_head=MultiheadAttention(16, 4), attention="quest", **SIZES)

    torch.save(build(0).state_dict(), tmp_path / "weights.pth")
    for exclude_head in (True, False):
        model = build(1)
        tsai.models.utils.transfer_weights(model, tmp_path / "weights.pth", exclude_head=exclude_head)
        for part, seed in ((model.backbone, 0), (model.head, int(exclude_head))):
            wanted = build(seed).get_submodule("backbone" if part is model.backbone else "head").state_dict()
            torch.testing.assert_close(part.state_dict(), wanted)


def test_plain_class_and_report(capsys):
    model = TSTPlus(3, 5, 12, attention="quest", **SIZES)
    assert model.attention_report.attention == "quest"
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("quest:")]
    assert lines == [f"quest: {model.attention_report}"]
    assert "; kernel=written out" in lines[0]  # because scores are passed from layer to layer


def test_a_learner_is_summarized_as_with_tsais_attention(tmp_path):
    """fastai hooks every module that has no children, and a score also returns a number."""
    learners = [classifier(tmp_path, attention) for attention in (None, "quest")]
    stock, own = ([line for line in learn.summary().splitlines() if "params:" in line] for learn in learners)
    assert own == stock != []


def test_a_subclass_of_a_user_passes_it_on():
    class Mine(TSTPlus):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            self.extra = torch.nn.Linear(1, 1)

    assert len(mechanisms(Mine(3, 5, 12, attention="quest", **SIZES))) == 2


def test_signatures_stay():
    assert "n_heads" in inspect.signature(TSTPlus).parameters
    assert "n_heads" in inspect.signature(TSTPlus.__init__).parameters


@pytest.mark.slow
def test_the_plugin_may_be_imported_before_tsai(tmp_path):
    """All other tests import it after tsai."""
    imports = "import quest_suites_environment, quest_tsai\nfrom tsai.basics import *\nimport tsai.models.TSTPlus"
    build = "print(tsai.models.TSTPlus.TSTPlus(3, 5, 12, attention='quest').attention_report)"
    said = python("-c", f"{imports}\n{build}", cwd=tmp_path, path=[ENVIRONMENT])[0]
    assert "attention=quest in 3 modules" in said


# --- torch.nn.MultiheadAttention inside tsai ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["TransformerModel", "TransformerRNNPlus", "TransformerLSTMPlus", "TransformerGRUPlus"]
)
def test_encoders_of_torch(name):
    """They are replaced by the core's adapter, whose tests have their numbers."""
    sizes = {"seq_len": 12, "nhead": 2, "num_encoder_layers": 2, "dim_feedforward": 32}
    if name == "TransformerModel":
        sizes = {"n_head": 2, "n_layers": 2, "d_ffn": 32}
    model = get_arch(name)(3, 5, d_model=16, **sizes, attention="quest")
    assert len(model.attention_report.replacements) == 2
    assert model(torch.randn(4, 3, 12)).isfinite().all()


# --- refusals -------------------------------------------------------------------------------------------------------


ARCHITECTURES = {get_arch(name) for name in all_arch_names if isinstance(get_arch(name), type)}


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES, key=lambda kind: kind.__name__))
def test_every_architecture_honors_or_refuses(architecture):
    assert (architecture, "__init__") in [(owner, name) for owner, name, _ in quest_tsai.TsaiAdapter().patches]
    if architecture.__name__ in surfaces.ARCHITECTURES:
        return
    with pytest.raises(UnsupportedError, match=f"cannot be used in {architecture.__name__}: .*TSTPlus"):
        architecture(3, 5, seq_len=12, attention="quest")


@pytest.fixture
def unprepared(monkeypatch):
    """Fails if tsai prepares data or builds a model."""
    for module, name in ((tsai.tslearner, "get_ts_dls"), (tsai.tslearner, "build_ts_model")):
        monkeypatch.setattr(module, name, lambda *_, **__: pytest.fail("the refusal came too late"))


def config(**options):
    return {"arch_config": {"attention": "quest", **options}}


WRONG = [
    ({"arch": "gMLP"}, UnsupportedError, "cannot be used in gMLP"),
    ({"arch": "XCMPlus"}, UnsupportedError, "cannot be used in XCMPlus"),
    ({"arch": "TSSequencer"}, UnsupportedError, "cannot be used in TSSequencer"),
    ({"arch": None}, UnsupportedError, "cannot be used in InceptionTimePlus"),
    ({"arch": "xresnet1d18"}, UnsupportedError, "cannot be used in xresnet1d18"),
    ({"arch": torch.nn.Linear(1, 1)}, ConfigError, r"Linear, a model that is built already.*quest_core\.inject"),
    (
        {"arch": "TSiTPlus", "arch_config": {"atention": "quest"}},
        ConfigError,
        "TSiTPlus has .*did you mean 'attention'",
    ),
    ({"arch_config": {"atention": "quest"}}, ConfigError, "did you mean 'attention'"),
    ({"arch_config": {}, "attention": "quest"}, ConfigError, r"write arch_config=\{'attention': 'quest'\}"),
    (config(attention={"name": "quest", "kv_head": 2}), ConfigError, "kv_heads"),
    (config(kv_heads=2), ConfigError, "write attention=.*'kv_heads': 2"),
    (config(atention_from="quest"), ConfigError, "did you mean 'attention_from'"),
    *(({"arch_config": options}, ConfigError, message) for options, message in COMMON),
]


@pytest.mark.parametrize(("options", "error", "message"), WRONG)
def test_what_cannot_be_is_refused_before_data_is_prepared(unprepared, options, error, message):
    with pytest.raises(error, match=message):
        TSClassifier(X, Y, splits=SPLITS, **{"arch": "TSTPlus", **config(), **options})


@pytest.mark.parametrize("learner", [TSRegressor, TSForecaster])
def test_other_learners_refuse_as_early(unprepared, learner):
    with pytest.raises(ConfigError, match="did you mean 'quest'"):
        learner(X, Y, splits=SPLITS, arch="TSTPlus", **config(attention="quset"))


def test_an_architecture_of_a_user_that_does_not_read_it(tmp_path):
    class Mine(torch.nn.Module):
        def __init__(self, c_in, c_out, **options):
            super().__init__()
            self.layer = torch.nn.Linear(c_in, c_out)

    class Reading(Mine):
        def __init__(self, c_in, c_out, attention, **options):
            super().__init__(c_in, c_out)
            self.read = attention

    with pytest.raises(quest_core.InjectionError, match=r"attention='quest' was given to .*Mine.*did not read it"):
        classifier(tmp_path, "quest", arch=Mine)
    assert classifier(tmp_path, "its own", arch=Reading).model.read == "its own"


def test_learner_function_refuses_what_it_would_ignore(loaders):
    with pytest.raises(ConfigError, match="a model that is built already"):
        ts_learner(loaders, TSTPlus(3, 3, 20, **SIZES), attention="quest")
    with pytest.raises(UnsupportedError, match="cannot be used in XCM"):
        ts_learner(loaders, "XCM", arch_config={"attention": "quest"})


def test_attention_that_stays_is_an_error_unless_allowed():
    class OtherAttention(torch.nn.Module):
        """A head whose attention no adapter knows."""

    def build(head, **options):
        return TSTPlus(3, 5, 12, attention="quest", custom_head=head, **options, **SIZES).attention_report

    with pytest.raises(quest_core.InjectionError, match=r"'head' \(OtherAttention\); .* say allow_partial=True"):
        build(OtherAttention())
    assert [*build(OtherAttention(), allow_partial=True).left_alone] == ["head"]
    report = build(torch.nn.MultiheadAttention(16, 4))
    assert (report.replacements[-1].path, report.left_alone) == ("head", {})


def test_no_function_swallows_it():
    for name in ("xresnet1d18", "xresnet1d18plus", "InceptionTimePlus17x17"):
        with pytest.raises((TypeError, UnsupportedError), match="attention"):
            get_arch(name)(3, 5, attention="quest")


@pytest.mark.parametrize("attention", ["linear", "cosine", "aft-simple"])
def test_a_family_where_scores_are_passed_on_names_the_option(attention):
    with pytest.raises(UnsupportedError, match=r"build with res_attention=False \(arch_config="):
        TSTPlus(3, 5, 12, attention=attention, **SIZES)
    assert TSTPlus(3, 5, 12, attention=attention, res_attention=False, **SIZES)


def test_learnable_scale_is_of_the_standard_score():
    build = get_arch("TSiTPlus")
    with pytest.raises(UnsupportedError, match="lsa=True learns a scale.*Possible here: .*standard"):
        build(3, 5, 12, depth=1, d_model=16, n_heads=4, lsa=True, attention="quest")


@pytest.mark.parametrize("lsa", [True, False])
def test_the_scale_is_the_parameter_of_tsai(lsa):
    # Learner.unfreeze and fine_tune train it without lsa too, so checkpoints hold any value.
    models = []
    for options in ({}, {"attention": "standard"}):
        torch.manual_seed(0)
        models.append(get_arch("TSiTPlus")(3, 5, 12, depth=1, d_model=16, n_heads=4, lsa=lsa, **options))
    x, scales = torch.randn(2, 3, 12), [model.backbone.encoder.encoder[0].mha.sdp_attn.scale for model in models]
    for model, scale in zip(models, scales, strict=True):
        scale.requires_grad_().data.mul_(1.7)
        model(x).square().sum().backward()
    torch.testing.assert_close(models[1](x), models[0](x), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(scales[1].grad, scales[0].grad, rtol=1e-4, atol=1e-6)


# --- scores and weights -----------------------------------------------------------------------------------------------


def test_scores_passed_on_are_quest_logits_plus_the_previous_ones():
    model = TSTPlus(3, 5, 12, attention="quest", **SIZES).eval()
    seen = []
    for layer in model.backbone.encoder.layers:
        layer.self_attn.register_forward_hook(lambda module, given, out: seen.append((module, given[0], out)))
    model(torch.randn(2, 3, 12))
    before = 0.0
    for module, source, (_, weights, scores) in seen:
        q = module.W_Q(source).unflatten(-1, (4, 4)).transpose(1, 2)
        k = module.W_K(source).unflatten(-1, (4, 4)).transpose(1, 2)
        expected = q @ torch.nn.functional.normalize(k, dim=-1).mT + before
        torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(weights, expected.softmax(-1), rtol=1e-4, atol=1e-5)
        before = scores


def test_weights_are_formed_only_where_they_are_read():
    def build(**options):
        return TSTPlus(3, 5, 12, res_attention=False, attention="quest", **SIZES, **options).eval()

    x, stored, plain = torch.randn(2, 3, 12), build(store_attn=True), build()
    stored(x)
    torch.testing.assert_close(stored.backbone.encoder.layers[0].attn.sum(-1), torch.ones(2, 4, 12))
    attention, caught = plain.backbone.encoder.layers[0].self_attn, []
    with mock.patch.object(attention.mechanism, "forward_with_logits", side_effect=AssertionError):
        plain(x)
    attention.register_forward_hook(lambda module, given, out: caught.append(out[1]))
    plain(x)
    torch.testing.assert_close(caught[0].sum(-1), torch.ones(2, 4, 12))


def test_padding_in_fastai_tensors_is_padding_too():
    """Subclasses of Tensor make new objects wherever they are unwrapped; sinkhorn must still see self-attention."""
    model = TSTPlus(3, 2, 12, attention="quest+sinkhorn", res_attention=False).eval()
    layer = model.backbone.encoder.layers[0].self_attn
    x, padding = torch.randn(2, 12, 128), torch.zeros(2, 12, dtype=torch.bool)
    padding[0, 8:] = True
    got, want = (layer(tokens, tokens, tokens, key_padding_mask=padding)[0] for tokens in (TSTensor(x), x))
    torch.testing.assert_close(got.detach().as_subclass(torch.Tensor), want.detach())


LATER = torch.ones(5, 5).triu(1).bool()


@pytest.mark.parametrize(
    ("kind", "arguments", "options"),
    [
        *((home._MultiHeadAttention, (), {"mask": LATER}) for home in (TST, RNNAttention, RNNAttentionPlus)),
        *((home._MultiheadAttention, (None, LATER), {}) for home in (TabTransformer, TabFusionTransformer)),
        *((kind, (torch.ones(2, 4, 5, 5).tril(),), {}) for kind in (PatchTST._MultiheadAttention, MultiheadAttention)),
        (MultiheadAttention, (None, LATER[-2:], LATER), {}),
    ],
)
def test_standard_reads_and_ignores_the_arguments_that_the_host_does(kind, arguments, options):
    host, x = kind(16, 4, 4, 4).eval(), torch.randn(2, 5, 16)
    ours, _ = quest_core.inject(copy.deepcopy(host), "standard", adapter="tsai")
    for model in (host, ours):
        model.register_forward_hook(lambda *_: None)  # weights are formed
    torch.testing.assert_close(*(model(x, x, x, *arguments, **options)[0] for model in (ours, host)))

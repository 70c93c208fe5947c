"""What users touch: GPSConv's arguments, GraphGym's configs from yaml and command line, plain inject, the launcher."""

import logging
import re
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from models import SMALL, ConvModel, configure
from torch import nn
from torch_geometric.graphgym import register
from torch_geometric.graphgym.checkpoint import load_ckpt, save_ckpt
from torch_geometric.graphgym.config import cfg, load_cfg, set_cfg, set_out_dir
from torch_geometric.graphgym.model_builder import create_model
from torch_geometric.nn import GPSConv, GraphMultisetTransformer, SetTransformerAggregation, TransformerConv

import quest_core
from devtools.running import python
from devtools.wrong import WRONG as COMMON
from quest_core.errors import ConfigError, InjectionError, UnsupportedError
from quest_graphgps import GraphGPSAdapter
from quest_graphgps.attention import GraphAttention
from quest_graphgps.graphgym import read_request

# --- GPSConv --------------------------------------------------------------------------------------------------------


def test_gps_conv_takes_attention_in_attn_kwargs():
    conv = GPSConv(16, None, heads=4, attn_type="multihead", attn_kwargs={"attention": "quest", "dropout": 0.5})
    assert isinstance(conv.attn, GraphAttention)
    assert (str(conv.attn.config), conv.attn.dropout) == ("quest", 0.5)
    assert str(conv.attention_report).startswith(
        "attention=quest in 1 module (MultiheadAttention; 1,088 parameters as before); "
        "kernel=scaled_dot_product_attention, packing=auto"
    )
    positional = GPSConv(16, None, 4, 0.0, "relu", None, "batch_norm", None, "multihead", {"attention": "qnorm"})
    assert str(positional.attn.config) == "qnorm"
    assert repr(conv) == "GPSConv(16, conv=None, heads=4, attn_type=quest)"
    conv.reset_parameters()


def test_gps_conv_leaves_the_conv_that_it_is_given():
    conv = TransformerConv(16, 8, heads=2)
    before = conv.lin_query.weight.clone()
    GPSConv(16, conv, heads=4, attn_kwargs={"attention": "quest+sigmoid"})  # which no TransformerConv can have
    made = GPSConv(16, conv, heads=4, attn_kwargs={"attention": "quest(init=12)"})
    assert made.conv is conv
    assert type(conv) is TransformerConv
    assert torch.equal(conv.lin_query.weight, before)
    assert [r.path for r in made.attention_report.replacements] == ["attn"]


def test_gps_conv_without_attention_is_untouched():
    for options in ({"dropout": 0.1}, {"dropout": 0.1, "attention": None}):
        attn = GPSConv(16, None, heads=4, attn_kwargs=options).attn
        assert (type(attn), attn.dropout) == (nn.MultiheadAttention, 0.1)


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"attention": "qest"}, ConfigError, "did you mean 'quest'"),
        (
            {"attention": "quest", "kv_heads": 2},
            ConfigError,
            r"no option 'kv_heads'; write .*\{'name': 'quest', 'kv_heads': 2\}",
        ),
        (
            {"attention_from": "quest"},
            ConfigError,
            "attention_from='quest' is given without attention; .*attention='standard'",
        ),
        ({"attention": "kdgqa(kv_heads=2)"}, UnsupportedError, "follow the keys of the whole batch.*dgqa"),
        ({"attention": "aft-conv"}, UnsupportedError, "keys are narrower than the host.s, and it needs ordered tokens"),
        ({"attention": "aft-local"}, UnsupportedError, "needs ordered tokens"),
        ({"attention": "elliptical"}, InjectionError, "compares each layer with the one before it"),
    ],
)
def test_what_gps_conv_refuses(options, error, said):
    with pytest.raises(error, match=said):
        GPSConv(16, None, heads=4, attn_kwargs=options)


def test_performers_have_nothing_to_replace():
    with pytest.raises(UnsupportedError, match="attn_type='performer' has no q.k.*; write attn_type='multihead'"):
        GPSConv(16, None, heads=4, attn_type="performer", attn_kwargs={"attention": "quest"})


def test_kdgqa_needs_to_be_asked_for():
    model, _ = quest_core.inject(ConvModel(0.0), "kdgqa(kv_heads=2)", adapter=GraphGPSAdapter(independent=False))
    assert str(model.convs[0].attn.config) == "kdgqa(kv_heads=2)"


def test_plain_inject_finds_the_hosts_and_other_attention():
    model = nn.ModuleDict({"gps": ConvModel(0.0), "pool": nn.MultiheadAttention(16, 4)})
    _, report = quest_core.inject(model, "quest")
    assert [(r.path, r.adapter) for r in report.replacements] == [
        ("gps.convs.0.attn", "graphgps"),
        ("gps.convs.1.attn", "graphgps"),
        ("pool", "torch"),
    ]


@pytest.mark.parametrize("attention", ["kdgqa(kv_heads=2)", "aft-full(max_length=16)"])
def test_set_poolings_refuse_what_graphs_cannot_have(attention):
    pool = SetTransformerAggregation(16, heads=4)
    with pytest.raises(
        UnsupportedError, match="MultiheadAttention at .* of graphgps: .*(needs ordered|the whole batch)"
    ):
        quest_core.inject(pool, attention)
    _, report = quest_core.inject(pool, "quest")
    assert [r.adapter for r in report.replacements] == ["graphgps"] * 3


def test_elliptical_compares_no_poolings_of_different_things():
    """pma1 pools nodes and pma2 clusters, which are as many where a graph has as many nodes as there are clusters."""
    torch.manual_seed(0)
    pool, _ = quest_core.inject(GraphMultisetTransformer(8, k=4, num_encoder_blocks=2, heads=2), "elliptical")
    x, batch = torch.randn(11, 8), torch.arange(11) // 4
    torch.testing.assert_close(pool(x[:4], batch[:4]), pool(x, batch.clamp(max=1))[:1])
    with pytest.raises(InjectionError, match="no layer follows another"):
        quest_core.inject(GraphMultisetTransformer(8, k=4, heads=2), "elliptical")


# --- GraphGym -------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _clean_config():
    yield
    set_cfg(cfg)


def build(*opts):
    configure()
    cfg.merge_from_list(list(opts))
    torch.manual_seed(0)
    return create_model(dim_in=3, dim_out=2).model


@pytest.mark.parametrize(
    ("opts", "attention"),
    [
        (("gt.attention", "quest"), "quest"),
        (("gt.attention", "quest+sigmoid"), "quest+sigmoid"),
        (("gt.attention", "qknorm-hs+gqa(kv_heads=2)"), "qknorm-hs+gqa(kv_heads=2)"),
        (("gt.attention", "gqa(kv_heads=2, scale=1)"), "gqa(kv_heads=2, scale=1.0)"),
        (("gt.attention", '{"name": "sigmoid", "bias": null}'), "sigmoid(bias=null)"),
        (
            ("gnn.attention", '{"name": "quest+pgqa", "kv_heads": 2, "noise_in_eval": false}'),
            "quest+pgqa(kv_heads=2, noise_in_eval=false)",
        ),
        (("gt.attention", "elliptical", "gt.attn_dropout", "0.0"), "elliptical"),
        (("gt.attention", "aft-simple", "gt.attn_dropout", "0.0"), "aft-simple"),
        (("gnn.attention", "sinkhorn(iterations=5)"), "sinkhorn(iterations=5)"),
    ],
)
def test_configs_choose_attention(opts, attention, capsys):
    model = build(*opts)
    assert model.attention_report.attention == attention
    assert [r.path for r in model.attention_report.replacements] == ["layers.0.self_attn", "layers.1.self_attn"]
    assert capsys.readouterr().err == f"quest: {model.attention_report}\n"


ONE_TEXT = r"has no key {}; write .* as one text, gt.attention: quest\(kv_heads=2\)"
WRONG = [
    ("gt.attention {name:quest", ConfigError, "gt.attention .*starts like JSON but is not"),
    ("gt.attention quest(kv_heads=3)", ConfigError, "kv_heads"),
    ("gt.attention.name quest", ConfigError, ONE_TEXT.format("gt.attention.name")),
    ("gt.quest.kvheads 2", ConfigError, ONE_TEXT.format("gt.quest.kvheads")),
    ("gt.kv_heads 2", ConfigError, ONE_TEXT.format("gt.kv_heads")),
    ("gt.atention quest", ConfigError, "no key gt.atention; did you mean gt.attention"),
    ("attention quest", ConfigError, "no key attention; write gt.attention"),
    ("model.attention quest", ConfigError, "no key model.attention; write gt.attention"),
    ("gnn.attention_form quest", ConfigError, "did you mean gnn.attention_from"),
    ("gt.layer_type GINE+Quest", ConfigError, r"gt.layer_type: GINE\+Transformer and gt.attention: quest"),
    ("gt.attention quest gnn.attention qnorm", ConfigError, "two keys choose the attention"),
    ("gt.attention quest gt.layer_type GINE+Performer", UnsupportedError, "Performer has no attention"),
    ("gt.attention quest gt.layer_type GINE+BigBird", UnsupportedError, "BigBird has no attention"),
    ("gt.attention quest model.type SANTransformer", UnsupportedError, "write model.type: GPSModel"),
    ("gt.attention linear", UnsupportedError, "no weights for the attention dropout"),
    ("gt.attention aft-full", UnsupportedError, "dropout, which would have to be 0, and it needs ordered tokens"),
    ("gt.attention elliptical gt.layers 1", InjectionError, "no layer follows another"),
    ("gt.attention aft-full gt.attn_dropout 0.0", UnsupportedError, "needs ordered.*Possible here: .*aft-simple"),
    ("gt.attention {'name':'quest'}", ValueError, "gt.attention"),
]


@pytest.mark.parametrize(("opts", "error", "said"), WRONG)
def test_load_cfg_refuses_before_a_main_touches_anything(opts, error, said, tmp_path):
    with pytest.raises(error, match=said):
        load(tmp_path, SMALL, *opts.split())


WRITTEN = [one for one in COMMON if {*map(type, one[0].values())} <= {str, int, bool} and "yes" not in one[0].values()]
"""Without mappings and lists, and a text for a flag, which yacs refuses in its own words."""


@pytest.mark.parametrize(("options", "said"), WRITTEN, ids=str)
def test_load_cfg_refuses_what_is_wrong_in_every_host(options, said, tmp_path):
    with pytest.raises(ConfigError, match=said):
        load(tmp_path, SMALL, *(str(x) for key, value in options.items() for x in (f"gt.{key}", value)))


def load(folder, text, *opts):
    """Load a yaml and a command line as a main does."""
    set_cfg(cfg)
    (folder / "own.yaml").write_text(text)
    load_cfg(cfg, SimpleNamespace(cfg_file=str(folder / "own.yaml"), opts=list(opts)))


@pytest.mark.parametrize("text", ["{name: quest}", "{quest: {kv_heads: 2}}"])
def test_a_mapping_in_a_yaml_says_what_to_write(text, tmp_path):
    with pytest.raises(ConfigError, match="has no key gnn.(attention|quest); write .* as one text"):
        load(tmp_path, f"gnn: {text}" if "{quest" in text else f"gnn: {{attention: {text}}}")


def test_errors_name_the_keys_of_the_config(tmp_path, monkeypatch):
    monkeypatch.setitem(register.network_dict, "partial", Partial)
    with pytest.raises(InjectionError, match=r"'pool' \(PoolingAttention\).*say gnn.allow_partial: True"):
        load(tmp_path, SMALL, "model.type", "partial", "gnn.attention", "quest")
    load(tmp_path, SMALL, "gt.attention", "quest", "out_dir", str(tmp_path))
    save_ckpt(create_model(dim_in=3, dim_out=2))
    cfg.gt.attention = "qnorm"
    with pytest.raises(quest_core.CheckpointError, match="gt.attention: 'quest', or say gt.attention_from: 'quest'"):
        load_ckpt(create_model(dim_in=3, dim_out=2))
    with pytest.raises(InjectionError, match="no attention that an adapter knows"):
        build("gnn.attention", "quest", "model.type", "gnn")


@pytest.mark.parametrize("written", ["quest+gqa(kv_heads=2)", "quest(kv_heads=2)"])
@pytest.mark.parametrize("section", ["gt", "gnn"])
def test_yaml_takes_the_text(section, written, tmp_path):
    """The dumped config means the same when it is read again."""
    configure()
    path = tmp_path / "own.yaml"
    path.write_text(f"{section}:\n  attention: {written}\n")
    cfg.merge_from_file(str(path))
    assert str(create_model(dim_in=3, dim_out=2).model.attention_report.attention) == "quest+gqa(kv_heads=2)"
    path.write_text(cfg.dump())
    again = cfg.clone()
    again.merge_from_file(str(path))
    assert again == cfg
    assert read_request(again) == read_request(cfg)


class Own(nn.Module):
    """A registered network of GPSConv layers, which writes to the config as some encoders of GraphGPS do."""

    def __init__(self, dim_in, dim_out):
        super().__init__()
        cfg.gnn.dim_edge = dim_in
        self.convs = nn.ModuleList(GPSConv(dim_in, None, heads=3) for _ in range(2))


def test_load_cfg_refuses_what_a_network_of_ones_own_cannot_have(tmp_path, monkeypatch, capfd):
    """After load_cfg, PyTorch Geometric's main deletes the folder of an earlier run."""
    monkeypatch.setitem(register.network_dict, "own", Own)
    plain, state = "model: {type: own}", torch.get_rng_state()
    for attention, said in (("quest(kv_heads=2)", "not divide the 3 heads"), ("aft-full", "ordered tokens")):
        with pytest.raises(quest_core.QuestError, match=said):
            load(tmp_path, plain, "gnn.attention", attention)
    load(tmp_path, plain, "gnn.attention", "quest(init=2)")
    assert torch.equal(torch.get_rng_state(), state)
    assert "dim_edge" not in cfg.gnn
    assert not capfd.readouterr().err


@pytest.mark.parametrize("key", ["gnn.watch_attention", "gnn.qk_clip"])
def test_load_cfg_refuses_to_watch_a_network_without_attention(tmp_path, key):
    with pytest.raises(quest_core.InjectionError, match="attention"):
        load(tmp_path, "model: {type: gnn}", key, "5")


def test_gps_conv_takes_attention_from():
    stock = GPSConv(16, None, heads=4).state_dict()
    options = {"attention": {"name": "quest", "kv_heads": 2}, "attention_from": "standard"}
    conv = GPSConv(16, None, heads=4, attn_kwargs=options)
    assert conv.attn.kv_heads == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error", quest_core.AttentionMismatchWarning)
        conv.load_state_dict(stock)


class PoolingAttention(nn.Module):
    """Attention that no adapter knows."""


class Partial(nn.Module):
    """Attention that two adapters know, and one more."""

    def __init__(self, dim_in, dim_out):
        super().__init__()
        self.conv = GPSConv(dim_in, None, heads=1)
        self.mix = nn.MultiheadAttention(dim_in, 1)
        self.pool = PoolingAttention()


def test_a_partial_replacement_needs_allow_partial(monkeypatch):
    monkeypatch.setitem(register.network_dict, "partial", Partial)
    model = build("model.type", "partial", "gnn.attention", "quest", "gnn.allow_partial", "True")
    assert [r.path for r in model.attention_report.replacements] == ["conv.attn", "mix"]
    assert [*model.attention_report.left_alone] == ["pool"]


def test_the_hosts_log_has_the_report_and_the_warning(caplog):
    """GraphGym logs to the root logger, where pytest listens too."""
    stock = build().state_dict()
    caplog.set_level(logging.INFO)
    model = build("gt.attention", "quest")
    with pytest.warns(quest_core.AttentionMismatchWarning):
        model.load_state_dict(stock)
    report, warning = caplog.messages
    assert report == str(model.attention_report)
    assert "trained with standard attention and are loaded into attention 'quest'" in warning


# --- runs -----------------------------------------------------------------------------------------------------------


def test_a_run_is_named_after_its_attention(tmp_path):
    """GraphGym's main names its folder after the config, and GraphGPS's also after `name_tag`."""
    tags, folders, state = [], [], torch.get_rng_state()
    for opts in ("", "gt.attention elliptical", "gt.attention quest(kv_heads=2) name_tag mine"):
        load(tmp_path, SMALL, *opts.split())
        set_out_dir(str(tmp_path), "own.yaml")
        tags.append(cfg.name_tag)
        folders.append(Path(cfg.out_dir).name)
    assert tags == ["", "elliptical", "mine-quest+gqa-kv_heads=2"]
    assert folders == ["own", "own-elliptical", "own-quest+gqa-kv_heads=2"]
    assert torch.equal(torch.get_rng_state(), state)


OWN = """
import argparse
import torch
from pytorch_lightning import Trainer
from torch import nn
from torch_geometric.data import Data
from torch_geometric.graphgym import register
from torch_geometric.graphgym.config import cfg, dump_cfg, load_cfg, set_cfg, set_out_dir
from torch_geometric.graphgym.model_builder import create_model
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GPSConv, TransformerConv

@register.register_network("own")
class Own(nn.Module):
    def __init__(self, dim_in, dim_out):
        super().__init__()
        self.conv = GPSConv(dim_in, TransformerConv(dim_in, dim_in), heads=2, norm=None)
        self.head = nn.Linear(dim_in, 1)
    def forward(self, batch):
        return self.head(self.conv(batch.x, batch.edge_index, batch.batch)), batch.y

if __name__ == "__main__":
    set_cfg(cfg)
    load_cfg(cfg, argparse.Namespace(cfg_file="own.yaml", opts=["gnn.attention", "quest(scale=0.5)"]))
    set_out_dir(cfg.out_dir, "own.yaml")
    dump_cfg(cfg)
    torch.manual_seed(0)
    model = create_model(dim_in=8, dim_out=1)
    graphs = [Data(x=torch.randn(n, 8), edge_index=torch.zeros(2, 0).long(), y=torch.rand(n)) for n in range(3, 11)]
    trainer = Trainer(max_epochs=1, accelerator="cpu", devices=2, strategy="ddp", logger=False,
                      enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    trainer.fit(model, DataLoader(graphs, batch_size=2))
    weight = model.model.conv.attn.in_proj_weight.sum().item()
    print(f"rank {trainer.global_rank} of {trainer.world_size}: {model.model.attention_report.attention} {weight:.9f}")
"""


@pytest.mark.distributed
@pytest.mark.slow
def test_processes_that_lightning_starts_train_the_same_model(tmp_path):
    """With plain GraphGym, which has no key of GraphGPS, by a script that does not import the plugin.

    Lightning runs the script again for every further process.
    """
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "own.yaml").write_text("model: {type: own}\naccelerator: cpu\n")
    text = "".join(python("-W", "ignore", "-m", "quest_graphgps", "own.py", cwd=tmp_path))
    # Two processes write into one pipe, so a line may begin in the middle of another.
    ranks = dict(re.findall(r"(rank \d of 2): (\S+ -?\d+\.\d{9})", text))
    assert sorted(ranks) == ["rank 0 of 2", "rank 1 of 2"], text
    assert len(set(ranks.values())) == 1
    assert ranks["rank 0 of 2"].startswith("quest(scale=0.5) ")
    assert "in 2 modules" in text
    assert (tmp_path / "results" / "own-quest-scale=0.5" / "config.yaml").exists()

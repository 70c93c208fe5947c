"""GraphGPS itself, unmodified, from the checkout in QUEST_GRAPHGPS_ROOT.

Its configs run for one epoch on few graphs: PATTERN and CLUSTER from the generator, the others with made-up data in the
layout of their downloads.
"""

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from graphgps_data import write_all

from devtools.logits import check
from devtools.running import python
from quest_core.checkpoints import ENTRY

if "QUEST_GRAPHGPS_ROOT" not in os.environ:
    pytest.skip(
        "needs a checkout of rampasek/GraphGPS whose requirements are installed; name it in QUEST_GRAPHGPS_ROOT",
        allow_module_level=True,
    )
ROOT = Path(os.environ["QUEST_GRAPHGPS_ROOT"]).resolve()
pytestmark = pytest.mark.slow

QUICK = (
    *("wandb.use", "False", "accelerator", "cpu", "num_threads", "1", "train.batch_size", "8"),
    *("optim.num_warmup_epochs", "0", "optim.max_epoch", "1", "train.enable_ckpt", "True", "train.ckpt_period", "1"),
)
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "LOKY_MAX_CPU_COUNT": "1",  # one process is enough for 40 molecules
    "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1",  # GraphGPS's loaders of superpixels and molecules, since PyTorch 2.6
}
GRAPHORMER = "configs/Graphormer/zinc-Graphormer.yaml"
PATTERN, ZINC = "configs/GPS/pattern-GPS.yaml", "configs/GPS/zinc-GPS+RWSE.yaml"
SHALLOW = ("gt.layers", "2")


@pytest.fixture(scope="session")
def datasets(tmp_path_factory):
    """Return a folder with small data sets in the layout of the downloads."""
    folder = tmp_path_factory.mktemp("datasets")
    write_all(folder)
    return folder


@pytest.fixture
def gps(datasets, tmp_path):
    """gps(config, *options) runs main.py through the plugin's launcher; returns its output and statistics by split."""

    def run(config, *options, launch=("-m", "quest_graphgps"), name="run", status=0):
        out = tmp_path / name
        command = [sys.executable, *launch, "main.py", "--cfg", config, *QUICK, "dataset.dir", str(datasets)]
        done = subprocess.run(
            [*command, "out_dir", str(out), *options],
            cwd=ROOT,
            env={**os.environ, **ENVIRONMENT},
            capture_output=True,
            text=True,
            check=False,
        )
        said = done.stdout + done.stderr
        assert done.returncode == status, said[-3000:]
        found = {
            path.parent.name: [json.loads(line) for line in path.read_text().splitlines()]
            for path in out.glob("*/0/*/stats.json")
        }
        return said, found

    return run


def training(found):
    return [(line["loss"], line["accuracy"]) for line in found["train"]]


def test_standard_trains_like_stock_to_the_printed_digits(gps):
    _, stock = gps(PATTERN, "optim.max_epoch", "2", launch=(), name="stock")
    said, ours = gps(PATTERN, "optim.max_epoch", "2", "gt.attention", "standard", name="standard")
    assert "attention=standard in 6 modules (MultiheadAttention; 99,840 parameters as before)" in said
    assert training(ours) == training(stock)
    assert ours["train"][0]["params"] == stock["train"][0]["params"] == 337_201
    for split in ("val", "test"):
        assert ours[split][0]["loss"] == pytest.approx(stock[split][0]["loss"], rel=1e-5)


RECORD = """
import json, runpy, sys
from pathlib import Path
import quest_graphgps
from devtools.logits import recorded
sys.argv.pop(0)
with recorded() as calls:
    runpy.run_path("main.py", run_name="__main__")
Path({file!r}).write_text(json.dumps(calls))
"""


def test_the_log_has_what_attention_does_in_every_layer(gps, tmp_path, monkeypatch):
    file = tmp_path / "calls.json"
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    options = ("gnn.watch_attention", "1", "train.batch_size", "1000")  # one batch
    _, found = gps(PATTERN, *options, launch=("-c", RECORD.format(file=str(file))))
    check(found["train"][0], json.loads(file.read_text()), abs=1e-4)


CONFIGS = {
    "pattern-GPS": 6,
    "pattern-GPS-ESLapPE": 6,
    "cluster-GPS": 16,
    "cluster-GPS-ESLapPE": 16,
    "zinc-GPS+RWSE": 10,
    "zinc-GPS": 10,
    "zinc-GPS-LapPE+RWSE": 10,
    "zinc-GPS+SNDS": 10,
    "zinc-GPS+SNMLP": 10,
    "zinc-GPSwGraphormer": 10,
    "zinc-GPSwGraphormer+VN": 10,
    "cifar10-GPS": 3,
    "cifar10-GPS+RWSE": 3,
    "cifar10-GPS+SNDS": 3,
    "cifar10-GPS+SNMLP": 3,
    "cifar10-GPS-ESLapPE": 3,
    "mnist-GPS": 3,
    "mnist-GPS-ESLapPE": 3,
    "vocsuperpixels-GPS": 4,
    "cocosuperpixels-GPS": 4,
    "peptides-func-GPS": 4,
    "pcqm-contact-GPS": 4,
}
"""Configs of GraphGPS whose data can be generated or made up, and how many attention layers they have.

Those of ZINC that save the best epoch and evaluate it again have a test of their own.
"""


@pytest.mark.parametrize("name", CONFIGS)
def test_every_config_that_the_data_allows(gps, name):
    said, found = gps(f"configs/GPS/{name}.yaml", "gt.attention", "quest")
    assert f"attention=quest in {CONFIGS[name]} modules" in said
    assert sorted(found) == ["test", "train", "val"]
    assert all(math.isfinite(line[0]["loss"]) for line in found.values())


def test_the_best_epoch_is_saved_and_evaluated_with_the_attention_it_was_trained_with(gps, tmp_path):
    said, trained = gps("configs/GPS/zinc-GPS+RWSE-ckptbest.yaml", "gt.attention", "quest", name="trained")
    best = tmp_path / "trained" / "zinc-GPS+RWSE-ckptbest-quest"
    inference = "configs/GPS/zinc-GPS+RWSE-inference.yaml"
    said, again = gps(inference, "pretrained.dir", str(best), name="again")
    assert "attention=quest in 10 modules" in said
    for split in ("val", "test"):
        assert again[split][0]["mae"] == pytest.approx(trained[split][-1]["mae"], rel=1e-4)


@pytest.mark.parametrize(
    ("config", "options", "attention"),
    [
        (ZINC, ("gt.attention", "quest+gqa(kv_heads=2)"), "quest+gqa(kv_heads=2) in 2"),
        (ZINC, ("gt.attention", "elliptical-quest"), "elliptical-quest in 2"),
        ("configs/GPS/cluster-GPS.yaml", ("gt.attention", "qknorm-hs+sigmoid"), "qknorm-hs+sigmoid in 2"),
        (ZINC, ("gt.attention", "linear", "gt.attn_dropout", "0.0"), "linear in 2"),
        (GRAPHORMER, ("gt.attention", "quest", "graphormer.num_layers", "2"), "quest in 2"),
    ],
    ids=["options", "elliptical", "sigmoid", "linear", "Graphormer"],
)
def test_attention_from_the_command_line(gps, config, options, attention):
    said, found = gps(config, *SHALLOW, *options)
    assert f"attention={attention} modules" in said
    assert all(math.isfinite(line[0]["loss"]) for line in found.values())


def test_weights_that_a_mechanism_has_not_cannot_be_logged(gps):
    options = ("gt.attention", "linear", "gt.attn_dropout", "0.0", "train.mode", "log-attn-weights")
    printed, _ = gps(ZINC, *SHALLOW, *options, status=1)
    assert "the host reads attention weights and it has none" in printed


def test_attention_from_yaml_and_the_shipped_configs(gps, tmp_path):
    import quest_graphgps

    shipped = Path(quest_graphgps.__file__).parent / "configs"
    for name in ("pattern.yaml", "zinc.yaml", "cifar10.yaml"):
        said, _ = gps(str(shipped / name), *SHALLOW, name=name)
        assert "attention=quest in 2 modules" in said


def test_a_mapping_from_yaml_is_kept_as_text_and_survives_a_resumed_run(gps, tmp_path):
    own = tmp_path / "own.yaml"
    own.write_text((ROOT / ZINC).read_text().replace("gt:\n", "gt:\n  attention: quest+gqa(kv_heads=2)\n", 1))
    options = (*SHALLOW, "train.auto_resume", "True")
    said, _ = gps(str(own), *options)
    assert "attention=quest+gqa(kv_heads=2) in 2 modules" in said
    written = tmp_path / "run" / "own-quest+gqa-kv_heads=2" / "config.yaml"
    assert "attention: quest+gqa(kv_heads=2)" in written.read_text()
    _, found = gps(str(own), *options, "optim.max_epoch", "2")
    assert [line["epoch"] for line in found["train"]] == [0, 1]


def test_one_file_dropped_into_graphgps_is_enough(datasets, tmp_path):
    checkout = tmp_path / "GraphGPS"
    shutil.copytree(ROOT, checkout, ignore=shutil.ignore_patterns(".git", "datasets", "results", "*.zip"))
    (checkout / "graphgps" / "network" / "quest.py").write_text("import quest_graphgps\n")
    options = (*QUICK, *SHALLOW, "dataset.dir", str(datasets), "gt.attention", "quest")
    assert "attention=quest in 2 modules" in "".join(python("main.py", "--cfg", ZINC, *options, cwd=checkout))


def test_a_run_is_a_start_for_fine_tuning(gps, tmp_path):
    gps(ZINC, *SHALLOW, "gt.attention", "standard")
    start = (*SHALLOW, "pretrained.dir", str(tmp_path / "run" / "zinc-GPS+RWSE-standard"))
    said, _ = gps(ZINC, *start, name="pretrained attention")
    assert "attention=standard in 2 modules" in said
    said, found = gps(ZINC, *start, "gt.attention", "quest", "gnn.watch_attention", "1", name="tuned")
    assert "attention=quest in 2 modules" in said
    assert "attention/max_logit" in found["train"][0]
    log = (tmp_path / "tuned" / "zinc-GPS+RWSE-quest" / "0" / "logging.log").read_text()
    assert "attention=quest in 2 modules" in log
    assert "trained with standard attention and are loaded into attention 'quest'" in log
    own = ("gt.attention", "quest", "gt.attention_from", "standard")
    said, _ = gps(ZINC, *start, *own, name="meant")
    assert "trained with standard attention" not in said


def test_a_quest_run_cannot_be_evaluated_without_the_plugin(gps, tmp_path):
    gps(ZINC, *SHALLOW, "gt.attention", "quest", name="trained")
    run = str(tmp_path / "trained" / "zinc-GPS+RWSE-quest")
    for mode in ("inference-only", "custom"):
        options = (*SHALLOW, "pretrained.dir", run, "train.mode", mode)
        said, found = gps(ZINC, *options, launch=(), name=f"stock {mode}", status=1)
        assert f"self_attn.mechanism.{ENTRY}" in said
        assert "attention: quest" not in said
        assert not any(found.values())


@pytest.mark.parametrize(
    "options",
    [
        ("gt.attention", "qest"),
        ("gt.attention", "quest", "gt.layer_type", "GINE+BigBird"),
        ("gt.attention", "linear", "gt.attn_dropout", "0.5"),
        ("gt.attention", "quest(kv_heads=3)"),
    ],
)
def test_a_refused_config_leaves_the_previous_run_as_it_was(gps, options, tmp_path):
    names = ("zinc-GPS+RWSE" + tag for tag in ("", "-qest", "-quest", "-linear", "-quest+gqa-kv_heads=3"))
    previous = {tmp_path / "run" / name / "0" / "ckpt" / "0.ckpt" for name in names}
    for path in previous:
        path.parent.mkdir(parents=True)
        path.write_text("weights")
    said, _ = gps(ZINC, *SHALLOW, *options, status=1)
    assert "quest_core.errors." in said
    assert {path for path in (tmp_path / "run").rglob("*") if path.is_file()} == previous


def test_a_start_from_a_checkpoint_of_another_attention(tmp_path):
    python(str(Path(__file__).with_name("finetuning_matrix.py")), str(tmp_path), cwd=ROOT)


def test_attention_weights_are_logged(gps, tmp_path):
    gps(ZINC, *SHALLOW, "gt.attention", "quest", "train.mode", "log-attn-weights")
    (saved,) = (tmp_path / "run").glob("*/0/graph_attn_stats.pt")
    graphs = torch.load(saved, weights_only=False)
    for graph in graphs:
        for weights in graph["attn_weights"]:  # [H, N, N], padded to the largest graph of the batch
            n = graph["num_nodes"]
            assert weights.shape[0] == 4
            torch.testing.assert_close(weights[:, :n, :n].sum(-1), torch.ones(4, n))
            assert weights[:, :, n:].abs().sum() == 0


OUTPUTS = """
import sys, torch
file, sys.argv = sys.argv[1], ["main.py"]
{imports}
from torch_geometric.graphgym.config import cfg, set_cfg
from torch_geometric.graphgym.model_builder import create_model
from torch_geometric.data import Batch
from quest_suites.graphgps.data import add_eigenvectors, pattern_graphs
set_cfg(cfg)
cfg.merge_from_file({config!r})
cfg.accelerator = "cpu"; cfg.share.dim_in, cfg.share.dim_out = 3, 2
model = create_model()
for name, p in sorted(model.named_parameters()):
    torch.manual_seed(len(name)); p.data.uniform_(-0.1, 0.1)
batch = Batch.from_data_list([add_eigenvectors(d, 16) for d in pattern_graphs((3, 0, 0), 0)[0]])
out = model.eval()(batch)[0]
torch.save([out.detach(), {{name: p.shape for name, p in model.named_parameters()}}], file)
"""


def test_parameters_are_those_of_the_plugins_own_model(tmp_path):
    """Names, shapes and results: what trains in `quest_suites.graphgps.gps` is GraphGPS's model."""
    results, file = [], tmp_path / "outputs.pt"
    for imports in ("import graphgps, quest_graphgps", "import quest_suites.graphgps.gps"):
        script = OUTPUTS.format(imports=imports, config=PATTERN)
        python("-W", "ignore", "-c", script, str(file), cwd=ROOT)
        results.append(torch.load(file, weights_only=False))
    (theirs, shapes), (ours, own) = results
    assert own == shapes
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)

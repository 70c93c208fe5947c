"""tsai on two processes, by fastai's own way: `Learner.distrib_ctx` in a script that torchrun starts."""

import json

import pytest

from devtools.running import python

environment = "quest-tsai"

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

SCRIPT = """
import json, os, sys
import numpy as np, torch
import fastai.distributed
from tsai.basics import TSClassification, TSClassifier
import quest_tsai

torch.set_num_threads(1)

def broadcast(self, values, rank):  # fastai's moves them to a GPU first
    values = torch.LongTensor(values)
    torch.distributed.broadcast(values, rank)
    return values.tolist()

fastai.distributed.DistributedDL._broadcast = broadcast

labels = np.arange(48) % 3
x = np.sin(np.arange(20) * (labels[:, None, None] + 1) * 0.4)
x = (x + 0.1 * np.random.default_rng(0).standard_normal((48, 2, 20))).astype(np.float32)
model = {"d_model": 16, "n_heads": 4, "n_layers": 2, "d_ff": 32, "dropout": 0.1}
found = {}
for attention in (None, "standard", "quest", "quest+dgqa(kv_heads=2, window=1)"):
    torch.manual_seed(0)
    learn = TSClassifier(
        x, labels, splits=(list(range(32)), list(range(32, 48))), tfms=[None, TSClassification()], bs=[8, 8],
        arch="TSTPlus", arch_config={**model, **({"attention": attention} if attention else {})}, seed=0, device="cpu",
    )
    with learn.distrib_ctx(sync_bn=False, cpu=True), learn.no_bar(), learn.no_logging():
        learn.fit(2, 1e-3)
    found[str(attention)] = {
        "losses": [float(v) for v in learn.recorder.losses],
        "weights": [p.double().sum().item() for p in learn.model.parameters()],
        "sizes": [b.tolist() for name, b in learn.model.named_buffers() if name.endswith("grouping.sizes")],
        "norms": [b.tolist() for name, b in learn.model.named_buffers() if name.endswith("grouping.norms")],
        "world": torch.distributed.get_world_size(),
    }
with open(os.path.join(sys.argv[1], os.environ["RANK"] + ".json"), "w") as file:
    json.dump(found, file)
torch.distributed.destroy_process_group()
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """What each of the two processes found, by attention."""
    folder = tmp_path_factory.mktemp("tsai")
    script = folder / "train.py"
    script.write_text(SCRIPT)
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    python(*command, str(folder), cwd=folder)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def test_standard_trains_as_tsai_does(trained):
    for found in trained:
        assert found["standard"]["losses"] == pytest.approx(found["None"]["losses"], rel=1e-5)
        assert found["standard"]["weights"] == pytest.approx(found["None"]["weights"], rel=1e-4, abs=1e-5)
        assert found["quest"]["losses"] != pytest.approx(found["standard"]["losses"], rel=1e-5)


@pytest.mark.parametrize("attention", ["standard", "quest", "quest+dgqa(kv_heads=2, window=1)"])
def test_both_processes_hold_the_same_model(trained, attention):
    first, second = (found[attention] for found in trained)
    assert first["world"] == 2
    assert first["weights"] == second["weights"]
    assert first["sizes"] == second["sizes"]
    assert first["norms"] == second["norms"]
    assert len(first["sizes"]) == (2 if "dgqa" in attention else 0)

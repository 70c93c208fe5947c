"""The shipped yamls train in half precision, by fairseq's own trainer on a CPU."""

import re
import sys
from pathlib import Path

import pytest
import torch
from conftest import USER_DIR

from devtools.running import python

TOOLS = Path(sys.executable).parent
CONFIGS = sorted((Path(USER_DIR) / "configs").glob("*.yaml"))
SHORT = ["task.tokens_per_sample=8", "dataset.batch_size_valid=2", "optimization.max_update=3", "common.log_interval=1"]
SIZES = {"wikitext103-transformer-xl": ["model.n_layer=2", "dataset.batch_size=4"]}  # the batch of the validation too
# Gradients in one piece, as float16 has them by default, ask for the current GPU.
HALF = {"bf16": ["common.bf16=true"], "fp16": ["common.fp16=true", "common.fp16_no_flatten_grads=true"]}


@pytest.mark.slow
@pytest.mark.parametrize("precision", HALF)
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_shipped_yaml_trains_in_half_precision(path, precision, lm_data, tmp_path):
    command = [TOOLS / "quest", "run", TOOLS / "fairseq-hydra-train", "--config-dir", path.parent]
    command += ["--config-name", path.stem, f"task.data={lm_data}", "common.cpu=true", f"hydra.run.dir={tmp_path}"]
    command += [*SHORT, *SIZES.get(path.stem, ["model.decoder_layers=2"]), *HALF[precision]]
    said = "".join(python(*map(str, command), cwd=tmp_path))
    assert len(re.findall(r'"loss": "[\d.]+"', said)) >= 3
    kept = torch.load(tmp_path / "checkpoints" / "checkpoint_last.pt", weights_only=False)
    assert kept["optimizer_history"][-1]["optimizer_name"] == "FP16Optimizer"  # of both types
    trained = {name: value for name, value in kept["model"].items() if name.endswith(("weight", "bias"))}
    assert trained
    assert all(value.isfinite().all() for value in trained.values())

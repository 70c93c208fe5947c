"""fairseq-train on two processes: the losses of one process that accumulates the same batches; resumed runs."""

import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import quest_fairseq
from quest_suites.fairseq.tasks import preprocess

environment = "quest-fairseq"

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(500)]

USER_DIR = str(Path(quest_fairseq.__file__).parent)
TOOLS = Path(sys.executable).parent
RUN = "--task language_modeling --arch quest_transformer_lm --cpu --optimizer adam --lr 0.003 --dropout 0 --seed 3 "
RUN += "--tokens-per-sample 24 --batch-size 4 --required-batch-size-multiple 1 --num-workers 0 --max-update 6 "
RUN += "--log-format simple --log-interval 1 --decoder-layers 2 --decoder-embed-dim 16 --decoder-ffn-embed-dim 32 "
RUN += "--decoder-attention-heads 4 --ddp-backend legacy_ddp --clip-norm 1"
TWO = ["--distributed-backend", "gloo", "--distributed-world-size", "2"]


def run(*commands, folder=None):
    """Run processes side by side in `folder`; the output of the first, which is rank 0."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    pipes |= {"env": environment, "cwd": folder}
    started = [subprocess.Popen(list(map(str, command)), **pipes) for command in commands]
    try:
        outputs = [process.communicate(timeout=240)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    for process, output in zip(started, outputs, strict=True):
        assert process.returncode == 0, re.sub(r"Extension modules: .*", "", output)[-4000:]
    return outputs[0]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text") / "bin"
    draw = random.Random(0)
    sentences = [" ".join(f"w{draw.randrange(20)}" for _ in range(7)) for _ in range(102)]
    preprocess(folder, {"train": sentences[:90], "valid": sentences[90:]})
    return folder


@pytest.mark.slow
def test_two_processes_train_as_one(data, tmp_path):
    given = [data, "--user-dir", USER_DIR, "--attention", "qknorm-hs+gqa(kv_heads=2)", *RUN.split()]
    train = [TOOLS / "fairseq-train", *given]
    one = run([*train, "--update-freq", "2", "--save-dir", tmp_path / "one"])
    # fairseq itself starts as many processes as there are GPUs, and under torchrun takes the rank modulo that number:
    # on a CPU neither goes, and what remains is its way for clusters, each process with its rank on the command line.
    meet = ["--distributed-init-method", f"file://{tmp_path}/meeting", "--distributed-no-spawn", *TWO]
    two = run(*([*train, *meet, "--distributed-rank", rank, "--save-dir", tmp_path / "two"] for rank in (0, 1)))
    assert "training on 2 devices" in two
    losses = [re.findall(r"num_updates=\d+|loss=[\d.]+", log) for log in (one, two)]
    assert losses[1] == losses[0]
    assert len(losses[0]) >= 12
    states = [
        torch.load(tmp_path / name / "checkpoint_last.pt", weights_only=False)["model"] for name in ("one", "two")
    ]
    for name, value in states[0].items():
        if name.endswith("_float_tensor"):  # 0.12.2 keeps an uninitialized number to know the device by
            continue
        torch.testing.assert_close(states[1][name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_two_processes_resume_and_refuse_another_attention(data, tmp_path):
    """Rank 0 reads the checkpoint and hands it on; its attention must arrive with it."""

    def train(attention, updates):
        given = [data, "--user-dir", USER_DIR, *RUN.split(), "--save-dir", tmp_path, *TWO]
        given += ["--distributed-no-spawn", "--attention", attention, "--max-update", updates]
        given += ["--distributed-init-method", f"file://{tmp_path}/meeting-{attention}-{updates}"]
        return run(*([TOOLS / "fairseq-train", *given, "--distributed-rank", rank] for rank in (0, 1)))

    assert re.findall(r"num_updates=(\d)", train("quest", 2)) == ["1", "2"]
    assert re.findall(r"num_updates=(\d)", train("quest", 4)) == ["3", "4"]
    with pytest.raises(AssertionError, match="trained with attention 'quest', and the model has 'qnorm'"):
        train("qnorm", 6)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])  # fp16 of fairseq needs a GPU
def test_a_shipped_yaml_keeps_its_batch_and_schedule_on_two_processes(precision, data, tmp_path):
    """Started as the README says, with `quest run`; fairseq's log counts sequences over all processes."""

    def command(folder, *more):
        given = [f"task.data={data}", f"checkpoint.save_dir={tmp_path / folder}", "common.cpu=true"]
        given += [f"hydra.run.dir={tmp_path}"] + ([f"common.{precision}=true"] if precision != "fp32" else [])
        given += ["optimization.max_update=4", "lr_scheduler.warmup_updates=2", "common.log_interval=1", *more]
        given += ["task.tokens_per_sample=8", "common.seed=3", "model.decoder_layers=1"]
        train = [TOOLS / "quest", "run", TOOLS / "fairseq-hydra-train", "--config-dir", f"{USER_DIR}/configs"]
        return [*train, "--config-name", "pydocs", *given]

    one = run(command("one"), folder=tmp_path)
    cluster = ["distributed_training.distributed_world_size=2", "distributed_training.distributed_backend=gloo"]
    cluster += [f"distributed_training.distributed_init_method=file://{tmp_path}/meeting"]
    cluster += ["distributed_training.distributed_no_spawn=true", "distributed_training.ddp_backend=legacy_ddp"]
    ranks = [command("two", *cluster, f"distributed_training.distributed_rank={rank}") for rank in (0, 1)]
    two = run(*ranks, folder=tmp_path)
    for key, count in (("bsz", 4), ("lr", 4)):
        values = [re.findall(rf'"{key}": "([^"]+)"', output)[:count] for output in (one, two)]
        assert values[0] == values[1] != [], key

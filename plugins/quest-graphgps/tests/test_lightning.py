"""quest_core.tools.lightning: the log of PyTorch Lightning, which GraphGym trains with."""

import pytest
import torch
from models import trainer
from torch import nn

from devtools.logits import clipped, recorded

lightning = pytest.importorskip("pytorch_lightning")


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1)

    def training_step(self, batch, _):
        return self.body(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def test_the_log_holds_the_largest_logit_of_each_layer(tmp_path):
    from quest_core.tools.lightning import WatchAttention

    model, seen = Module(), []
    watch = WatchAttention(every=2, clip=1e-6)

    class Read(lightning.Callback):
        def on_train_batch_end(self, trainer, *_):
            seen.append(dict(trainer.logged_metrics))

    run = trainer(max_steps=4, callbacks=[watch, Read()], default_root_dir=tmp_path)
    with recorded() as calls, clipped() as factors:
        run.fit(model, torch.utils.data.DataLoader(torch.randn(8, 5, 8), 2))
    key = "attention/body.layers.0.self_attn/max_logit/max"
    assert [step for step, _ in watch.watch.history] == [1, 2, 4]
    assert seen[-1][key] == pytest.approx(calls[-1][0], rel=1e-5)
    assert [set(found) for found in factors] == [{"body.layers.0.self_attn"}] * 4
    assert type(model.body.layers[0].self_attn) is nn.MultiheadAttention

"""quest_core.tools.lightning: the log of PyTorch Lightning, which GraphGym trains with."""

import torch
from models import trainer
from pytorch_lightning import LightningModule
from pytorch_lightning.loggers import TensorBoardLogger
from torch import nn

from devtools.logits import check, clipped, recorded, scalars
from quest_core.tools.lightning import WatchAttention


class Module(LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1)

    def training_step(self, batch, _):
        return self.body(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def test_the_log_holds_the_largest_logit_of_each_layer(tmp_path):
    model = Module()
    watch = WatchAttention(every=2, clip=1e-6)
    log = {"logger": TensorBoardLogger(tmp_path), "log_every_n_steps": 1}
    run = trainer(max_steps=4, callbacks=[watch], default_root_dir=tmp_path, **log)
    with recorded() as calls, clipped() as factors:
        run.fit(model, torch.utils.data.DataLoader(torch.randn(8, 5, 8), 2))
    curves = scalars(tmp_path)
    for step in (1, 2, 4):
        check(curves[step - 1], [calls[step - 1]], rel=1e-4)
    assert [set(found) for found in factors] == [{"body.layers.0.self_attn"}] * 4
    assert type(model.body.layers[0].self_attn) is nn.MultiheadAttention

"""vision/strokes: an image holds a few strokes, and the class is the direction that most of them have.

Images are generated, so nothing is downloaded and nothing can be overfitted. Synthetic data; not comparable with
published results.
"""

import timm
import torch
import torch.nn.functional as F
from torch import Tensor

import quest_timm  # noqa: F401  # timm accepts attention= from here on
from quest_suites.contract import Cell, Progress, Result, about, train_steps

SIZE, DIRECTIONS, STROKES, BATCH, TEST_IMAGES, SMOKE_STEPS = 32, 4, 7, 64, 1024, 5
STEPS = ((0, 1), (1, 0), (1, 1), (1, -1))


def make_batch(images: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return images [B, 3, SIZE, SIZE] and the direction of most strokes [B]."""
    x = 0.3 * torch.randn(images, 3, SIZE, SIZE, generator=generator)
    wanted = torch.randint(DIRECTIONS, (images,), generator=generator)
    others = torch.randint(DIRECTIONS, (images, STROKES), generator=generator)
    most = torch.arange(STROKES) <= STROKES // 2
    directions = torch.where(most, wanted[:, None], others)  # [B, strokes]
    starts = torch.randint(6, SIZE - 12, (images, STROKES, 2), generator=generator)
    rows = torch.arange(images)[:, None, None]
    reach = torch.arange(6)
    move = torch.tensor(STEPS)[directions]  # [B, strokes, 2]
    points = starts[:, :, None] + reach[:, None] * move[:, :, None]  # [B, strokes, 6, 2]
    x[rows, :, points[..., 0], points[..., 1]] += 2.0
    return x, wanted


def run_strokes(cell: Cell, progress: Progress) -> Result:
    """Train and evaluate with one attention and one seed.

    Returns:
        The metric ``accuracy`` on new images, in %, and the series ``train_loss`` by step.
    """
    steps = min(cell.options["steps"], SMOKE_STEPS) if cell.smoke else cell.options["steps"]
    torch.manual_seed(cell.seed)
    model = timm.create_model(
        "vit_tiny_patch16_224", attention=cell.attention, img_size=SIZE, patch_size=4, embed_dim=64, depth=4,
        num_heads=4, num_classes=DIRECTIONS,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(cell.seed)  # its own: the same data for every attention
    optimizer = torch.optim.AdamW(model.parameters(), lr=cell.options["lr"])

    def loss(step: int) -> Tensor:
        x, wanted = make_batch(BATCH, generator)
        return F.cross_entropy(model(x), wanted)

    losses = train_steps(cell, progress, steps, model, optimizer, generator, loss)
    model.eval()
    with torch.no_grad():
        x, wanted = make_batch(TEST_IMAGES, generator)
        accuracy = 100 * (model(x).argmax(-1) == wanted).float().mean().item()
    return Result(
        metrics={"accuracy": accuracy},
        series={"train_loss": losses},
        details=about(model),
    )

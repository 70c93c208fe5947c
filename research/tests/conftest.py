"""Images in the layout of Fashion-MNIST."""

import gzip

import pytest
import torch


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """A folder with 600 training and 200 test images, and a text."""
    folder = tmp_path_factory.mktemp("fashion")
    for split, count in (("train", 600), ("t10k", 200)):
        draw = torch.Generator().manual_seed(count)
        labels = torch.randint(10, (count,), generator=draw, dtype=torch.uint8)
        pixels = torch.randint(60, (count, 28, 28), generator=draw, dtype=torch.uint8)
        pixels += (labels * 19)[:, None, None]  # brighter for each class, so that there is something to learn
        for name, raw in ((f"{split}-images-idx3-ubyte", pixels), (f"{split}-labels-idx1-ubyte", labels)):
            head = bytes([0, 0, 8, raw.dim()]) + b"".join(size.to_bytes(4, "big") for size in raw.shape)
            (folder / f"{name}.gz").write_bytes(gzip.compress(head + raw.numpy().tobytes()))
    (folder / "input.txt").write_text("To be, or not to be: that is the question.\n" * 100)
    return folder

"""What spconv's CPU build lacks for training. Imports nothing of this package, so tests load it without the plugin."""

from typing import Any

import torch


def train_on_cpu() -> None:
    """Let spconv 2.3.8 train without a CUDA device; with one, change nothing.

    Three things of its CPU build stand in the way. The backward pass asks for the current CUDA stream and then ignores
    it. Evaluation wants to add the bias inside a kernel that only CUDA has. With more than one thread its sums come out
    wrong, so PyTorch is left with one. All this lasts until the process ends.
    """
    if torch.cuda.is_available():
        return
    torch.set_num_threads(1)
    from spconv.pytorch import conv, cppcore, ops

    if hasattr(conv.SparseConvolution, "stock_forward"):
        return
    for user in (cppcore, ops):
        user.get_current_stream = lambda: 0
    conv.SparseConvolution.stock_forward = conv.SparseConvolution._conv_forward
    conv.SparseConvolution._conv_forward = _add_bias_after


def _add_bias_after(
    self: Any, training: bool, input: Any, weight: Any, bias: Any, *arguments: Any, **options: Any
) -> Any:
    if training or bias is None:
        return self.stock_forward(training, input, weight, bias, *arguments, **options)
    out = self.stock_forward(training, input, weight, None, *arguments, **options)
    return out.replace_feature(out.features + bias)

"""Lets spconv 2.3.8 train on a CPU, in environments made for tests and demonstrations.

Three things of its CPU build stand in the way: the backward pass asks for the current CUDA stream and then ignores it;
evaluation wants to add the bias inside a kernel that only CUDA has; and with more than one thread its sums come out
wrong. The .pth file next to this module imports it at start-up; nothing happens until spconv is imported, and nothing
at all where there is a CUDA device.
"""

import importlib.abc
import importlib.machinery
import sys

_MODULE = "spconv.pytorch"


class _Loader(importlib.abc.Loader):
    """spconv's own loader, and the changes after it."""

    def __init__(self, stock):
        self._stock = stock

    def create_module(self, spec):
        return self._stock.create_module(spec)

    def exec_module(self, module):
        self._stock.exec_module(module)
        import torch

        if torch.cuda.is_available():
            return
        torch.set_num_threads(1)
        from spconv.pytorch import conv, cppcore, ops

        for user in (cppcore, ops):
            user.get_current_stream = lambda: 0
        forward = conv.SparseConvolution._conv_forward

        def add_bias_after(self, training, input, weight, bias, *arguments, **options):
            if training or bias is None:
                return forward(self, training, input, weight, bias, *arguments, **options)
            out = forward(self, training, input, weight, None, *arguments, **options)
            return out.replace_feature(out.features + bias)

        conv.SparseConvolution._conv_forward = add_bias_after


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


sys.meta_path.insert(0, _Finder())

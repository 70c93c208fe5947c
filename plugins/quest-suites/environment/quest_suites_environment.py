"""Lets torchvision import with a CPU build of PyTorch, in environments made for tests and demonstrations.

timm and fastai import torchvision. The registry's torchvision is a CUDA build whose compiled operators do not load with
a CPU PyTorch, and its Python part then fails for want of two operator schemas, which nothing here calls. The .pth file
next to this module imports it at start-up; nothing happens until torchvision is imported.
"""

import importlib.abc
import importlib.util
import sys
from pathlib import Path

_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


class _Finder(importlib.abc.MetaPathFinder):
    """Declares the schemas just before torchvision is imported, then steps aside."""

    def find_spec(self, name, path=None, target=None):
        if name != "torchvision":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None:
            import torch

            try:
                for compiled in Path(spec.origin).parent.glob("_C*.so"):
                    torch.ops.load_library(compiled)
            except OSError:
                global _library  # declarations last as long as the object
                _library = torch.library.Library("torchvision", "DEF")
                for operator in ("nms", "qnms"):
                    _library.define(operator + _SCHEMA)
        return spec


sys.meta_path.insert(0, _Finder())

"""Lets mmseg and mmdet run on mmcv-lite and a recent PyTorch, in environments made for tests and demonstrations.

They import every op of mmcv at start, and mmcv-lite lacks the compiled module that they come from, `mmcv._ext`.
Segmenter and the other models of the tests call none of them. The .pth file in this folder imports it at start-up;
a real build of mmcv wins, because the finder comes last.
"""

import importlib.abc
import importlib.machinery
import os
import sys
import types

NAME = "mmcv._ext"
# mmengine 0.10 stores more than tensors in its checkpoints and loads them without saying so, which PyTorch >= 2.6
# refuses by default. Checkpoints of the tests are their own.
os.environ.setdefault("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")


class _Ops(types.ModuleType):
    """Every op exists and none can be called."""

    def __getattr__(self, op):
        if op.startswith("__"):
            raise AttributeError(op)

        def missing(*_, **__):
            raise RuntimeError(f"mmcv-lite has no compiled op '{op}'; install a full build of mmcv")

        return missing


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.ModuleSpec(NAME, self) if name == NAME else None

    def create_module(self, spec):
        return _Ops(NAME)

    def exec_module(self, module):
        pass


sys.meta_path.append(_Finder())

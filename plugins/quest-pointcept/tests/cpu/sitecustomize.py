"""Lets Pointcept's trainer, which moves everything to CUDA unasked, run on a CPU: there `.cuda()` changes nothing.

Its launcher of several processes insists on CUDA and NCCL, too: here it finds two devices, which are none, and gloo.
spconv's CPU build is mended as for users, without an import of the plugin, which some of these processes must not have.
Python imports this at start-up, where this folder is on PYTHONPATH. Only tests use it.
"""

import runpy
import sys
from pathlib import Path

import torch

if not torch.cuda.is_available():
    runpy.run_path(str(Path(__file__).parents[2] / "src" / "quest_pointcept" / "on_cpu.py"))["train_on_cpu"]()
    for kind in (torch.Tensor, torch.nn.Module, torch.UntypedStorage, torch.TypedStorage):
        kind.cuda = lambda self, *_, **__: self

    histc = torch.histc

    def histogram(x, *arguments, **options):  # only a GPU counts whole numbers
        return histc(x.float(), *arguments, **options).to(x.dtype)

    torch.histc = histogram

    def launches():
        return sys._getframe(2).f_globals.get("__name__") == "pointcept.engines.launch"

    torch.cuda.is_available = lambda: launches()  # only the launcher sees a device
    torch.cuda.device_count = lambda: 2 if launches() else 0
    torch.cuda.set_device = lambda *_: None
    if torch.distributed.is_available():
        start, parallel = torch.distributed.init_process_group, torch.nn.parallel.DistributedDataParallel.__init__

        def init_process_group(backend=None, *arguments, **options):
            start("gloo" if backend == "NCCL" else backend, *arguments, **options)

        def distributed(self, module, device_ids=None, output_device=None, *arguments, **options):
            parallel(self, module, None, None, *arguments, **options)

        torch.distributed.init_process_group = init_process_group
        torch.nn.parallel.DistributedDataParallel.__init__ = distributed

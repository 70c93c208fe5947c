"""A hook that writes measurements of attention to Pointcept's log, TensorBoard and W&B."""

import math

from quest_core import Watch
from quest_core.hosts.patching import Patches

NAME = "WatchAttention"


def install(patches: Patches) -> None:
    """Add the hook to Pointcept's registry, as soon as Pointcept is imported."""
    patches.when_imported("pointcept.engines.hooks.default", lambda: patches.once(NAME, register, forget))


def register() -> None:
    """Register the hook WatchAttention, a subclass of Pointcept's HookBase."""
    import wandb
    from pointcept.engines.hooks.builder import HOOKS
    from pointcept.engines.hooks.default import HookBase

    class WatchAttention(HookBase):  # type: ignore[misc]
        """Measures the attention of the trainer's model at every n-th step, whether it is quest or the model's own.

        >>> hooks = [dict(type="WatchAttention", every=100), dict(type="CheckpointLoader"), ...]

        The log gets a line with the largest logit and the mean entropy over all layers and heads; TensorBoard, and W&B
        with `enable_wandb`, get every layer too.

        Args:
            every, clip: as for :class:`quest_core.Watch`.
        """

        def __init__(self, every: int = 100, clip: float | None = None) -> None:
            self.every, self.clip = every, clip
            self.watch: Watch | None = None

        def before_epoch(self) -> None:  # and not before_train, in which a checkpoint may be loaded
            if self.watch is None:
                model, steps = self.trainer.model, self.trainer.epoch * len(self.trainer.train_loader)
                self.watch = Watch(getattr(model, "module", model), every=self.every, clip=self.clip, steps=steps)

        def after_step(self) -> None:
            assert self.watch is not None  # the trainer begins first
            trainer, values = self.trainer, self.watch.step()
            if not values:
                return
            step = trainer.epoch * len(trainer.train_loader) + trainer.comm_info["iter"] + 1  # of its own values
            totals = {name: values.get(f"attention/{name}", math.nan) for name in ("max_logit", "entropy")}
            trainer.logger.info(f"Step {step} " + " ".join(f"{name}: {totals[name]:.4g}" for name in totals))
            if trainer.writer is None:  # not the first process
                return
            for key, value in values.items():
                trainer.writer.add_scalar(key, value, step)
            if trainer.cfg.enable_wandb:
                wandb.log({"Iter": step, **values}, step=step)

        def after_train(self) -> None:
            if self.watch is not None:
                self.watch.close()

    HOOKS.register_module(module=WatchAttention)


def forget() -> None:
    """Remove the hook from Pointcept's registry."""
    from pointcept.engines.hooks.builder import HOOKS

    HOOKS.module_dict.pop(NAME)

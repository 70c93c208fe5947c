"""QK-clip: scale the queries of heads whose logits grow beyond a threshold."""

import torch
from torch import nn

from ..errors import ConfigError, UnsupportedError
from ..hosts.inject import REPORT
from ..mechanism import Mechanism
from .calibration import leaves_unchanged, refuse_shared, scale_queries
from .monitor import Monitor, borrow


class QKClip:
    """Bounds the attention logits of a training step, as Kimi K2's MuonClip does (arXiv:2507.20534, section 2.1).

    >>> clip = quest_core.QKClip(model, threshold=100)
    >>> for batch in batches:
    ...     train_step(model, batch)  # forward, backward, optimizer.step()
    ...     clip.step()

    Where the largest logit S of a head in the step's forward passes is above the threshold τ, the head's query
    projection is multiplied by τ / S, so that the same inputs reach τ at most; an additive mask, which S counts, is not
    scaled. (Kimi K2 gives √(τ/S) to the queries and √(τ/S) to the keys; the logits are the same.) A model without
    attention of quest_core gets the mechanism `standard` until `close`. Forward passes in evaluation do not count.

    The logits are formed once more in every step; `quest` bounds them by its queries without that.

    Args:
        model: a model whose attention an adapter knows.
        threshold: τ, positive.

    Raises:
        ConfigError: τ is not positive, or logits do not grow with the projected queries: the score normalizes or scales
            them, or a function such as softcap follows.
        InjectionError: no attention was found.
        UnsupportedError: it is not known which projection makes a layer's queries, or layers share parameters.
    """

    def __init__(self, model: nn.Module, threshold: float = 100) -> None:
        if not threshold > 0:
            raise ConfigError(f"threshold is {threshold}; expected a positive number")
        self.model, self.threshold = model, threshold
        self._give_back = borrow(model)
        try:
            found = {path.rpartition(".")[0]: x for path, x in model.named_modules() if isinstance(x, Mechanism)}
            for path, mechanism in found.items():
                self._refuse(path, mechanism)
            refuse_shared(model, list(found))
            self._monitor = Monitor(model, in_evaluation=False)
        except Exception:
            self._give_back()
            raise

    def _refuse(self, path: str, mechanism: Mechanism) -> None:
        """Raise if the queries of an attention cannot be scaled; nothing is changed."""
        later = [part.name for part in mechanism.config.components if part.axis == "score_mod" and not part.fused]
        if later or not leaves_unchanged(mechanism.config, "query"):
            why = f"'{later[0]}' changes logits" if later else "its score changes queries, or reads more than they hold"
            raise ConfigError(
                f"QK-clip finds its factor only where logits grow with the projected queries, and in attention "
                f"'{mechanism.config}' {why}; train without it"
            )
        self._scale(path, torch.ones(mechanism.dims.num_heads if mechanism.dims else 1, dtype=torch.float64))

    def step(self) -> dict[str, list[float]]:
        """Clip what the forward passes since the last call exceeded.

        Returns:
            {path: [the factor of each head]} of the layers that were clipped.

        Raises:
            UnsupportedError: the logits of a layer could not be observed.
        """
        layers = self._monitor.layers.items()
        capped = {path: "the host changes them before the softmax" for path, layer in layers if layer.capped}
        if unseen := self._monitor.unseen() | capped:
            path, why = next(iter(unseen.items()))
            raise UnsupportedError(f"QK-clip does not know the logits of '{path}': {why}")
        clipped = {}
        for path, seen in self._monitor.collect().items():
            factor = (self.threshold / torch.tensor(seen["max_logit"], dtype=torch.float64)).clamp(max=1)
            factor = torch.where(factor > 0, factor, 1)  # NaN: the head saw no pair; 0: no factor mends infinity
            if bool((factor < 1).any()):
                self._scale(path, factor)
                clipped[path] = factor.tolist()
        return clipped

    def _scale(self, path: str, factor: torch.Tensor) -> None:
        if isinstance(self.model.get_submodule(path), Mechanism):  # of a model that is one attention
            path = ""
        rows = getattr(self.model, REPORT).replacements if hasattr(self.model, REPORT) else ()
        try:
            owner = next((row.adapter for row in rows if row.path == path), None)
            scale_queries(self.model, path, factor, owner)
        except UnsupportedError as error:
            raise UnsupportedError(f"QK-clip cannot scale the queries of '{path}': {error}") from error

    def close(self) -> None:
        """Stop, and give a model back as it was but for the scaled projections."""
        self._monitor.remove()
        self._give_back()

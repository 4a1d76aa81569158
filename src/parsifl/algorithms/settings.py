"""Settings that every method with local SGD has."""

from __future__ import annotations

from dataclasses import dataclass

from parsifl.algorithm import ClientInfo
from parsifl.config import Count, Fraction, Momentum, NonNegative, Positive, Size
from parsifl.errors import ConfigError
from parsifl.work import Draw, Partial


@dataclass(frozen=True)
class LocalSGD:
    """Local SGD: how long, how fast, on which batches.

    Parameters
    ----------
    lr, lr_decay, milestones
        Learning rate in round t: lr * lr_decay^t, times 0.1 for each milestone that t has reached.
    batch, steps, epochs
        Rows a step and how many steps a round; `epochs` is used instead of `steps` if given, and
        a device profile with "epochs" or "steps" (one of them) overrides both.
    momentum, decay
        Heavy-ball momentum (fresh each round) and weight decay.
    partial
        What becomes of a last batch that is not full (see `Draw`).
    """

    lr: Positive = 0.02
    lr_decay: Fraction = 1.0
    milestones: tuple[int, ...] = ()
    batch: Count = 20
    steps: Size = 20
    epochs: NonNegative | None = None
    momentum: Momentum = 0.0
    decay: NonNegative = 0.0
    partial: Partial = "pad"

    def rate(self, round: int) -> float:
        """Return the learning rate of a round."""
        passed = sum(round >= milestone for milestone in self.milestones)
        return float(self.lr * self.lr_decay**round * 0.1**passed)

    def draw(self, info: ClientInfo) -> Draw:
        """Return the mini-batches that this device trains on in a round."""
        device = {name: info.profile.get(name) for name in ("epochs", "steps")}
        if None not in device.values():
            raise ConfigError(
                f"the profile of client {info.id} has both epochs and steps; give one of them"
            )
        if device["epochs"] is None and device["steps"] is None:
            device = {"epochs": self.epochs, "steps": self.steps}
        if device["epochs"] is not None:
            return Draw(self.batch, epochs=device["epochs"], partial=self.partial)
        return Draw(self.batch, steps=device["steps"], partial=self.partial)

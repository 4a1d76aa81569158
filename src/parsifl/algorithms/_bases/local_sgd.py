"""Settings of algorithms with local SGD."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from parsifl.core.algorithm import ClientInfo
from parsifl.core.batching import BatchSpec, DataRequest, Partial
from parsifl.core.config import Count, Fraction, Momentum, NonNegative, Positive, Size
from parsifl.core.errors import ConfigError
from parsifl.solvers.sgd import SgdConfig


@dataclass(frozen=True)
class LocalSgd:
    """Settings of local SGD.

    Parameters
    ----------
    lr
        Learning rate of the first round.
    lr_decay
        Factor on the learning rate per round: lr * lr_decay^t in round t.
    milestones
        Rounds at which the learning rate is multiplied by 0.1.
    batch_size
        Rows per step.
    local_steps
        SGD steps per round. "local_steps" or "epochs" in a device profile takes precedence, except
        in algorithms whose server counts on equal steps (FedMid, Distributed-IHT).
    epochs
        Passes over the client's rows per round, in place of `local_steps`.
    momentum
        Heavy-ball momentum, reset every round.
    weight_decay
        Weight decay of the local steps.
    last_batch
        What happens to an incomplete last batch: "pad" adds rows of weight 0, "wrap" fills it from
        the next epoch, "drop" omits it. With "redraw" every step draws its rows independently.
    """

    equal_steps: ClassVar[bool] = False
    """Whether all devices take the same number of steps, whatever their profiles are."""

    lr: Positive = 0.02
    lr_decay: Fraction = 1.0
    milestones: tuple[int, ...] = ()
    batch_size: Count = 20
    local_steps: Size = 20
    epochs: NonNegative | None = None
    momentum: Momentum = 0.0
    weight_decay: NonNegative = 0.0
    last_batch: Partial = "pad"

    @classmethod
    def check_given(cls, settings: Mapping[str, Any]) -> None:
        """Reject `epochs` together with `local_steps`."""
        # dataclasses.replace passes every field, so that no pair counts as explicit
        copied = settings.keys() >= {field.name for field in fields(cls)}
        if not copied and "local_steps" in settings and settings.get("epochs") is not None:
            raise ConfigError(
                "`local_steps` and `epochs` are mutually exclusive: got "
                f"local_steps={settings['local_steps']} and epochs={settings['epochs']}. Remove "
                "one of them."
            )

    def learning_rate(self, round: int) -> float:
        """Return the learning rate of a round."""
        passed = sum(round >= milestone for milestone in self.milestones)
        return float(self.lr * self.lr_decay**round * 0.1**passed)

    def sgd(self, round: int) -> SgdConfig:
        """Return learning rate, momentum and weight decay of a round."""
        return SgdConfig(self.learning_rate(round), self.momentum, self.weight_decay)

    def batches(self, client: ClientInfo, round: int) -> DataRequest:
        """Request the mini-batches of local SGD."""
        return DataRequest({"train": self.batch_spec(client)})

    def profile_fields(self) -> tuple[str, ...]:
        """Return the entries that set the number of steps of a device."""
        return () if self.equal_steps else ("epochs", "local_steps")

    def batch_spec(self, client: ClientInfo, *, epochs: float | None = None) -> BatchSpec:
        """Return the mini-batches of this device in a round; `epochs` overrides its settings."""
        if epochs is not None:
            return BatchSpec(self.batch_size, epochs=epochs, last_batch=self.last_batch)
        profile = {} if self.equal_steps else client.profile
        device = {name: profile.get(name) for name in ("epochs", "local_steps")}
        if None not in device.values():
            raise ConfigError(
                f"the profile of client {client.id} has both epochs and local_steps; give one"
            )
        if device["epochs"] is None and device["local_steps"] is None:
            device = {"epochs": self.epochs, "local_steps": self.local_steps}
        if device["epochs"] is not None:
            return BatchSpec(self.batch_size, epochs=device["epochs"], last_batch=self.last_batch)
        return BatchSpec(self.batch_size, steps=device["local_steps"], last_batch=self.last_batch)

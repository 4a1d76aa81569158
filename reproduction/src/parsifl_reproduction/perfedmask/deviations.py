"""Where the protocol of a scale is not the paper's."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from parsifl_reproduction.recipe import Context

Deviations = Callable[[Context], Sequence[str]]

_DATA = {
    "MLP": (
        "CIFAR-10 at 16 x 16 as 60 standardized principal components of the training rows, without "
        "augmentation; an MLP of six layers with layer norm (42,240 parameters to mask) replaces "
        "PreResNet18 and MobileNet"
    ),
    "CNN": (
        "CIFAR-10 at 16 x 16 without augmentation; a network of seven convolutions with batch norm "
        "(88,528 parameters to mask) replaces PreResNet18. Batch statistics normalise at test time "
        "too, because the federation has no buffers"
    ),
    "looks": (
        "six looks of Fashion-MNIST (plain, inverted, blurred, rotated, noisy, thresholded), each "
        "split among five devices of 600 rows, replace DomainNet; an MLP on 60 principal "
        "components replaces AlexNet; 20 rounds instead of 100"
    ),
}
_SIZE = {
    "MLP": (
        "c = 1: the first 20 of 100 devices and 20 rounds instead of 80; c = 0.1: the first 40, 4 "
        "per round, for the paper's 80 rounds (after 40, HeteroFL and Split-Mix FL had not trained)"
    ),
    "CNN": (
        "c = 1: the first 10 of 100 devices and 20 rounds; c = 0.1: the first 40, 4 per round, 40 "
        "rounds at rate 0.03, because FedAvg and HeteroFL do not train at 0.1"
    ),
}
_RATE = "the MLP starts at rate 0.03 instead of 0.1"
_WIDTH = "narrow networks have a quarter of the units instead of an eighth"
LOSS = (
    "the training loss is that of the aggregated model on the training rows of all devices; the "
    "authors' code averages the losses of the local batches"
)
NO_CIFAR_100 = "CIFAR-100 is not available here: CIFAR-10 stands for it"
FEDPROX = "FedProx has mu = 0.1, which the paper does not give"


def of(*networks: str, more: Sequence[str] = (), wide: bool = True) -> Deviations:
    """Return the deviations of a recipe that trains these networks at the scale "faithful"."""
    found = [_DATA[network] for network in networks]
    found += [_SIZE[network] for network in networks if network in _SIZE]
    if "MLP" in networks:
        found.append(_RATE)
    if wide:
        found.append(_WIDTH)

    def deviations(context: Context) -> Sequence[str]:
        return () if context.scale == "full" else (*found, *more)

    return deviations

"""What your own algorithm builds on: the contract, bases, settings and local SGD."""

from parsifl.algorithms._bases.averaging import Averaging, Mean, Weighted
from parsifl.algorithms._bases.local_sgd import LocalSgd
from parsifl.core.algorithm import (
    AdditiveAlgorithm,
    ClientInfo,
    ClientUpdate,
    ClientUpload,
    FederatedAlgorithm,
    GatherAlgorithm,
)
from parsifl.core.batching import BatchSpec, ClientRoundData, DataRequest
from parsifl.core.config import Count, Fraction, NonNegative, Positive, Size
from parsifl.core.keys import Key
from parsifl.core.problem import Model, Params, Problem
from parsifl.solvers.sgd import SgdConfig, sgd
from parsifl.solvers.update_rules import Aux, Rule

__all__ = [
    "AdditiveAlgorithm",
    "Aux",
    "Averaging",
    "BatchSpec",
    "ClientInfo",
    "ClientRoundData",
    "ClientUpdate",
    "ClientUpload",
    "Count",
    "DataRequest",
    "FederatedAlgorithm",
    "Fraction",
    "GatherAlgorithm",
    "Key",
    "LocalSgd",
    "Mean",
    "Model",
    "NonNegative",
    "Params",
    "Positive",
    "Problem",
    "Rule",
    "SgdConfig",
    "Size",
    "Weighted",
    "sgd",
]

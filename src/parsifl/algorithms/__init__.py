"""Federated algorithms, one per module.

Each class can be imported from here (`from parsifl.algorithms import Ditto`) and is registered
under its name in lower case (`parsifl.get("ditto")`). Modules are imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from parsifl.core import renamed

if TYPE_CHECKING:
    from parsifl.algorithms.apfl import APFL
    from parsifl.algorithms.composed import Composed
    from parsifl.algorithms.distributediht import DistributedIHT
    from parsifl.algorithms.ditto import Ditto
    from parsifl.algorithms.fedamp import FedAMP
    from parsifl.algorithms.fedavg import FedAvg
    from parsifl.algorithms.fedbabu import FedBABU
    from parsifl.algorithms.feddualavg import FedDualAvg
    from parsifl.algorithms.feddyn import FedDyn
    from parsifl.algorithms.fedgradmp import FedGradMP
    from parsifl.algorithms.fedht import FedHT
    from parsifl.algorithms.fediterht import FedIterHT
    from parsifl.algorithms.fedmac import FedMac
    from parsifl.algorithms.fedmid import FedMid
    from parsifl.algorithms.fednova import FedNova
    from parsifl.algorithms.fedper import FedPer
    from parsifl.algorithms.fedprox import FedProx
    from parsifl.algorithms.fedrep import FedRep
    from parsifl.algorithms.fedslr import FedSLR
    from parsifl.algorithms.fedspa import FedSpa
    from parsifl.algorithms.heterofl import HeteroFL
    from parsifl.algorithms.heurfedamp import HeurFedAMP
    from parsifl.algorithms.inexactfedgradmp import InexactFedGradMP
    from parsifl.algorithms.lgfedavg import LGFedAvg
    from parsifl.algorithms.local import Local
    from parsifl.algorithms.perfedavg import PerFedAvg
    from parsifl.algorithms.perfedmask import PerFedMask
    from parsifl.algorithms.pfedme import PFedMe
    from parsifl.algorithms.scaffold import Scaffold
    from parsifl.algorithms.splitmix import SplitMix

__all__ = [
    "APFL",
    "Composed",
    "DistributedIHT",
    "Ditto",
    "FedAMP",
    "FedAvg",
    "FedBABU",
    "FedDualAvg",
    "FedDyn",
    "FedGradMP",
    "FedHT",
    "FedIterHT",
    "FedMac",
    "FedMid",
    "FedNova",
    "FedPer",
    "FedProx",
    "FedRep",
    "FedSLR",
    "FedSpa",
    "HeteroFL",
    "HeurFedAMP",
    "InexactFedGradMP",
    "LGFedAvg",
    "Local",
    "PFedMe",
    "PerFedAvg",
    "PerFedMask",
    "Scaffold",
    "SplitMix",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise renamed.missing(__name__, name)
    return getattr(importlib.import_module(f"{__name__}.{name.lower()}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)

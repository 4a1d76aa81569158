"""Running a federation: the loop, client pools, executors, records and checkpoints.

The names below are public and imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from parsifl.engine.batch_sampler import BatchSampler as BatchSampler
    from parsifl.engine.callbacks import DistanceToTruth as DistanceToTruth
    from parsifl.engine.callbacks import EarlyStopping as EarlyStopping
    from parsifl.engine.evaluator import Evaluator as Evaluator
    from parsifl.engine.local_pool import LocalPool as LocalPool
    from parsifl.engine.pool import ClientFailure as ClientFailure
    from parsifl.engine.pool import ClientPool as ClientPool
    from parsifl.engine.pool import ClientProgram as ClientProgram
    from parsifl.engine.pool import ClientRequest as ClientRequest
    from parsifl.engine.pool import ClientResult as ClientResult
    from parsifl.engine.pool import ClientScores as ClientScores
    from parsifl.engine.pool import PartialTotal as PartialTotal
    from parsifl.engine.pool import PendingEvaluation as PendingEvaluation
    from parsifl.engine.record import RoundRecord as RoundRecord
    from parsifl.engine.run_dir import RunDir as RunDir
    from parsifl.engine.settings import RunSettings as RunSettings
    from parsifl.engine.training import RoundEnd as RoundEnd
    from parsifl.engine.training import StopTraining as StopTraining
    from parsifl.engine.training import Training as Training

_HOMES = {
    "BatchSampler": "batch_sampler",
    "ClientFailure": "pool",
    "ClientPool": "pool",
    "ClientProgram": "pool",
    "ClientRequest": "pool",
    "ClientResult": "pool",
    "ClientScores": "pool",
    "DistanceToTruth": "callbacks",
    "EarlyStopping": "callbacks",
    "Evaluator": "evaluator",
    "LocalPool": "local_pool",
    "PartialTotal": "pool",
    "PendingEvaluation": "pool",
    "RoundEnd": "training",
    "RoundRecord": "record",
    "RunDir": "run_dir",
    "RunSettings": "settings",
    "StopTraining": "training",
    "Training": "training",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'parsifl.engine' has no attribute '{name}'")
    return getattr(importlib.import_module(f"parsifl.engine.{_HOMES[name]}"), name)

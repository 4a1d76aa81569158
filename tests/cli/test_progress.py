from __future__ import annotations

import pytest

from parsifl.cli.progress import score
from parsifl.engine.record import RoundRecord


@pytest.mark.parametrize(("value", "text"), [(0.61803, "0.6180"), (8.618e119, "8.618e+119")])
def test_scores_are_short(value: float, text: str) -> None:
    record = RoundRecord.from_json(
        {
            "round": 1,
            "cohort": 2,
            "trained": 2,
            "global": {"test": {"mse": {"mean": value, "std": 0.0, "worst_decile": 0.0}}},
        }
    )
    assert score(record) == f"global mse {text}"

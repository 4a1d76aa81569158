from __future__ import annotations

import json

import numpy as np

from parsifl.data.clients import ClientData
from parsifl.data.describe import bars, summary


def test_bars_are_full_and_in_proportion() -> None:
    clients = [
        (np.zeros((3, 1)), np.array([0, 1, 2])),
        (np.zeros((4, 1)), np.array([2, 2, 2, 0])),
    ]
    drawn = bars(ClientData.of(clients, test=0.0), width=10)
    assert [len(bar.text()) for bar in drawn] == [10, 10]
    assert drawn[0].text() == "0000111222"
    assert dict(drawn[1].stretches) in ({0: 2, 2: 8}, {0: 3, 2: 7})
    assert drawn[1].train == 4


def test_more_clients_than_the_limit_are_left_out() -> None:
    clients = [(np.zeros((2, 1)), np.array([0, 1]))] * 5
    assert len(bars(ClientData.of(clients), limit=3)) == 3


def test_a_numeric_target_has_empty_bars_and_no_shares() -> None:
    data = ClientData.of([(np.zeros((4, 1)), np.arange(4.0))])
    assert bars(data)[0].text() == ""
    assert bars(data)[0].test == 1
    facts = summary(data)
    assert facts["shares"] is None
    assert json.loads(json.dumps(facts)) == facts


def test_the_summary_holds_every_clients_distribution() -> None:
    data = ClientData.of([(np.zeros((4, 1)), np.array([0, 0, 0, 1]))], test=0.0)
    facts = summary(data)
    assert facts["shares"] == [[0.75, 0.25]]
    assert facts["train"] == [4]
    assert facts["features"] == [1]

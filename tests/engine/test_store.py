from __future__ import annotations

import torch

from parsifl.engine.store import ClientStore


def test_states_are_copies_of_their_own_contiguous_memory() -> None:
    store = ClientStore()
    whole = torch.arange(6.0).reshape(2, 3)
    store.save(3, {"t": whole.t(), "first": whole[0]})
    whole += 1
    state = store.load(3, lambda: None)
    assert state["t"].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert state["t"].is_contiguous()
    assert state["first"].untyped_storage().nbytes() == 12
    assert len(store) == 1


def test_a_first_state_is_made_and_not_kept() -> None:
    store = ClientStore()
    assert store.load(1, lambda: "made") == "made"
    assert len(store) == 0
    store.restore({7: None, 2: None})
    assert [client for client, _ in store] == [2, 7]

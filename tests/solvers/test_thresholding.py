from __future__ import annotations

import torch

from parsifl.linear.sparsity.constraint import Sparsity
from parsifl.solvers.thresholding import HardThresholdRule, SoftThresholdRule


def test_the_hard_rule_works_client_by_client_and_in_place() -> None:
    w = torch.tensor([[3.0, -1.0, 2.0], [0.5, 4.0, -5.0]])
    HardThresholdRule(Sparsity(tau=1), always=(0,)).after_(w, (), 0.1)
    assert w.tolist() == [[3.0, 0.0, 2.0], [0.5, 0.0, -5.0]]


def test_the_hard_rule_can_spare_vectors() -> None:
    w = torch.tensor([[3.0, -1.0]])
    HardThresholdRule(Sparsity(tau=1, spare_vectors=True)).after_(w, (), 0.1)
    assert w.tolist() == [[3.0, -1.0]]


def test_the_soft_rule_leaves_kept_coefficients_alone() -> None:
    w = torch.tensor([[3.0, -0.5, 2.0]])
    SoftThresholdRule(strength=10.0, always=(2,)).after_(w, (), 0.1)
    assert w.tolist() == [[2.0, 0.0, 2.0]]

"""The tables and figures of the five papers, and the recipes that stand for each of them."""

from __future__ import annotations

from dataclasses import dataclass

from parsifl_reproduction import (
    fedgradmp_setup,
    fedht_setup,
    fedmac_setup,
    fedslr_setup,
    fedslr_trials,
    findings,
    perfedmask_setup,
)


@dataclass(frozen=True)
class Item:
    """One table or figure: its recipes, or why there is nothing to run."""

    name: str
    recipes: tuple[str, ...] = ()
    note: str = ""


@dataclass(frozen=True)
class Paper:
    """A paper: a short key for file names, the text that its recipes carry, what it shows.

    `note` comes before the tables on its page: how the small scale was chosen, say.
    """

    key: str
    title: str
    items: tuple[Item, ...]
    note: str = ""


_SETTINGS = "settings; the recipes use them"
_DRAWING = "an illustration; nothing to run"

PAPERS = (
    Paper(
        "fedmac",
        fedmac_setup.PAPER,
        (
            Item("Table 1", ("fedmac-table1", "fedmac-table1-tuned")),
            Item("Table 2", note=_SETTINGS),
            Item("Table 3", note=_SETTINGS),
            Item("Figure 1", note=_DRAWING),
            Item("Figure 2", ("fedmac-figure2",)),
            Item("Figure 3", ("fedmac-figure3",)),
            Item("Figure 4", ("fedmac-figure4",)),
            Item("Figure 5", ("fedmac-figure4",), "the cost of the runs of Figure 4"),
            Item("Figure 6", ("fedmac-figure6",)),
            Item("Theorem 3", ("fedmac-theorem3",)),
        ),
        findings.FEDMAC,
    ),
    Paper(
        "fedht",
        fedht_setup.PAPER,
        (
            Item("Table I", note="notation"),
            Item("Table II", ("fedht-table2",)),
            Item("Figure 1", ("fedht-figure1",)),
            Item("Figure 2", ("fedht-figure2",)),
            Item("Figure 3", ("fedht-simulation-i", "fedht-simulation-ii")),
            Item("Figure 4", ("fedht-simulation-i", "fedht-simulation-ii")),
            Item(
                "Figure 5",
                (
                    "fedht-figure5-e2006",
                    "fedht-figure5-rcv1",
                    "fedht-figure5-rcv1-generated",
                    "fedht-figure5-mnist",
                ),
            ),
        ),
        findings.FEDHT,
    ),
    Paper(
        "fedgradmp",
        fedgradmp_setup.PAPER,
        (
            Item("Table I", note="a comparison of guarantees"),
            Item("Figure 1", ("fedgradmp-figure1",)),
            Item("Figure 2", ("fedgradmp-figure2",)),
            Item("Figure 3", ("fedgradmp-figure3",)),
            Item("Figure 4", ("fedgradmp-figure4",)),
            Item("Figure 5", ("fedgradmp-figure5",)),
            Item("Figure 6", ("fedgradmp-figure6",)),
            Item("Figure 7", ("fedgradmp-figure7",)),
            Item("Figure 8", ("fedgradmp-figure8",)),
            Item("Figure 9", ("fedgradmp-figure1",), "the same experiment as Figure 1"),
            Item("Figure 10", ("fedgradmp-figure10",)),
            Item("Figure 11", ("fedgradmp-figure11",)),
        ),
        findings.FEDGRADMP,
    ),
    Paper(
        "perfedmask",
        perfedmask_setup.PAPER,
        (
            *(Item(f"Table {n}", (f"perfedmask-table{n}",)) for n in range(1, 10)),
            Item("Figure 1", note=_DRAWING),
            Item("Figure 2", ("perfedmask-table6",), "the devices that Table 6 speaks of"),
            *(Item(f"Figure {n}", (f"perfedmask-figure{n}",)) for n in range(3, 7)),
            Item("Beside them", ("perfedmask-all",), "a comparison of our own"),
        ),
        findings.PERFEDMASK,
    ),
    Paper(
        "fedslr",
        fedslr_setup.PAPER,
        (
            *(Item(f"Table {n}", (f"fedslr-table{n}",)) for n in range(1, 10)),
            Item("Figure 1", note=_DRAWING),
            *(Item(f"Figure {n}", (f"fedslr-figure{n}",)) for n in range(2, 6)),
            Item(
                "Tables 1, 5, 8, the paper's federation",
                ("fedslr-fashion-mnist",),
                "clients, cohort, steps, rates and eta_g of the paper, on Fashion-MNIST",
            ),
        ),
        findings.FEDSLR + "\n" + fedslr_trials.NOTE,
    ),
)

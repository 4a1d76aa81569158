"""The tables and figures of the five papers, and the recipes that stand for each of them."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files

from parsifl_reproduction.fedgradmp import setup as fedgradmp
from parsifl_reproduction.fedht import setup as fedht
from parsifl_reproduction.fedmac import setup as fedmac
from parsifl_reproduction.fedslr import setup as fedslr
from parsifl_reproduction.perfedmask import setup as perfedmask


@dataclass(frozen=True)
class Item:
    """One table or figure: its recipes, or why there is nothing to run."""

    name: str
    recipes: tuple[str, ...] = ()
    note: str = ""


@dataclass(frozen=True)
class Paper:
    """A paper: a short key for file names, the text that its recipes carry, what it shows."""

    key: str
    title: str
    items: tuple[Item, ...]

    @property
    def recipes(self) -> list[str]:
        """The names of its recipes, each once."""
        return list(dict.fromkeys(name for item in self.items for name in item.recipes))

    @property
    def findings(self) -> str:
        """The text that opens its page: `findings.md` of its package; "" if there is none."""
        place = files("parsifl_reproduction") / self.key / "findings.md"
        return place.read_text(encoding="utf-8") if place.is_file() else ""


_SETTINGS = "settings; the recipes use them"
_DRAWING = "an illustration; nothing to run"
_FED_HT_SIMULATIONS = (
    "fedht-simulation-i",
    "fedht-simulation-ii",
    "fedht-simulations-one-step",
)
PAPERS = (
    Paper(
        "fedmac",
        fedmac.PAPER,
        (
            Item(
                "Table 1",
                (
                    "fedmac-table1",
                    "fedmac-table1-fmnist",
                    "fedmac-table1-cifar",
                    "fedmac-table1-synthetic",
                    "fedmac-table1-tuned",
                    "fedmac-table1-tuned-fmnist",
                    "fedmac-table1-tuned-cifar",
                    "fedmac-table1-tuned-synthetic",
                ),
            ),
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
    ),
    Paper(
        "fedht",
        fedht.PAPER,
        (
            Item("Table I", note="notation"),
            Item("Table II", ("fedht-table2",)),
            Item("Figure 1", ("fedht-figure1",)),
            Item("Figure 2", ("fedht-figure2",)),
            Item("Figure 3", _FED_HT_SIMULATIONS),
            Item("Figure 4", _FED_HT_SIMULATIONS),
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
    ),
    Paper(
        "fedgradmp",
        fedgradmp.PAPER,
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
            Item("Figure 9", ("fedgradmp-figure9",)),
            Item("Figure 10", ("fedgradmp-figure10",)),
            Item("Figure 11", ("fedgradmp-figure11",)),
        ),
    ),
    Paper(
        "perfedmask",
        perfedmask.PAPER,
        (
            Item(
                "Table 1",
                ("perfedmask-table1", "perfedmask-table1-cnn", "perfedmask-table1-participation"),
            ),
            *(Item(f"Table {n}", (f"perfedmask-table{n}",)) for n in range(2, 10)),
            Item("Figure 1", note=_DRAWING),
            Item("Figure 2", ("perfedmask-table6",), "the devices that Table 6 speaks of"),
            *(Item(f"Figure {n}", (f"perfedmask-figure{n}",)) for n in range(3, 7)),
            Item("Appendix H", ("perfedmask-sca",)),
        ),
    ),
    Paper(
        "fedslr",
        fedslr.PAPER,
        (
            *(Item(f"Table {n}", (f"fedslr-table{n}",)) for n in range(1, 4)),
            Item("Table 4", ("fedslr-table4", "fedslr-table4-truth")),
            *(Item(f"Table {n}", (f"fedslr-table{n}",)) for n in range(5, 10)),
            Item("Figure 1", note=_DRAWING),
            *(Item(f"Figure {n}", (f"fedslr-figure{n}",)) for n in range(2, 6)),
            Item("Appendix A.2", ("fedslr-solvers",)),
            Item("Appendix A.3", ("fedslr-penalties",)),
            Item("Beyond the paper", ("fedslr-refit",)),
        ),
    ),
)

"""How Fed-HT divides its real data: Table II, and the clusters of Figures 1 and 2."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from parsifl.core.keys import Key
from parsifl.data.partitions import kmeans
from parsifl.data.registry import load
from parsifl_reproduction.comparison import compare
from parsifl_reproduction.fedht.real import CLIENTS
from parsifl_reproduction.fedht.setup import PAPER
from parsifl_reproduction.recipe import Claim, Context, Job, Recipe, Result, Values, spread

Array = npt.NDArray[Any]
TABLE: dict[str, tuple[str, int, float, float | None]] = {
    "E2006-tfidf": ("text-like-e2006", 3_308, 33.8, 9.1),
    "RCV1": ("rcv1-sample", 20_242, 202.4, 114.5),
    "MNIST": ("mnist", 60_000, 600.0, None),
}
"""What stands in for it, and the paper's rows, mean and standard deviation of rows a client."""
NOTES = {
    "text-like-e2006": "stand-in: generated text-like data with 150,360 columns",
    "rcv1-sample": "stand-in: 1,500 documents of RCV1; the paper's numbers scale with the rows",
    "mnist": "MNIST itself, by digits",
}
FIGURES = {"1": "text-like-e2006", "2": "rcv1-sample"}
COMPONENTS, NEIGHBOURS, CLUSTERS, SHOWN = 50, 10, 10, 1_000
COLOURS = ("#47a", "#e67", "#283", "#cb4", "#6ce", "#a37", "#bbb", "#222", "#e93", "#173")


def _load(dataset: str, context: Context, seed: int) -> Any:
    if dataset.startswith("text-like"):
        return load(dataset, seed=seed)
    made = load(dataset, context.data_dir)
    return made.merged() if dataset == "rcv1-sample" else made


def _sizes(name: str, context: Context, seed: int, _folder: Path | None) -> Values:
    made = _load(TABLE[name][0], context, seed)
    by = "labels" if name == "MNIST" else "features"
    sizes = kmeans(made, CLIENTS, Key(seed, purpose="fedht-table2"), by=by).sizes
    spread_ = float(np.std(sizes, ddof=1))
    return {"rows": len(made), "mean": float(np.mean(sizes)), "std": spread_}


def _plan_table(context: Context) -> list[Job]:
    return [
        Job(name, seed, partial(_sizes, name, context, seed))
        for name in TABLE
        for seed in range(context.seeds)
    ]


def _conclude_table(_context: Context, results: Sequence[Result]) -> list[Claim]:
    claims = []
    for name, (dataset, rows, mean, deviation) in TABLE.items():
        values = [r.values for r in results if r.label == name]
        means, stds = [v["mean"] for v in values], [v["std"] for v in values]
        expected = mean * values[0]["rows"] / rows
        near = all(0.8 * expected <= found <= 1.25 * expected for found in means)
        claims.append(
            Claim(
                f"{name}: a client has about a hundredth of the rows ({expected:.1f} here)",
                f"{mean:g} rows of {rows:,}, standard deviation {deviation or '-'} (Table II)",
                f"{spread(means, 1)} of {values[0]['rows']:,}, standard deviation "
                f"{spread(stds, 1)}",
                "held" if near else "did not hold",
                NOTES[dataset],
            )
        )
    return [*claims, *(_unbalanced(name, results) for name in TABLE if name != "MNIST")]


def _unbalanced(name: str, results: Sequence[Result]) -> Claim:
    """Compare the relative spread of the rows per client with that of MNIST."""
    spreads = [
        [100 * r.values["std"] / r.values["mean"] for r in results if r.label == each]
        for each in (name, "MNIST")
    ]
    return compare(
        f"{name}: clients have less equal numbers of rows than those of MNIST (standard deviation "
        "in percent of the mean)",
        "MNIST is balanced, the other two are unbalanced (Section V-B)",
        *spreads,
    )


def _embed(figure: str, context: Context, seed: int, folder: Path | None) -> Values:
    """Place documents in the plane by t-SNE, and ask whose neighbours are of their own cluster."""
    from sklearn.cluster import KMeans
    from sklearn.decomposition import TruncatedSVD
    from sklearn.manifold import TSNE
    from sklearn.neighbors import NearestNeighbors

    made = _load(FIGURES[figure], context, seed)
    draw = Key(seed, purpose="fedht-figure").numpy_generator()
    count = len(made) if context.scale == "full" else 200 if context.smoke else SHOWN
    rows = np.sort(draw.permutation(len(made))[:count])
    labels = KMeans(CLUSTERS, n_init=1, max_iter=50, random_state=seed).fit_predict(made.x)[rows]
    flat = TruncatedSVD(COMPONENTS, random_state=seed).fit_transform(made.x[rows])
    plane = TSNE(random_state=seed, init="pca", perplexity=30).fit_transform(flat)
    nearest = NearestNeighbors(n_neighbors=NEIGHBOURS + 1).fit(plane).kneighbors(plane)[1][:, 1:]
    if folder is not None:
        (folder / f"figure{figure}.svg").write_text(scatter(plane, labels))
    shares = np.bincount(labels, minlength=CLUSTERS) / len(labels)
    return {
        "agreement": float((labels[nearest] == labels[:, None]).mean()),
        "chance": float((shares**2).sum()),
    }


def scatter(plane: Array, labels: Array, side: int = 600) -> str:
    """Draw points in the colours of their clusters, as SVG.

    >>> scatter(np.array([[0.0, 0.0], [1.0, 2.0]]), np.array([0, 1])).count("<circle")
    2
    """
    low, high = plane.min(axis=0), plane.max(axis=0)
    places = 10 + (side - 20) * (plane - low) / np.where(high > low, high - low, 1.0)
    dots = [
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{COLOURS[label % len(COLOURS)]}"/>'
        for (x, y), label in zip(places, labels, strict=True)
    ]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {side} {side}">'
    return "\n".join([head, *dots, "</svg>"])


def _plan_figure(figure: str, context: Context) -> list[Job]:
    return [
        Job("t-SNE", seed, partial(_embed, figure, context, seed)) for seed in range(context.seeds)
    ]


def _conclude_figure(figure: str, _context: Context, results: Sequence[Result]) -> list[Claim]:
    agreement = [r.values["agreement"] for r in results]
    chance = [r.values["chance"] for r in results]
    clear = all(a > 2 * c for a, c in zip(agreement, chance, strict=True))
    return [
        Claim(
            f"the {CLUSTERS} clusters of K-means show in the plane of t-SNE: the {NEIGHBOURS} "
            "nearest points share a point's cluster at least twice as often as by chance",
            f"a scatter plot (Figure {figure})",
            f"{spread(agreement)} of neighbours, by chance {spread(chance)}",
            "held" if clear else "did not hold",
            NOTES[FIGURES[figure]],
        )
    ]


RECIPES = (
    Recipe(
        "fedht-table2",
        "Fed-HT's partition by clusters (Table II)",
        PAPER,
        _plan_table,
        _conclude_table,
    ),
    *(
        Recipe(
            f"fedht-figure{figure}",
            f"K-means clusters in the plane of t-SNE (Figure {figure})",
            PAPER,
            partial(_plan_figure, figure),
            partial(_conclude_figure, figure),
        )
        for figure in FIGURES
    ),
)

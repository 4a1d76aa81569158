"""Write docs/reference/disclosure.md from the types of the messages.

python docs/disclosure.py
"""

from __future__ import annotations

from pathlib import Path

from parsifl.core import registry
from parsifl.flower.disclosure import reply_paths, upload_paths
from parsifl.sites.deployment import messages

PAGE = Path(__file__).parent / "reference" / "disclosure.md"

INTRODUCTION = """# What leaves a client

This page lists every value that a client can send in a deployment. It is generated from the
types of the messages (`python docs/disclosure.py`). A test records the traffic of every algorithm
and fails if a value is not listed here. The server rejects any other field.

No message carries rows, labels of single rows or client state. A personal model leaves its client
only if it is the upload of the algorithm (FedAMP, HeurFedAMP). An upload is computed from rows and
can reveal information about them: Parsifl has no differential privacy and no secure aggregation.
The guards of a site with a table limit the leverage of rows and pairs in everything that ever left
it, and add noise to the sums of logistic, Poisson and Cox regressions. What they promise, and what
they do not cover, is in `docs/privacy-officer.md`. Such a site trains with FedBestSubset only,
unless its owner allows other algorithms (`guard-algorithms`), and refuses to evaluate.
`SECURITY.md` has the threat model.

`*` stands for any name or position.
"""

REPLIES = {
    "hello": "The first message of a client",
    "train": "After a round of training",
    "evaluate": "After an evaluation (none with `evaluate_every=0`, and from sites with tables)",
    "agree": "Sparse-regression template: the sums over a table, within the site's guards",
    "products": "Sparse-regression template: the last step, within the site's guards",
    "failure": "If a request fails: instead of the reply",
}

FIELDS = {
    "client": "the number of the client",
    "round": "the round of the request, repeated",
    "experiment": "the id of the run, repeated",
    "reinitialized": "whether the client had lost its state",
    "samples": "the number of training rows",
    "profile": "entries `profile-*` of the node's configuration, such as its speed",
    "data_schema": "shape and type of a row, number of classes, name of the dataset",
    "machine": "versions of Parsifl, Python and torch; clock; free bytes",
    "metrics": "means over the client's batches, such as its training loss",
    "part upload": "the upload of the algorithm, see below",
    "samples.*": "the number of test or validation rows",
    "scores": "means over the client's test or validation rows, per model and metric",
    "columns": "how many columns one message of the site may have, by its guards",
    "noise": "the width of the noise in later sums, by its guards",
    "units": "the unit that the site's schema declares for a column",
    "summary.rows": "the number of rows of the table",
    "summary.columns.*.count": "how many values a numeric column has",
    "summary.columns.*.sum": "the sum of a numeric column",
    "summary.columns.*.squares": "the sum of its squared deviations from the mean",
    "summary.columns.*.levels": "how often each level of a column occurs; rare ones merged",
    "summary.columns.*.missing": "how many of its values are missing",
    "part sums": "loss, gradient and curvature of the selected columns",
    "error": "the type of an exception",
    "detail": "a message about tensors, columns or rules; never a value of a row",
    "rule": "the guard that a request broke",
}

_PURSUIT = (
    "the coefficients after matching pursuit, `tau` of them non-zero; from round `refit_from` on, "
    "gradient, Hessian and its bound on the support"
)
UPLOADS = {
    "apfl": "the client's copy of the global parameters after training",
    "distributediht": "the parameters after one gradient step",
    "ditto": "the client's copy of the global parameters after training",
    "fedamp": "the personal parameters: **the server sees every personal model**",
    "fedavg": "the parameters after training",
    "fedbabu": "the parameters below the head after training",
    "fedbestsubset": "loss, gradient, diagonal and selected block of the Hessian, number of rows",
    "feddualavg": "the dual parameters, and the sum of the step sizes",
    "feddyn": "the change of the parameters",
    "fedgradmp": _PURSUIT,
    "fedht": "the parameters after training",
    "fediterht": "the parameters after training, thresholded",
    "fedmac": "the client's copy of the global parameters after training",
    "fedmid": "the parameters after training",
    "fednova": "the normalized change of the parameters, and the number of local steps",
    "fedper": "the parameters below the head after training",
    "fedprox": "the parameters after training",
    "fedrep": "the parameters below the head after training",
    "fedslr": 'the change of the parameters (other than `solver="dual"`: the parameters after '
    "training); the sparse component stays on the client",
    "fedspa": "the change of the parameters inside the client's mask, and the mask",
    "heterofl": "the parameters of the client's submodel after training",
    "heurfedamp": "the personal parameters: **the server sees every personal model**",
    "inexactfedgradmp": _PURSUIT,
    "lgfedavg": "the parameters of the head after training",
    "local": "nothing",
    "perfedavg": "the parameters after training",
    "perfedmask": "the parameters of the layers that the client trains",
    "pfedme": "the client's copy of the global parameters after training",
    "scaffold": "the changes of the parameters and of the control variate",
    "splitmix": "the parameters of the client's base networks after training",
}


def meaning(path: str) -> str:
    """Return the description of a field: that of its longest known prefix."""
    steps = path.split(".")
    for length in range(len(steps), 0, -1):
        text = FIELDS.get(".".join(steps[:length]))
        if text:
            return text
    raise KeyError(f"describe '{path}' in docs/disclosure.py")


def page() -> str:
    """Return the page."""
    lines = [INTRODUCTION]
    for kind, paths in reply_paths(messages.REPLIES).items():
        lines += [f"## {REPLIES[kind]}", "", "| field | what it is |", "|-|-|"]
        grouped: dict[str, list[str]] = {}
        for path in paths:
            grouped.setdefault(meaning(path), []).append(f"`{path}`")
        lines += [f"| {', '.join(named)} | {text} |" for text, named in grouped.items()]
        lines.append("")
    lines += ["## Uploads", "", "| algorithm | tensors | what they are |", "|-|-|-|"]
    for name, kind in registry.algorithms().items():
        tensors = ", ".join(f"`{path}`" for path in upload_paths(kind())) or "none"
        lines.append(f"| `{name}` | {tensors} | {UPLOADS[name]} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())

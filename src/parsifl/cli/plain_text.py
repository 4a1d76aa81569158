"""Convert docstrings to plain text for a terminal: LaTeX and reST become Unicode symbols."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator

# ruff: noqa: RUF001 - Greek letters are meant
_GREEK = {
    "alpha": "α", "beta": "β", "gamma": "γ", "delta": "δ", "eta": "η", "theta": "θ", "lambda": "λ",
    "mu": "μ", "nu": "ν", "xi": "ξ", "pi": "π", "rho": "ρ", "sigma": "σ", "tau": "τ", "phi": "φ",
    "psi": "ψ", "omega": "ω",
}  # fmt: skip
_SYMBOLS = {
    **_GREEK,
    **{name.capitalize(): sign.upper() for name, sign in _GREEK.items()},
    "approx": "≈", "arg": "arg ", "cdot": "·", "cup": "\N{UNION}", "in": " ∈ ", "langle": "⟨",
    "leftarrow": "←", "nabla": "∇", "ne": "≠", "ni": " ∋ ", "odot": "⊙", "rangle": "⟩", "sum": "Σ",
    "|": "‖", ",": " ", ";": " ",
    "Bigl": "", "Bigr": "", "left": "", "right": "", "textstyle": "",
}  # fmt: skip
_ACCENTS = {"bar": "\N{COMBINING MACRON}", "hat": "\N{COMBINING CIRCUMFLEX ACCENT}"}
_FONTS = ("mathcal", "mathrm", "operatorname", "text")
_SUPERSCRIPTS = str.maketrans("0123456789+", "⁰¹²³⁴⁵⁶⁷⁸⁹⁺")
_BREAK, _OPEN, _CLOSE = "\n", "\x01", "\x02"  # between formulas; around a fraction
_TOKEN = re.compile(r"\\(?:[A-Za-z]+|.)|\s+|.", re.DOTALL)


def formula(latex: str) -> list[str]:
    r"""Return a LaTeX formula as lines of plain text, one for each part between `\quad`s.

    >>> formula(r"w_i \leftarrow w_i - \eta g_i \quad (K \text{ times}), \qquad w = \frac{a}{2}")
    ['w_i ← w_i - η g_i (K times)', 'w = a/2']
    """
    text = _group(iter(_TOKEN.findall(latex)))
    # a remark such as "(K times)" belongs to the formula before it; an equation has a relation
    text = re.sub(rf"{_BREAK}\s*(?=\([^←=≈]*(?:{_BREAK}|$))", " ", text)
    lines = (_tidy(line).strip(" ,") for line in text.split(_BREAK))
    return [line for line in lines if line]


def _tidy(text: str) -> str:
    """Set spaces, and parentheses around a fraction that is a factor."""
    text = re.sub(rf"{_OPEN}([^{_CLOSE}]*){_CLOSE}(?=\s*[\w‖(⟨])", r"(\1) ", text)
    text = text.replace(_OPEN, "").replace(_CLOSE, "")
    text = re.sub(r"\s+(?=[,)⟩])|(?<=[(⟨Δ])\s+", "", text)
    return re.sub(r" {2,}", " ", text)


def _group(tokens: Iterator[str]) -> str:
    """Return the text of a group, up to its closing brace."""
    pieces = []
    for token in tokens:
        if token == "}":
            break
        pieces.append(_piece(token, tokens))
    return "".join(pieces)


def _piece(token: str, tokens: Iterator[str]) -> str:
    if token == "{":
        return _group(tokens)
    if token in ("_", "^"):
        return _script(token, _argument(tokens))
    if not token.startswith("\\"):
        return " " if token.isspace() else token
    name = token[1:]
    if name in ("quad", "qquad"):
        return _BREAK
    if name in ("frac", "tfrac"):
        return f"{_OPEN}{_enclosed(_argument(tokens))}/{_enclosed(_argument(tokens))}{_CLOSE}"
    if name == "overline":
        return f"mean({_argument(tokens).strip()})"
    if name in _ACCENTS:
        return _argument(tokens) + _ACCENTS[name]
    if name in _FONTS:
        return _argument(tokens)
    return _SYMBOLS.get(name, name)


def _argument(tokens: Iterator[str]) -> str:
    token = next(tokens, "")
    return _argument(tokens) if token.isspace() else _piece(token, tokens)


def _script(sign: str, text: str) -> str:
    text = text.strip()
    if sign == "^" and text and not text.strip("0123456789+"):
        return text.translate(_SUPERSCRIPTS)
    plain = re.fullmatch(r"[^\W_]{1,3}'*|\*", text)
    return f"{sign}{text}" if plain else f"{sign}({_tidy(text)})"


def _enclosed(text: str) -> str:
    text = _tidy(text.strip())
    single = re.fullmatch(r"[^\W\d_](?:_\w)?|\d+|[|‖][^|‖\s]*[|‖](?:_\w)?", text)
    return text if single else f"({text})"


def docstring(text: str, width: int = 80) -> str:
    """Return the description in a docstring, without its sections, for a terminal."""
    description = re.split(r"^\w[^\n]*\n-{3,}$", text, maxsplit=1, flags=re.MULTILINE)[0]
    paragraphs = []
    for paragraph in description.strip().split("\n\n"):
        if paragraph.startswith(".. math::"):
            lines = formula(" ".join(paragraph.removeprefix(".. math::").split()))
            paragraphs.append("\n".join(f"    {line}" for line in lines))
        else:
            paragraphs.append(textwrap.fill(prose(paragraph), width))
    return "\n\n".join(paragraphs)


def prose(text: str) -> str:
    r"""Return a paragraph without markup, with Greek letters for their names.

    >>> prose("with eta = `lr`, phi_0 and :math:`\\sum_i p_i`; `alpha` stays")
    'with η = lr, φ_0 and Σ_i p_i; alpha stays'
    """
    text = re.sub(r":math:`([^`]*)`", lambda found: " ".join(formula(found[1])), text)
    pieces = re.split(r"``?([^`]*)``?", " ".join(text.split()))
    # odd pieces were in backticks: names of settings, which are kept
    plain = [piece if at % 2 else _greek(piece) for at, piece in enumerate(pieces)]
    return "".join(plain).replace("\\|", "|")


def _greek(text: str) -> str:
    letters = {name: sign for name, sign in _SYMBOLS.items() if name.lower() in _GREEK}
    pattern = rf"(?<!\w)({'|'.join(letters)})(?![a-zA-Z])"
    return re.sub(pattern, lambda found: letters[found[1]], text)


def parameters(text: str) -> dict[str, str]:
    """Return the descriptions in the Parameters section of a docstring, by name."""
    section = re.search(r"^Parameters\n-+\n(.*?)(?=^\w[^\n]*\n-{3,}$|\Z)", text, re.M | re.S)
    texts: dict[str, str] = {}
    for names, body in re.findall(
        r"^(\w[\w, ]*)\n((?:    [^\n]*(?:\n|\Z))+)", section[1] if section else "", re.MULTILINE
    ):
        texts |= dict.fromkeys(re.split(r",\s*", names), prose(body))
    return texts

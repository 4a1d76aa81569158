"""Messages of a regression beside those of every deployment: agreeing on columns, and products."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, final

from annotated_types import Ge, Le, Lt, MaxLen
from pydantic import AfterValidator, Field

from parsifl.data.table_encoding import MOST_COLUMNS, Summary, Text, check_counts
from parsifl.flower import network_schema
from parsifl.flower.message import Kind
from parsifl.flower.network_schema import LONG, MOST_ROWS, Addressed, Agreed, ClientId, Message


@final
class AgreeRequest(Message):
    """Asks a site for the sums over its table."""


@final
class ProductsRequest(Addressed):
    """Asks a site for loss, gradient and curvature in some coefficients.

    Attributes
    ----------
    support
        The columns; the intercept, if the problem has one, is the last.
    coefficients
        The values of these coefficients at which sums are requested; all others are 0.
    """

    longest: ClassVar[int] = LONG
    agreement: Agreed
    support: Annotated[tuple[Annotated[int, Ge(0), Lt(1 << 31)], ...], MaxLen(MOST_COLUMNS)]
    coefficients: Annotated[tuple[float, ...], MaxLen(MOST_COLUMNS)]


@final
class AgreeReply(Message):
    """The sums over a site's table, declared units, and limits of later messages."""

    longest: ClassVar[int] = LONG
    client: ClientId
    columns: Annotated[int, Ge(0), Lt(MOST_ROWS)]
    noise: Annotated[float, Ge(0), Le(1)] = 0.0
    units: Annotated[dict[Text, Annotated[str, MaxLen(100)]], MaxLen(MOST_COLUMNS)] = Field(
        default_factory=dict
    )
    summary: Annotated[Summary, AfterValidator(check_counts)]


@final
class ProductsReply(Addressed):
    """Loss, gradient and curvature, as one part."""

    allowed: ClassVar[frozenset[str]] = frozenset({"sums"})


REQUESTS: Mapping[Kind, type[Message]] = {
    **network_schema.REQUESTS,
    "agree": AgreeRequest,
    "products": ProductsRequest,
}
REPLIES: Mapping[Kind, type[Message]] = {
    **network_schema.REPLIES,
    "agree": AgreeReply,
    "products": ProductsReply,
}

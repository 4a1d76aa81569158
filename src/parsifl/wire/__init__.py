"""Messages as bytes: the only package that counts bytes.

A message is a tree (see `parsifl.core.tree`); its leaves are strided tensors, `Sparse` or
`LowRank`. The encoder picks the shortest form for each leaf:

- a tensor is sent dense, or as an entropy-coded support with the non-zero values (a bool tensor
  as packed bits, or as a support alone); zeros are recognized by their bits, so -0.0 is kept;
- a `Sparse` is sent in the same two forms and decoded as a `Sparse`; zeros stored in it keep
  their position in the support;
- a `LowRank` is always sent as its two factors, each in its own shortest form, and decoded as
  a `LowRank`. Create it with `core.leaves.factored`, which returns the plain tensor if the
  factors would be longer, r (d1 + d2) >= d1 d2;
- a layer that is not sent is a missing key.

Integers and floats are lossless unless a lower precision is requested. A sender then continues with
`as_received(message, precision)`, the values that the receiver sees. `wire.frame` has the layout.

To add a form, write it in `wire.tensor_codec`. A new kind of leaf also needs a class in
`core.leaves`.
"""

from __future__ import annotations

from parsifl.core.config import Precision
from parsifl.wire.codec import as_received, decode, encode, measure, size
from parsifl.wire.message_size import MessageStats, check, dense_size, entropy_size
from parsifl.wire.quantization import PRECISIONS

__all__ = [
    "PRECISIONS",
    "MessageStats",
    "Precision",
    "as_received",
    "check",
    "decode",
    "dense_size",
    "encode",
    "entropy_size",
    "measure",
    "size",
]

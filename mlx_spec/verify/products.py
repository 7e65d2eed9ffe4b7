"""Matrices that a model multiplies by itself, without a module that would: tied heads, and a head that is a parameter.

Such a product is no call that a swapped class could route. Where the module that holds the matrix is asked for it
inside a verify call, it hands out something that stands for it instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial, reduce
from typing import Any, NamedTuple

import mlx.core as mx
from mlx import nn

from mlx_spec.model.anatomy import architecture
from mlx_spec.model.swap import lock, swap_class
from mlx_spec.ops.linear import HeldMatrix


class Product(NamedTuple):
    """Where a model keeps a matrix that it multiplies rows by, as `rows @ matrix.T`.

    Attributes:
        owner: path of the module that holds it, from the model; "" is the model itself.
        matrix: its name there.
    """

    owner: str
    matrix: str

    def holder(self, model: nn.Module) -> Any:
        """The module that holds the matrix."""
        return reduce(getattr, self.owner.split(".") if self.owner else [], model)


PRODUCTS: dict[str, Product] = {
    "llama4_text": Product("model.embed_tokens", "weight"),
    "minicpm": Product("model.embed_tokens", "weight"),
    "seed_oss": Product("model.embed_tokens", "weight"),
    "talkie": Product("", "lm_head"),
}
"""mlx-lm module name -> the product in its forward. Declared by hand; a model that makes none is none the worse."""


def product_of(model: nn.Module) -> Product | None:
    """The product that a model's architecture makes, if it makes one."""
    return PRODUCTS.get(architecture(model))


Multiply = Callable[[mx.array], mx.array]
"""[..., K] rows -> [..., N] rows times the transposed matrix."""

Asked = Callable[[Any, HeldMatrix], Multiply | None]
"""(module, the matrix it holds) -> what multiplies by it now; None leaves it to the model."""


class _Transposed(mx.array):
    """Stands for a transposed matrix on the right of a product.

    As a number without axes it fails in any other use: nothing is computed with it by mistake.
    """

    def __init__(self, multiply: Multiply) -> None:
        super().__init__(0)
        self._multiply = multiply

    def __rmatmul__(self, rows: mx.array) -> mx.array:
        return self._multiply(rows)


class _StandIn(mx.array):
    """Stands for a matrix of which rows are looked up, and that is transposed to be multiplied by."""

    def __init__(self, matrix: mx.array, multiply: Multiply) -> None:
        super().__init__(0)
        self._matrix = matrix
        self._multiply = multiply

    def __getitem__(self, index: Any) -> mx.array:
        return self._matrix[index]

    @property
    def T(self) -> mx.array:
        return _Transposed(self._multiply)


def holding_class(base: type[Any], kind: str, name: str, asked: Asked) -> type[Any]:
    """A swap of some kind for modules whose matrix of that name goes by what `asked` tells whenever it is read."""

    def held(self: Any) -> mx.array:
        # Read anew each time: weights may be replaced.
        matrix: mx.array = self[name]
        multiply = asked(self, HeldMatrix(name, matrix))
        return matrix if multiply is None else _StandIn(matrix, multiply)

    return swap_class(base, kind, **{name: property(held)})


_watch: ContextVar[object | None] = ContextVar("mlx_spec_watched_product", default=None)
"""The watch of the forward that is being built in this context. Other contexts multiply unwatched."""


@contextmanager
def watched(model: nn.Module, multiplied: Callable[[Any, HeldMatrix, mx.array], None]) -> Iterator[None]:
    """Report (module, the matrix it holds, rows) of the product that a model makes in this context.

    Nothing can be attached to any model meanwhile.
    """
    product = product_of(model)
    if product is None:
        yield
        return
    own_watch = object()

    def noting(module: Any, held: HeldMatrix, rows: mx.array) -> mx.array:
        multiplied(module, held, rows)
        return held.times(rows)

    def asked(module: Any, held: HeldMatrix) -> Multiply | None:
        return partial(noting, module, held) if _watch.get() is own_watch else None

    token = _watch.set(own_watch)
    with lock:
        holder = product.holder(model)
        base = type(holder)
        holder.__class__ = holding_class(base, "watch product", product.matrix, asked)
        try:
            yield
        finally:
            holder.__class__ = base
            _watch.reset(token)

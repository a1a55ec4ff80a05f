"""Libraries of processors that are not here: products below torch that add in another order by a rule of their own.

A product is split along what it sums over, at places that the rule chooses; the three parts are exact but for the last
rounding, whatever processor the test runs on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from zlib import crc32

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# Of the shape of the answer [..., rows, columns] and how many numbers are summed, for each row -> a number that decides.
Rule = Callable[[tuple[int, ...], int, torch.Tensor], torch.Tensor]


def by_whole_shape(shape: tuple[int, ...], summed: int, rows: torch.Tensor) -> torch.Tensor:
    return torch.full_like(rows, crc32(repr((shape, summed)).encode()))


def by_place(shape: tuple[int, ...], summed: int, rows: torch.Tensor) -> torch.Tensor:
    """Also other for a row in the middle than for the first."""
    return by_whole_shape(shape, summed, rows) + 5 * rows


def by_borders(shape: tuple[int, ...], summed: int, rows: torch.Tensor) -> torch.Tensor:
    """As on the Xeon of 2026: one row, few columns, and small weights have ways of their own."""
    classes = (shape[-2] == 1, shape[-1] < 48 and len(shape) == 3, summed < 48 and len(shape) == 3)
    return by_whole_shape((), sum(each << bit for bit, each in enumerate(classes)), rows)


RULES: dict[str, Rule] = {"whole shape": by_whole_shape, "place": by_place, "borders": by_borders}


class Products(TorchDispatchMode):
    def __init__(self, rule: Rule) -> None:
        super().__init__()
        self._rule = rule
        self.num_products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten, kwargs = torch.ops.aten, kwargs or {}
        match func:
            case aten.mm.default | aten.bmm.default:
                return self._product(*args)
            case torch.ops.mkldnn._linear_pointwise.default:
                return self._product(args[0], args[1].to_dense().t())
            case aten.baddbmm.default | aten.addmm.default:
                return args[0] * kwargs.get("beta", 1) + self._product(*args[1:3]) * kwargs.get("alpha", 1)
            case aten.baddbmm_.default | aten.addmm_.default:
                return args[0].mul_(kwargs.get("beta", 1)).add_(self._product(*args[1:3]) * kwargs.get("alpha", 1))
            case aten.linear.default:
                return self._product(args[0], args[1].t())
            case aten.matmul.default:
                raise AssertionError(f"{func} is none of the products that are replaced")
        return func(*args, **kwargs)

    def _product(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        self.num_products += 1
        summed, rows = a.shape[-1], torch.arange(a.shape[-2])
        decided = self._rule((*a.shape[:-1], b.shape[-1]), summed, rows)
        cut = (decided % max(1, summed - 1) + 1)[:, None]
        place = torch.arange(summed)
        chosen = (place < cut // 2, (place >= cut // 2) & (place < cut), place >= cut)
        parts = [((a.double() * part) @ b.double()).to(torch.promote_types(a.dtype, torch.float32)) for part in chosen]
        return (parts[0] + parts[1] + parts[2]).to(a.dtype)


@contextmanager
def strange_products(rule: str) -> Iterator[None]:
    """All products of the block are of such a library."""
    with Products(RULES[rule]) as products:
        yield
    assert products.num_products, "no product was computed"

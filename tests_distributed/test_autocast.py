"""Under the caller's own autocast every kernel gets the dtype that the plain model's kernel gets.

Judge: torch's autocast on the plain model. torch has no rule of autocast for an operator of ours, so each is here by name,
and a new one fails until it is: it computes, and gets what the plain kernel gets, or it only moves what it is given.
"""

import sys
from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from nemo_like import ContextParallel, parallelize
from nemo_like.torch_compat import TorchDispatchMode
from tests.checks import labelled
from tests.models.families import FAMILIES
from tests_distributed.spawn import on_ranks

COMPUTES = {"causal_attention": 3, "causal_attention_backward": 5}
"""Operators that compute, and how many of their tensors have the dtype of queries."""
MOVES = {
    *("gather_sequence", "scatter_sequence", "heads_for_sequence", "sequence_for_heads", "exchange_rows"),
    *("rows_of_rank", "rows_of_all"),
}
OTHERS = {
    *("route", "sum_parts"),  # whole numbers; sums of gradients and losses, which are float32 in the plain model, too
    *("mxfp8_linear", "mxfp8_linear_backward"),  # `MXFP8Linear` casts for them
    *("border", "made_apart"),  # in traces of plans alone
}
PRODUCTS = {"mm", "addmm", "bmm", "baddbmm"}


class Inputs(TorchDispatchMode):
    """Dtypes of what attention, products and operators of ours are given."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, set[torch.dtype]] = defaultdict(set)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        kind = "attention" if "scaled_dot_product" in name else "products" if name in PRODUCTS else name
        if kind != name or func.namespace == "nemo_like":
            tensors = [arg for arg in args if isinstance(arg, Tensor) and arg.is_floating_point()]
            count = 3 if "scaled_dot_product" in name else COMPUTES.get(name)
            self.seen["attention" if name in COMPUTES else kind] |= {t.dtype for t in tensors[:count]}
        return func(*args, **(kwargs or {}))


class Mixed(TorchFunctionMode):
    """Where this package joins tensors of several dtypes, so that the narrow ones become wide."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.cat, torch.stack) and len({t.dtype for t in args[0]}) > 1:
            self.seen.add(sys._getframe(1).f_globals["__name__"])
        return func(*args, **(kwargs or {}))


CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "ring": ("llama", "sdpa", {"cp": ContextParallel(2, "ring")}),
    "all_gather": ("llama", "sdpa", {"cp": 2}),
    "all_gather, packed": ("llama", "sdpa", {"cp": 2}),
    "all_gather, eager": ("llama", "eager", {"cp": 2}),
    "ulysses": ("llama", "sdpa", {"cp": ContextParallel(2, "ulysses")}),
    "tp": ("llama", "sdpa", {"tp": 2}),
    "chunked": ("llama", "sdpa", {"loss": "chunked"}),
    "ep": ("mixtral", "sdpa", {"ep": 2}),
    "tp, ep": ("mixtral", "sdpa", {"tp": 2, "ep": 2}),
}


@pytest.mark.parametrize("name", CASES)
@on_ranks(2)
def test_kernels_get_the_dtypes_of_the_plain_model(rank: int, world_size: int, name: str) -> None:
    family, implementation, options = CASES[name]
    batch = labelled(torch.randint(1, 48, (2, 32), generator=torch.Generator().manual_seed(0)))
    if "packed" in name:
        batch["position_ids"] = torch.arange(32).expand(2, -1).remainder(8)
    seen = []
    for parallel in (False, True):
        model = FAMILIES[family].build().train()
        model.set_attn_implementation(implementation)
        if parallel:
            model = parallelize(model, precision="fp32", **options)
        with Inputs() as inputs, Mixed() as mixed, torch.autocast("cpu", torch.bfloat16):
            loss = model(**batch).loss
        with inputs:
            loss.backward()
        seen.append(inputs.seen)
    plain, ours = seen
    assert {kind: ours.get(kind) for kind in plain} == plain
    low = {torch.bfloat16}
    assert plain["products"] == low and plain.get("attention", low) == low  # eager attention is products
    # Keys are float32 there, by rotary embeddings, and values are not: gathered as one, and told apart behind it.
    assert mixed.seen <= ({"nemo_like.distributed.context.methods"} if "eager" in name else set())


def test_every_operator_of_ours_has_its_place() -> None:
    import nemo_like.distributed.context.methods
    import nemo_like.distributed.expert.exchange
    import nemo_like.mxfp8
    import nemo_like.planning.trace.compiled_pieces  # noqa: F401

    names = {name.partition("::")[2].partition(".")[0] for name in torch._C._dispatch_get_all_op_names()}
    assert {name for name in names if hasattr(torch.ops.nemo_like, name)} == COMPUTES.keys() | MOVES | OTHERS

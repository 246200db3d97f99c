"""The head of one call: from a chunk of hidden states to its logits, and from their gradient back."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from nemo_like._util.tensors import autocast_dtype, autocast_is_on, on_accelerator
from nemo_like.losses.rows import SparseGradient, Vocabulary, pieces
from nemo_like.torch_compat import cast_as_weight, has_hooks_but_fsdp, is_fake, is_rocm, local_part

Head = Callable[[Tensor], Tensor]


class GradientSums:
    """The gradients of a head's parameters, added over chunks; in float32 unless told otherwise."""

    def __init__(self, params: Sequence[Tensor], in_float32: bool) -> None:
        self.sums: list[Tensor | None] = [None] * len(params)
        self._params = params
        self._in_float32 = in_float32

    def dtype(self, index: int) -> torch.dtype:
        """Return the dtype in which the gradient of parameter `index` is summed."""
        dtype = self._params[index].dtype
        return torch.float32 if self._in_float32 and dtype in (torch.bfloat16, torch.float16) else dtype

    def add(self, index: int, gradient: Tensor) -> None:
        """Add one chunk's gradient, which may be saved."""
        total = self.sums[index]
        if total is None:
            self.sums[index] = gradient.to(self.dtype(index))
        else:
            total.add_(gradient)

    def zeros(self, index: int) -> Tensor:
        """The sum so far, to be added to in place."""
        total = self.sums[index]
        if total is None:
            total = self.sums[index] = torch.zeros_like(self._params[index], dtype=self.dtype(index))
        return total


class AutogradHead:
    """Any module or callable: its gradients come from autograd, chunk by chunk."""

    def __init__(self, head: Head, params: Sequence[Tensor]) -> None:
        self._head, self._params = head, params
        self._graph: tuple[Tensor, Tensor] | None = None

    def logits(self, hidden: Tensor, with_gradient: bool) -> Tensor:
        """(tokens, D) to (tokens, V), plain or a DTensor. The result may be changed in place."""
        if not with_gradient:
            with torch.no_grad():
                return self._head(hidden)
        seen: set[int] = set()

        def note(tensor: Tensor) -> Tensor:
            if isinstance(tensor, DTensor) or _is_plain(tensor):
                seen.add(_storage(tensor))
            return tensor

        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(note, lambda saved: saved):
            # The hooks also keep outer ones (offloading) away from the tensors saved in a chunk.
            leaf = hidden.detach().requires_grad_()
            output = self._head(leaf)
        self._graph = (leaf, output)
        # An op that saved its own result needs it in backward: then the gradient is made next to it. Else nothing looks
        # at the logits again, and in-place changes need not be known to autograd (which refuses them for views).
        return output.detach().clone() if _storage(output) in seen else output.data

    def backward(
        self,
        gradient: Tensor,  # (tokens, V)
        sparse: SparseGradient | None,
        hidden: Tensor,  # (tokens, D)
        into: Tensor | None,  # (tokens, D)
        sums: GradientSums,
    ) -> None:
        """Write the gradient of the chunk's `hidden` to `into`; add those of the parameters to `sums`."""
        assert self._graph is not None and sparse is None
        (leaf, output), self._graph = self._graph, None
        if not output.requires_grad:
            return
        inputs = [leaf, *self._params] if into is not None else list(self._params)
        grads = list(torch.autograd.grad(output, inputs, gradient, allow_unused=True))
        if into is not None:
            first = grads.pop(0)
            if first is None:
                into.zero_()
            else:
                into.copy_(first)
        for index, grad in enumerate(grads):
            if grad is not None:
                sums.add(index, grad)


class LinearHead:
    """A plain `nn.Linear`: its gradients by hand, so that no second gradient of the weight exists next to the sum."""

    block_bytes = 0  # Bytes that a temporary of the weight's gradient may take.

    def __init__(self, head: nn.Linear, params: Sequence[Tensor]) -> None:
        dtype = autocast_dtype(head.weight)
        self._cast = autocast_is_on(head.weight.device.type) or cast_as_weight in head._forward_pre_hooks.values()
        self._weight = head.weight.detach().to(dtype)  # once per call, as autocast does
        self._bias = None if head.bias is None else head.bias.detach().to(dtype)
        # By identity: which of the head's own tensors train.
        index_of = {id(param): index for index, param in enumerate(params)}
        self._of_weight, self._of_bias = index_of.get(id(head.weight)), index_of.get(id(head.bias))

    def check(self, hidden: Tensor) -> tuple[int, int]:
        """Return the size of the vocabulary and the bytes of a token's logits.

        Raises:
            ValueError: `hidden`, (tokens, D), does not fit the weight.
        """
        width, dtype = self._weight.shape[1], self._weight.dtype
        if hidden.shape[1] != width:
            raise ValueError(f"hidden has {hidden.shape[1]} features per token, and the head takes {width}.")
        if hidden.dtype != dtype and not self._cast:
            raise ValueError(
                f"hidden is {hidden.dtype} and the head's weight {dtype}; cast one, or use torch.autocast."
            )
        return len(self._weight), len(self._weight) * self._weight.element_size()

    def logits(self, hidden: Tensor, with_gradient: bool) -> Tensor:
        with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
            hidden = hidden.detach().to(self._weight.dtype) if self._cast else hidden.detach()
            return nn.functional.linear(hidden, self._weight, self._bias)

    def backward(
        self,
        gradient: Tensor,  # (tokens, V)
        sparse: SparseGradient | None,
        hidden: Tensor,  # (tokens, D)
        into: Tensor | None,  # (tokens, D)
        sums: GradientSums,
    ) -> None:
        """As `AutogradHead.backward`; `sparse`: entries that `gradient` lacks."""
        with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
            if into is not None:
                if into.dtype == gradient.dtype:
                    torch.mm(gradient, self._weight, out=into)
                else:
                    into.copy_(gradient @ self._weight)
                for rows, column, value in _few(sparse, self._weight):
                    into[rows].add_(self._weight[column] * value[:, None])  # in float32
            if self._of_weight is not None:
                states = hidden.detach().to(gradient.dtype)
                if sums.sums[self._of_weight] is None and sums.dtype(self._of_weight) == gradient.dtype:
                    sums.sums[self._of_weight] = torch.mm(
                        gradient.t(), states
                    )  # no pass to write zeros, none to read them
                else:
                    self._add_outer(sums.zeros(self._of_weight), gradient, states)
                for rows, column, value in _few(sparse, self._weight):
                    _add_rows(sums.zeros(self._of_weight), column, states[rows] * value[:, None])
            if self._of_bias is not None:
                total = sums.zeros(self._of_bias)
                total.add_(gradient.sum(0, dtype=total.dtype))
                if sparse is not None:
                    _add_rows(total, sparse.column, sparse.value)

    def _add_outer(
        self,
        total: Tensor,  # (V, D)
        gradient: Tensor,  # (tokens, V)
        hidden: Tensor,  # (tokens, D)
    ) -> None:
        """``total += gradient.T @ hidden`` without rounding a chunk's product to less than `total` has."""
        if total.dtype == gradient.dtype:
            total.addmm_(gradient.t(), hidden)
            return
        # Devices whose products of 16 bits can be added to a float32 sum; on the CPU, tensors in the place of CUDA's. ROCm's
        # gemm takes no other type of output.
        sums = hidden.device.type in ("cuda", "meta", "cpu") and not is_rocm()
        if on_accelerator(hidden) and sums and total.dtype == torch.float32:
            # Tensor cores add in float32 anyway; this hands the sum over as it is.
            torch.addmm(total, gradient.t(), hidden, out_dtype=torch.float32, out=total)
            return
        rows = max(1, self.block_bytes // (total.element_size() * max(1, total.shape[1], len(gradient))))
        wide = hidden.to(total.dtype)
        for some in pieces(len(total), rows, total):
            total[some].addmm_(gradient[:, some].t().to(total.dtype), wide)


def _few(sparse: SparseGradient | None, weight: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """The entries in parts, (tokens of the chunk, columns, values), so small that a row of the weight, (V, D), for each
    takes 1/64 of the bytes of the chunk's logits; on an accelerator in one part, which takes D / V of them."""
    if sparse is not None:
        parts = 1 if on_accelerator(weight) else max(1, -(-64 * weight.shape[1] // max(1, len(weight))))
        for rows in pieces(len(sparse.value), max(1, len(sparse.value) // parts), sparse.value):
            yield rows, sparse.column[rows], sparse.value[rows]


def _add_rows(
    total: Tensor,  # (V, D); of a bias (V,)
    rows: Tensor,  # (tokens,)
    values: Tensor,  # (tokens, D); of a bias (tokens,)
) -> None:
    """Add `values` to those rows of `total`, several to one in the same order each time."""
    if total.device.type == "cpu":
        total.index_add_(0, rows, values.to(total.dtype))
    else:
        total.index_put_((rows,), values.to(total.dtype), accumulate=True)  # sorts; index_add_ adds as threads come


def unwrap_logits(logits: Tensor, tokens: int) -> tuple[Tensor, Vocabulary]:
    """This rank's part of `logits`, and which columns it is.

    Raises:
        ValueError: not (tokens, vocabulary), or cut in another way than by vocabulary.
    """
    if logits.ndim != 2 or logits.shape[0] != tokens:
        raise ValueError(
            f"The head made {tuple(logits.shape)} of hidden states of {tokens} tokens; it must make (tokens, vocabulary)."
        )
    size = logits.shape[1]
    if not isinstance(logits, DTensor):
        return logits, Vocabulary(size, size)
    placements, mesh = logits.placements, logits.device_mesh
    cut = [axis for axis, placement in enumerate(placements) if not placement.is_replicate()]
    if not cut:
        return logits.to_local(), Vocabulary(size, size)
    if len(cut) > 1 or placements[cut[0]] not in (Shard(1), Shard(-1)):
        raise ValueError(
            f"The head's logits are a DTensor placed {placements}; chunks know logits cut by vocabulary on one axis, "
            "Shard(-1), and whole ones. Give the head such an output layout."
        )
    width = -(-size // mesh.size(cut[0]))  # as `torch.chunk` cuts
    local = logits.to_local()
    start = min(mesh.get_local_rank(cut[0]) * width, size)
    return local, Vocabulary(size, local.shape[1], start, mesh.get_group(cut[0]))


def like_logits(gradient: Tensor, logits: Tensor) -> Tensor:
    """A gradient of this rank's part of `logits` as one of `logits`."""
    if not isinstance(logits, DTensor):
        return gradient
    return DTensor.from_local(
        gradient, logits.device_mesh, logits.placements, run_check=False, shape=logits.shape, stride=logits.stride()
    )


def is_plain_linear(head: nn.Linear) -> bool:
    """Return whether calling `head` is `F.linear` of its two tensors, and nothing else."""
    plain = all(_is_plain(tensor) for tensor in (head.weight, head.bias) if tensor is not None)
    called = type(head).forward is nn.Linear.forward and "forward" not in vars(head)
    return plain and called and not has_hooks_but_fsdp(head) and not nn.utils.parametrize.is_parametrized(head)


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, nn.Parameter) or is_fake(tensor)


def _storage(tensor: Tensor) -> int:
    return id(
        local_part(tensor).untyped_storage()
    )  # one object for as long as the storage lives; fake ones have no address

"""Faults that the tests must see: each is put into a copy of the package, and the named test files have to fail.

    python -m tests.tools.mutations [--only WORD] [--jobs 2]

runs these files once as they are, then prints a line for each fault. It ends with 1 where more than three faults live.
`docs/evidence/tests.md` has the last result.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MAY_LIVE = 3
"""Faults that may stay unseen."""
SECONDS = 400
"""Of the tests of one fault; a run that takes longer counts as failed, since a hang is seen."""


@dataclass(frozen=True)
class Fault:
    """One change of one place."""

    file: str
    """In `nemo_like/`."""
    right: str
    """Text that occurs there once."""
    wrong: str
    """What is put in its place."""
    seen_by: str
    """Test files and folders, with blanks between, that must fail."""

    @property
    def name(self) -> str:
        return f"{self.file}: {' '.join(self.right.split())[:60]} -> {' '.join(self.wrong.split())[:60]}"


FAULTS: tuple[Fault, ...] = (
    Fault(
        "_util/forwards.py",
        "inner.place < self.place:",
        "inner.place > self.place:",
        "tests/activation_checkpointing/test_others_hands.py",
    ),
    Fault(
        "_util/forwards.py",
        "        last.inner = forward\n",
        "        pass\n",
        "tests/activation_checkpointing/test_others_hands.py",
    ),
    Fault(
        "_util/forwards.py",
        'vars(self) | {"_module": self._module()}',
        'vars(self) | {"_module": None}',
        "tests/activation_checkpointing/test_others_hands.py",
    ),
    Fault(
        "_util/forwards.py",
        "        self._module = weakref.ref(module)\n",
        "        self._module = lambda: module\n",
        "tests/activation_checkpointing/test_others_hands.py",
    ),
    Fault(
        "activation_checkpointing/checkpointed.py",
        "            owner=self.module,\n",
        "",
        "tests/activation_checkpointing/test_state.py",
    ),
    Fault(
        "activation_checkpointing/checkpointed.py",
        "if inner.training and getattr(inner, name) is True:",
        "if not inner.training and getattr(inner, name) is True:",
        "tests/activation_checkpointing/test_others_hands.py",
    ),
    Fault(
        "activation_checkpointing/engine/module_state.py",
        "            fields.update(values)\n",
        "            pass\n",
        "tests/activation_checkpointing/test_state.py",
    ),
    Fault(
        "activation_checkpointing/engine/module_state.py",
        "            owns[number][name] = value\n",
        "            pass\n",
        "tests/activation_checkpointing/test_state.py",
    ),
    Fault(
        "activation_checkpointing/engine/module_state.py",
        "            if now != before:\n",
        "            if False:\n",
        "tests/activation_checkpointing/test_state.py",
    ),
    Fault(
        "activation_checkpointing/engine/region.py",
        "            self.check_again()\n",
        "            pass\n",
        "tests/activation_checkpointing/test_state.py",
    ),
    Fault(
        "activation_checkpointing/engine/hooks.py",
        "            self._calls[hook] = [None] * len(self._calls[hook])\n",
        "            pass\n",
        "tests/activation_checkpointing/test_hooks.py",
    ),
    Fault(
        "activation_checkpointing/engine/hooks.py",
        "hook(*args, **kwargs) if packs is None else region.pass_over(packs)",
        "hook(*args, **kwargs) if packs is None else None",
        "tests/activation_checkpointing/test_hooks.py",
    ),
    Fault(
        "activation_checkpointing/engine/hooks.py",
        "result is None and before == _state(args)",
        "result is None",
        "tests/activation_checkpointing/test_hooks.py",
    ),
    Fault(
        "activation_checkpointing/sequential.py",
        "            with only_fsdp_hooks(self.module):\n",
        "            with contextlib.nullcontext():\n",
        "tests/activation_checkpointing/test_sequential.py",
    ),
    Fault(
        "precision.py",
        "        with torch.autocast(**self.context):\n",
        "        with torch.no_grad():\n",
        "tests/test_front_door.py",
    ),
    Fault(
        "activation_checkpointing/engine/dispatch.py",
        "        if kind == MUTABLE and not self.paused:",
        "        if kind == MUTABLE and self.paused:",
        "tests/activation_checkpointing/test_engine.py",
    ),
    Fault(
        "activation_checkpointing/engine/dispatch.py",
        "if entry.rng_after is not None:\n            set_rng_state",
        "if entry.rng_after is None and False:\n            set_rng_state",
        "tests/activation_checkpointing/test_state.py tests/activation_checkpointing/test_engine.py",
    ),
    Fault(
        "activation_checkpointing/engine/dispatch.py",
        "position >= len(self.kept) or self.kept[position].op is not func",
        "position >= len(self.kept)",
        "tests/activation_checkpointing/test_regions.py tests/activation_checkpointing/test_engine.py",
    ),
    Fault(
        "activation_checkpointing/engine/dispatch.py",
        "entry.op in misfit.ops:\n                    entry.recompute()",
        "entry.op in misfit.ops and False:\n                    entry.recompute()",
        "tests/planning/test_other_batches.py",
    ),
    Fault(
        "activation_checkpointing/policy.py",
        "wrong = [op for op, row in self._rows.items() if self._counts.get(op, 0) != len(row)]",
        "wrong = [op for op, row in self._rows.items() if self._counts.get(op, 0) > len(row)]",
        "tests/activation_checkpointing/test_policy.py tests/activation_checkpointing/test_engine.py",
    ),
    Fault(
        "activation_checkpointing/policy.py",
        "if SKIP in row and op_facts.random and not op_facts.attention:",
        "if SKIP in row and op_facts.random and op_facts.collective and not op_facts.attention:",
        "tests/activation_checkpointing/test_policy.py",
    ),
    Fault(
        "activation_checkpointing/sequential.py",
        "Surroundings(self.module, member.preserve_rng_state)",
        "Surroundings(self.module, False)",
        "tests/activation_checkpointing/test_sequential.py",
    ),
    Fault(
        "activation_checkpointing/ops.py",
        '    "aten._local_scalar_dense.default": OpFacts(saved=True, pinned=True),\n',
        '    "aten._local_scalar_dense.default": OpFacts(),\n',
        "tests/activation_checkpointing/test_ops.py",
    ),
    Fault(
        "activation_checkpointing/ops.py",
        "mutating=bool(schema is not None and schema.is_mutable) or",
        "mutating=False or",
        "tests/activation_checkpointing/test_engine.py",
    ),
    Fault(
        "offload/mover.py",
        "                backend.copies.wait_event(backend.record(copy.stream))\n",
        "",
        "tests/offload/test_accelerators.py",
    ),
    Fault(
        "offload/mover.py",
        "                stream.wait_event(copy.ready)\n",
        "",
        "tests/offload/test_accelerators.py",
    ),
    Fault(
        "offload/mover.py",
        " or sum(n for *_, n in held) > self.config.max_inflight_bytes",
        "",
        "tests/offload/test_accelerators.py",
    ),
    Fault(
        "offload/mover.py",
        "        increment_version([buffer] * copy.version)\n",
        "",
        "tests/offload/test_saved_tensors.py",
    ),
    Fault(
        "offload/mover.py",
        "            if not copy.unread:\n                # From",
        "            if True:\n                # From",
        "tests/offload/test_saved_tensors.py",
    ),
    Fault(
        "offload/mover.py",
        "                    held.append((ready, buffer, 0))\n",
        "                    pass\n",
        "tests/gpusim/test_device.py",
    ),
    Fault(
        "losses/cross_entropy.py",
        '        num_items = rows.counts.sum() if reduction == "mean" else 1',
        '        num_items = rows.counts.numel() if reduction == "mean" else 1',
        "tests/losses/test_cross_entropy.py",
    ),
    Fault(
        "losses/cross_entropy.py",
        "nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]",
        "nn.functional.pad(labels, (1, 0), value=ignore_index)[..., :-1]",
        "tests/losses/test_cross_entropy.py",
    ),
    Fault(
        "losses/rows.py", "square_().neg_().add_(1)", "square_().neg_().add_(0.9)", "tests/losses/test_cross_entropy.py"
    ),
    Fault(
        "losses/rows.py",
        "        if self.factor is not None:\n            gradient.mul_(self.factor)",
        "        if self.factor is not None:\n            gradient.div_(self.factor)",
        "tests/losses/test_cross_entropy.py",
    ),
    Fault(
        "losses/heads.py",
        " or cast_as_weight in head._forward_pre_hooks.values()",
        "",
        "tests/losses/test_cross_entropy.py",
    ),
    Fault(
        "torch_compat.py",
        "hook is not cast_as_weight and not _of_fsdp(hook)",
        "not _of_fsdp(hook)",
        "tests/planning/test_outside_layers.py",
    ),
    Fault(
        "losses/cross_entropy.py",
        "with ctx.autocast(), ctx.random(),",
        "with ctx.autocast(),",
        "tests/losses/test_cross_entropy.py",
    ),
    Fault(
        "distributed/gradients.py",
        "scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)",
        "scale = max_norm / (total + 1e-6)",
        "tests_distributed/fsdp/test_clip.py",
    ),
    Fault(
        "distributed/gradients.py",
        "        dist.all_reduce(total, op, group=stages.group)\n",
        "        pass\n",
        "tests_distributed/fsdp/test_clip.py tests_distributed/pipeline/test_pipeline.py",
    ),
    Fault(
        "distributed/units.py",
        "        return [*self.layers, *ends, self.root]",
        "        return [self.root, *ends, *self.layers]",
        "tests_distributed/fsdp/test_units.py tests_distributed/fsdp/test_shard.py",
    ),
    Fault(
        "distributed/units.py",
        "return -(-param.shape[0] // ranks) * ranks",
        "return param.shape[0] // ranks * ranks",
        "tests_distributed/tensor/test_shard_dim.py",
    ),
    Fault(
        "distributed/tensor/shared_random.py",
        "                self._put({name: state for name, state in self._lent.items() if name not in drew})\n",
        "                pass\n",
        "tests_distributed/tensor/test_shared_random.py",
    ),
    Fault(
        "distributed/context/sequence_ops.py",
        "lambda grad, ranks, group: grad * ranks)",
        "lambda grad, ranks, group: grad)",
        "tests_distributed/context/test_cut_sequences.py",
    ),
    Fault(
        "distributed/context/sequence_ops.py",
        "return torch.cat([chunks[rank], chunks[2 * ranks - 1 - rank]], dim)",
        "return torch.cat([chunks[2 * rank], chunks[2 * rank + 1]], dim)",
        "tests_distributed/context/test_cut_sequences.py",
    ),
    Fault(
        "distributed/context/methods.py",
        "of_query[:, :, rows] += grads.pop(0)",
        "of_query[:, :, rows] = grads.pop(0)",
        "tests_distributed/context/test_cut_sequences.py",
    ),
    Fault(
        "distributed/context/methods.py",
        "after = torch.logaddexp(total, lse)",
        "after = torch.maximum(total, lse)",
        "tests_distributed/context/test_cut_sequences.py",
    ),
    Fault(
        "distributed/context/methods.py",
        "total = F.pad(total, (0, -total.shape[-1] % 32), value=torch.inf)",
        "total = F.pad(total, (0, total.shape[-1] % 32), value=torch.inf)",
        "tests/test_cut_attention.py",
    ),
    Fault(
        "distributed/context/methods.py",
        "front, back = slice(None, rank * half), slice((rank + 1) * half, None)",
        "front, back = slice(None, rank * half), slice(rank * half, None)",
        "tests_distributed/context/test_cut_sequences.py",
    ),
    Fault(
        "distributed/context/methods.py",
        "_add(sums[rank * half : (rank + 1) * half], of_own.pop(0))",
        "_add(sums[:half], of_own.pop(0))",
        "tests_distributed/context/test_cut_sequences.py",
    ),
    Fault(
        "distributed/context/methods.py",
        "columns = slice(None, half) if of < rank else everything",
        "columns = everything",
        "tests_distributed/context/test_cut_sequences.py",
    ),
    Fault(
        "distributed/context/whole_loss.py",
        "stop_unless(equals(known), OTHER_TARGETS)",
        "pass",
        "tests_distributed/context tests/test_cut_refusals.py",
    ),
    Fault(
        "distributed/context/parts.py",
        "return torch.where(mask, zero, hidden)",
        "return torch.where(mask, hidden, zero)",
        "tests_distributed/fsdp/test_packing.py",
    ),
    Fault(
        "distributed/shard.py",
        "set_unshard_in_backward(False)",
        "set_unshard_in_backward(True)",
        "tests_distributed/fsdp/test_shard.py",
    ),
    Fault(
        "distributed/shard.py",
        "chain[max(0, index - backward) : index][::-1]",
        "[]",
        "tests_distributed/fsdp/test_shard.py",
    ),
    Fault(
        "_util/tensor_summary.py",
        "values.sum(tuple(range(values.ndim - 1)), dtype=wide)",
        "values.sum(-1, dtype=wide)",
        "tests/test_tensor_summary.py",
    ),
    Fault(
        "planning/memory_model/microbatch.py",
        "self.buffers.reduce(EMBEDDING, self.sharding.embedding, of_embedding, self.rule)",
        "self.storages.drop_all(of_embedding)",
        "tests/planning/test_memory_model.py tests_distributed/planning",
    ),
    Fault(
        "distributed/expert/exchange.py",
        "return exchange_rows(grad, ctx.received, ctx.sent, ctx.group), None, None, None",
        "return exchange_rows(grad, ctx.sent, ctx.received, ctx.group), None, None, None",
        "tests_distributed/expert/test_expert_parallel.py",
    ),
    Fault(
        "distributed/expert/exchange.py",
        "torch.argsort(numbers.reshape(-1), stable=True)",
        "torch.argsort(numbers.reshape(-1), stable=True, descending=True)",
        "tests_distributed/expert/test_expert_parallel.py",
    ),
    Fault(
        "distributed/expert/split_experts.py",
        'axis_size(self.dense, "dp_shard") * axis_size(self.dense, "cp")\n',
        'axis_size(self.dense, "dp_shard")\n',
        "tests_distributed/expert/test_expert_training.py",
    ),
    Fault(
        "distributed/pipeline/cut.py",
        "    size = (rows + missing) // count",
        "    size = max(1, (rows + missing) // count - 1)",
        "tests/test_parts.py tests_distributed/pipeline/test_pipeline.py",
    ),
    Fault(
        "distributed/pipeline/cut.py",
        "torch.full_like(added, fill[name]) if name in fill else added",
        "added",
        "tests_distributed/pipeline/test_pipeline.py tests_distributed/pipeline/test_pipeline_loss.py",
    ),
    Fault(
        "distributed/pipeline/loss_mean.py",
        "uneven = compared or ",
        "uneven = False and ",
        "tests_distributed/pipeline/test_pipeline_loss.py",
    ),
    Fault(
        "distributed/tensor/apply.py",
        "redistribute(placements=[Shard(1)]).to_local()\n\n\ndef _whole_of",
        "redistribute(placements=[Shard(1)]).to_local() * 1.001\n\n\ndef _whole_of",
        "tests_distributed/tensor/test_tensor_parallel.py",
    ),
    Fault(
        "planning/selection/solver.py",
        "saving = [(b + op.bytes, c, keep | bit) for b, c, keep in choices]",
        "saving = [(b, c, keep | bit) for b, c, keep in choices]",
        "tests/planning/test_solver.py",
    ),
    Fault(
        "planning/selection/solver.py",
        "grown.setdefault(rest | reads, []).extend(",
        "grown.setdefault(rest, []).extend(",
        "tests/planning/test_solver.py",
    ),
    Fault(
        "planning/memory_model/allocator.py",
        "found.size >= size + self.config.large_segment",
        "found.size > size + self.config.large_segment",
        "tests/planning/test_allocator_model.py",
    ),
    Fault(
        "planning/memory_model/allocator.py",
        "least_rest = MIN_BLOCK if fine",
        "least_rest = MIN_BLOCK + 1 if fine",
        "tests/planning/test_allocator_model.py",
    ),
    Fault(
        "planning/predictions/seconds.py",
        "backward / 2 + recompute + third + sent",
        "backward / 2 + third + sent",
        "tests/planning/test_pipeline_plans.py",
    ),
    Fault(
        "planning/sharding.py",
        "return 0 if self.gathered == self.shard_gathered else self.gathered",
        "return self.gathered",
        "tests/planning/test_memory_model.py",
    ),
    Fault(
        "planning/memory_model/microbatch.py",
        "            buffers.copy_out(ROOT, self.sharding.root, forward=False)\n",
        "            pass\n",
        "tests/planning/test_outside_layers.py",
    ),
    Fault(
        "planning/fit/layouts.py",
        "self.dp_replicate * self.dp_shard * self.micro_batch * self.grad_accum",
        "self.dp_shard * self.micro_batch * self.grad_accum",
        "tests/planning/test_fit.py",
    ),
    Fault(
        "planning/fit/search.py",
        "fits = sizes[..., number] <= limit",
        "fits = sizes[..., number] >= limit",
        "tests/planning/test_pipeline_plans.py tests/planning/test_fit.py",
    ),
    Fault(
        "profiling/profiler.py",
        "recompute_peak=live.get(call, 0) - freed[call] + growth[call]",
        "recompute_peak=live.get(call, 0) + growth[call]",
        "tests/profiling/test_profiler.py tests/test_strategies.py",
    ),
    Fault(
        "recipes/loop.py",
        "return options.lr * (step + 1) / options.warmup",
        "return options.lr * step / options.warmup",
        "tests/recipes/test_data.py",
    ),
    Fault(
        "recipes/loop.py",
        "part = micro * ranks.data_ranks + ranks.data_rank\n",
        "part = ranks.data_rank\n",
        "tests_distributed/recipes/test_pretrain.py",
    ),
    Fault(
        "recipes/loop.py",
        "self._loss(self.model, batch) / passes",
        "self._loss(self.model, batch)",
        "tests_distributed/recipes/test_pretrain.py",
    ),
    Fault(
        "recipes/data.py",
        "shuffled(place, self.windows, mix(self._seed, epoch, 2))",
        "shuffled(place, self.windows, mix(self._seed, 0, 2))",
        "tests/recipes/test_data.py",
    ),
    Fault(
        "layers/structure.py",
        '    if "parametrizations" in inner._modules:\n        return 1\n',
        "",
        "tests/layers/test_find_layers.py tests/layers/test_families.py",
    ),
    Fault(
        "flags.py",
        'parts["pp"] = {}\n',
        'parts["pp"], parts["step"]["microbatches"] = {}, 1\n',
        "tests/test_front_door.py",
    ),
    Fault(
        "planning/report.py",
        "describe(query, choices, name, reserved=reserved)",
        "describe(query, choices, name)",
        "tests/planning/test_reserved.py",
    ),
    Fault(
        "planning/model/outside.py",
        "grads = {name: t.grad for name, t in state.items()",
        "grads = {name: t.grad for name, t in reversed(state.items())",
        "tests/planning/test_outside_layers.py",
    ),
    Fault(
        "planning/fit/formula.py",
        "        self.split = base.tp / self.tp",
        "        self.split = self.tp / base.tp",
        "tests/planning/test_formula.py",
    ),
    Fault(
        "integrations/activation_offloading.py",
        "left_out=() if head is None else (head,),\n    )\n\n\ndef output_head",
        "left_out=(),\n    )\n\n\ndef output_head",
        "tests/integrations",
    ),
    Fault(
        "distributed/weights/checkpoints.py",
        "for old in self.steps()[self._keep :]:",
        "for old in self.steps()[self._keep + 1 :]:",
        "tests/recipes/test_checkpoint.py",
    ),
    Fault(
        "_util/json_file.py",
        "        old.rename(folder)\n",
        "        pass\n",
        "tests_distributed/recipes/test_failures.py",
    ),
    Fault(
        "distributed/weights/checked_files.py",
        'self._allowed.get(f"{module}.{name}")',
        "super().find_class(module, name)",
        "tests/recipes/test_untrusted_files.py",
    ),
    Fault(
        "distributed/weights/checked_files.py",
        ' or ".." in PurePath(name).parts',
        "",
        "tests/recipes/test_untrusted_files.py",
    ),
    Fault(
        "models.py",
        "if value != value or (",
        "if (",
        "tests/models/test_config_numbers.py",
    ),
    Fault(
        "planning/selection/layer.py",
        "or not op_facts.tracked or record.steers:",
        "or not op_facts.tracked:",
        "tests/planning/test_remembered.py",
    ),
    Fault(
        "planning/trace/kinds.py",
        "self.before | dict(zip(self.given, kwargs.pop(GIVEN, ())))",
        "dict(zip(self.given[1:], kwargs.pop(GIVEN, ())))",
        "tests/planning/test_attributes_of_layers.py",
    ),
    Fault(
        "offload/mover.py",
        "copy.original() is storage",
        "True",
        "tests/gpusim/test_device.py",
    ),
    Fault(
        "activation_checkpointing/sequential.py",
        "            call.keep_containers(self.tail)\n",
        "            pass\n",
        "tests/activation_checkpointing/test_hooks.py",
    ),
    Fault(
        "distributed/tensor/shared_random.py",
        "inside(value, depth=3)",
        "inside(value, depth=0)",
        "tests_distributed/tensor/test_shared_random.py",
    ),
    Fault(
        "distributed/shard.py",
        "_as_fsdp(modules[0]).set_reduce_scatter_unused_params(True, recurse=False)",
        "pass",
        "tests_distributed/fsdp/test_parts_that_differ.py",
    ),
    Fault(
        "distributed/unit_calls.py",
        "                shard.grad = None\n",
        "                pass\n",
        "tests_distributed/fsdp/test_parts_that_differ.py",
    ),
    Fault(
        "distributed/unit_calls.py",
        "        complete_accumulated(params)\n\n",
        "\n\n",
        "tests_distributed/expert/test_expert_training.py tests_distributed/fsdp/test_parts_that_differ.py",
    ),
    Fault(
        "distributed/unit_calls.py",
        "            elif not self._keep:",
        "            elif self._keep:",
        "tests_distributed/fsdp/test_parts_that_differ.py",
    ),
    Fault(
        "distributed/unit_calls.py",
        "            self._model.reset_iter_state()",
        "            pass",
        "tests_distributed/fsdp/test_parts_that_differ.py",
    ),
    Fault(
        "distributed/unit_calls.py",
        "        if self._calls <= _CALLS or self._writes:",
        "        if self._writes:",
        "tests_distributed/fsdp/test_parts_that_differ.py",
    ),
    Fault(
        "distributed/unit_calls.py",
        "        if now != self._versions and len(now) == len(self._versions):",
        "        if False:",
        "tests_distributed/fsdp/test_parts_that_differ.py",
    ),
    Fault(
        "torch_compat.py",
        "                _put_item(self.container, key, of[id(value)])",
        "                pass",
        "tests_distributed/fsdp/test_parts_that_differ.py",
    ),
    Fault(
        "torch_compat.py",
        "                added += [tensor for tensor in tree_leaves(value) if isinstance(tensor, Tensor)]",
        "                added += []",
        "tests_distributed/fsdp/test_parts_that_differ.py",
    ),
    Fault(
        "distributed/layer_order.py",
        "        elif asks:\n            self._ask(index, event)",
        "        elif asks and len(place.then) > 1000:\n            self._ask(index, event)",
        "tests_distributed/fsdp/test_ranks_run_other_layers.py",
    ),
    Fault(
        "distributed/layer_order.py",
        "        if self._count > index and index not in self._asked and self._refused < 0:",
        "        if False:",
        "tests_distributed/fsdp/test_ranks_run_other_layers.py",
    ),
    Fault(
        "distributed/weights/replaced.py",
        "        put_marks(parameter, known.marks)",
        "        pass",
        "tests_distributed/fsdp/test_parts_that_differ.py",
    ),
    Fault(
        "distributed/documents.py",
        "index - index.masked_fill(~starts, 0).cummax(1).values",
        "index - index.masked_fill(starts, 0).cummax(1).values",
        "tests_distributed/fsdp/test_packing.py",
    ),
    Fault(
        "distributed/documents.py",
        "if again.any():",
        "if again.all():",
        "tests_distributed/fsdp/test_packing.py",
    ),
    Fault(
        "distributed/tensor/apply.py",
        "others |= ids == padding_idx",
        "others |= ids < 0",
        "tests_distributed/tensor/test_row_lookup.py",
    ),
    Fault(
        "distributed/expert/split_experts.py",
        "hidden = linear * activation(gate)",
        "hidden = gate * activation(linear)",
        "tests_distributed/expert/test_expert_parallel.py",
    ),
    Fault(
        "distributed/context/whole_loss.py",
        "counts = whole != ignore_index",
        "counts = mine != ignore_index",
        "tests_distributed/context/test_cut_combinations.py",
    ),
    Fault(
        "distributed/context/whole_loss.py",
        "return F.pad(labels, (0, 1), value=ignored)[..., 1:]",
        "return labels.roll(-1, -1)",
        "tests_distributed/context/test_cut_combinations.py",
    ),
    Fault(
        "distributed/context/whole_loss.py",
        "self.parts.group) / self.parts.ranks\n",
        "self.parts.group)\n",
        "tests_distributed/context",
    ),
    Fault(
        "distributed/weights/state_dict.py",
        "state |= dict.fromkeys(slot.names, in_boxes(tensor))",
        "state |= {slot.names[0]: in_boxes(tensor)}",
        "tests_distributed/weights/test_state_dict.py",
    ),
    Fault(
        "distributed/pipeline/schedules.py",
        "        if number >= ahead:",
        "        if number > ahead:",
        "tests/planning/test_pipeline_plans.py",
    ),
    Fault(
        "distributed/consistency_checks.py",
        "return (rows != rows[0]).any(0).tolist()",
        "return (rows != rows[0]).all(0).tolist()",
        "tests_distributed/test_consistency_checks.py",
    ),
    Fault(
        "offload/mover.py",
        "                self._inner = kept(inner.get().clone())\n",
        "                pass\n",
        "tests/offload",
    ),
    Fault(
        "offload/mover.py",
        "                copy.mover.part_from_source(copy)",
        "                pass",
        "tests/offload",
    ),
    Fault(
        "offload/offloader.py",
        "return back.conj() if conjugate else back",
        "return back",
        "tests/offload/test_saved_tensors.py",
    ),
    Fault(
        "offload/offloader.py",
        "(int(last) + 1) * tensor.element_size() * 2 >=",
        "(int(last) + 1) * tensor.element_size() >=",
        "tests/offload",
    ),
    Fault(
        "offload/offloader.py",
        "copied = tensor.dtype in (torch.bfloat16, torch.float16) and not tensor.requires_grad and like_weight",
        "copied = False",
        "tests/offload",
    ),
    Fault(
        "offload/offloader.py",
        "moved = names[:-1] if len(names) > 1 else names",
        "moved = names",
        "tests/offload/test_layers.py",
    ),
    Fault(
        "planning/fit/formula.py",
        "return (pp - 1) / per_rank",
        "return (pp + 1) / per_rank",
        "tests/planning/test_formula.py",
    ),
    Fault(
        "planning/fit/formula.py",
        "        self.scales = self.grow, self.tokens * before / self.cut, self.tokens",
        "        self.scales = (self.tokens,) * 3",
        "tests/planning/test_formula.py",
    ),
    Fault(
        "planning/fit/layouts.py",
        "    if remainder or not per_group:",
        "    if not per_group:",
        "tests/planning/test_fit.py",
    ),
    Fault(
        "planning/fit/layouts.py",
        "if allowed and (shards * cp * tp) % ep == 0:",
        "if allowed:",
        "tests/planning/test_fit.py tests/planning/test_fit_report.py",
    ),
    Fault(
        "planning/fit/report.py",
        "while rows and needs(base, rows) > limit:",
        "while rows and needs(base, rows) < limit:",
        "tests/planning/test_fit_report.py tests/planning/test_fit.py",
    ),
    Fault(
        "planning/account.py",
        "return sum(other not in indices for _, other in edges)",
        "return len(edges)",
        "tests/planning/test_fit_report.py",
    ),
    Fault(
        "planning/fit/search.py",
        "self.rows.sort(key=lambda row: row.per_token)",
        "self.rows.sort(key=lambda row: -row.per_token)",
        "tests/planning/test_fit.py",
    ),
    # Around the step: initial values, checkpoints, compile beside tp, ranks that differ.
    Fault(
        "distributed/consistency_checks.py",
        "(*model.named_parameters(), *model.named_buffers())}\n    agree(",
        "(*model.named_parameters(),)}\n    agree(",
        "tests_distributed/test_consistency_checks.py",
    ),
    Fault(
        "planning/trace/compiled_memory.py",
        "backward += [(temporary, step), (temporary, 0)] if step else []",
        "backward += []",
        "tests_distributed/fsdp/test_update_in_backward.py",
    ),
    Fault(
        "torch_compat.py",
        "return tensor.trigger_wait().detach()",
        "return tensor.trigger_wait().detach().clone().detach().zero_()",
        "tests_distributed/test_compiled_ranks.py",
    ),
    Fault(
        "torch_compat.py",
        "written := [name for name, tensor, version in before if tensor._version != version]",
        "written := []",
        "tests/test_compile.py",
    ),
    Fault(
        "torch_compat.py",
        "outside = torch.inference_mode(False)(torch.no_grad()(own)) if torch.is_inference_mode_enabled() else own",
        "outside = own",
        "tests_distributed/fsdp/test_parts_that_differ.py",
    ),
    Fault(
        "torch_compat.py",
        "isinstance(t, Tensor) and id(t) not in before]",
        "isinstance(t, Tensor) and id(t) in before]",
        "tests_distributed/fsdp/test_parts_that_differ.py",
    ),
    Fault(
        "distributed/units.py",
        'r"(\\.token_adapter\\.base_layer|\\.original_module)$"',
        'r"(\\.never)$"',
        "tests_distributed/fsdp/test_modes_on_ranks.py",
    ),
    Fault(
        "activation_checkpointing/engine/module_state.py",
        "if t is not None and not t.requires_grad}",
        "if t is not None and t.requires_grad}",
        "tests/activation_checkpointing/test_frozen_layers.py",
    ),
    Fault(
        "distributed/weights/replaced.py",
        "if whole and parameter.to_local().shape != value.shape:",
        "if whole and parameter.to_local().shape == value.shape:",
        "tests_distributed/weights/test_state_dict.py",
    ),
    Fault(
        "distributed/weights/state_dict.py",
        "and isinstance(given, Tensor) and not isinstance(given, DTensor):",
        "and isinstance(given, Tensor) and isinstance(given, DTensor):",
        "tests_distributed/weights/test_state_dict.py",
    ),
    Fault(
        "distributed/tensor/apply.py",
        "return local.clone() if torch.compiler.is_compiling() else local",
        "return local",
        "tests_distributed/test_compiled_ranks.py",
    ),
    Fault(
        "distributed/tensor/plan.py",
        "return partial(method, self) if isinstance(method, FunctionType)",
        'return __import__("types").MethodType(method, self) if isinstance(method, FunctionType)',
        "tests_distributed/test_compiled_ranks.py",
    ),
    Fault(
        "distributed/layer_order.py",
        "self._waiting += 1",
        "self._waiting += 0",
        "tests_distributed/fsdp/test_ranks_run_other_layers.py",
    ),
    Fault(
        "distributed/weights/checkpoints.py",
        "if dropped := frozen & {path",
        "if dropped := set() & {path",
        "tests_distributed/weights/test_optimizer_state.py",
    ),
    Fault(
        "distributed/tensor/plan.py",
        "if torch.compiler.is_compiling() and self.inner is None:",
        "if False and self.inner is None:",
        "tests_distributed/test_compiled_ranks.py",
    ),
    Fault(
        "distributed/tensor/plan.py",
        "            style.context_around_forward = lambda *_: nullcontext()\n            _Other",
        "            _Other",
        "tests_distributed/test_compiled_ranks.py",
    ),
)


def main(arguments: list[str] | None = None) -> int:
    """Try every fault; return 1 where more than `MAY_LIVE` live."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="faults whose file or text has this word")
    parser.add_argument("--jobs", type=int, default=2, help="faults at a time")
    options = parser.parse_args(arguments)
    faults = [fault for fault in FAULTS if options.only in f"{fault.file} {fault.right}"]
    for fault in faults:
        _changed(fault, ROOT)
    files = sorted({file for fault in faults for file in fault.seen_by.split()})
    if _fails(" ".join(files)):
        raise SystemExit("The tests fail without any fault; run them first.")
    with ThreadPoolExecutor(options.jobs) as pool:
        outcomes = list(pool.map(_try, faults))
    living = [fault.name for fault, killed in zip(faults, outcomes) if not killed]
    print(f"{len(faults) - len(living)} of {len(faults)} faults are seen. Living: {living or 'none'}")
    return int(len(living) > MAY_LIVE)


def _try(fault: Fault) -> bool:
    """Return whether the tests of `fault` fail with it."""
    start = time.monotonic()
    killed = _fails(fault.seen_by, fault)
    print(f"{'seen   ' if killed else 'LIVES  '} {time.monotonic() - start:4.0f} s  {fault.name}", flush=True)
    return killed


def _fails(tests: str, fault: Fault | None = None) -> bool:
    """Run `tests` in a copy of the project, with `fault`; return whether they fail."""
    with tempfile.TemporaryDirectory(prefix="nemo_like-fault-") as folder:
        copy = Path(folder)
        for name in ("nemo_like", "tests", "tests_distributed"):
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("docs", ".ci", "README.md"):
            (copy / name).symlink_to(ROOT / name)
        shutil.copy(ROOT / "pyproject.toml", copy)
        if fault is not None:
            put_in(fault, copy)
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not long", "-p", "no:cacheprovider"]
        try:
            done = subprocess.run(
                [*command, *tests.split()], cwd=copy, env=os.environ | {"PYTHONPATH": folder},
                capture_output=True, text=True, timeout=SECONDS if fault is not None else None,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return True
    if done.returncode not in (0, 1, 2):  # a wrong name of a file, say
        raise RuntimeError(f"pytest ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.returncode != 0


def put_in(fault: Fault, root: Path) -> None:
    """Put `fault` into the package under `root`."""
    (root / "nemo_like" / fault.file).write_text(_changed(fault, root), encoding="utf-8")


def _changed(fault: Fault, root: Path) -> str:
    """Return the file of `fault` with it.

    Raises:
        ValueError: its text does not occur exactly once.
    """
    text = (root / "nemo_like" / fault.file).read_text(encoding="utf-8")
    if text.count(fault.right) != 1:
        raise ValueError(f"{fault.file} has {text.count(fault.right)} times {fault.right!r}; a fault needs one place.")
    return text.replace(fault.right, fault.wrong)


if __name__ == "__main__":
    sys.exit(main())

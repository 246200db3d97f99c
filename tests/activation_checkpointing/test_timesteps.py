"""Checkpointed timesteps: a spiking network on a spike-encoded task and PyTorch's own cells, memory counted."""

import copy

import pytest
import torch
from torch import nn

from nemo_like import CheckpointConfig, apply_activation_checkpointing, parallelize
from nemo_like._util.live_bytes import LiveBytes
from nemo_like.activation_checkpointing import apply_specs
from nemo_like.activation_checkpointing.spec import chunks_of_calls
from nemo_like.activation_checkpointing.timesteps import checkpoint_timesteps
from tests.checks import assert_bitwise, gradients_of, seeded, step
from tests.models.blocks import Layer


def unroll(cell, inputs, state):
    """The plain loop."""
    outputs = []
    for member in inputs:
        after = cell(member, state)
        pytorchs = isinstance(cell, nn.RNNCellBase)
        output = (after[0] if isinstance(cell, nn.LSTMCell) else after) if pytorchs else after[0]
        state = after if pytorchs else after[1]
        outputs.append(output)
    return (torch.stack(outputs) if isinstance(outputs[0], torch.Tensor) else outputs), state


class Spike(torch.autograd.Function):
    """A step forward, the derivative of a fast sigmoid backward (Zenke and Ganguli 2018, "SuperSpike", eq. 5)."""

    @staticmethod
    def forward(ctx, potential):
        ctx.save_for_backward(potential)
        return (potential > 0).to(potential.dtype)

    @staticmethod
    def backward(ctx, gradient):
        (potential,) = ctx.saved_tensors
        return gradient / (1 + 10 * potential.abs()) ** 2


class LeakyIntegrateAndFire(nn.Module):
    """Two layers of leaky integrate-and-fire neurons; the output layer only integrates. State: a dict of potentials."""

    def __init__(self, inputs: int, hidden: int, classes: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.into, self.out, self.dropout = nn.Linear(inputs, hidden), nn.Linear(hidden, classes), nn.Dropout(dropout)

    def forward(self, spikes, state):
        potential = 0.9 * state["hidden"] + self.into(spikes)
        fired = Spike.apply(potential - 1.0)
        readout = 0.95 * state["readout"] + self.out(self.dropout(fired))
        return readout, {"hidden": potential - fired.detach(), "readout": readout}

    def rest(self, batch: int):
        return {
            "hidden": torch.zeros(batch, self.into.out_features),
            "readout": torch.zeros(batch, self.out.out_features),
        }


# Ten glyphs of 5 x 3 pixels. A lit pixel fires with probability 0.5 in each timestep, a dark one with 0.05.
GLYPHS = [
    "111101101101111", "010110010010111",
    "111001111100111", "111001111001111",
    "101101111001001", "111100111001111",
    "111100111101111", "111001001001001",
    "111101111101111", "111101111001111",
]  # fmt: skip


def spike_trains(steps: int, batch: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Poisson-coded digits: spikes (T, B, 15) and labels (B,)."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(batch) % 10
    lit = torch.tensor([[float(pixel) for pixel in GLYPHS[int(label)]] for label in labels])
    return torch.bernoulli((0.05 + 0.45 * lit).expand(steps, batch, 15), generator=generator), labels


def test_a_spiking_network_learns_as_without_checkpoints():
    plain = seeded(LeakyIntegrateAndFire, 15, 24, 10, dropout=0.1)
    checkpointed = copy.deepcopy(plain)
    losses = {}
    for name, model, run in (("plain", plain, unroll), ("checkpointed", checkpointed, checkpoint_timesteps)):
        torch.manual_seed(1)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
        losses[name] = []
        for number in range(20):
            spikes, labels = spike_trains(60, 20, seed=number)
            outputs, _ = run(model, spikes, model.rest(20))
            loss = nn.functional.cross_entropy(outputs.mean(0), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[name].append(loss.item())
    assert losses["plain"] == losses["checkpointed"]  # every bit of every update
    assert losses["plain"][-1] < 0.5 * losses["plain"][0]
    spikes, labels = spike_trains(60, 20, seed=99)
    with torch.no_grad():
        outputs, _ = checkpoint_timesteps(checkpointed, spikes, checkpointed.rest(20))
    assert (outputs.mean(0).argmax(-1) == labels).float().mean() >= 0.9  # chance: 0.1


def held_and_peak(steps: int, chunk_size: int | None) -> tuple[int, int, nn.Module]:
    """Bytes held between forward and backward, and at the peak of backward, of a loss on the last state alone."""
    model = seeded(LeakyIntegrateAndFire, 15, 24, 10)
    spikes, labels = spike_trains(steps, 4)
    state = model.rest(4)
    sum(parameter.sum() * 0 for parameter in model.parameters()).backward()  # the gradients are there from here on

    def last_only(spikes, state):
        return None, model(spikes, state)[1]

    with LiveBytes() as meter:
        run = unroll if chunk_size == 0 else checkpoint_timesteps
        options = {} if chunk_size == 0 else {"chunk_size": chunk_size}
        _, state = run(last_only, spikes, state, **options)
        loss = nn.functional.cross_entropy(state["readout"], labels)
        del state
        held = meter.live
        meter.take_peak()
        loss.backward()
        return held, meter.take_peak(), model


def test_memory_grows_with_the_root_of_time():
    short, short_peak, _ = held_and_peak(250, None)
    long, long_peak, checkpointed = held_and_peak(1000, None)
    assert long <= 1.1 * 2 * short  # four times the steps: twice the chunks
    assert long_peak <= 1.1 * 2 * short_peak
    plain, plain_peak, reference = held_and_peak(1000, 0)
    assert plain > 40 * long and plain_peak > 10 * long_peak
    assert_bitwise(gradients_of(checkpointed), gradients_of(reference))


def test_held_bytes_are_the_states_at_the_chunk_borders():
    state_bytes = 4 * 4 * (24 + 10)
    base, _, _ = held_and_peak(100, 100)
    for chunk_size in (5, 10, 20, 33):
        held, _, _ = held_and_peak(100, chunk_size)
        borders = -(-100 // chunk_size)
        assert held - base == (borders - 1) * state_bytes


CELLS = [nn.LSTMCell, nn.GRUCell, nn.RNNCell]


@pytest.mark.few(1)
@pytest.mark.parametrize("cell_class", CELLS)
def test_pytorchs_cells_over_1000_steps(cell_class):
    plain = seeded(cell_class, 5, 7)
    checkpointed = copy.deepcopy(plain)
    results, kept = [], []
    for cell, run in ((plain, unroll), (checkpointed, checkpoint_timesteps)):
        inputs = seeded(torch.randn, 1000, 3, 5, requires_grad=True, seed=1)
        first = torch.randn(3, 7, requires_grad=True)
        with LiveBytes() as live:
            outputs, _ = run(cell, inputs, (first, first * 2) if cell_class is nn.LSTMCell else first)
            kept.append(live.live)
        outputs.square().mean().backward()
        results.append([outputs, inputs.grad, first.grad, *gradients_of(cell).values()])
    assert_bitwise(*results)
    outputs_bytes = 2 * 1000 * 3 * 7 * 4  # what the steps returned, and their stack
    assert kept[1] - outputs_bytes < 0.1 * (kept[0] - outputs_bytes)


def test_lists_and_a_cell_that_makes_its_own_state():
    weight = torch.randn(4, 4, requires_grad=True)

    def cell(member, state):
        state = (torch.zeros(2, 4), [torch.ones(2)]) if state is None else state
        hidden = torch.tanh(member["a"] @ weight + state[0] * member["b"])
        return {"hidden": hidden, "count": state[1][0]}, (hidden, [state[1][0] + 1])

    inputs = [{"a": torch.randn(2, 4), "b": torch.randn(2, 4)} for _ in range(9)]
    outputs, state = checkpoint_timesteps(cell, inputs, None, 2)
    assert len(outputs) == 9 and torch.equal(outputs[-1]["count"], torch.full((2,), 9.0))
    assert torch.equal(state[0], outputs[-1]["hidden"]) and state[1][0].tolist() == [10, 10]
    ours, theirs = (
        torch.autograd.grad(sum(output["hidden"].sum() for output in each), weight)[0]
        for each in (outputs, unroll(cell, inputs, None)[0])
    )
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"chunk_size": 0}, ValueError, "chunk_size is 0"),
        ({"chunk_size": 2.0}, ValueError, r"chunk_size is 2\.0"),
        ({"inputs": []}, ValueError, "0 timesteps"),
        ({"inputs": torch.randn(0, 2, 3)}, ValueError, "0 timesteps"),
        ({"inputs": "text"}, TypeError, "inputs is a str"),
        ({"cell": lambda x, state: x}, TypeError, "must return the pair"),
    ],
)
def test_wrong_arguments_are_refused(options, error, message):
    arguments = {"cell": nn.GRUCell(3, 4), "inputs": torch.randn(5, 2, 3), "state": torch.zeros(2, 4)} | options
    with pytest.raises(error, match=message):
        checkpoint_timesteps(**arguments)


def own_loop(model, inputs):
    """A module that unrolls its cell itself, and mixes something of its own in between the steps."""
    state, outputs = None, []
    for number, member in enumerate(inputs.unbind(0)):
        state = model.cell(member, state)
        if number % 7 == 3:  # no output of the cell any more: has to be kept, and is
            state = (state[0] * model.gain, state[1])
        outputs.append(state[0].mean())
    return torch.stack(outputs)


def test_a_cell_in_somebody_elses_loop_is_replayed_by_chunks():
    plain = Layer(own_loop, cell=seeded(nn.LSTMCell, 3, 8), gain=nn.Parameter(torch.ones(8)))
    checkpointed = copy.deepcopy(plain)
    placed = apply_specs(checkpointed, chunks_of_calls(["cell"], 25))
    assert placed == {"cell": checkpointed.cell} and checkpointed.state_dict().keys() == plain.state_dict().keys()
    inputs = torch.randn(200, 2, 3)
    for _ in range(2):  # a second sequence begins a chunk of its own
        assert_bitwise(step(checkpointed, inputs), step(plain, inputs))
        assert held_after(checkpointed, inputs) < 0.5 * held_after(plain, inputs)


def last_state(model, inputs):  # of (T, B, 4)
    """A recurrent model of one cell: no repeated layers."""
    state = inputs.new_zeros(inputs.shape[1], 6)
    for x in inputs:
        state = model.cell(x, state)
    return state


def held_after(model: nn.Module, inputs: torch.Tensor) -> int:
    """Bytes held between forward and backward."""
    with LiveBytes() as live:
        out = model(inputs)
        assert out.requires_grad
        return live.live


@pytest.mark.parametrize("front", [apply_activation_checkpointing, parallelize])
def test_a_lone_cell(front):
    config = CheckpointConfig(enabled=True, snn_timestep_checkpoint=True, snn_chunk_size=3)
    bare, model = (Layer(last_state, cell=seeded(nn.GRUCell, 4, 6)) for _ in range(2))
    chunked = front(model, ac=config)
    inputs = torch.randn(10, 2, 4)
    assert_bitwise(step(chunked, inputs), step(bare, inputs))
    assert held_after(chunked, inputs) < held_after(bare, inputs)


def test_a_cell_that_is_the_model_is_refused_with_the_way_out():
    with pytest.raises(ValueError, match=r"is the GRUCell itself.*checkpoint_timesteps"):
        apply_activation_checkpointing(nn.GRUCell(4, 6), CheckpointConfig(enabled=True, snn_timestep_checkpoint=True))

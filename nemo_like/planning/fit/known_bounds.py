"""The bounds of a search: for shapes that are not traced, by all those that are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from nemo_like.planning.fit.bounds import StagedBounds, StagedLeast, WholeBounds
from nemo_like.planning.fit.layouts import Configuration
from nemo_like.planning.fit.question import Question
from nemo_like.planning.fit.shapes import Shape, ShapeKey


class KnownBounds:
    """Bounds that are known of shapes while they are traced.

    Args:
        question: the question of the search.
        shapes: shapes that are traced; for the others, why the model cannot have them.
        by_shape: the configurations of every shape.
        trace: puts a shape into `shapes`, and returns it.
    """

    def __init__(
        self,
        question: Question,
        shapes: Mapping[ShapeKey, Shape | str],
        by_shape: Mapping[ShapeKey, Sequence[Configuration]],
        trace: Callable[[ShapeKey], Shape | str],
    ) -> None:
        self.question, self.shapes, self.by_shape, self.trace = question, shapes, by_shape, trace
        self._whole: dict[ShapeKey, WholeBounds] = {}
        self._staged: dict[ShapeKey, StagedBounds] = {}
        self._pipelines: dict[ShapeKey, StagedLeast | None] = {}

    def seconds(self, key: ShapeKey) -> float:
        """Return seconds of one GPU for a token that no configuration of a shape is faster than.

        0 where no traced shape has such weights. Without split experts, no rank has more rows than with them. With them,
        it has as many on any number of ranks.
        """
        if key.staged:
            known = [self.staged(other) for other in self._traced() if _like_stages(other.key, key)]
            return max((self._least_staged(key, bounds) for bounds in known), default=0.0)
        alike = [shape for shape in self._traced() if _like_weights(shape.key, key)]
        # One of each kind suffices: with and without split experts, with and without parts of sequences.
        kinds = {(shape.key.ep > 1, shape.key.cp > 1): shape for shape in alike if _like_parts(shape.key, key)}
        bounds = [self.whole(shape) for shape in kinds.values()]
        return max((self._least_per_token(key, each.least_step) for each in bounds), default=0.0)

    def exclude(self, key: ShapeKey, ways: Callable[[Shape, Configuration], Iterable[Configuration]]) -> bool:
        """Return whether no configuration of a shape fits, by traced ones with the same weights.

        Fewer rows take their share at least, and more rows take more. `ways`: to run a configuration.
        """
        if key.staged:
            return False
        alike = [
            shape
            for shape in self._traced()
            if (shape.key.axes, shape.key.ep) == (key.axes, key.ep) and _like_parts(shape.key, key)
        ]
        layouts = sorted(self.by_shape[key], key=lambda conf: -conf.shard_ranks)
        return any(all(self._exceeds(shape, ways(shape, conf)) for conf in layouts) for shape in alike)

    def _exceeds(self, shape: Shape, ways: Iterable[Configuration]) -> bool:
        full, bounds = dict.fromkeys(way.change(ac="full") for way in ways), self.whole(shape)
        # What takes least comes last.
        return bool(full) and all(bounds.least_peak(way) > shape.most_allocated(way) for way in reversed(full))

    def whole(self, shape: Shape) -> WholeBounds:
        """Return the bounds by a traced shape in one stage."""
        if shape.key not in self._whole:
            self._whole[shape.key] = WholeBounds(shape)
        return self._whole[shape.key]

    def staged(self, shape: Shape) -> StagedBounds:
        """Return the bounds of pipelines by a traced shape in one stage."""
        if shape.key not in self._staged:
            self._staged[shape.key] = StagedBounds(self.whole(shape))
        return self._staged[shape.key]

    def exact(self, key: ShapeKey) -> StagedBounds | None:
        """Return the bounds by a model in one stage with the same weights, traced for it if none is; None: it cannot be."""
        for shape in self._traced():
            if shape.key.ep == key.ep and _like_stages(shape.key, key):
                return self.staged(shape)
        whole = self.trace(key.in_one_stage)
        return self.staged(whole) if isinstance(whole, Shape) else None

    def pipeline(self, key: ShapeKey) -> StagedLeast | None:
        """Return the bounds of single pipelines of a shape, by the model in one stage; None: it cannot be cut or traced."""
        whole = self.trace(key.in_one_stage)
        if not isinstance(whole, Shape):
            return None
        if key not in self._pipelines:
            self._pipelines[key] = StagedLeast.of(self.staged(whole))
        return self._pipelines[key]

    def _traced(self) -> list[Shape]:
        """Return the shapes in one stage that are traced."""
        return [shape for shape in self.shapes.values() if isinstance(shape, Shape) and not shape.key.staged]

    def _least_per_token(self, key: ShapeKey, least: Callable[[Configuration], float]) -> float:
        every = (least(conf) * conf.gpus / conf.sequences for conf in self.by_shape[key])
        return min(every) / self.question.seq_len

    def _least_staged(self, key: ShapeKey, bounds: StagedBounds) -> float:
        ep = bounds.shape.key.ep
        # What recomputes nothing is the fastest, where it is allowed.
        modes = self.question.pins.get("ac", ("none",))
        mode = "none" if {"none", "plan"} & set(modes) else modes[0] if len(modes) == 1 else "none"
        return self._least_per_token(key, lambda conf: bounds.seconds(conf, mode, exchanges=ep > 1, once=ep == key.ep))


def _like_stages(whole: ShapeKey, stages: ShapeKey) -> bool:
    """Return whether a model in one stage has the local weights that stages have, but for the share of the experts.

    It has no smaller parts of sequences, whose gathered keys and values would not grow with them.
    """
    return _like_weights(whole, stages) and whole.cp in (1, stages.cp) and _like_parts(whole, stages)


def _like_parts(one: ShapeKey, other: ShapeKey) -> bool:
    """Return whether the first has whole sequences, or parts of them in the same way as the other."""
    return one.cp == 1 or (other.cp > 1 and one.cp_method == other.cp_method)


def _like_weights(one: ShapeKey, other: ShapeKey) -> bool:
    """Return whether both shapes have the same weights, but for the share of the experts.

    Under tp all weights are cut by other rules where experts are split.
    """
    return one.axes == other.axes and one.ep <= other.ep and (one.tp == 1 or (one.ep > 1) == (other.ep > 1))

"""Notices the backward passes of a training: records them as phases, and examines their autograd graphs."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

import torch

from tidegate.agent.engine.phases import PhaseRecorder
from tidegate.timeline.gradient_arrival import MIN_PARAMS

GRAPH_CHECK_INTERVAL: Final = 16
"""Number of steps from one examination of the autograd graph (see `single_node_share`) to the next. The first four
steps are examined, too. An examination takes about 0.2 ms."""

MAX_NODES: Final = 16
"""Maximum number of nodes of the autograd graph examined in one backward. A node that produces the gradients of
the whole model is among the first nodes of its backward."""

NO_BACKWARD: Final = -1
"""Value that autograd returns as the id of the current backward pass when no backward pass is running."""


class BackwardPasses:
    """Records the backward passes of one optimizer's parameters as phases, and examines their autograd graphs."""

    def __init__(self, phases: PhaseRecorder) -> None:
        self._phases = phases
        self._id = NO_BACKWARD
        """Id of the last backward pass that was noticed."""
        self._single_node_share = 0.0
        """Largest share of the elements whose gradients came from a single node of the autograd graph, in the last
        backward pass whose graph was examined."""

    def is_noticed(self, backward_id: int) -> bool:
        """Whether `began` was called in the backward pass with this id, and the phase `backward` of this pass is still
        the current phase."""
        return self._id == backward_id and self._phases.current == "backward"

    def began(self, param_groups: Sequence[Mapping[str, Any]], num_steps: int) -> None:
        """Begins the phase `backward`, which lasts until the backward pass ends, and in some of the steps examines the
        autograd graph of the pass. To be called inside a backward pass.

        num_steps: number of steps of the optimizer so far.
        """
        self._phases.enter("backward")
        backward_id = torch._C._current_graph_task_id()
        if backward_id != self._id:
            self._id = backward_id
            if num_steps < 4 or num_steps % GRAPH_CHECK_INTERVAL == 0:
                self._single_node_share = _share_of_current_pass(param_groups)
            self._phases.single_node_share = self._single_node_share
            torch.autograd.Variable._execution_engine.queue_callback(self._ended)

    def _ended(self) -> None:
        if self._phases.current == "backward":
            self._phases.enter("other")


def _share_of_current_pass(param_groups: Sequence[Mapping[str, Any]]) -> float:
    """Largest share of these parameters' elements whose gradients come from a single node of the autograd graph, in the
    backward pass that is running; 0 if no node is running."""
    node = torch._C._current_autograd_node()
    params = [param for group in param_groups for param in group["params"] if param.requires_grad]
    return single_node_share(node, params) if node is not None else 0.0


def single_node_share(node: Any, params: Collection[Any]) -> float:
    """Largest share of the elements of these parameters whose gradients come from a single node of the autograd graph.
    Examines the first MAX_NODES nodes of a backward, from `node` on. `torch.compile` turns each region that it compiles
    into a single node.

    The share is computed from the graph, because measured times do not show whether gradients come from the same node:
    if a backward is brief, or only enqueued by the host, the hooks between two gradients of one node take longer than
    the work before the first gradient.
    """
    nodes, largest = [node], 0
    for node in itertools.islice(nodes, MAX_NODES):
        inputs = [source for source, _ in node.next_functions if source is not None]
        leaves = {id(source.variable) for source in inputs if _is_leaf(source)}
        if len(leaves) >= MIN_PARAMS:
            largest = max(largest, sum(p.numel() for p in params if id(p) in leaves))
        nodes += [source for source in inputs if not _is_leaf(source)]
    return largest / sum(p.numel() for p in params) if largest else 0.0


def _is_leaf(node: Any) -> bool:
    """Whether the node accumulates into the gradient of a parameter."""
    return type(node).__name__ == "AccumulateGrad"

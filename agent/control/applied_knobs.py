"""Records which generation of knobs is in force on this rank, and from which step on."""

from __future__ import annotations

from tidegate.agent.control.committed_knobs import CommittedKnobs


class AppliedKnobs:
    """The generations of knobs that were in force on this rank. The generation itself is stored only here."""

    def __init__(self, first_step: int) -> None:
        """`first_step`: number of the next step. Until then no knobs of the daemon are in force: generation 0."""
        self.since: list[tuple[int, int]] = [(0, first_step)]
        """Pairs (generation, first step with it), oldest first."""
        self._decided: tuple[int, int] | None = None
        """The last knobs committed by the daemon that were applied or refused: epoch (how often the daemon has lost its
        state) and generation."""

    @property
    def generation(self) -> int:
        """Generation of the knobs in force; 0 for those that the optimizer was built with."""
        return self.since[-1][0]

    @property
    def has_decided(self) -> bool:
        """Whether knobs of the daemon were applied or refused before."""
        return self._decided is not None

    def decide(self, committed: CommittedKnobs) -> bool:
        """Whether these knobs are new here: they were neither applied nor refused. To be called once for each."""
        is_new, self._decided = committed.decision != self._decided, committed.decision
        return is_new

    def record(self, generation: int, next_step: int) -> None:
        """Records that the knobs of `generation` are in force from `next_step` on."""
        if (generation, next_step) != self.since[-1]:
            self.since.append((generation, next_step))

    def restart(self, next_step: int) -> None:
        """Forgets earlier steps, because the numbers of steps begin anew at `next_step`. The generation stays."""
        self.since = [(self.generation, next_step)]

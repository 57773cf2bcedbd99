"""Builds the messages of one rank to the daemon: the registration message (hello), which describes the rank, and the
reports of its steps."""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

from pydantic import ValidationError

from tidegate.agent.control.applied_knobs import AppliedKnobs
from tidegate.agent.control.process_identity import this_host, this_process
from tidegate.agent.control.rank_predictor import rank_predictor
from tidegate.agent.optimizer.optimizer import Optimizer
from tidegate.agent.ranks import Ranks
from tidegate.agent.telemetry.recorder import Recorder
from tidegate.knobs.knobs import Knobs
from tidegate.logs import event
from tidegate.plan import Subgroup
from tidegate.simulator.predictor import Predictor, size_runs
from tidegate.speeds.rate_card import RateCard
from tidegate.wire.agent import AgentHello, AgentReport, Rates
from tidegate.wire.base import Message
from tidegate.wire.evidence import ModelEvidence
from tidegate.wire.translation import view_of

log = logging.getLogger("tidegate")
M = TypeVar("M", bound=Message)

MAX_REASON_CHARACTERS: Final = 1000
"""Most characters of the reason for which a path was retired."""


class RankMessages:
    """Builds the messages of one rank. It is the `ReportSource` of the link to the daemon."""

    def __init__(self, optimizer: Optimizer, recorder: Recorder, applied: AppliedKnobs, run: str, ranks: Ranks) -> None:
        """`applied`: the generation of knobs in force."""
        self._optimizer, self._recorder, self._applied = optimizer, recorder, applied
        self._run, self._ranks = run, ranks
        self._started_at = time.time()
        self._agent = uuid.uuid4().hex
        self._registered: Sequence[Subgroup] = ()
        """Subgroups in the last registration message."""
        self._refused: set[str] = set()
        """Event names of the warnings that `_accepted` has logged; each is logged once."""

    def renew_agent(self) -> None:
        """Gives the rank a new agent id, as after a restart."""
        self._agent = uuid.uuid4().hex

    def hello(self, metrics_address: str, reset_knobs: bool) -> AgentHello:
        """Builds the registration message (hello) of this rank.

        metrics_address: "host:port" of /metrics.
        reset_knobs: whether the settings of the optimizer replace the knobs that the run had before.
        """
        engine, device, offload = self._optimizer.engine, self._optimizer.device, self._optimizer.offload
        subgroups = engine.subgroups
        message = AgentHello(
            agent=self._agent,
            run=self._run,
            rank=self._ranks.rank,
            world_size=self._ranks.count,
            host=this_host(),
            pid=os.getpid(),
            device_kind=device.kind,
            metrics_address=metrics_address,
            knobs=self._optimizer.knobs.as_dict(paths=engine.store is not None),
            reset_knobs=reset_knobs,
            subgroups=size_runs(subgroups),
            num_slots=engine.num_slots,
            device_memory_bytes=device.capacity_bytes,
            host_slots=offload.host_slots,
            gradients=offload.gradients,
            policy=offload.policy,
            paths=tuple(engine.host_slots),
            started_at=self._started_at,
            process=this_process(),
        )
        self._registered = subgroups  # unchanged if the message is refused: the daemon keeps the one before
        return message

    # ---- for the threads of the link

    def report(self) -> AgentReport:
        """Builds the next report: the steps since the last report, and the present phase, knobs and rates. May be
        called from any thread."""
        recorder = self._recorder
        rates, last = recorder.rates, recorder.last_step
        # Before steps are taken: an error here must not lose them.
        timeline = None if last is None else view_of(last)
        predictor = rank_predictor(self._optimizer, recorder)
        return AgentReport(
            timestamp=time.time(),
            step=recorder.totals.steps,
            phase=self._optimizer.phases.current,
            generation=self._applied.generation,
            effective=self._optimizer.effective_knobs(),
            rates=None if rates is None else self._rates_message(rates),
            evidence=self._accepted(
                lambda: self._evidence(predictor), "inputs of predictions", event("evidence_refused")
            ),
            steps=recorder.take_unreported(),
            timeline=timeline,
            predicted_update_seconds=recorder.totals.predicted_update_seconds,
        )

    def undelivered(self, report: AgentReport) -> None:
        """Takes back a report that was not delivered: its steps are included in the next report."""
        self._recorder.give_back(report.steps)

    def check(self, knobs: Knobs) -> None:
        """Raises ConfigError when the knobs cannot work on this rank."""
        self._optimizer.check_knobs(knobs)

    def _evidence(self, predictor: Predictor) -> ModelEvidence:
        store = self._optimizer.engine.store
        if store is None:
            return predictor.evidence(self._registered)
        return predictor.evidence(
            self._registered,
            retired_reasons={path: why[:MAX_REASON_CHARACTERS] for path, why in store.retired.copy().items()},
            automatic_cache_bytes=self._optimizer._automatic_cache_bytes(),
        )

    def _rates_message(self, rates: RateCard) -> Rates | None:
        return self._accepted(lambda: Rates(**rates.to_dict()), "measured speeds", event("rates_refused"))

    def _accepted(self, build: Callable[[], M], what: str, refusal: dict[str, Any]) -> M | None:
        """Builds a part of a report with `build`. None if a value is outside the bounds that the daemon allows: then
        the report is sent without this part, and a warning is logged the first time. `what`: name of the part, for the
        warning. `refusal`: the event of the warning (`event`)."""
        try:
            return build()
        except ValidationError as error:
            if refusal["event"] not in self._refused:
                log.warning(
                    "the %s of this rank are out of bounds, and are not sent to the daemon: %s",
                    what,
                    error,
                    extra=refusal,
                )
            self._refused.add(refusal["event"])
            return None

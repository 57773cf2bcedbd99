"""`tidegate.attach`: connects an optimizer to telemetry and the control daemon.

Hooks on the model mark the phases of a step. A server for /metrics and a link to the daemon are started. Knobs are
applied between steps.
"""

from __future__ import annotations

import torch

from tidegate.agent.control.attach_checks import AttachSettings
from tidegate.agent.control.attachment import Attachment
from tidegate.agent.optimizer.wrapped import OptimizerWrapper, unwrapped


def attach(
    optimizer: torch.optim.Optimizer | OptimizerWrapper,
    model: torch.nn.Module | None = None,
    *,
    run: str,
    daemon: str | None = None,
    token: str | None = None,
    metrics_bind: str = "127.0.0.1",
    metrics_port: int = 0,
    advertise_host: str | None = None,
    reset_knobs: bool = False,
    strict: bool = False,
) -> Attachment:
    """Connects an optimizer to telemetry and, if `daemon` is given, to the control daemon. `close()` of the returned
    handle disconnects it; so do `optimizer.close()` and the end of a `with` block.

    optimizer: a `tidegate.AdamW`, or a wrapper of a framework that holds one.
    model: a `torch.nn.Module`, whose forward and backward become phases (default None: only backward and update are
        separate phases).
    run: name of the run, the same on all ranks of a run: 1 to 64 letters, digits, ".", "_" and "-", beginning with a
        letter or a digit.
    daemon: address of the control daemon, "http://host:port" (default None: no daemon; metrics are still served).
    token: the daemon's token for agents (default None: TIDEGATE_AGENT_TOKEN, TIDEGATE_TOKEN or the file that the daemon
        wrote).
    metrics_bind: address on which /metrics is served (default "127.0.0.1": reachable only from this host).
    metrics_port: port of /metrics, 0 to 65535 (default 0: a free port). Each further rank of a host (LOCAL_RANK, which
        torchrun and deepspeed set, or what mpirun and srun set) takes the next port.
    advertise_host: host name or address at which other machines reach /metrics, 253 characters at most (default None:
        `metrics_bind`).
    reset_knobs: with True, the settings of the optimizer replace the knobs that the run had before (default False).
    strict: with True, an error is raised if telemetry or the connection cannot work as requested; with False, training
        continues without it (default False).

    Raises ConfigError for arguments that are wrong in every environment: another optimizer, a model that is no module,
    a model in DistributedDataParallel with gradients="release", a value of another type or out of these bounds.

    With `strict`, raises also RankTaken when another live agent holds this run and rank (if that agent may have ended
    on another host, only after the time for which the daemon reserves the rank for it); NotAuthorized for a token that
    the daemon refuses; ConfigError for an optimizer that is attached already or a port that is taken; and other errors
    when the environment prevents a connection to the daemon. A daemon that does not answer is only logged: the rank
    registers as soon as the daemon answers.

    Without `strict`, problems with the daemon, the environment, other processes or earlier attachments of this process
    do not stop the training. The rank of a process that has ended on this host is taken over at once. Earlier
    attachments of this process with the same run and rank, or of this optimizer, are closed.
    """
    settings = AttachSettings(
        run=run, daemon=daemon, token=token, metrics_bind=metrics_bind, metrics_port=metrics_port,
        advertise_host=advertise_host, reset_knobs=reset_knobs, strict=strict,
    )  # fmt: skip
    return Attachment(unwrapped(optimizer, "attach"), model, settings)
